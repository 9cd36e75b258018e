"""A device for vLLM on machines without a GPU: vLLM's V2 model runner and asynchronous
scheduling, as on GPUs.

`use` prepares a process. There are two devices:

- by default vLLM's V2 runner computes with CPU tensors. Its streams do nothing, and its
  Triton kernels run in Triton's interpreter. Tokens are real, and a step takes about
  0.1 s;
- `SimulatedWorker`, for vLLM's option `worker_cls`, computes nothing. A forward pass
  takes `STEP_SECONDS`, while the scheduler continues. Tokens are random, but the masks
  allow them.

`python -m benchmarks.fake_device ARGUMENTS` is `vllm serve ARGUMENTS` on the first
device.

Neither device can test vLLM's platform and worker for CUDA (the worker for CPUs runs
the same V2 runner), CUDA graphs, batches that need another graph, races of streams,
unfinished copies, the speed and accuracy of compiled kernels, the time of a real
forward pass, several devices, or EAGLE and other drafting models.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # vLLM takes Triton although no driver is active
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""Set it before vLLM is imported."""
STEP_SECONDS = "GUIDED_STEP_SECONDS"
"""The environment variable with the duration of a forward pass of `SimulatedWorker`."""


def use(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Use the device in this process, in which `ENVIRONMENT` is set. Replaces functions
    with `patch`."""
    from triton.runtime.interpreter import InterpreterBuilder
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def schedule_asynchronously(config: Any) -> None:
        configure(config)
        config.scheduler_config.async_scheduling = True

    # The interpreter refuses masks of integers, which some of vLLM's kernels compute.

    def load_masked(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *others)

    def store_masked(
        self: Any, pointers: Any, value: Any, mask: Any, *others: Any
    ) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *others)

    patch(CpuPlatform, "check_and_update_config", staticmethod(schedule_asynchronously))
    patch(InterpreterBuilder, "create_masked_load", load_masked)
    patch(InterpreterBuilder, "create_masked_store", store_masked)


# also in vLLM's processes, which import this module anew
if __name__ in ("__main__", "__mp_main__"):
    os.environ.update(ENVIRONMENT)
    use()
if __name__ == "__main__":
    sys.argv[0] = "vllm.entrypoints.openai.api_server"
    runpy.run_module(sys.argv[0], run_name="__main__")
