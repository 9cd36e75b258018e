"""The built-in logits processors: logit bias, min_tokens and min_p. Each holds only the rows that use it."""

from __future__ import annotations

import math

import torch

from engine.logits_processors.interface import BatchUpdate, LogitsProcessor, VllmConfig, process_dict_updates
from engine.sampling_params import SamplingParams

SUPPRESSED = -1e30
"""The logit of a suppressed token: finite in float32 even when a penalty or the lowest temperature multiplies it."""


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds `logit_bias`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._biases: dict[int, dict[int, float]] = {}
        self._rows = self._tokens = self._values = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not process_dict_updates(
            self._biases, batch_update, lambda params, _, __: dict(params.logit_bias or ()) or None
        ):
            return
        entries = [(row, token, bias) for row, biases in self._biases.items() for token, bias in biases.items()]
        rows, tokens, values = zip(*entries, strict=True) if entries else ((), (), ())
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        self._values = torch.tensor(values, dtype=torch.float32, device=self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._biases:
            logits[self._rows, self._tokens] += self._values
        return logits


class MinTokensLogitsProcessor(LogitsProcessor):
    """Suppresses the stop tokens of the model and the request until the output has `min_tokens`.

    Suppressed logits stay finite: where a constraint allows no other token, its mask wins.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._eos = vllm_config.stop_token_ids
        self._short: dict[int, tuple[int, list[int], list[int]]] = {}
        """By row: min_tokens, the stop tokens, and the output so far (by reference)."""
        self._rows = self._tokens = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        changed = process_dict_updates(self._short, batch_update, self._new_state)
        enough = [row for row, (least, _, output) in self._short.items() if len(output) >= least]
        for row in enough:
            del self._short[row]
        if not changed and not enough:
            return
        entries = [(row, token) for row, (_, tokens, _) in self._short.items() for token in tokens]
        rows, tokens = zip(*entries, strict=True) if entries else ((), ())
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._tokens = torch.tensor(tokens, dtype=torch.int64, device=self._device)

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> tuple[int, list[int], list[int]] | None:
        if len(output_ids) >= params.min_tokens:
            return None
        return params.min_tokens, sorted(self._eos.union(params.stop_token_ids)), output_ids

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._short:
            logits[self._rows, self._tokens] = SUPPRESSED
        return logits


class MinPLogitsProcessor(LogitsProcessor):
    """Forbids tokens less than `min_p` times as likely as the most likely token. Ignores greedy rows."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._min_p: dict[int, float] = {}
        self._rows = self._log_min_p = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not process_dict_updates(self._min_p, batch_update, self._new_state):
            return
        rows = sorted(self._min_p)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        values = torch.tensor([self._min_p[row] for row in rows], dtype=torch.float32, device=self._device)
        self._log_min_p = values.log_()[:, None]

    @staticmethod
    def _new_state(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> float | None:
        return None if params.is_greedy or not params.min_p else params.min_p

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._min_p:
            return logits
        if len(self._min_p) == len(logits):
            return _truncated(logits, self._log_min_p)
        logits[self._rows] = _truncated(logits[self._rows], self._log_min_p)
        return logits


def _truncated(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    floor = logits.max(-1, keepdim=True).values + log_min_p
    return logits.masked_fill_(logits < floor, -math.inf)
