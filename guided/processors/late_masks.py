"""How long a step waits for masks, where its deadline alone does not say it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from guided.pools.protocol import MaskPool, StepMasks
from guided.processors.cuda_kernel import end_of_work

if TYPE_CHECKING:
    import torch

FIRST_MASK_SECONDS = 0.1
"""Minimum deadline for a step's first mask if no other row can be sampled. It delays
new requests by up to this."""
_LOOK_SECONDS = 0.0002
"""Interval between looks at masks and device."""


def collect_during(
    pool: MaskPool, logits: torch.Tensor, deadline: float
) -> tuple[StepMasks, float]:
    """Collect masks while a CUDA device computes `logits`. `deadline` counts from the
    end of that. Masks that are there before it do not wait. Returns the masks, and the
    `time.perf_counter()` at which the wait for masks began."""
    computed = end_of_work(logits)
    step = pool.collect(0.0)
    while step.late and not computed.query():
        time.sleep(_LOOK_SECONDS)  # a pool may wait longer, up to a millisecond
        step = pool.collect(0.0)
    started = time.perf_counter()
    if step.late:
        step = pool.collect(deadline)
    return step, started


def wait_for_share(pool: MaskPool, step: StepMasks, seconds: float) -> StepMasks:
    """Wait for another `seconds` for each late row."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds * len(step.late):
        step = pool.collect(_LOOK_SECONDS)
    return step


def wait_for_first(pool: MaskPool, late: Collection[int], until: float) -> None:
    """Wait until one of the late sequences with these ids is decided, or until a
    `time.perf_counter()`."""
    while not pool.decided(late) and time.perf_counter() < until:
        time.sleep(_LOOK_SECONDS)
