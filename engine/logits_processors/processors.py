"""LogitsProcessors: runs all logits processors of one engine, built-in and custom.

Built-in processors run only in batches that use them. Custom processors see every batch. A processor that raises is
replaced by a new instance, which gets the step's rows one by one. The rows on which it raises again fail; the others
continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows
from functools import partial

import torch

from engine.logits_processors.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from engine.logits_processors.host import Host, IndexHost, RowHost
from engine.logits_processors.indices import RequestIndices
from engine.logits_processors.interface import LogitsProcessor
from engine.logits_processors.revised import RevisedLogitsProcessor
from engine.logits_processors.vllm_config import VllmConfig
from engine.sampling_metadata import SamplingMetadata
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded

__all__ = ["LogitsProcessorFailed", "LogitsProcessors", "ProcessorClass"]

logger = logging.getLogger(__name__)

ProcessorClass = type[LogitsProcessor] | type[RevisedLogitsProcessor]


class LogitsProcessorFailed(InternalError):
    """A custom logits processor has raised. The message names it."""

    code = "logits_processor_failed"


class LogitsProcessors:
    """The built-in and the custom processors of an engine. The set is fixed.

    Args:
        config: argument of each processor's constructor.
        classes: the custom processors, in the order in which they run.

    Raises:
        ValueError: a processor cannot be created. The message names it.
    """

    def __init__(self, config: VllmConfig, device: torch.device, classes: Rows[ProcessorClass] = ()) -> None:
        self.classes = tuple(classes)
        self.failed: dict[int, LogitsProcessorFailed] = {}
        """Rows of this step on which a custom processor has raised."""
        indices = None
        if any(issubclass(one, RevisedLogitsProcessor) for one in classes):
            indices = RequestIndices(config.scheduler_config.max_num_seqs, config.model_config.max_model_len)
        host = partial(_hosted, config=config, device=device, indices=indices)
        capacity = config.scheduler_config.max_num_seqs
        made = partial(_row_host, config=config, device=device, capacity=capacity)
        self._bias = made(LogitBiasLogitsProcessor)
        self._min_tokens = made(MinTokensLogitsProcessor)
        self._min_p = made(MinPLogitsProcessor)
        self._custom = [host(one) for one in classes]
        self._before = [one for one in self._custom if not one.argmax_invariant]
        self._after = [one for one in self._custom if one.argmax_invariant]
        self._is_used = False
        """A built-in processor holds state of a row."""
        self._broken: set[Host] = set()
        """Hosts of processors that have raised and were not restarted yet."""
        self._announced: SamplingMetadata | None = None
        self._is_fresh = False

    def validate(self, params: SamplingParams) -> None:
        """Let the custom processors check a request. Call it from any thread.

        Raises:
            InvalidRequest: a processor rejects the request.
            LogitsProcessorFailed: a processor has raised something else than a `ValueError`.
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

    def begin(self, metadata: SamplingMetadata) -> None:
        """Announce the step's batch. Call it before the forward pass."""
        self.failed = {}
        self._announced, self._is_fresh = metadata, True
        used = metadata.biased or metadata.with_min_tokens or metadata.with_min_p
        if used or self._is_used:
            self._begin_builtins(metadata)
            self._is_used = bool(used)
        for host in self._custom:
            self._announce(host, partial(host.begin, metadata.sequences))

    def _begin_builtins(self, metadata: SamplingMetadata) -> None:
        for builtin, users in (
            (self._bias, metadata.biased),
            (self._min_tokens, metadata.with_min_tokens),
            (self._min_p, metadata.with_min_p),
        ):
            if users or not builtin.is_empty:
                self._announce(builtin, partial(builtin.begin, metadata.sequences if users else ()))

    def begin_parked(self, metadata: SamplingMetadata) -> None:
        """Announce a batch of parked rows to the processors that run after the mask. The others have run before."""
        self.failed = {}
        self._announced, self._is_fresh = metadata, False
        if metadata.is_all_greedy:
            return
        if metadata.with_min_p:
            self._is_used = True
            self._announce(self._min_p, partial(self._min_p.begin_parked, metadata.sequences))
        for host in self._after:
            self._announce(host, partial(host.begin_parked, metadata.sequences))

    def _announce(self, host: Host, begin: Callable[[], None]) -> None:
        try:
            if host in self._broken:
                host.restart()
            begin()
            self._broken.discard(host)
        except Exception:
            self._note(host)

    def before_penalties(
        self, logits: torch.Tensor, metadata: SamplingMetadata, again: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        """Run min_tokens, bias and the custom processors that are not argmax-invariant, on float32 `[rows, vocab]`.

        Args:
            again: computes the unchanged logits again, in case a processor raises. None: a copy is kept instead.
        """
        if not self._is_fresh or self._announced is not metadata:
            self.begin(metadata)
        self._is_fresh = False
        first: list[Host] = []
        if metadata.with_min_tokens and self._before:  # custom processors see suppressed tokens, as in vLLM
            first.append(self._min_tokens)
        if metadata.biased:
            first.append(self._bias)
        if not first and not self._before:
            return logits
        return self._run([*first, *self._before], logits, metadata, again or logits.clone().clone)

    def after_penalties(self, logits: torch.Tensor, metadata: SamplingMetadata) -> None:
        """Enforce min_tokens, also against the processors that have run since."""
        if metadata.with_min_tokens:
            self._min_tokens.apply(logits)

    def runs_after_mask(self, metadata: SamplingMetadata) -> bool:
        """Whether an argmax-invariant processor is to run on this batch: some row must be random."""
        return bool(self._after or metadata.with_min_p) and not metadata.is_all_greedy

    def after_temperature(
        self, logits: torch.Tensor, metadata: SamplingMetadata, again: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run min_p and the argmax-invariant custom processors on masked and scaled logits, float32 `[rows, vocab]`.

        The logits of greedy rows are included and not used afterwards.
        """
        if self._announced is not metadata:
            self.begin(metadata)
        first = [self._min_p] if metadata.with_min_p else []
        return self._run([*first, *self._after], logits, metadata, again)

    def _run(
        self,
        hosts: Collection[Host],
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        again: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        rounds = len(hosts)
        for _ in range(rounds):  # each failing round adds a broken host
            try:
                return self._chain(hosts, logits, metadata)
            except _Raised as raised:
                self._note(raised.host)
                logits = again()
        return self._chain(hosts, logits, metadata)

    def _chain(self, hosts: Collection[Host], logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        for host in hosts:
            if host in self._broken:
                self._one_by_one(host, logits, metadata.sequences)
                continue
            try:
                logits = host.apply(logits)
            except Exception as error:
                raise _Raised(host) from error
        return logits

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


class _Raised(Exception):
    def __init__(self, host: Host) -> None:
        super().__init__(host.name)
        self.host = host


def _failure(name: str, error: Exception) -> LogitsProcessorFailed:
    why = bounded(f"{type(error).__name__}: {error}")
    return LogitsProcessorFailed(f"the logits processor {name} failed on this request: {why}")


def _row_host(one: type[LogitsProcessor], *, config: VllmConfig, device: torch.device, capacity: int) -> RowHost:
    return RowHost(one.__name__, lambda: one(config, device, device.type == "cuda"), capacity)


def _hosted(one: ProcessorClass, *, config: VllmConfig, device: torch.device, indices: RequestIndices | None) -> Host:
    try:
        if issubclass(one, LogitsProcessor):
            return _row_host(one, config=config, device=device, capacity=config.scheduler_config.max_num_seqs)
        assert indices is not None
        revised = one
        return IndexHost(one.__name__, lambda: revised(config, device, device.type == "cuda"), indices)
    except Exception as error:
        raise ValueError(f"the logits processor {one.__name__} can't be made: {bounded(repr(error))}") from error
