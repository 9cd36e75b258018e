"""The logits processor: `vllm serve --logits-processors guided.integrations.vllm.processor:GuidedLogitsProcessor`.

For versions of vLLM without `GuidedManager` (`activation.py`). With it, this class only translates `vllm_xargs`.

One class for both interfaces of vLLM 0.32. The V1 model runner calls `update_state` before the forward pass and `apply`
after it. The V2 model runner, which keeps tokens on the device, calls `add_request`, `apply_staged_writes` and `apply`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor

from guided.errors import GuidedError, InvalidRequest, PoolUnavailable
from guided.integrations.vllm import activation, admission, error_reports, worker_registry
from guided.integrations.vllm.configuration import pool_opener, step_wait, stop_token
from guided.integrations.vllm.masker import UNKNOWN_TOKEN, GuidedRequest, GuidedRow, Masker
from guided.integrations.vllm.request_params import VALIDATED, GuidedParams, guided_params, request_id
from guided.integrations.vllm.run_directory import announce
from guided.integrations.vllm.tensor_parallel import Ranks
from guided.integrations.vllm.v2_batch import V2Batch

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig

MAX_ABSENT_STEPS = 256
"""Number of successive batches without a slot's request after which its matchers are closed. The request has probably
ended, which the V2 runner does not report."""
_SERVER = "vllm.entrypoints.openai.api_server"
_WITHOUT_MIDDLEWARE = (
    "constraints in vllm_xargs need the middleware, which gives the request an id to report errors under (start vLLM "
    "with --middleware guided.integrations.vllm.middleware.GuidedErrors), and a body within its limits"
)
_log = logging.getLogger("guided.integrations")
_instances: weakref.WeakValueDictionary[int, GuidedLogitsProcessor] = weakref.WeakValueDictionary()
"""By id of their configuration. vLLM makes two if the class is both given by name and an entry point."""


class GuidedLogitsProcessor(V1LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]
    """Masks the requests with guided parameters in `extra_args` (HTTP: `vllm_xargs`); see `docs/vllm.md`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request, in the process that admits requests.

        Raises:
            VLLMValidationError: the guided parameters are invalid (with the message of `guided serve`), or no worker
                would mask the request.
        """
        try:
            guided = guided_params(sampling_params)
            if activation.is_active():
                admission.enforce(sampling_params, guided)
            elif guided is not None:
                worker_registry.check()
                if _SERVER in sys.modules and request_id(sampling_params) is None:
                    raise InvalidRequest(_WITHOUT_MIDDLEWARE)
                sampling_params.extra_args = {**(sampling_params.extra_args or {}), VALIDATED: guided.to_text()}
        except GuidedError as error:
            raise VLLMValidationError(str(error)) from error

    def __init__(self, vllm_config: VllmConfig, *runner: Any) -> None:
        """
        Args:
            runner: V1: device, is_pin_memory. V2: the request states.
        """
        first_stages = vllm_config.parallel_config.pipeline_parallel_size > 1 and not get_pp_group().is_last_rank
        self.idle = activation.is_active() or id(vllm_config) in _instances or first_stages
        """`GuidedManager` or another instance masks this engine's batches, or this process has no logits."""
        if self.idle:
            return
        _instances[id(vllm_config)] = self
        announce()
        v2 = isinstance(runner[0], LogitsProcRequestState)
        self._rejection = _rejection(vllm_config, v2)
        ranks = _ranks(vllm_config)
        pool = pool_opener(vllm_config, opens=self._rejection is None and (ranks is None or ranks.computes))
        weakref.finalize(self, pool.close)
        self._masker = Masker(pool, error_reports.report, vllm_config.model_config.get_vocab_size(), ranks)
        self._step_wait = step_wait(vllm_config)
        self._v1: dict[int, tuple[GuidedRequest, list[int]]] = {}
        """The V1 runner's guided rows: the request and its output tokens."""
        self._rows: list[GuidedRow] = []
        self._prepared = True
        if v2:
            speculative = vllm_config.speculative_config
            max_drafts = speculative.num_speculative_tokens if speculative is not None else 0
            self._v2 = V2Batch(runner[0], int(max_drafts or 0))
        if self._masker.computes:
            try:
                worker_registry.register(str(self._rejection or "") or None, vllm_config.instance_id)
            except OSError:  # requests without a constraint are not affected
                _log.exception("guided requests will be rejected: this worker can't register")
        if self._rejection is not None:
            _log.warning("guided requests are rejected: %s", self._rejection)

    def is_argmax_invariant(self) -> bool:
        """Return False: the most probable token may be forbidden."""
        return False

    def _begin(self, params: SamplingParams) -> GuidedRequest | None:
        """Add a request of the batch to the masker. None: it has no guided parameters."""
        text = (params.extra_args or {}).get(VALIDATED)
        if text is None:
            return None
        guided = self._rejection or GuidedParams.from_text(text)
        return self._masker.begin(guided, stop_token(params), request_id(params))

    # the V1 model runner

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before the forward pass: follow the batch, and prepare its masks if all tokens are known."""
        if self.idle:
            return
        before = self._rows
        if process_dict_updates(self._v1, batch_update, self._enter):
            self._rows = [GuidedRow(request, row, outputs) for row, (request, outputs) in sorted(self._v1.items())]
            for request in {row.request for row in before} - {row.request for row in self._rows}:
                self._masker.end(request)
        self._prepared = self._masker.prepare(self._rows)

    def _enter(self, params: SamplingParams, _: Any, outputs: list[int]) -> tuple[GuidedRequest, list[int]] | None:
        request = self._begin(params)
        return None if request is None else (request, outputs)

    # the V2 model runner

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Fill a slot. Returns whether its request is guided."""
        if self.idle:
            return False
        request = self._begin(sampling_params)
        previous = self._v2.put(req_idx, request)
        if previous is not None:
            self._masker.end(previous)
        return request is not None

    def apply_staged_writes(self) -> None:
        """Before the forward pass: the tokens of the previous step are complete."""
        if not self.idle and self._masker.computes:
            self._v2.begin()

    def _prepare_v2(self, context: LogitsContext) -> None:
        error: Exception | None = None
        try:
            if self._masker.computes:
                self._v2.read()
        except Exception as failure:
            error = failure
        self._masker.prepare(self._v2.rows(*_layout(context)), self._step_wait, error)

    # both

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Wait for the masks, and write -inf to forbidden tokens, in place. `ctx`: the layout of the step (V2)."""
        if self.idle:
            return logits
        if ctx is not None:
            present = set(ctx.idx_mapping_np.tolist())
            for request in self._v2.count_absent(present, MAX_ABSENT_STEPS):
                self._masker.release(request)
            if present.isdisjoint(self._v2):
                return logits
            self._prepare_v2(ctx)
        elif not self._prepared:
            self._masker.prepare(self._rows, self._step_wait)
        self._masker.apply(logits, self._step_wait)
        self._prepared = False
        return logits


# the configuration


def _ranks(config: VllmConfig) -> Ranks | None:
    if config.parallel_config.tensor_parallel_size == 1:
        return None
    group = get_tp_group()
    return Ranks(group.cpu_group, group.ranks[0])


def _rejection(config: VllmConfig, v2: bool) -> GuidedError | None:
    """Return why this engine can't mask guided requests. None: it can."""
    if config.model_config.is_diffusion:
        return PoolUnavailable(
            "vLLM doesn't call logits processors for diffusion models: guided requests can't be masked"
        )
    if v2 and config.parallel_config.enable_batch_sharded_sampling:
        return PoolUnavailable("with batch-sharded sampling each rank has other rows: guided requests can't be masked")
    # The V1 runner passes the real tokens to processors if any class is given by name.
    if not v2 and config.scheduler_config.async_scheduling and not config.model_config.logits_processors:
        return UNKNOWN_TOKEN
    return None


def _layout(context: LogitsContext) -> tuple[list[int], list[int], list[int]]:
    """Return the arguments of `V2Batch.rows`.

    With one row per request, the host knows them. Otherwise they are read from the device, after the forward pass.
    """
    if len(context.expanded_idx_mapping) == len(context.idx_mapping_np):
        slots = context.idx_mapping_np.tolist()
        return slots, [0] * len(slots), []
    import torch

    columns = (context.expanded_idx_mapping, context.expanded_local_pos, context.input_ids)
    slots, draft_counts, input_ids = torch.stack([column.to(torch.int64) for column in columns]).tolist()
    return slots, draft_counts, input_ids
