"""What a post-processor knows of a sequence (`GuidedSequence`) and of a sampled token (`SequenceOutput`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True, eq=False)
class GuidedSequence:
    """One sequence, with the fields of a row in vLLM's RFC 5423. The engine passes the same object at every step."""

    request_id: str
    sequence_id: int
    """Unique within the engine's life. It names the matcher."""
    output_token_ids: Sequence[int]
    """All output tokens so far. The engine appends to it between steps."""
    prompt_token_ids: Sequence[int] = ()
    sampling_params: Any = None
    """The engine's own object; the standard post-processor does not read it."""
    constrained: bool = True
    """It has a constraint. Others are for post-processors with `all_rows`."""
    eos_token_id: int | None = None
    """The model's first stop token."""
    budget: int | None = None
    """The output tokens within which the constraint must be completed. None: the mask ignores the engine's limit."""
    final: int | None = None
    """Set by the pool: the first `final` output tokens stay. It may take the others back (`StepMasks.vetoes`), if the
    engine has set this to 0 because a keyword is only checked. None: no token is taken back."""
    steered: bool = False
    """Set by the pool: a mask was restricted, so that the output fits in `budget`."""
    mask_seconds: float | None = None
    """The post-processor adds the time that the workers take for this sequence's masks, unless it is None."""


class VetoReport(NamedTuple):
    """What a worker says of a sequence of which it may take tokens back, after it has written the mask."""

    length: int
    """The mask is that after so many output tokens. If the output has more, the others are taken back."""
    final: int
    """So many output tokens are never taken back."""
    keyword: str = ""
    """The keyword of the schema that was violated last."""


class SequenceOutput(NamedTuple):
    """A sampled token of one sequence."""

    parent_seq_id: int
    """The sequence that the token continues."""
    output_token: int
    logprobs: Mapping[int, Any]
    """Log-probabilities by token id: of the token, and of as many others as the request asked for."""
