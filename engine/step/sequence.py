"""Sequences and their state. A request is a `SequenceGroup` of n `Sequence`s with one prompt."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.detokenizer import Detokenizer
from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs
from engine.step.restriction import Restriction
from guided.errors import GuidedError
from guided.pools.protocol import CLIENT
from guided.sequence import GuidedSequence

_ids = itertools.count()


class SequenceStatus(Enum):
    """State of a sequence. The value of a finished one is its `finish_reason`."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"
    FINISHED_INTERNAL_ERROR = "error"

    @staticmethod
    def get_finished_reason(status: SequenceStatus) -> str | None:
        """Return the `finish_reason`: `stop`, `length`, `abort` or `error`, and None of an unfinished sequence."""
        if status in _UNFINISHED:
            return None
        if status is SequenceStatus.FINISHED_IGNORED:
            return "length"
        return str(status.value)


_UNFINISHED = {SequenceStatus.WAITING, SequenceStatus.WAITING_FOR_GRAMMAR, SequenceStatus.RUNNING}


Measured = tuple[int, float | None]
"""Number of tokens that a mask allowed, and the log of its kept mass. None: a forced token, not scored yet."""


@dataclass(slots=True)
class MaskDetails:
    """What the masks of one sequence allowed, for requests with `mask_details` or `resample`."""

    allowed: list[int | None] = field(default_factory=list)
    """For each output token: the number of tokens that could be sampled. None: there was no mask."""
    forced: list[bool] = field(default_factory=list)
    """For each output token: it was appended without a forward pass of its own."""
    kept: list[float | None] = field(default_factory=list)
    """For each output token: the log of its kept mass, see `kept_mass`."""
    exposed_seconds: float = 0.0
    """By how much masks have lengthened the sequence's steps."""
    mask_seconds: float = 0.0
    """What its masks took the workers. Set in snapshots."""

    @property
    def kept_mass(self) -> list[float | None]:
        """For each output token: the probability of all the tokens that its mask allowed, in the model's own
        distribution (before bias and penalties, at temperature 1). None: there was no mask, or it is not known yet."""
        return [None if log is None else math.exp(log) for log in self.kept]


@dataclass(slots=True)
class SequenceData:
    """Token ids of one sequence."""

    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    """Sum over the output tokens that have log-probabilities (`Sequence.needs_logprobs`)."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_token_ids + self.output_token_ids

    def span(self, start: int, end: int) -> list[int]:
        """Return tokens `start` to `end` of prompt and output."""
        prompt = self.prompt_token_ids
        num_prompt = len(self.prompt_token_ids)
        return prompt[start:end] + self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]


def uniforms(seed: int) -> Iterator[float]:
    """Yield the random numbers in [0, 1) of one sequence. They depend on its seed only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(32, generator=generator, dtype=torch.float64).tolist()


