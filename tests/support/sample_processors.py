"""Logits processors for tests: examples from vLLM's documentation, and some that do the
same as a sampling parameter, so that outputs can be compared."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np
import torch

from engine.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    SamplingParams,
    VllmConfig,
    process_dict_updates,
)

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]


class DummyLogitsProcessor(LogitsProcessor):
    """Fake logit processor to support unit testing and examples. (vLLM:
    docs/features/custom_logitsprocs.md)"""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target_token: int | None = params.extra_args and params.extra_args.get(
            "target_token"
        )
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} is not int")

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ):
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        """Never impacts greedy sampling"""
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if not batch_update:
            return

        # Process added requests.
        for index, params, _, _ in batch_update.added:
            assert params is not None
            self.validate_params(params)
            if params.extra_args and (
                target_token := params.extra_args.get("target_token")
            ):
                self.req_info[index] = target_token
            else:
                self.req_info.pop(index, None)

        if self.req_info:
            # Process removed requests.
            for index in batch_update.removed:
                self.req_info.pop(index, None)

            # Process moved requests, unidirectional move (a->b) and swap
            # (a<->b)
            for adx, bdx, direct in batch_update.moved:
                a_val = self.req_info.pop(adx, None)
                b_val = self.req_info.pop(bdx, None)
                if a_val is not None:
                    self.req_info[bdx] = a_val
                if direct == MoveDirectionality.SWAP and b_val is not None:
                    self.req_info[adx] = b_val

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.req_info:
            return logits

        # Save target values before modification
        cols = torch.tensor(
            list(self.req_info.values()), dtype=torch.long, device=logits.device
        )
        rows = torch.tensor(
            list(self.req_info.keys()), dtype=torch.long, device=logits.device
        )
        values_to_keep = logits[rows, cols].clone()

        # Mask all but target tokens
        logits[rows] = float("-inf")
        logits[rows, cols] = values_to_keep

        return logits


class DummyPerReqLogitsProcessor:
    """The request-level logits processor masks out all logits except the token id
    identified by `target_token`. (vLLM: docs/features/custom_logitsprocs.md)"""

    def __init__(self, target_token: int) -> None:
        """Specify `target_token`"""
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        val_to_keep = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = val_to_keep
        return logits


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    """Example of wrapping a fake request-level logit processor to create a
    batch-level logits processor. (vLLM: docs/features/custom_logitsprocs.md)"""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> RequestLogitsProcessor | None:
        """This method returns a new request-level logits processor, customized
        to the `target_token` value associated with a particular request."""
        target_token: Any | None = params.extra_args and params.extra_args.get(
            "target_token"
        )
        if target_token is None:
            return None
        return DummyPerReqLogitsProcessor(target_token)


class Plain(LogitsProcessor):
    """Keeps one of `extra_args` by row, and changes nothing. The base of those
    below."""

    name = ""
    after_the_mask = False

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        self.values: dict[int, Any] = {}

    def is_argmax_invariant(self) -> bool:
        return self.after_the_mask

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.values, batch_update, lambda params, *_: _extra(params, self.name)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class MyBias(Plain):
    """`logit_bias`. It returns a new tensor."""

    name = "bias"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return _biased(logits.clone(), self.values)


class MyMinP(Plain):
    """`min_p` for requests that have it in `extra_args`."""

    name = "min_p"
    after_the_mask = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return _cut(logits, self.values)


class RevisedBias(LogitsProcessor):
    """`logit_bias` in the revised model."""

    after_the_mask = False

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        self.count = vllm_config.scheduler_config.max_num_seqs
        self.params: dict[int, SamplingParams] = {}
        self.rows: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return self.after_the_mask

    def add_request(self, req_info: tuple[SamplingParams, int, int]) -> None:
        params, prompt_length, index = req_info
        assert prompt_length
        assert index not in self.params
        assert 0 <= index < self.count
        self.params[index] = params

    def remove_request(self, req_pdx: int) -> None:
        del self.params[req_pdx]

    def update_state(
        self, index_mapping: Array | None, token_ids: Array, seq_lens: Array
    ) -> None:
        if index_mapping is not None:
            self.rows = index_mapping.tolist()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.rows)
        return _biased(logits, self.extras("bias"))

    def extras(self, name: str) -> dict[int, Any]:
        """One of `extra_args` by row, of the requests that have it."""
        found = {
            row: _extra(self.params[index], name) for row, index in enumerate(self.rows)
        }
        return {row: value for row, value in found.items() if value is not None}


class RevisedMinP(RevisedBias):
    """`min_p` in the revised model."""

    after_the_mask = True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return _cut(logits, self.extras("min_p"))


def _extra(params: SamplingParams, name: str) -> Any:
    return (params.extra_args or {}).get(name)


def _biased(logits: torch.Tensor, bias: dict[int, dict[int, float]]) -> torch.Tensor:
    for row, values in bias.items():
        for token, value in values.items():
            logits[row, token] += value
    return logits


def _cut(logits: torch.Tensor, min_p: dict[int, float]) -> torch.Tensor:
    for row, share in min_p.items():
        logits[row, logits[row] < logits[row].max() + math.log(share)] = float("-inf")
    return logits


class Poisonable(Plain):
    """Raises for requests with `poison` in `extra_args`, in the method that it names,
    after it has overwritten the logits, or returns what is wrong. `made` counts its
    instances."""

    name = "poison"
    made = 0

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        type(self).made += 1

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(batch_update)
        if "update_state" in self.values.values():
            raise LookupError("poisoned update_state")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if "apply" in self.values.values():
            logits.fill_(float("nan"))
            raise LookupError("poisoned apply")
        if "None" in self.values.values():
            return None  # type: ignore[return-value]
        return logits[:, 1:] if "shape" in self.values.values() else logits


class PoisonableLate(Poisonable):
    """The same after the mask."""

    after_the_mask = True


class RevisedPoisonable(RevisedBias):
    """The same in the revised model, also for "add_request"."""

    def add_request(self, req_info: tuple[SamplingParams, int, int]) -> None:
        super().add_request(req_info)
        self._raise("add_request", [req_info[2]])

    def update_state(
        self, index_mapping: Array | None, token_ids: Array, seq_lens: Array
    ) -> None:
        super().update_state(index_mapping, token_ids, seq_lens)
        self._raise("update_state", self.rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self._raise("apply", self.rows)
        return logits

    def _raise(self, where: str, indices: list[int]) -> None:
        if any(_extra(self.params[index], "poison") == where for index in indices):
            raise LookupError(f"poisoned {where}")


class CantBeMade(Plain):
    """Its constructor raises."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        raise OSError("no such file")


class BadValidator(Plain):
    """Its `validate_params` has a bug."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        raise KeyError("target")


class HangsAtAdmission(Plain):
    """Its `validate_params` never returns for a request that asks for it."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if _extra(sampling_params, "hang"):
            threading.Event().wait()


class EchoLogitsProcessor(WrappedPerReqLogitsProcessor):
    """A callable with prompt ids that repeats the prompt. It returns a new tensor."""

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> RequestLogitsProcessor | None:
        def echo(
            prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
        ) -> torch.Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[prompt_ids[len(output_ids) % len(prompt_ids)]] = 0.0
            return forced

        return echo if _extra(params, "echo") else None
