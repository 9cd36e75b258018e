"""LogitsProcessors: runs the custom logits processors of one engine.

A processor that raises is replaced by a new instance, which gets the step's rows one by one. The rows on which it
raises again fail; the others continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from engine.batch import Batch
from engine.logits_processors.host import Host
from engine.logits_processors.interface import LogitsProcessor, VllmConfig
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded

logger = logging.getLogger(__name__)


class LogitsProcessorFailed(InternalError):
    """A custom logits processor has raised. The message names it."""

    code = "logits_processor_failed"


class LogitsProcessors:
    """The custom processors of an engine; `classes` run in their order. The `ValueError` of one that cannot be created
    names it."""

    def __init__(self, config: VllmConfig, device: torch.device, classes: Rows[type[LogitsProcessor]] = ()) -> None:
        self.classes = tuple(classes)
        self.failed: dict[int, LogitsProcessorFailed] = {}
        """Rows of this step on which a custom processor has raised."""
        self._config, self._device = config, device
        self._hosts = [self._host(one) for one in classes]
        self.before = [one for one in self._hosts if not one.argmax_invariant]
        """Those that run before the penalties."""
        self.after = [one for one in self._hosts if one.argmax_invariant]
        """Those that run on masked and scaled logits. Those of greedy rows are included and not used afterwards."""
        self._broken: set[Host] = set()
        """Hosts of processors that have raised and were not restarted yet."""

    def _host(self, one: type[LogitsProcessor]) -> Host:
        try:
            return Host(one, self._config, self._device)
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
        for host in self._hosts:
            self._announce(host, batch.sequences)

    def _announce(self, host: Host, rows: Rows[Sequence]) -> None:
        try:
            if host in self._broken:
                host.restart()
            host.begin(rows)
            self._broken.discard(host)
        except Exception:
            self._note(host)

    def run(
        self, hosts: list[Host], logits: torch.Tensor, batch: Batch, again: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run `before` or `after` on float32 `[rows, vocab]`.

        `again` computes the unchanged logits again, in case a processor raises.
        """
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
                host.begin([sequence])
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