class Sequence:
    """One output while it is generated: the `index`th of its group. It ends with a token of `stop_ids`, or at
    `max_length` tokens, the prompt included."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        max_length: int,
        stop_ids: frozenset[int],
        seed: int,
        detokenizer: Detokenizer,
    ) -> None:
        self.seq_id = next(_ids)
        self.index = index
        self.params = params
        self.data = SequenceData(prompt_token_ids)
        self.status = SequenceStatus.WAITING
        self.max_length = max_length
        self.stop_ids = stop_ids
        self.detokenizer = detokenizer
        self.restriction: Restriction | None = None
        """What the request forbids, beside its constraint."""
        self.uniforms = uniforms(seed)
        self.length = len(prompt_token_ids)
        """Prompt and output tokens, counted."""
        self.computed = 0
        """Number of its first tokens with keys and values in the cache, once the scheduled step has run."""
        self.last_token = prompt_token_ids[-1] if prompt_token_ids else -1
        self.edits = 0
        """Number of times that output tokens were replaced or removed."""
        self.needs_logprobs = params.needs_logprobs
        """Compute log-probabilities of each output token."""
        self.output_logprobs: list[TokenLogprobs] = []
        self.stop_reason: str | int | None = None
        """The stop string or stop token that ended it; None for the model's own stop tokens."""
        self.ended_by_stop_token = False
        self.text_complete = False
        """`detokenizer.text` is final."""
        self.error: GuidedError | None = None
        self.is_late = False
        """Its mask is late, or that of another beam of its group. It does not run, and keeps its blocks."""
        self.hidden: NDArray[np.float32]
        """`[hidden]`: the hidden state of its last token, there while `computed` is `length`: after a late mask, or
        after a rollback of the sampled token. To sample the next token, only the head and the mask run again."""
        self.group: SequenceGroup
        self.details = MaskDetails() if params.mask_details or params.resample else None
        self.vetoes: Counter[str] = Counter()
        """Number of times that tokens were taken back, by the keyword of the schema that they violated."""
        self.guided: GuidedSequence | None = None
        """Its view for post-processors, if it has a constraint or one of them handles all rows."""

    @property
    def num_output_tokens(self) -> int:
        return self.length - len(self.data.prompt_token_ids)

    @property
    def held_back(self) -> int:
        """Number of newest tokens that outputs do not show before the end, because they may be taken back."""
        if self.guided is None:
            final = None
        else:
            final = self.guided.final
        if final is None:
            return self.group.held_back
        return max(self.group.held_back, self.num_output_tokens - final)

    def is_finished(self) -> bool:
        """Return whether it has ended."""
        return self.status not in _UNFINISHED

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None, measured: Measured | None = None) -> bool:
        """Add a token and, if they are requested, its log-probabilities and what its mask allowed. Returns whether it
        has ended the sequence."""
        self.data.output_token_ids.append(token_id)
        self.last_token = token_id
        self.length += 1
        if logprobs is not None:
            self.add_logprobs(logprobs)
        if self.details is not None and measured is not None:
            (allowed, kept) = measured
            constrained = self.params.constraint is not None
            self.details.allowed.append(allowed if constrained else None)
            self.details.forced.append(kept is None)
            if kept is not None or not constrained:
                self.details.kept.append(kept if constrained else None)
        if token_id in self.stop_ids or self.length >= self.max_length or self.params.stop:
            return self.end_if_complete()
        return False

    def take_over(self, output: list[int], logprob: float, logprobs: list[TokenLogprobs]) -> None:
        """Replace the output, its cumulative log-probability and, if they are requested, those of its tokens."""
        self.data.output_token_ids[:] = output
        self.length = len(self.data.prompt_token_ids) + len(output)
        self.last_token = output[-1]
        self.data.cumulative_logprob = logprob
        self.output_logprobs = logprobs
        self.edits += 1

    def roll_back(self, count: int) -> None:
        """Remove the last `count` output tokens."""
        del self.data.output_token_ids[-count:]
        self.length -= count
        self.edits += 1
        self.last_token = self.data.span(self.length - 1, self.length)[0]
        self.detokenizer.rewind(self.num_output_tokens)
        if self.details is not None:
            for each in (self.details.allowed, self.details.forced, self.details.kept):
                del each[self.num_output_tokens :]
        while len(self.output_logprobs) > self.num_output_tokens:
            self.data.cumulative_logprob -= self.output_logprobs.pop().own

    @property
    def num_scored(self) -> int:
        """Number of its first output tokens that have what is wanted of them: log-probabilities and kept masses."""
        scored = len(self.output_logprobs) if self.needs_logprobs else self.num_output_tokens
        if self.details is None:
            return scored
        return min(scored, len(self.details.kept))

    @property
    def has_unscored_tokens(self) -> bool:
        """Forced tokens lack what is wanted of them: the step that computes them scores them."""
        return self.num_scored < self.num_output_tokens

    def add_score(self, entries: TokenLogprobs) -> None:
        """Add the log-probabilities of the first forced token that has none. Its kept mass is its own probability."""
        place = self.num_scored
        if self.details is not None and len(self.details.kept) == place:
            self.details.kept.append(entries.own)
        if self.needs_logprobs and len(self.output_logprobs) == place:
            self.add_logprobs(entries)

    def add_logprobs(self, entries: TokenLogprobs) -> None:
        """Add the log-probabilities that were requested for the newest token."""
        self.output_logprobs.append(entries)
        self.data.cumulative_logprob += entries.own

    def end_if_complete(self) -> bool:
        """End it at a stop token, a stop string, or its maximum length, in this order. Returns whether it has ended."""
        token = self.last_token
        output = self.data.output_token_ids
        params = self.params
        if token in self.stop_ids:
            self.finish(SequenceStatus.FINISHED_STOPPED)
            self.ended_by_stop_token = True
            if token in params.stop_token_ids:
                self.stop_reason = token
            else:
                self.stop_reason = None
        elif params.stop and (stop := self.detokenizer.find_stop(output, params.min_tokens)) is not None:
            self.finish(SequenceStatus.FINISHED_STOPPED)
            self.stop_reason = stop
            self.text_complete = True
        elif self.length >= self.max_length:
            self.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
        return self.is_finished()

    def finish(self, status: SequenceStatus, error: GuidedError | None = None) -> None:
        """End it, unless it has ended already."""
        if not self.is_finished():
            self.status = status
            self.error = error
            self.is_late = False


