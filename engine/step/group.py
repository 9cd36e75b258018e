"""SequenceGroup: one request, n sequences from one prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs
from engine.step.restriction import Restriction
from engine.step.sequence import Sequence, SequenceStatus
from guided.errors import GuidedError
from guided.pools.protocol import CLIENT
from guided.sequence import GuidedSequence

_UNLIMITED = 1 << 60


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
