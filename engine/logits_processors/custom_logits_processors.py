"""CustomLogitsProcessors: runs the custom logits processors of one engine.

A processor that raises is replaced by a new instance, which gets the rows of the step
one by one. The rows on which the instance raises again fail; other rows continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import torch
from torch import Tensor

from engine.logits_processors.batch import IndexedBatch, PersistentBatch
from engine.logits_processors.interface import LogitsProcessor, VllmConfig, is_revised
from engine.sampling_params import SamplingParams
from engine.step.scheduler import Batch
from engine.step.sequence import Sequence
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded

logger = logging.getLogger(__name__)


class LogitsProcessorFailed(InternalError):
    """A custom logits processor has raised. The message names it."""

    code = "logits_processor_failed"


class _Host:
    """Creates and runs one logits processor. Exceptions of the processor pass through;
    call `restart` after one. Late sequences stay in the batch, so that the processor
    keeps their states."""

    def __init__(
        self, kind: type[LogitsProcessor], config: VllmConfig, device: torch.device
    ) -> None:
        self.name = kind.__name__
        self._make = partial(kind, config, device, device.type == "cuda")
        self._config = config if is_revised(kind) else None
        self.restart()
        self.argmax_invariant = bool(self._processor.is_argmax_invariant())

    def restart(self) -> None:
        """Replace the processor by a new instance without state. Exceptions of its
        constructor pass through."""
        self._rows: list[Sequence] = []
        """The batch. Late sequences are at its end: they have no logits in this
        step."""
        self._processor: LogitsProcessor = self._make()
        self._batch = PersistentBatch()
        self._indexed = (
            None
            if self._config is None
            else IndexedBatch(self._processor, self._config)
        )

    def begin(self, rows: Rows[Sequence]) -> None:
        """Announce the next batch."""
        self._rows = [*rows, *(sequence for sequence in self._rows if sequence.is_late)]
        if self._indexed is not None:
            self._indexed.update(self._rows)
        else:
            self._processor.update_state(self._batch.update(self._rows))

    def apply(self, logits: Tensor) -> Tensor:
        """Process the logits of the announced rows, float32 `[rows, vocab]`."""
        rows = logits
        num_late = len(self._rows) - len(logits)
        if num_late:
            rows = torch.cat([logits, logits.new_zeros(num_late, logits.shape[1])])
        after: object = self._processor.apply(rows)
        if not isinstance(after, Tensor):
            raise TypeError(
                f"{self.name}.apply returned {type(after).__name__} instead of the logits"
            )
        if after.shape != rows.shape:
            raise ValueError(
                f"{self.name}.apply returned shape {tuple(after.shape)} for {tuple(rows.shape)}"
            )
        return after[: len(logits)].to(logits)


class CustomLogitsProcessors:
    """The custom processors of an engine, in the order of `classes`. Raises
    `ValueError` if one cannot be created."""

    def __init__(
        self,
        config: VllmConfig,
        device: torch.device,
        classes: Rows[type[LogitsProcessor]] = (),
    ) -> None:
        self.classes = tuple(classes)
        self.failed: dict[int, LogitsProcessorFailed] = {}
        """The errors of the rows of this step on which a custom processor has raised,
        by row."""
        self._hosts: list[_Host] = []
        self._broken: set[_Host] = set()
        """Hosts of processors that have raised and were not restarted yet."""
        for kind in classes:
            try:
                self._hosts.append(_Host(kind, config, device))
            except Exception as error:
                raise ValueError(
                    f"the logits processor {kind.__name__} can't be made: {bounded(repr(error))}"
                ) from error
        self.before = [host for host in self._hosts if not host.argmax_invariant]
        """Hosts of the processors that run before the penalties."""
        self.after = [host for host in self._hosts if host.argmax_invariant]
        """Hosts of the processors that run on masked and scaled logits. Their results
        for greedy rows are not used."""

    def validate(self, params: SamplingParams) -> None:
        """Let the custom processors check a request, in any thread.

        Raises:
            InvalidRequest: a processor rejects the request by a `ValueError`.
            LogitsProcessorFailed: a processor raises another exception.
        """
        for kind in self.classes:
            try:
                kind.validate_params(params)
            except GuidedError:
                raise
            except ValueError as error:
                param = "extra_args" if params.extra_args else None
                raise InvalidRequest(bounded(error), param=param) from error
            except Exception as error:
                logger.exception("%s.validate_params raised", kind.__name__)
                raise _failure(kind.__name__, error) from error

    def begin(self, batch: Batch) -> None:
        """Announce the step's batch. Call it before the forward pass."""
        self.failed = {}
        for host in self._hosts:
            try:
                if host in self._broken:
                    host.restart()
                host.begin(batch.sequences)
                self._broken.discard(host)
            except Exception:
                self._note(host)

    def run(
        self,
        hosts: list[_Host],
        logits: Tensor,
        batch: Batch,
        again: Callable[[], Tensor],
    ) -> Tensor:
        """Run `before` or `after` on float32 `[rows, vocab]`. `again` recomputes the
        logits if a processor raises."""
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

    def _one_by_one(self, host: _Host, logits: Tensor, rows: Rows[Sequence]) -> None:
        """Process the rows one by one, in place, and record the rows on which the
        processor raises."""
        is_new = False
        for row, sequence in enumerate(rows):
            try:
                if not is_new:
                    host.restart()
                    is_new = True
                host.begin([sequence])
                logits[row] = host.apply(logits[row : row + 1])[0]
            except Exception as error:
                self.failed[row] = _failure(host.name, error)
                is_new = False

    def _note(self, host: _Host) -> None:
        if host not in self._broken:
            logger.exception(
                "logits processor %s raised: a new instance gets the rows one by one",
                host.name,
            )
            self._broken.add(host)


def _failure(name: str, error: Exception) -> LogitsProcessorFailed:
    why = bounded(f"{type(error).__name__}: {error}")
    return LogitsProcessorFailed(
        f"the logits processor {name} failed on this request: {why}"
    )