@dataclass(eq=False)
class SequenceGroup:
    """One request: n sequences from one prompt. Those of a beam search are its beams."""

    request_id: str
    sequences: list[Sequence]
    sampling_params: SamplingParams
    prompt: str | None = None
    stream: bool = True
    """Report after every step, not only at the end."""
    held_back: int = 0
    """Number of newest tokens that outputs do not show before the end: the post-processor may take them back."""
    backend: str | None = None
    """The grammar library that enforces the constraint. Known once it is compiled."""
    checked: tuple[str, ...] = ()
    """JSON pointers of keywords that are checked when the output ends, not enforced by the mask."""
    compile_seconds: float = 0.0
    """Seconds of the compilation; 0 if the grammar came from the cache."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache had when the group started. None: it has not started yet."""
    seed: int = 0
    """For draws from its outputs (`SamplingParams.resample`)."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """One entry per scored prompt token, if they were requested. The first token has none."""
    arrival_time: float = field(default_factory=time.monotonic)
    client: str = field(default_factory=CLIENT.get)
    compiled_time: float | None = None
    search: Any = None
    """`engine.beams.BeamSearch`, once it has begun."""
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self) -> None:
        for sequence in self.sequences:
            sequence.group = self

    def show(self, eos_token_id: int | None, needs_logprobs: bool) -> None:
        """Create the view of each sequence that post-processors get. `needs_logprobs`: one of them reads them."""
        params = self.sampling_params
        budget = None
        if params.complete and params.constraint is not None:
            first = self.sequences[0]
            budget = first.max_length - first.length
        for sequence in self.sequences:
            sequence.needs_logprobs |= needs_logprobs and not params.use_beam_search
            sequence.guided = GuidedSequence(
                self.request_id,
                sequence.seq_id,
                sequence.data.output_token_ids,
                sequence.data.prompt_token_ids,
                params,
                constrained=params.constraint is not None,
                eos_token_id=eos_token_id,
                budget=budget,
                mask_seconds=0.0 if params.mask_details else None,
            )

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.sequences[0].data.prompt_token_ids

    @property
    def seqs_dict(self) -> dict[int, Sequence]:
        """The sequences by id."""
        return {sequence.seq_id: sequence for sequence in self.sequences}

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return the sequences, or those with this status."""
        return [sequence for sequence in self.sequences if status is None or sequence.status is status]

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
        """Move all unfinished sequences to an unfinished status."""
        for sequence in self.unfinished():
            sequence.status = status


def sequence_seed(engine_seed: int, request_id: str, seed: int | None, index: int) -> int:
    """Derive a 63-bit seed from `index` and the request's seed, or else the engine's seed and the request id."""
    if seed is not None:
        root = f"seed {seed}"
    else:
        root = f"request {engine_seed} {request_id}"
    digest = hashlib.blake2b(f"{root} {index}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
