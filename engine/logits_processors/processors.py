"""LogitsProcessors: runs all logits processors of one engine, built-in and custom.

Built-in processors run only in batches that use them. Custom processors see every batch. A processor that raises is
replaced by a new instance, which gets the step's rows one by one. The rows on which it raises again fail; the others
continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from engine.batch import Batch
from engine.logits_processors.batch import RequestIndices
from engine.logits_processors.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from engine.logits_processors.host import Host, IndexHost, RowHost
from engine.logits_processors.interface import LogitsProcessor, VllmConfig, is_revised
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded

logger = logging.getLogger(__name__)


class LogitsProcessorFailed(InternalError):
    """A custom logits processor has raised. The message names it."""

    code = "logits_processor_failed"


class LogitsProcessors:
    """The built-in and the custom processors of an engine; `classes` run in their order. The `ValueError` of one that
    cannot be created names it."""

    def __init__(self, config: VllmConfig, device: torch.device, classes: Rows[type[LogitsProcessor]] = ()) -> None:
        self.classes = tuple(classes)
        self.failed: dict[int, LogitsProcessorFailed] = {}
        """Rows of this step on which a custom processor has raised."""
        self._config, self._device = config, device
        self._indices = RequestIndices(config.scheduler_config.max_num_seqs, config.model_config.max_model_len)
        self._bias = RowHost(LogitBiasLogitsProcessor, config, device)
        self._min_tokens = RowHost(MinTokensLogitsProcessor, config, device)
        self._min_p = RowHost(MinPLogitsProcessor, config, device)
        self._custom = [self._host(one) for one in classes]
        self._before = [one for one in self._custom if not one.argmax_invariant]
        self._after = [one for one in self._custom if one.argmax_invariant]
        self._broken: set[Host] = set()
        """Hosts of processors that have raised and were not restarted yet."""

    def _host(self, one: type[LogitsProcessor]) -> Host:
        try:
            if is_revised(one):
                return IndexHost(one, self._config, self._device, self._indices)
            return RowHost(one, self._config, self._device, keeps_late=True)
        except Exception as error:
            raise ValueError(f"the logits processor {one.__name__} can't be made: {bounded(repr(error))}") from error

    def validate(self, params: SamplingParams) -> None:
        """Let the custom processors check a request. Call it from any thread.

        Raises `InvalidRequest` if one rejects it, `LogitsProcessorFailed` if one raises something else than a
        `ValueError`.
        """
        for one in self.classes:
            try:
                one.validate_params(params)
            except GuidedError:
                raise
            except ValueError as error:
                param = "extra_args" if params.extra_args else None
                raise InvalidRequest(bounded(error), param=param) from error
            except Exception as error:
                logger.exception("%s.validate_params raised", one.__name__)
                raise _failure(one.__name__, error) from error

    def begin(self, batch: Batch) -> None:
        """Announce the step's batch. Call it before the forward pass."""
        self.failed = {}
        for builtin, users in (
            (self._bias, batch.biased),
            (self._min_tokens, batch.with_min_tokens),
            (self._min_p, batch.with_min_p),
        ):
            if users or not builtin.is_empty:
                self._announce(builtin, batch.sequences if users else ())
        for host in self._custom:
            self._announce(host, batch.sequences)

    def _announce(self, host: Host, rows: Rows[Sequence]) -> None:
        try:
            if host in self._broken:
                host.restart()
            host.begin(rows)
            self._broken.discard(host)
        except Exception:
            self._note(host)

    def before_penalties(
        self, logits: torch.Tensor, batch: Batch, again: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        """Run min_tokens, bias and the custom processors that are not argmax-invariant, on float32 `[rows, vocab]`.

        `again` computes the unchanged logits again, in case a processor raises. None: a copy is kept instead.
        """
        first: list[Host] = []
        if batch.with_min_tokens and self._before:  # custom processors see suppressed tokens, as in vLLM
            first.append(self._min_tokens)
        if batch.biased:
            first.append(self._bias)
        if not first and not self._before:
            return logits
        return self._run([*first, *self._before], logits, batch, again or logits.clone().clone)

    def after_penalties(self, logits: torch.Tensor, batch: Batch) -> None:
        """Enforce min_tokens, also against the processors that have run since."""
        if batch.with_min_tokens:
            self._min_tokens.apply(logits)

    def runs_after_mask(self, batch: Batch) -> bool:
        """Whether an argmax-invariant processor is to run on this batch: some row must be random."""
        return bool(self._after_mask(batch))

    def _after_mask(self, batch: Batch) -> list[Host]:
        if not batch.random:
            return []
        return [self._min_p, *self._after] if batch.with_min_p else self._after

    def after_temperature(self, logits: torch.Tensor, batch: Batch, again: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run min_p and the argmax-invariant custom processors on masked and scaled logits, float32 `[rows, vocab]`.

        The logits of greedy rows are included and not used afterwards.
        """
        return self._run(self._after_mask(batch), logits, batch, again)

    def _run(
        self, hosts: list[Host], logits: torch.Tensor, batch: Batch, again: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        while True:  # each failing round adds a broken host
            for host in hosts:
                if host in self._broken:
                    self._one_by_one(host, logits, batch.sequences)
                    continue
                try:
                    logits = host.apply(logits)
                except Exception:
                    self._note(host)
                    break
            else:
                return logits
            logits = again()

    def _one_by_one(self, host: Host, logits: torch.Tensor, rows: Rows[Sequence]) -> None:
        """Process the rows one by one, in place, and record those on which the processor raises."""
        is_new = False
        for row, sequence in enumerate(rows):
            try:
                if not is_new:
                    host.restart()
                    is_new = True
                host.begin([sequence], alone=True)
                logits[row] = host.apply(logits[row : row + 1])[0]
            except Exception as error:
                self.failed[row] = _failure(host.name, error)
                is_new = False

    def _note(self, host: Host) -> None:
        if host not in self._broken:
            logger.exception("logits processor %s raised: a new instance gets the rows one by one", host.name)
            self._broken.add(host)


def _failure(name: str, error: Exception) -> LogitsProcessorFailed:
    why = bounded(f"{type(error).__name__}: {error}")
    return LogitsProcessorFailed(f"the logits processor {name} failed on this request: {why}")
