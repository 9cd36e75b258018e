"""The logits processor: `vllm serve --logits-processors guided.integrations.vllm.processor:GuidedLogitsProcessor`.

One class for vLLM 0.32's two interfaces. The V1 runner says what changes in its batch before the forward pass
(`update_state`) and hands over the logits after it (`apply`). The V2 runner has slots, and tokens on the device
(`add_request`, `apply_staged_writes`, `apply` with the step's layout).

Options go through `--additional-config '{"guided": {"pool": "ray", "num_actors": 4}}'`: which pool, and its options.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor

from guided.errors import GuidedError, InvalidRequest, PoolUnavailable
from guided.integrations.pools import DEFAULT, Opening, find_pool
from guided.integrations.vllm import error_reports, worker_registry
from guided.integrations.vllm.masker import UNKNOWN, Guest, GuestRow, Masker
from guided.integrations.vllm.request_params import asked, refuse_host_stops, request_id
from guided.integrations.vllm.run_directory import announce
from guided.integrations.vllm.tensor_parallel import TensorParallelRanks
from guided.integrations.vllm.v1_batch import V1Batch
from guided.integrations.vllm.v2_batch import TokenCopies, V2Batch, V2Row
from guided.pool import MaskPool
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig

__all__ = ["GuidedLogitsProcessor"]

_ABSENT_STEPS = 256
"""Steps out of the batch after which a slot's matcher is closed: it has probably ended, and V2 doesn't say."""
_log = logging.getLogger("guided.integrations")
_there: weakref.WeakValueDictionary[int, GuidedLogitsProcessor] = weakref.WeakValueDictionary()
"""By the id of its configuration: vLLM makes two where the class is both passed by name and an entry point."""


class GuidedLogitsProcessor(V1LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]
    """Masks the requests that ask for it in `extra_args` (HTTP: `vllm_xargs`); see `docs/vllm.md`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """In the process that admits requests.

        Raises:
            VLLMValidationError: what our HTTP server refuses, in its words; or nobody here would mask it.
        """
        try:
            what = asked(sampling_params)
            if what is not None:
                refuse_host_stops(what, sampling_params)
                worker_registry.check()
        except GuidedError as error:
            raise VLLMValidationError(str(error)) from error

    def __init__(self, vllm_config: VllmConfig, *runner: Any) -> None:
        """
        Args:
            runner: V1: device, is_pin_memory. V2: the request states.
        """
        self._config = vllm_config
        self._idle = id(vllm_config) in _there or not _is_last_stage(vllm_config)
        if self._idle:
            return
        _there[id(vllm_config)] = self
        announce()
        v2 = isinstance(runner[0], LogitsProcRequestState)
        self._refusal = _refusal(vllm_config, v2)
        options = _pool_options(vllm_config)
        self._opening = Opening(partial(_open_pool, vllm_config, options))
        ranks = _ranks(vllm_config)
        width = vllm_config.model_config.get_vocab_size()
        self._masker = Masker(self._opening, error_reports.report, ranks, width, **_masker_options(options))
        self._contested = _has_others(vllm_config)
        weakref.finalize(self, self._opening.close)
        self._v1: V1Batch[tuple[Guest, list[int]]] = V1Batch()
        self._step: list[GuestRow] = []
        self._prepared = True
        self._v2: V2Batch[Guest] = V2Batch()
        if v2:
            self._state: LogitsProcRequestState = runner[0]
            self._copies = TokenCopies(self._state)
            self._copied: list[int] | None = None
            self._not_copied: Exception | None = None
        if ranks is None or ranks.computes:
            _register(self._refusal, vllm_config.instance_id)
        if self._refusal is not None:
            _log.warning("guided requests are refused: %s", self._refusal)

    def is_argmax_invariant(self) -> bool:
        """It is not: the likeliest token may be forbidden."""
        return False

    def _begin(self, params: SamplingParams) -> Guest | None:
        """The guest that a request of the batch is; None where it asks for nothing of ours."""
        try:
            what = asked(params)
        except Exception as error:
            return self._masker.begin(error, _stop_token(params), request_id=request_id(params))
        if what is None:
            return None
        guest = self._masker.begin(what, _stop_token(params), self._contested or _is_contested(params))
        if self._refusal is not None:
            self._masker.fail(guest, UNKNOWN if self._refusal == str(UNKNOWN) else PoolUnavailable(self._refusal))
        return guest

    # the V1 runner

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before the forward pass: who is where, and where all tokens are known, have the masks computed."""
        if self._idle:
            return
        if batch_update is not None:
            added = [(index, self._enter(params, outputs)) for index, params, _, outputs in batch_update.added]
            moved = [(one, other, how is MoveDirectionality.SWAP) for one, other, how in batch_update.moved]
            for guest, _ in self._v1.update(batch_update.removed, added, moved):
                self._masker.end(guest)
            self._step = [GuestRow(guest, row, outputs) for row, (guest, outputs) in self._v1]
        self._prepared = self._masker.prepare(self._step)

    def _enter(self, params: SamplingParams, outputs: list[int]) -> tuple[Guest, list[int]] | None:
        guest = self._begin(params)
        return None if guest is None else (guest, outputs)

    # the V2 runner

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A slot is filled, whoever was there; whether it is with a guided request."""
        if self._idle:
            return False
        guest = self._begin(sampling_params)
        prompt = int(self._state.prompt_len.np[req_idx])
        before = self._v2.put(req_idx, guest, prompt, int(self._state.prefill_len.np[req_idx]) - prompt)
        if before is not None:
            self._masker.end(before)
        return guest is not None

    def apply_staged_writes(self) -> None:
        """Before the forward pass: begin to copy the tokens that the step before added."""
        if self._idle:
            return
        self._copied = self._not_copied = None
        if not len(self._v2) or not self._masker.computes:
            return
        copied = list(self._v2)
        slots = [self._v2[index] for index in copied]
        width = 1 + _drafts(self._config) + max(slot.prior for slot in slots)
        try:
            self._copies.begin(copied, [slot.length for slot in slots], width)
        except Exception as error:  # to be told of in `apply`, where it is seen whose masks need the tokens
            self._not_copied = error
        else:
            self._copied = copied

    def _take_copy(self) -> None:
        if self._not_copied is not None:
            raise self._not_copied
        if self._copied is None:
            return
        copied, self._copied = self._copied, None
        totals, windows = self._copies.read()
        by_slot = dict(zip(copied, totals, strict=True))
        for index in self._v2.add_tokens(by_slot, dict(zip(copied, windows, strict=True))):
            slot = self._v2[index]
            rest = self._state.all_token_ids.gpu[index, slot.length : by_slot[index]].tolist()
            self._v2.add_tokens({index: by_slot[index]}, {index: rest})

    def _prepare_v2(self, context: LogitsContext) -> None:
        slots, offsets, fed = _layout(context)
        step = self._v2.rows(slots, offsets)
        try:
            self._take_copy()
            rows = self._rows(step, fed)
        except Exception as error:  # without the tokens nobody knows what comes next
            whose = [GuestRow(self._v2[row.slot].request, row.logits_row, (), row.draft_count) for row in step]
            self._masker.break_off(whose, error)
        else:
            self._masker.prepare(rows, wait=True)

    def _rows(self, step: list[V2Row], fed: list[int]) -> list[GuestRow]:
        rows: list[GuestRow] = []
        for row in step:
            slot = self._v2[row.slot]
            # The first row's input is the last token that is committed; each later row's is one guess more.
            first = row.logits_row - row.draft_count
            guesses = fed[first + 1 : row.logits_row + 1]
            tokens = slot.tokens + guesses if guesses else slot.tokens
            rows.append(GuestRow(slot.request, row.logits_row, tokens, row.draft_count))
        return rows

    # both

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """After the forward pass: write -inf over what is forbidden, in place. Waits for masks.

        Args:
            ctx: V2: which row is whose.
        """
        if self._idle:
            return logits
        if ctx is not None:
            present = set(ctx.idx_mapping_np.tolist())
            for guest in self._v2.count_absent(present, _ABSENT_STEPS):
                self._masker.rest(guest)
            if present.isdisjoint(self._v2):
                return logits
            self._prepare_v2(ctx)
        elif not self._prepared:
            self._masker.prepare(self._step, wait=True)
        self._masker.apply(logits)
        self._prepared = False
        return logits


