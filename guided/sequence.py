"""GuidedSequence: one constrained sequence, as an engine hands it to the post-processor at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from guided.budget import Budget


@dataclass(slots=True, eq=False)
class GuidedSequence:
    """One constrained sequence. The engine makes it once and passes the same object at every step.

    The fields are those that vLLM's RFC 5423 lists for a row. Everything is held by reference.
    """

    request_id: str
    sequence_id: int
    """Unique within the engine's life. It names the matcher."""
    output_token_ids: Sequence[int]
    """All output tokens so far. The engine appends to it between steps."""
    prompt_token_ids: Sequence[int] = ()
    sampling_params: Any = None
    """The engine's own object; the standard post-processor does not read it."""
    parent_id: int | None = None
    """The sequence that this one was forked from. Its matcher is copied if it is still open."""
    budget: Budget | None = None
    """The output tokens within which the constraint must be completed. None: the mask ignores the engine's limit."""
    steered: bool = False
    """Set by the pool: a mask was restricted, so that the output fits in `budget`."""
    mask_seconds: float | None = None
    """The post-processor adds the time that the workers take for this sequence's masks, unless it is None."""
