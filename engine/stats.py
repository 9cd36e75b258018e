"""EngineStats: what the engine counts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from guided.processors.logit_post_processor import ApplyReport

KEPT_MASS_BOUNDS = (0.0001, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Upper bounds of the classes of `EngineStats.kept_mass`."""


@dataclass
class EngineStats:
    """Counters since the start. Only the engine's thread writes them. Times are
    seconds."""

    steps: int = 0
    """Forward passes."""
    step_seconds: float = 0.0
    mean_step: float = 0.0
    """Moving average of a step's seconds, without the time that it waits for masks."""
    prepare_seconds: float = 0.0
    wait_seconds: float = 0.0
    kernel_seconds: float = 0.0
    """These three are the exposed mask time: `wait_seconds` is that for masks in
    `apply`."""
    mask_seconds: float = 0.0
    hidden_seconds: float = 0.0
    """Mask time of the workers, and the part of it that no step waited for."""
    forced_tokens: int = 0
    """Tokens that were appended without a forward pass of their own."""
    late: int = 0
    """Sequences with a late mask, after the last step."""
    late_rows: int = 0
    """Rows without a mask at the deadline."""
    kept_mass: list[int] = field(default_factory=lambda: [0] * len(KEPT_MASS_BOUNDS))
    """Number of measured masks, by the first of `KEPT_MASS_BOUNDS` that the kept mass
    does not exceed."""
    kept_mass_sum: float = 0.0
    vetoes: Counter[str] = field(default_factory=Counter)
    """Number of times that tokens were taken back, by the keyword of the schema that
    they violated."""
    failures: Counter[str] = field(default_factory=Counter)
    """Groups that ended with an error, by its code."""

    def note_masks(self, report: ApplyReport) -> None:
        """Add what `apply` reports."""
        self.wait_seconds += report.wait_seconds
        self.kernel_seconds += report.kernel_seconds
        self.mask_seconds += report.mask_seconds
        self.hidden_seconds += max(0.0, report.mask_seconds - report.wait_seconds)

    def note_kept_mass(self, log: float) -> None:
        """Add a kept mass, given as its log. NaN is left out: the model has computed no
        distribution."""
        if not math.isnan(log):
            mass = math.exp(log)
            self.kept_mass[bisect_left(KEPT_MASS_BOUNDS, mass)] += 1
            self.kept_mass_sum += mass

    def note_step(self, seconds: float, waited: float, computed: bool) -> None:
        """Add a step that waited `waited` of its seconds for masks. `computed`: it had
        a forward pass."""
        self.step_seconds += seconds
        if computed:
            weight = max(1 / self.steps, 0.02)
            self.mean_step += weight * (seconds - waited - self.mean_step)
