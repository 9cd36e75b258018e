"""LLMEngine: one step after another. Synchronous and single-threaded; `AsyncLLM` gives it a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.admission import Admission
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.kv_cache import KVCache, plan_blocks
from engine.logits_processors.loading import processors_of
from engine.model_loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.outputs import RequestOutput
from engine.sampler import Sampler, SamplerOutput
from engine.sampling_metadata import SamplingMetadata
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledBatch, Scheduler
from engine.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.errors import BackendError, GuidedError, InternalError, bounded
from guided.pool import Grammar, MaskPool
from guided.processor import ApplyReport, GuidedProcessor, LogitPostProcessor

__all__ = ["EngineStats", "LLMEngine"]


@dataclass
class EngineStats:
    """Counters since the start. Written by the engine's thread only; times are seconds."""

    steps: int = 0
    step_seconds: float = 0.0
    prepare_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Waiting for masks in `apply`: with `prepare_seconds` and `kernel_seconds` the exposed mask time."""
    kernel_seconds: float = 0.0
    mask_seconds: float = 0.0
    """What the workers spent: exposed or hidden."""
    hidden_seconds: float = 0.0
    """What of it nobody waited for, step by step."""
    parked: int = 0
    """Sequences that are parked now."""
    parkings: int = 0
    parked_seconds: float = 0.0
    """From parking to being sampled, of those that were."""
    failures: dict[str, int] = field(default_factory=dict)
    """Groups that ended with an error, by its code."""


class LLMEngine:
    """Requests in, a step at a time, outputs out.

    Args:
        model: what runs.
        pool: where masks are computed. Not shut down here.
        processor: the post-processor. None: a `GuidedProcessor` on `pool`; if that is None too, constrained requests
            are rejected.

    Raises:
        ValueError: `config` asks for a longer context than the model has.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        pool: MaskPool | None = None,
        processor: LogitPostProcessor | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model = model
        self.max_model_len = model.context_length(config.max_model_len)
        num_blocks = plan_blocks(
            config, model.layers, max_model_len=self.max_model_len, dtype=model.dtype, device=model.device
        )
        self.blocks = BlockManager(
            num_blocks,
            config.block_size,
            max_seqs=config.max_num_seqs,
            max_blocks=-(-self.max_model_len // config.block_size),
        )
        cache = KVCache(
            model.layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, self.max_model_len + config.max_num_seqs),
        )
        self.runner = ModelRunner(model, cache, self.blocks)
        processors = processors_of(model, config, self.max_model_len)
        self.sampler = Sampler(model.vocabulary.stop_token_ids, processors)
        self.processor = GuidedProcessor(pool) if processor is None and pool is not None else processor
        self.stats = EngineStats()
        self.groups: dict[str, SequenceGroup] = {}
        """Requests that have not finished, by id."""
        self.awake = threading.Event()
        """Set when something has happened that a step should see; cleared by whoever waits for it."""
        self._admission = Admission(model, config, self.max_model_len, processors.validate)
        self._metadata: SamplingMetadata | None = None
        self._compiled: deque[tuple[SequenceGroup, Future[Grammar]]] = deque()
        self._changed: dict[SequenceGroup, None] = {}
        self._parked: dict[int, Sequence] = {}
        self._appended: tuple[SamplingMetadata, NDArray[np.int32]] | None = None
        """The last step's metadata and tokens, if every row got one."""
        self._mean_step = 0.0
        """Seconds of a step, waiting for masks left out: a moving average."""

    # -- requests

    def admit(
        self, request_id: str, prompt: str | Tokens[int], params: SamplingParams, *, stream: bool = True
    ) -> SequenceGroup:
        """Check a request and tokenise its prompt; nothing is taken in yet. May be called from any thread.

        Args:
            prompt: text (the tokenizer adds its special tokens) or token ids.
            stream: report it after every step, not only at its end.

        Raises:
            InvalidRequest: something about it can't be served.
        """
        return self._admission.admit(request_id, prompt, params, stream=stream)

    def submit(self, group: SequenceGroup) -> None:
        """Take an admitted request in. One whose prompt is too long for the context ended `FINISHED_IGNORED` already.

        Raises:
            InvalidRequest: its backend can't do its constraint.
            ValueError: a request of this id is running.
        """
        if group.request_id in self.groups:
            raise ValueError(f"request {group.request_id!r} is running already")
        if group.is_finished:
            self._changed[group] = None
        elif group.params.constraint is None:
            self._enter(group)
            self._changed[group] = None
        else:
            self._compile(group)
        self.awake.set()

    def add_request(
        self, request_id: str, prompt: str | Tokens[int], params: SamplingParams, *, stream: bool = True
    ) -> SequenceGroup:
        """`admit` and `submit` in one."""
        group = self.admit(request_id, prompt, params, stream=stream)
        self.submit(group)
        return group

    def _enter(self, group: SequenceGroup) -> None:
        self.groups[group.request_id] = group
        self.scheduler.add(group)

    def _compile(self, group: SequenceGroup) -> None:
        params = group.params
        assert params.constraint is not None
        if self.processor is None:
            raise InternalError("this engine was built without a mask pool: it takes no constraints")
        future = self.processor.initialize(group.request_id, params.constraint, params.backend)
        group.set_status(SequenceStatus.WAITING_FOR_GRAMMAR)
        self._enter(group)

        def done(compiled: Future[Grammar]) -> None:  # on whatever thread the pool completes its futures
            self._compiled.append((group, compiled))
            self.awake.set()

        future.add_done_callback(done)

    def abort_request(self, request_id: str) -> None:
        """End a request now, `FINISHED_ABORTED`. One that is not there is ignored."""
        group = self.groups.get(request_id)
        if group is not None:
            self._end(group, SequenceStatus.FINISHED_ABORTED)

    @property
    def has_unfinished(self) -> bool:
        """Some request is not over, or is over and was not reported yet."""
        return bool(self.groups or self._changed)

    @property
    def has_work(self) -> bool:
        """A step would do something now. If not, `awake` is set once one would."""
        return bool(self._changed or self._compiled or self.scheduler.has_work)

    # -- the step

    def step(self) -> list[RequestOutput]:
        """Do one step, and say what has changed: of streaming requests everything, of the others their end.

        Where nobody can run (all wait for their grammar, or there is nobody), it returns at once; `awake` is set when
        it is worth calling again. Where everybody who could is parked, it waits for a mask, a little.
        """
        self.resume()
        started = time.perf_counter()
        batch = self.schedule()
        if batch.is_empty:
            self.resume(_IDLE_SECONDS)
        else:
            with torch.inference_mode():
                metadata = self._metadata = SamplingMetadata.for_batch(batch, self.model.device, self._metadata)
                self.prepare(metadata)
                self.sampler.begin(metadata)
                hidden = self.execute(batch)
                logits = self.compute_logits(hidden, metadata)
                report = self.apply(logits, metadata)
                sampled, skipped = self.sample(logits, metadata, report)
            self.append(sampled, metadata, skipped)
            self._note_step(time.perf_counter() - started, report.wait_seconds)
        changed, self._changed = self._changed, {}
        return [RequestOutput.from_seq_group(group) for group in changed if group.stream or group.is_finished]

    def resume(self, timeout: float = 0.0) -> None:
        """Sample the parked sequences whose masks have come, from the logits that were kept: they run again.

        Waits for the first such mask, `timeout` seconds at the most.
        """
        if not self._parked:
            return
        assert self.processor is not None
        settled = [self._parked[seq_id] for seq_id in self.processor.settled(timeout) if seq_id in self._parked]
        settled = settled[: self.config.max_num_seqs]  # rows that logits processors are prepared for; the rest has time
        if not settled:
            return
        with torch.inference_mode():
            metadata = SamplingMetadata.for_parked(settled, self.model.device)
            self.prepare(metadata)
            logits = self.sampler.recall(metadata)
            report = self.apply(logits, metadata, alone=False)
            sampled, skipped = self.sample(logits, metadata, report)
        for row, sequence in enumerate(settled):
            if row not in skipped:
                self._unpark(sequence)
        self.append(sampled, metadata, skipped)

    def _park(self, sequence: Sequence, logits: torch.Tensor, row: int, metadata: SamplingMetadata) -> None:
        if sequence.parked is None and not sequence.status.is_finished:  # a row before it may have ended its group
            sequence.parked = self.sampler.park(logits, row, metadata)
            self._parked[sequence.seq_id] = sequence
            self.stats.parkings += 1
            self.stats.parked = len(self._parked)

    def _unpark(self, sequence: Sequence) -> None:
        if sequence.parked is not None:
            self.stats.parked_seconds += time.monotonic() - sequence.parked.since
            sequence.parked = None
            del self._parked[sequence.seq_id]
            self.stats.parked = len(self._parked)

    def schedule(self) -> ScheduledBatch:
        """Let in whose grammar is there, end who lost their matcher, and decide who runs."""
        while self._compiled:
            self._let_in(*self._compiled.popleft())
        if self.processor is not None:
            for request_id, error in self.processor.failures().items():
                if request_id in self.groups:
                    self._fail(self.groups[request_id], error)
        return self.scheduler.schedule()

    def _let_in(self, group: SequenceGroup, compiled: Future[Grammar]) -> None:
        if group.is_finished:
            return
        try:
            grammar = compiled.result()
            group.backend, group.compile_seconds = grammar.backend, grammar.compile_seconds
            group.compiled_time = time.monotonic()
        except GuidedError as error:
            self._fail(group, error)
        except Exception as error:
            self._fail(group, BackendError(f"compiling failed: {type(error).__name__}: {bounded(error)}"))
        else:
            group.set_status(SequenceStatus.WAITING)
            self._changed[group] = None

    def prepare(self, metadata: SamplingMetadata) -> None:
        """Have the masks of the constrained rows computed elsewhere."""
        if not metadata.guided:
            return
        assert self.processor is not None
        started = time.perf_counter()
        new_tokens = None
        if self._appended is not None and self._appended[0] is metadata:
            new_tokens = self._appended[1][metadata.guided_rows]
        self.processor.prepare(metadata.guided, metadata.guided_rows, new_tokens)
        self.stats.prepare_seconds += time.perf_counter() - started

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """The forward pass: hidden states `[tokens, hidden]`."""
        return self.runner.execute(batch)

    def compute_logits(self, hidden: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Logits of the sampled rows, float32 `[rows, vocab]`, with bias and penalties: all but the mask."""

        def raw() -> torch.Tensor:
            return self.runner.compute_logits(hidden, metadata)

        return self.sampler.adjust(raw(), metadata, raw)

    def apply(self, logits: torch.Tensor, metadata: SamplingMetadata, *, alone: bool = True) -> ApplyReport:
        """Wait for the masks, until the step's mask deadline, and apply them, in place.

        Args:
            alone: nobody else waits to go on.
        """
        if not metadata.guided:
            return _NOTHING_MASKED
        assert self.processor is not None
        alone = alone and len(metadata.guided) == len(metadata.sequences)
        report = self.processor.apply(logits, self._patience(), alone)
        self.stats.wait_seconds += report.wait_seconds
        self.stats.kernel_seconds += report.kernel_seconds
        self.stats.mask_seconds += report.mask_seconds
        self.stats.hidden_seconds += max(0.0, report.mask_seconds - report.wait_seconds)
        return report

    def _patience(self) -> float | None:
        if not self.config.parking:
            return None
        given = self.config.mask_deadline
        return given if given is not None else max(_LEAST_DEADLINE, _DEADLINE_SHARE * self._mean_step)

    def _note_step(self, seconds: float, waited: float) -> None:
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        weight = max(1 / self.stats.steps, _MEAN_WEIGHT)
        self._mean_step += weight * (seconds - waited - self._mean_step)

    def sample(
        self, logits: torch.Tensor, metadata: SamplingMetadata, report: ApplyReport
    ) -> tuple[SamplerOutput, frozenset[int]]:
        """Sample every row that may be: returns the tokens, and the rows that were skipped.

        Rows whose mask or logits processor failed, or whose mask is late, are not sampled. The groups of failed ones
        end here; a late one's sequence is parked.
        """
        skipped: frozenset[int] = frozenset()
        broken = self.sampler.processors.failed
        if report.failed or report.late or broken:
            late = set(report.late)
            excluded = list(broken)
            for row, failure in broken.items():
                self._fail(metadata.sequences[row].group, failure)
            for row in metadata.guided_rows.tolist():
                sequence = metadata.sequences[row]
                error = report.failed.get(sequence.seq_id)
                if error is not None:
                    self._fail(sequence.group, error)
                elif sequence.seq_id in late:
                    self._park(sequence, logits, row, metadata)
                else:
                    continue
                excluded.append(row)
            skipped = frozenset(excluded)
        sampled = self.sampler.sample(logits, metadata, skipped)
        for row, failure in sampled.failed.items():
            self._fail(metadata.sequences[row].group, failure)
        for row in sampled.broken:
            self._fail(metadata.sequences[row].group, InternalError("no token of this step has a finite logit"))
        return sampled, skipped

    def append(self, sampled: SamplerOutput, metadata: SamplingMetadata, skipped: frozenset[int]) -> None:
        """Append the tokens, and end what is complete."""
        changed, now = self._changed, time.monotonic()
        # One that was parked may have been preempted since: it has its token before it runs again.
        running, waiting = SequenceStatus.RUNNING, SequenceStatus.WAITING
        any_ended = False
        for row, (sequence, token) in enumerate(zip(metadata.sequences, sampled.token_ids, strict=True)):
            if row in skipped or (sequence.status is not running and sequence.status is not waiting):
                continue
            sequence.append(token)
            group = sequence.group
            changed[group] = None
            if group.first_token_time is None:
                group.first_token_time = now
            if token in sequence.stop_ids or sequence.length >= sequence.max_length:
                _end_by_token(sequence, token)
                any_ended = True
        self._appended = None if skipped else (metadata, np.array(sampled.token_ids, np.int32))
        for row, entries in sampled.logprobs.items():
            if row not in skipped:
                metadata.sequences[row].add_logprobs(sampled.token_ids[row], entries)
        for row in metadata.stop_checked:
            any_ended |= _end_by_stop_string(metadata.sequences[row])
        if any_ended:
            self._drop_ended(metadata)

    def _drop_ended(self, metadata: SamplingMetadata) -> None:
        self.scheduler.drop_finished()
        for sequence in metadata.sequences:
            if sequence.status.is_finished and sequence.group.request_id in self.groups:
                if sequence.group.is_finished:
                    self._forget(sequence.group)
                elif self.processor is not None:
                    self.processor.free_sequence(sequence.seq_id)

    # -- ends

    def _fail(self, group: SequenceGroup, error: GuidedError) -> None:
        if group.is_finished:
            return
        self.stats.failures[error.code] = self.stats.failures.get(error.code, 0) + 1
        self._end(group, SequenceStatus.FINISHED_INTERNAL_ERROR, error)

    def _end(self, group: SequenceGroup, status: SequenceStatus, error: GuidedError | None = None) -> None:
        for sequence in group.sequences:
            sequence.finish(status, error)
        self._changed[group] = None
        self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        """The group has ended, for whatever reason: nothing of it stays."""
        group.finished_time = time.monotonic()
        if self._parked:
            for sequence in group.sequences:
                self._unpark(sequence)
        self.scheduler.remove(group)
        if self.groups.pop(group.request_id, None) is not None and self.processor is not None:
            self.processor.free(group.request_id)


_NOTHING_MASKED = ApplyReport()
_LEAST_DEADLINE, _DEADLINE_SHARE = 0.001, 0.05
"""A step waits for masks for so many seconds, or this share of the mean step, whichever is more."""
_MEAN_WEIGHT = 0.02
_IDLE_SECONDS = 0.01
"""How long a step waits where everybody is parked: requests that come or go meanwhile wait as long."""


def _end_by_token(sequence: Sequence, token: int) -> None:
    """It has sampled a stop token, or has all the tokens it may have."""
    if token in sequence.stop_ids:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
        sequence.ended_by_stop_token = True
        sequence.stop_reason = token if token in sequence.params.stop_token_ids else None
    else:
        sequence.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)


def _end_by_stop_string(sequence: Sequence) -> bool:
    """End it if its newest token completes a stop string; True if so. A stop string goes before the length cap."""
    if sequence.status not in (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED_LENGTH_CAPPED):
        return False
    detokenizer = sequence.detokenizer
    before = len(detokenizer.text)
    detokenizer.feed(sequence.data.output_token_ids, sequence.num_output_tokens)
    if sequence.num_output_tokens <= sequence.params.min_tokens:
        return False
    stop = detokenizer.cut_at_stop(before)
    if stop is None:
        return False
    sequence.status = SequenceStatus.FINISHED_STOPPED
    sequence.stop_reason = stop
    sequence.text_complete = True
    return True