def _register(refusal: str | None, engine: str) -> None:
    try:
        worker_registry.register(refusal, engine)
    except OSError:  # others than guided requests go on as if this was not installed
        _log.exception("guided requests will be refused: this worker can't say that it masks them")


# what the configuration says


def _is_last_stage(config: VllmConfig) -> bool:
    """Logits are where the last stage of a pipeline is."""
    return config.parallel_config.pipeline_parallel_size == 1 or bool(get_pp_group().is_last_rank)


def _ranks(config: VllmConfig) -> TensorParallelRanks | None:
    if config.parallel_config.tensor_parallel_size == 1:
        return None
    group = get_tp_group()
    return TensorParallelRanks(group.cpu_group, group.ranks[0])


def _drafts(config: VllmConfig) -> int:
    """Draft tokens that a step may have for a request."""
    speculative = config.speculative_config
    return int(speculative.num_speculative_tokens or 0) if speculative is not None else 0


def _refusal(config: VllmConfig, v2: bool) -> str | None:
    """Why guided requests can't be masked in this engine, where they can't."""
    if config.model_config.is_diffusion:
        return "vLLM doesn't call logits processors for diffusion models: guided requests can't be masked"
    if v2:
        if config.parallel_config.enable_batch_sharded_sampling:
            return "with batch-sharded sampling each rank has other rows: start vLLM without it for guided requests"
        return None
    # Passed by name, whichever class: then the V1 runner tells processors the real tokens.
    if config.scheduler_config.async_scheduling and not config.model_config.logits_processors:
        return str(UNKNOWN)
    return None


