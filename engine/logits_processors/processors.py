"""LogitsProcessors: all processors of one engine, when each of them runs, and what happens when one raises.

A batch in which nobody uses a built-in one costs nothing a row; those of the user see every batch. One that raises is
made anew, and the step's rows are put to it one by one: those on which it raises alone have failed, the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows
from functools import partial

import torch

from engine.logits_processors.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from engine.logits_processors.host import Host, IndexHost, RowHost
from engine.logits_processors.interface import LogitsProcessor
from engine.logits_processors.revised import RevisedLogitsProcessor
from engine.logits_processors.slots import Slots
from engine.logits_processors.vllm_config import VllmConfig
from engine.sampling_metadata import SamplingMetadata
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from guided.errors import GuidedError, InternalError, InvalidRequest, bounded

__all__ = ["LogitsProcessorFailed", "LogitsProcessors", "ProcessorClass"]

logger = logging.getLogger(__name__)

ProcessorClass = type[LogitsProcessor] | type[RevisedLogitsProcessor]


class LogitsProcessorFailed(InternalError):
    """A custom logits processor raised; the message names it."""

    code = "logits_processor_failed"


class LogitsProcessors:
    """The built-in processors and the engine's custom ones, which stay what they are.

    Args:
        config: what each is made with.
        classes: the custom ones, in the order in which they run.

    Raises:
        ValueError: one can't be made; the message names it.
    """

    def __init__(self, config: VllmConfig, device: torch.device, classes: Rows[ProcessorClass] = ()) -> None:
        self.classes = tuple(classes)
        self.failed: dict[int, LogitsProcessorFailed] = {}
        """Rows of this step that a custom processor raised on."""
        slots = None
        if any(issubclass(one, RevisedLogitsProcessor) for one in classes):
            slots = Slots(config.scheduler_config.max_num_seqs, config.model_config.max_model_len)
        host = partial(_hosted, config=config, device=device, slots=slots)
        capacity = config.scheduler_config.max_num_seqs
        made = partial(_row_host, config=config, device=device, capacity=capacity)
        self._bias = made(LogitBiasLogitsProcessor)
        self._min_tokens = made(MinTokensLogitsProcessor)
        self._min_p = made(MinPLogitsProcessor)
        self._custom = [host(one) for one in classes]
        self._before = [one for one in self._custom if not one.argmax_invariant]
        self._after = [one for one in self._custom if one.argmax_invariant]
        self._is_used = False
        """Some built-in one knows of somebody."""
        self._broken: set[Host] = set()
        """Those that have raised and were not begun anew since."""
        self._told: SamplingMetadata | None = None
        self._is_fresh = False

    def validate(self, params: SamplingParams) -> None:
        """Have the custom processors look at a request. From any thread.

        Raises:
            InvalidRequest: one of them says that it can't be served.
            LogitsProcessorFailed: one of them raised something else than a `ValueError`.
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

    # -- before the forward pass

    def begin(self, metadata: SamplingMetadata) -> None:
        """Tell them of the step's batch."""
        self.failed = {}
        self._told, self._is_fresh = metadata, True
        used = metadata.biased or metadata.with_min_tokens or metadata.with_min_p
        if used or self._is_used:
            self._begin_builtins(metadata)
            self._is_used = bool(used)
        for host in self._custom:
            self._tell(host, partial(host.begin, metadata.sequences))

    def _begin_builtins(self, metadata: SamplingMetadata) -> None:
        for builtin, users in (
            (self._bias, metadata.biased),
            (self._min_tokens, metadata.with_min_tokens),
            (self._min_p, metadata.with_min_p),
        ):
            if users or not builtin.is_empty:
                self._tell(builtin, partial(builtin.begin, metadata.sequences if users else ()))

    def begin_parked(self, metadata: SamplingMetadata) -> None:
        """Tell those that run after the mask of rows that were parked; the others had their turn before."""
        self.failed = {}
        self._told, self._is_fresh = metadata, False
        if metadata.is_all_greedy:
            return
        if metadata.with_min_p:
            self._is_used = True
            self._tell(self._min_p, partial(self._min_p.begin_parked, metadata.sequences))
        for host in self._after:
            self._tell(host, partial(host.begin_parked, metadata.sequences))

    def _tell(self, host: Host, begin: Callable[[], None]) -> None:
        try:
            if host in self._broken:
                host.restart()
            begin()
            self._broken.discard(host)
        except Exception:
            self._note(host)

    # -- after it

    def before_penalties(
        self, logits: torch.Tensor, metadata: SamplingMetadata, again: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        """min_tokens, bias and the custom processors that may change the best token: float32 `[rows, vocab]`.

        Args:
            again: the logits as they were, for when a processor raises in the middle of them. None: they are kept.
        """
        if not self._is_fresh or self._told is not metadata:
            self.begin(metadata)
        self._is_fresh = False
        first: list[Host] = []
        if metadata.with_min_tokens and self._before:  # others are to see what is suppressed, as in vLLM
            first.append(self._min_tokens)
        if metadata.biased:
            first.append(self._bias)
        if not first and not self._before:
            return logits
        return self._run([*first, *self._before], logits, metadata, again or logits.clone().clone)

    def after_penalties(self, logits: torch.Tensor, metadata: SamplingMetadata) -> None:
        """min_tokens again, or for the first time: nothing that ran since has lifted it."""
        if metadata.with_min_tokens:
            self._min_tokens.apply(logits)

    def runs_after_mask(self, metadata: SamplingMetadata) -> bool:
        """Somebody draws, and some argmax-invariant processor is there for it."""
        return bool(self._after or metadata.with_min_p) and not metadata.is_all_greedy

    def after_temperature(
        self, logits: torch.Tensor, metadata: SamplingMetadata, again: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """min_p and the custom argmax-invariant processors: float32 `[rows, vocab]`, masked and scaled; greedy rows are
        there too, and what becomes of them doesn't matter."""
        if self._told is not metadata:
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
        for _ in range(rounds):  # each round that fails adds a broken one
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
        """Find out on which rows it raises, and do the others, in place."""
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
            logger.exception("logits processor %s raised: it is made anew, and asked row by row", host.name)
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


def _hosted(one: ProcessorClass, *, config: VllmConfig, device: torch.device, slots: Slots | None) -> Host:
    try:
        if issubclass(one, LogitsProcessor):
            return _row_host(one, config=config, device=device, capacity=config.scheduler_config.max_num_seqs)
        assert slots is not None
        revised = one
        return IndexHost(one.__name__, lambda: revised(config, device, device.type == "cuda"), slots)
    except Exception as error:
        raise ValueError(f"the logits processor {one.__name__} can't be made: {bounded(repr(error))}") from error
