"""SequenceGroup: one request. Sequence: one of its n outputs while it is generated."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.detokenizer import Detokenizer
from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs
from engine.step.record import Measured, TokenRecord
from engine.step.restriction import Restriction
from engine.step.seeds import uniforms
from guided.errors import GuidedError
from guided.pools.protocol import CLIENT
from guided.sequence import GuidedSequence

_ids = itertools.count()
_UNLIMITED = 1 << 60


class SequenceStatus(Enum):
    """State of a sequence. The value of a finished one is its `finish_reason`."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    RUNNING = "running"
    LATE = "late"
    """Its mask was late. It keeps its blocks, and runs again once the mask is
    decided."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"
    FINISHED_INTERNAL_ERROR = "error"

    @staticmethod
    def get_finished_reason(status: SequenceStatus) -> str | None:
        """Return the `finish_reason`: `stop`, `length`, `abort` or `error`, and None of
        an unfinished sequence."""
        if status in _UNFINISHED:
            return None
        if status is SequenceStatus.FINISHED_IGNORED:
            return "length"
        return str(status.value)


_UNFINISHED = {
    SequenceStatus.WAITING,
    SequenceStatus.WAITING_FOR_GRAMMAR,
    SequenceStatus.RUNNING,
    SequenceStatus.LATE,
}


class Sequence:
    """One output while it is generated: the `index`th of its group."""

    group: SequenceGroup
    """The request. It has the parameters and limits of all its sequences."""
    hidden: NDArray[np.float32]
    """`[hidden]`: the hidden state of the last token, there while `computed` is
    `length`: after a late mask, or after a rollback of the sampled token. To sample the
    next token, only the head and the mask run again."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        seed: int,
        detokenizer: Detokenizer,
    ) -> None:
        self.seq_id = next(_ids)
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.length = len(prompt_token_ids)
        """Prompt and output tokens, counted."""
        self.computed = 0
        """Number of its first tokens with keys and values in the cache, once the
        scheduled step has run."""
        self.status = SequenceStatus.WAITING
        self.edits = 0
        """Number of times that output tokens were replaced or removed."""
        self.uniforms = uniforms(seed)
        self.detokenizer = detokenizer
        self.record = TokenRecord(params)
        self.view: GuidedSequence | None = None
        """What post-processors see of it, if it has a constraint or one of them handles
        all rows."""

    @property
    def params(self) -> SamplingParams:
        return self.group.sampling_params

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def last_token(self) -> int:
        if self.output_token_ids:
            return self.output_token_ids[-1]
        return self.prompt_token_ids[-1]

    def span(self, start: int, end: int) -> list[int]:
        """Return tokens `start` to `end` of prompt and output."""
        prompt = self.prompt_token_ids
        num_prompt = len(prompt)
        return (
            prompt[start:end]
            + self.output_token_ids[
                max(0, start - num_prompt) : max(0, end - num_prompt)
            ]
        )

    @property
    def held_back(self) -> int:
        """Number of newest tokens that outputs do not show before the end, because they
        may be taken back."""
        held_back = self.group.held_back
        if self.view is None or self.view.final is None:
            return held_back
        return max(held_back, self.num_output_tokens - self.view.final)

    @property
    def is_late(self) -> bool:
        """Whether its mask is late, or that of another beam of its group. It does not
        run, and keeps its blocks."""
        if self.params.use_beam_search:
            return any(
                beam.status is SequenceStatus.LATE for beam in self.group.sequences
            )
        return self.status is SequenceStatus.LATE

    def is_finished(self) -> bool:
        """Return whether it has ended."""
        return self.status not in _UNFINISHED

    @property
    def has_unscored_tokens(self) -> bool:
        """Whether forced tokens lack what is wanted of them: the step that computes
        them scores them."""
        return self.record.num_scored(self.num_output_tokens) < self.num_output_tokens

    @property
    def error(self) -> GuidedError | None:
        """The error that ended it."""
        if self.status in (
            SequenceStatus.FINISHED_INTERNAL_ERROR,
            SequenceStatus.FINISHED_IGNORED,
        ):
            return self.group.error
        return None

    def append(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        measured: Measured | None = None,
    ) -> bool:
        """Add a token and, if they are requested, its log-probabilities and what its
        mask allowed. Returns whether it has ended the sequence."""
        self.output_token_ids.append(token_id)
        self.length += 1
        if logprobs is not None or measured is not None:
            self.record.add(logprobs, measured)
        group = self.group
        if (
            token_id in group.stop_ids
            or self.length >= group.max_length
            or group.sampling_params.stop
        ):
            return self.end_if_complete()
        return False

    def take_over(
        self, output: list[int], logprob: float, logprobs: list[TokenLogprobs]
    ) -> None:
        """Replace the output, its cumulative log-probability and, if they are
        requested, those of its tokens."""
        self.output_token_ids[:] = output
        self.length = len(self.prompt_token_ids) + len(output)
        self.record.cumulative_logprob = logprob
        self.record.logprobs = logprobs
        self.edits += 1

    def rollback(self, count: int) -> None:
        """Remove the last `count` output tokens."""
        del self.output_token_ids[-count:]
        self.length -= count
        self.edits += 1
        self.detokenizer.rollback(self.num_output_tokens)
        self.record.rollback(self.num_output_tokens)

    def end_if_complete(self) -> bool:
        """End it at a stop token, a stop string, or its maximum length, in this order.
        Returns whether it has ended."""
        params = self.params
        ends = self.last_token in self.group.stop_ids
        if params.stop and not ends:
            ends = (
                self.detokenizer.find_stop(self.output_token_ids, params.min_tokens)
                is not None
            )
        if ends:
            self.finish(SequenceStatus.FINISHED_STOPPED)
        elif self.length >= self.group.max_length:
            self.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
        return self.is_finished()

    def finish(self, status: SequenceStatus) -> None:
        """End it, unless it has ended already."""
        if not self.is_finished():
            self.status = status