def _pool_options(config: VllmConfig) -> dict[str, Any]:
    additional = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    options = dict(additional.get("guided") or {})
    if options.get("pool", DEFAULT) == "ray" and config.parallel_config.distributed_executor_backend == "ray":
        options.setdefault("address", "auto")  # the cluster that vLLM itself runs on
    if len(options) > ("pool" in options):
        find_pool(options.get("pool", DEFAULT), _without_pool(options))  # raises now what is wrong with them
    return options


def _masker_options(options: Mapping[str, Any]) -> dict[str, float]:
    """What the pool is told of waiting holds for who waits for it."""
    return {"fill_limit": float(options["mask_limit"])} if "mask_limit" in options else {}


def _has_others(config: VllmConfig) -> bool:
    """Whether there are other custom logits processors: what comes before may forbid all that a mask allows."""
    mine = f"{GuidedLogitsProcessor.__module__}:{GuidedLogitsProcessor.__qualname__}"
    found = {entry.value for entry in entry_points(group="vllm.logits_processors")}
    found.update(map(_qualified_name, config.model_config.logits_processors or ()))
    return bool(found - {mine})


def _qualified_name(processor: type | str) -> str:
    return processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"


def _without_pool(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "pool"}


def _open_pool(config: VllmConfig, options: Mapping[str, Any]) -> MaskPool:
    open_pool = find_pool(options.get("pool", DEFAULT), _without_pool(options))
    return open_pool(_vocabulary(config))


def _vocabulary(config: VllmConfig) -> Vocabulary:
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise InvalidRequest("guided requests need the tokenizer: start vLLM without --skip-tokenizer-init")
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)  # in vLLM's own for Mistral's models
    also = (model.try_get_generation_config() or {}).get("eos_token_id")
    stops = [tokenizer.eos_token_id, *(also if isinstance(also, list) else [also])]
    return Vocabulary.from_tokenizer(
        tokenizer, model.get_vocab_size(), list(dict.fromkeys(token for token in stops if token is not None))
    )


# what a request says


def _stop_token(params: SamplingParams) -> int:
    """What vLLM ends this request at."""
    if params.eos_token_id is not None:
        return int(params.eos_token_id)
    return int(next(iter(params.stop_token_ids or ()), 0))


def _is_contested(params: SamplingParams) -> bool:
    """vLLM writes -inf for it before logits processors are called."""
    return bool(params.min_tokens or params.bad_words or params.allowed_token_ids)


def _layout(context: LogitsContext) -> tuple[list[int], list[int], list[int]]:
    """Of each row of the logits: its slot, its place among its request's rows, and the token that was fed there.

    The host knows where each request has one row; else the device does, and the forward pass is waited for.
    """
    if len(context.expanded_idx_mapping) == len(context.idx_mapping_np):
        slots = context.idx_mapping_np.tolist()
        return slots, [0] * len(slots), []
    import torch

    columns = (context.expanded_idx_mapping, context.expanded_local_pos, context.input_ids)
    slots, offsets, fed = torch.stack([column.to(torch.int64) for column in columns]).tolist()
    return slots, offsets, fed
