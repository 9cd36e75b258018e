"""A worker of vLLM that computes nothing: see `benchmarks.fake_device`."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.fake_device import STEP_SECONDS


class SimulatedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """The tokens of a step, available when the device has computed the step."""

    def __init__(self, tokens: dict[str, list[int]], done_at: float) -> None:
        self._tokens = tokens
        self._done_at = done_at

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._done_at - time.perf_counter()))
        names = list(self._tokens)
        return ModelRunnerOutput(
            names,
            {name: row for row, name in enumerate(names)},
            list(self._tokens.values()),
        )

    def get_kv_connector_output(self) -> None:
        return None


class SimulatedWorker(CPUWorker):  # type: ignore[misc]
    """Run one step after the other, as a device does, while the engine continues."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = float(os.environ[STEP_SECONDS])
        self._free_at = 0.0
        """The time at which the device has computed all its steps."""
        self._lengths: dict[str, int] = {}
        """Number of tokens of each request when it joined. Only the last of them gives
        a token."""
        self._rows: dict[str, bool] = {}
        """Request of the step -> whether a token is sampled."""

    def determine_available_memory(self) -> int:
        return 1 << 30

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in scheduler_output.finished_req_ids:
            self._lengths.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._lengths[new.req_id] = len(new.prefill_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        self._rows = {
            request_id: computed[request_id] + count >= self._lengths[request_id]
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
        }
        if not self._rows:
            return ModelRunnerOutput([], {})
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        return None

    def sample_tokens(self, grammar_output: Any) -> SimulatedOutput:
        masks: dict[str, NDArray[np.int32]] = {}
        if grammar_output is not None:
            ids = grammar_output.structured_output_request_ids
            masks = dict(zip(ids, grammar_output.grammar_bitmask, strict=True))
        tokens = {
            request_id: [allowed_token(masks.get(request_id))] if is_sampled else []
            for request_id, is_sampled in self._rows.items()
        }
        self._free_at = max(self._free_at, time.perf_counter())
        return SimulatedOutput(tokens, self._free_at)


def allowed_token(mask: NDArray[np.int32] | None) -> int:
    """Return a random token that the mask allows."""
    if mask is None:
        return random.randrange(256)
    place = int(random.choice(np.flatnonzero(mask)))
    word = int(mask[place]) & 0xFFFFFFFF
    return 32 * place + random.choice([bit for bit in range(32) if word >> bit & 1])