@dataclass(eq=False)
class SequenceGroup:
    """One request: n sequences from one prompt. Those of a beam search are its
    beams."""

    request_id: str
    sequences: list[Sequence]
    sampling_params: SamplingParams
    prompt: str | None = None
    stream: bool = True
    """Report after every step, not only at the end."""
    max_length: int = _UNLIMITED
    """Maximum number of tokens of a sequence, the prompt included."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence."""
    restriction: Restriction | None = None
    """What the request forbids, beside its constraint."""
    held_back: int = 0
    """Number of newest tokens that outputs do not show before the end: the
    post-processor may take them back."""
    backend: str | None = None
    """The grammar library that enforces the constraint. Known once it is compiled."""
    checked: tuple[str, ...] = ()
    """JSON pointers of keywords that are checked when the output ends, not enforced by
    the mask."""
    compile_seconds: float = 0.0
    """Seconds of the compilation; 0 if the grammar came from the cache."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache had when the group started. None:
    it has not started yet."""
    seed: int = 0
    """For draws from its outputs (`SamplingParams.resample`)."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """One entry per scored prompt token, if they were requested. The first token has
    none."""
    arrival_time: float = field(default_factory=time.monotonic)
    client: str = field(default_factory=CLIENT.get)
    compiled_time: float | None = None
    search: Any = None
    """`engine.beams.BeamSearch`, once it has begun."""
    first_token_time: float | None = None
    finished_time: float | None = None
    error: GuidedError | None = None
    """The error that has ended the sequences that had not ended before."""

    def __post_init__(self) -> None:
        for sequence in self.sequences:
            sequence.group = self

    def show(self, eos_token_id: int | None, needs_logprobs: bool) -> None:
        """Create the view of each sequence that post-processors get. `needs_logprobs`:
        one of them reads them."""
        params = self.sampling_params
        budget = None
        if params.complete and params.constraint is not None:
            budget = self.max_length - len(self.prompt_token_ids)
        for sequence in self.sequences:
            sequence.record.needs_logprobs |= (
                needs_logprobs and not params.use_beam_search
            )
            sequence.view = GuidedSequence(
                self.request_id,
                sequence.seq_id,
                sequence.output_token_ids,
                sequence.prompt_token_ids,
                params,
                constrained=params.constraint is not None,
                eos_token_id=eos_token_id,
                budget=budget,
                mask_seconds=0.0 if params.mask_details else None,
            )

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.sequences[0].prompt_token_ids

    @property
    def seqs_dict(self) -> dict[int, Sequence]:
        """The sequences by id."""
        return {sequence.seq_id: sequence for sequence in self.sequences}

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return the sequences, or those with this status."""
        return [
            sequence
            for sequence in self.sequences
            if status is None or sequence.status is status
        ]

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended."""
        return [sequence for sequence in self.sequences if not sequence.is_finished()]

    def is_finished(self) -> bool:
        """Return whether all sequences have ended."""
        return all(sequence.is_finished() for sequence in self.sequences)

    @property
    def waits_for_grammar(self) -> bool:
        return self.sequences[0].status is SequenceStatus.WAITING_FOR_GRAMMAR

    def set_status(self, status: SequenceStatus) -> None:
        """Move all unfinished sequences to another status."""
        for sequence in self.unfinished():
            sequence.status = status
