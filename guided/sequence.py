"""The views of a sequence (`GuidedSequence`) and of a sampled token (`SequenceOutput`)
that post-processors get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True, eq=False)
class GuidedSequence:
    """One sequence, with the fields of a row in vLLM's RFC 5423. The engine passes the
    same object at every step."""

    request_id: str
    sequence_id: int
    """The id of the sequence, which is unique within the life of the engine and of the
    pool."""
    output_token_ids: Sequence[int]
    """All output tokens so far. The engine appends to this list between steps."""
    prompt_token_ids: Sequence[int] = ()
    sampling_params: Any = None
    """The engine's own object. The standard post-processor does not read it."""
    constrained: bool = True
    """Whether the sequence has a constraint. Only post-processors with `all_rows` get
    sequences without one."""
    eos_token_id: int | None = None
    """The model's first stop token."""
    budget: int | None = None
    """The number of output tokens within which the constraint must be completed. None:
    masks ignore the engine's limit of tokens."""
    final: int | None = None
    """The number of first output tokens that stay. The engine sets it to 0 if a keyword
    of the schema is only checked. The pool then increases it, and may take back later
    tokens (`StepMasks.vetoes`). None: no token is taken back."""
    steered: bool = False
    """Whether the pool has restricted a mask so that the output fits in `budget`."""
    mask_seconds: float | None = None
    """The seconds that the workers have taken for the masks of this sequence. None:
    they are not measured."""


class VetoReport(NamedTuple):
    """A worker's report about a sequence that may lose tokens. It comes with a mask."""

    length: int
    """The number of output tokens after which the mask applies. If the output has more,
    they are taken back."""
    final: int
    """The number of first output tokens that are never taken back."""
    keyword: str = ""
    """The keyword of the schema that was violated last."""


class SequenceOutput(NamedTuple):
    """A sampled token of one sequence."""

    parent_seq_id: int
    """The sequence that the token continues."""
    output_token: int
    logprobs: Mapping[int, Any]
    """The log-probabilities of the token, and of as many others as the request asked
    for, by token id."""
