"""LLMEngine: runs requests step by step. Synchronous and single-threaded; `AsyncLLM` gives it a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from engine.admission import Admission, Prompt
from engine.beams import advance_beams, show_result
from engine.config import EngineConfig
from engine.keywords import refuse_unknown, without_neutral
from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.logits_processors.loading import describe, load_classes
from engine.memory.block_manager import BlockManager
from engine.memory.kv_cache import plan_cache
from engine.model.loader import LoadedModel
from engine.model.runner import ModelRunner
from engine.outputs import RequestOutput
from engine.sampler import Sampler, SamplerOutput, ranked_logprobs
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.step.batch import Batch, Chunk
from engine.step.logprobs import TokenLogprobs
from engine.step.scheduler import Scheduler
from engine.step.sequence import SequenceGroup, SequenceStatus
from guided.errors import BackendError, DeadEnd, GuidedError, InternalError, PostProcessorFailed, bounded
from guided.pools.protocol import CLIENT, Grammar, MaskPool
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import ApplyReport, LogitPostProcessor, SampledEdit
from guided.processors.post_processors import PostProcessors
from guided.sequence import SequenceOutput

logger = logging.getLogger(__name__)


class LLMEngine:
    """Runs requests, one step at a time. `pool` computes the masks; the engine does not shut it down. `processor` works
    beside the standard post-processor. If both are None, the engine rejects constraints."""

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
        self.runner = ModelRunner(model, config.block_size, config.enforce_eager)
        num_blocks, max_num_seqs = plan_cache(
            config, model.layers, model.layout, self.max_model_len, model.dtype, self._memory_for_cache
        )
        self.config = config = replace(config, max_num_seqs=max_num_seqs)
        self.blocks = BlockManager(
            num_blocks,
            config.block_size,
            max_seqs=config.max_num_seqs,
            max_blocks=-(-self.max_model_len // config.block_size),
            prefix_cache=config.enable_prefix_caching and model.layout is None,
        )
        self.runner.start(self.blocks)
        description = describe(model, config, self.max_model_len)
        self.logits_processors = CustomLogitsProcessors(description, model.device, load_classes(config))
        self.sampler = Sampler(self.logits_processors, model.vocabulary.stop_token_ids)
        if not isinstance(processor, PostProcessors):  # it contains the exceptions of its members
            if pool is None or isinstance(processor, GuidedProcessor):
                standard = []
            else:
                standard = [GuidedProcessor(pool)]
            processor = PostProcessors(*standard, *([] if processor is None else [processor]))
        self.processor = processor
        on_cpu = model.device.type == "cpu"
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.tokens_per_step(on_cpu),
            max_tokens_of_prefills=config.tokens_per_step(on_cpu, delays_decoding=False),
            layout=model.layout,
        )
        self.stats = EngineStats()
        self.groups: dict[str, SequenceGroup] = {}
        """Requests that have not finished, by id."""
        self.awake = threading.Event()
        """Set when a step could do something new."""
        admission = Admission(model, config, self.max_model_len, num_blocks, self.logits_processors.validate)
        self.texts = admission.texts
        self.admit = admission.admit
        """Check a request and tokenize its prompt, without queueing it. Call it from any thread."""
        self._compiled: deque[tuple[SequenceGroup, Future[Grammar]]] = deque()
        self._changed: dict[SequenceGroup, None] = {}
        self._prepared: Batch | None = None
        """The step that was prepared and not applied yet."""
        self._preparing = 0.0
        """Seconds that the last `prepare` took."""

    def _memory_for_cache(self) -> int:
        """Return the bytes that the KV cache may take in this process. Without a GPU: a quarter of the free memory, at
        most 4 GiB, shared by all ranks."""
        if self.model.device.type != "cuda":
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return min(free // 4, 4 << 30) // (1 if self.model.ranks is None else self.model.ranks.size)
        tokens = self.config.tokens_per_step(on_cpu=False)
        return self.runner.memory_for_cache(tokens, self.config.max_num_seqs, self.max_model_len)

    # -- requests

    def submit(self, group: SequenceGroup) -> None:
        """Queue an admitted request. If its prompt is too long for the context, it is `FINISHED_IGNORED` already.
        Raises `InvalidRequest` if the backend does not support the constraint, `ValueError` if the id is in use."""
        if group.request_id in self.groups:
            raise ValueError(f"request {group.request_id!r} is running already")
        constrained = group.sampling_params.constraint is not None
        if constrained or self.processor.all_rows:
            group.held_back = max(0, self.processor.max_rollback - 1)
            group.show(self.model.vocabulary.stop_token_ids[0], self.processor.needs_samples)
        if constrained and not group.is_finished():
            group.set_status(SequenceStatus.WAITING_FOR_GRAMMAR)
            self._compile(group)
        else:
            self._changed[group] = None
        if not group.is_finished():
            self.groups[group.request_id] = group
            self.scheduler.add(group)
        self.awake.set()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams = SamplingParams(),  # noqa: B008  it is frozen
        prompt_token_ids: Tokens[int] | None = None,
        arrival_time: float | None = None,
        *,
        stream: bool = True,
        **others: Any,
    ) -> SequenceGroup:
        """Admit and submit a request. With `prompt_token_ids`, `prompt` is only repeated in the output. `arrival_time`
        is in seconds of `time.monotonic()`. `others` are refused: the error says what to use instead."""
        refuse_unknown("add_request()", without_neutral(others), ("prompt_token_ids", "arrival_time", "stream"))
        if prompt is None or prompt_token_ids is not None:
            if isinstance(prompt, str):
                text = prompt
            else:
                text = None
            prompt = {"prompt": text, "prompt_token_ids": prompt_token_ids}
        group = self.admit(request_id, prompt, sampling_params, stream=stream)
        if arrival_time is not None:
            group.arrival_time = arrival_time
        self.submit(group)
        return group

    def _compile(self, group: SequenceGroup) -> None:
        params = group.sampling_params
        assert params.constraint is not None
        CLIENT.set(group.client)
        future = self.processor.initialize(group.request_id, params.constraint, params.backend)

        def done(compiled: Future[Grammar]) -> None:  # on a thread of the pool
            self._compiled.append((group, compiled))
            self.awake.set()

        future.add_done_callback(done)

    def abort_request(self, request_id: str) -> None:
        """End a request as `FINISHED_ABORTED`. An unknown id is ignored."""
        group = self.groups.get(request_id)
        if group is not None:
            self._end(group, SequenceStatus.FINISHED_ABORTED)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or its end was not reported yet."""
        return bool(self.groups or self._changed)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now. If not, `awake` is set as soon as it would."""
        return bool(self._changed or self._compiled or self.scheduler.has_work)

    # -- the step

    def step(self) -> list[RequestOutput]:
        """Run one step, if a sequence can run. Returns requests that have changed; without `stream`, at their end."""
        started = time.perf_counter()
        batch = self.schedule()
        if not batch.is_empty:
            with self._surviving(batch), torch.inference_mode():
                self.prepare(batch)
                hidden = self.execute(batch)
                logits = self.compute_logits(hidden, batch)
                report = self.apply(logits, batch)
                sampled = self.sample(logits, batch, report)
                self.append(sampled, batch)
                self.stats.note_step(time.perf_counter() - started, report.wait_seconds, batch.computes)
        self.stats.late = sum(sequence.is_late for sequence in self.scheduler.skipped)
        changed = self._changed
        self._changed = {}
        return [RequestOutput.from_seq_group(group) for group in changed if group.stream or group.is_finished()]

    @contextlib.contextmanager
    def _surviving(self, batch: Batch) -> Iterator[None]:
        """If the device runs out of memory, fail the newest group. The others, as after any exception, start again."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            logger.exception("a step ran out of memory")
            newest = max((one.group for one in batch.all_sequences), key=lambda group: group.arrival_time)
            self._fail(newest, InternalError(f"the device ran out of memory: {bounded(error)}"))
            self._abandon(batch)
            torch.cuda.empty_cache()
        except BaseException:  # for example Ctrl-C
            self._abandon(batch)
            raise

    def _abandon(self, batch: Batch) -> None:
        """Give a step up. Its sequences are prefilled again."""
        self.blocks.forget_content()  # it may have blocks that this step did not compute
        for sequence in batch.all_sequences:
            if sequence in self.scheduler.running:
                sequence.computed = 0
                self.scheduler.preempt(sequence)
        batch.is_repeatable = False
        if self._prepared is not None:  # the post-processor expects an `apply` for it
            width = self.model.vocabulary.padded_vocab_size
            self.apply(torch.zeros(len(self._prepared.sequences), width), self._prepared)

    def schedule(self) -> Batch:
        """Queue groups with a new grammar, end groups that lost a matcher, and select the sequences that run. Late ones
        run once their mask is decided, or if nothing else can run: the step then waits for the first mask."""
        while self._compiled:
            self._finish_compilation(*self._compiled.popleft())
        for request_id, error in self.processor.failures().items():
            if request_id in self.groups:
                self._fail(self.groups[request_id], error)
        if self.scheduler.skipped:
            self.scheduler.resume(self.processor.decided([sequence.seq_id for sequence in self.scheduler.skipped]))
        batch = self.scheduler.schedule()
        if batch.is_empty and self.scheduler.skipped:
            self.scheduler.resume()
            batch = self.scheduler.schedule()
        return batch

    def _finish_compilation(self, group: SequenceGroup, compiled: Future[Grammar]) -> None:
        if group.is_finished():
            return
        try:
            grammar = compiled.result()
            is_new = grammar.compiled_at >= group.arrival_time
            group.backend = grammar.backend
            if is_new:
                group.compile_seconds = grammar.compile_seconds
            else:
                group.compile_seconds = 0.0
            group.checked = grammar.checked
            if grammar.checked and not group.sampling_params.use_beam_search:
                for sequence in group.sequences:
                    if sequence.guided is not None:
                        sequence.guided.final = 0
            group.compiled_time = time.monotonic()
        except Exception as error:
            other = BackendError(f"compiling failed: {bounded(repr(error))}")
            self._fail(group, error if isinstance(error, GuidedError) else other)
        else:
            group.set_status(SequenceStatus.WAITING)
            if not group.sampling_params.complete:  # with it, the first mask tells whether `max_tokens` suffices
                self._changed[group] = None

    def prepare(self, batch: Batch) -> None:
        """Ask the post-processor for the masks of constrained rows, and announce the batch to the logits processors."""
        if batch.guided:
            started = time.perf_counter()
            self._prepared = batch
            self.processor.prepare(batch.guided, batch.guided_rows, batch.number)
            self._preparing = time.perf_counter() - started
            self.stats.prepare_seconds += self._preparing
        self.logits_processors.begin(batch)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`. Rows that have kept theirs need none."""
        self.stats.steps += batch.computes
        return self.runner.execute(batch)

    def compute_logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the logits of the sampled rows, float32 `[rows, vocab]`, with everything applied but the mask."""
        for chunk in batch.prefills:
            for first, last in chunk.unscored():
                self._score(chunk, first, last, hidden)
        batch.hidden = self.runner.select(hidden, batch.selected, batch.kept)
        return self.sampler.adjust(lambda: self.runner.compute_logits(batch.hidden), batch)

    def _score(self, chunk: Chunk, first: int, last: int, hidden: torch.Tensor) -> None:
        """Add the log-probabilities of tokens `first` to `last` of a chunk's sequence."""
        sequence = chunk.sequences[0]
        params = sequence.params
        of_prompt = first < len(sequence.data.prompt_token_ids)
        count = (params.prompt_logprobs if of_prompt else params.logprobs) or 0
        for begin in range(first, last, _SCORED_ROWS):
            end = min(last, begin + _SCORED_ROWS)
            rows = range(chunk.row + begin - 1 - chunk.start, chunk.row + end - 1 - chunk.start)
            logprobs = self.runner.compute_logits(self.runner.select(hidden, list(rows))).log_softmax(-1)
            own = torch.tensor(sequence.data.span(begin, end), device=hidden.device)
            entries = ranked_logprobs(logprobs, own, [count] * len(own))
            if of_prompt:
                sequence.group.prompt_logprobs += entries
            else:
                for each in entries:
                    sequence.add_score(each)

    def apply(self, logits: torch.Tensor, batch: Batch) -> ApplyReport:
        """Wait for the masks until the step's deadline, and apply them to `logits` in place."""
        if not batch.guided:
            return ApplyReport()
        report = self.processor.apply(logits, max(_LEAST_DEADLINE, _DEADLINE_SHARE * self.stats.mean_step))
        self._prepared = None
        self.stats.note_masks(report)
        for row in batch.measured:
            if (details := batch.sequences[row].details) is not None:
                details.exposed_seconds += self._preparing + report.wait_seconds + report.kernel_seconds
        return report

    def sample(self, logits: torch.Tensor, batch: Batch, report: ApplyReport) -> SamplerOutput:
        """Sample a token for each row. Rows with a failed mask or logits processor are skipped, and their groups end.
        Rows with a late mask are skipped, and their sequences do not run until it is ready."""
        skipped: frozenset[int] = frozenset()
        if report.failed or report.late or report.vetoes or self.logits_processors.failed or batch.beams:
            skipped = self._skip(batch, report)
        sampled = self.sampler.sample(logits, batch, skipped)
        if batch.searched:
            stop_logits = logits[:, self.model.vocabulary.stop_token_ids[0]].tolist()
            for row, free_places in batch.searched:
                if row not in skipped and stop_logits[row] > -math.inf:
                    free_places.add(batch.sequences[row].num_output_tokens)
        masked = {row: mass for row, (_, mass) in sampled.measured.items() if batch.sequences[row].guided is not None}
        self.stats.note_kept_mass(masked.values())
        for row, failure in self.logits_processors.failed.items():
            self._fail(batch.sequences[row].group, failure)
        for row in sampled.broken:
            reason: GuidedError = InternalError("no token of this step has a finite logit")
            if batch.sequences[row].restriction is not None:
                reason = DeadEnd("allowed_token_ids or bad_words forbid every token that the constraint allows")
            self._fail(batch.sequences[row].group, reason)
        return sampled

    def _skip(self, batch: Batch, report: ApplyReport) -> frozenset[int]:
        """End the groups of failed rows, take back what is vetoed, and note the late rows. Returns these rows."""
        late_ids = set(report.late)
        late: list[int] = []
        skipped = set(self.logits_processors.failed)
        for row in batch.guided_rows.tolist():
            sequence = batch.sequences[row]
            error = report.failed.get(sequence.seq_id)
            if error is not None:
                self._fail(sequence.group, error)
                skipped.add(row)
            elif (veto := report.vetoes.get(sequence.seq_id)) is not None:
                self._take_back(batch, row, sequence.num_output_tokens - veto.length)
                sequence.vetoes[veto.keyword] += 1
                self.stats.vetoes[veto.keyword] += 1
                skipped.add(row)
            elif sequence.seq_id in late_ids:
                late.append(row)
        self.stats.late_rows += len(late)
        return frozenset(skipped) | self.scheduler.skip(batch, late, skipped)

    def append(self, sampled: SamplerOutput, batch: Batch) -> None:
        """Append the tokens, apply the post-processor's edits, continue beams, end what is complete."""
        any_ended = self._append_tokens(sampled, batch)
        if batch.guided:
            any_ended |= self._follow_edits(sampled, batch)
        if batch.beams:
            batch.is_repeatable = False  # penalties are counted again
            for group, finished in advance_beams(sampled, batch, self.blocks, self.processor).items():
                self._forget(group)
                show_result(group, finished)
        if any_ended:
            self._drop_ended(batch)

    def _append_tokens(self, sampled: SamplerOutput, batch: Batch) -> bool:
        """Append a token to each sequence but beams. Returns whether a sequence has ended."""
        changed = self._changed
        now = time.monotonic()
        running = SequenceStatus.RUNNING
        skipped = sampled.skipped
        logprobs = sampled.logprobs
        measured = sampled.measured
        plain = not logprobs and not measured
        any_ended = False
        for row, (sequence, token) in enumerate(zip(batch.sequences, sampled.token_ids, strict=True)):
            if row in skipped or sequence.status is not running:
                continue
            group = sequence.group
            changed[group] = None
            if not sequence.params.use_beam_search:
                if group.first_token_time is None:
                    group.first_token_time = now
                if plain:
                    any_ended |= sequence.append(token)
                else:
                    any_ended |= sequence.append(token, logprobs.get(row), measured.get(row))
        return any_ended

    def _follow_edits(self, sampled: SamplerOutput, batch: Batch) -> bool:
        """Apply the edits that the post-processor requests. Returns whether a sequence has ended."""
        skipped = sampled.skipped
        samples: list[SequenceOutput | None] = []
        if self.processor.needs_samples:
            for row, sequence in zip(batch.guided_rows.tolist(), batch.guided, strict=True):
                has_sample = row not in skipped and not batch.sequences[row].params.use_beam_search
                samples.append(sampled.sample_of(row, sequence.sequence_id) if has_sample else None)
        wanted = self.processor.edits(batch.guided, samples)
        if not wanted:
            return False
        batch.is_repeatable = False  # penalties are counted again
        any_ended = False
        for row in batch.guided_rows.tolist():
            sequence = batch.sequences[row]
            edit = wanted.get(sequence.seq_id)
            if edit is None or row in skipped or sequence.is_finished() or sequence.params.use_beam_search:
                continue
            try:
                self._follow(edit, batch, row)
            except Exception as error:
                wrong = PostProcessorFailed(f"a wrong edit: {bounded(error)}")
                self._fail(sequence.group, error if isinstance(error, GuidedError) else wrong)
            any_ended |= sequence.is_finished()
        return any_ended

    def _take_back(self, batch: Batch, row: int, count: int, again: bool = False) -> None:
        """Remove the last `count` output tokens of a row: from output, blocks and matcher. `again`: compute the token
        before them again, because a token that is appended is scored by the step that computes the one before it."""
        sequence = batch.sequences[row]
        batch.is_repeatable = False  # penalties are counted again
        sequence.roll_back(count)
        self.scheduler.rewind(batch, row, again)
        self.processor.rollback(sequence.seq_id, sequence.num_output_tokens)

    def _follow(self, edit: SampledEdit, batch: Batch, row: int) -> None:
        """Roll back, append and stop, as the edit of a row says: output, blocks and matcher."""
        sequence = batch.sequences[row]
        processor = self.processor
        vocab_size = self.model.vocabulary.padded_vocab_size
        if not all(type(token) is int and 0 <= token < vocab_size for token in edit.append):
            raise InternalError(f"tokens to append must be integers from 0 to {vocab_size - 1}: {bounded(edit.append)}")
        if edit.rollback:
            if not 0 < edit.rollback <= max(1, processor.max_rollback):  # the newest token was not sent
                raise InternalError(f"{edit.rollback} tokens to roll back; the limit is {processor.max_rollback}")
            scores = bool(edit.append) and (sequence.needs_logprobs or sequence.details is not None)
            self._take_back(batch, row, min(edit.rollback, sequence.num_output_tokens), again=scores)
        masked = sequence.params.logprobs_mode == "masked"
        for token in edit.append:
            is_last = token in sequence.stop_ids or sequence.length + 1 >= sequence.max_length
            if sequence.restriction is not None:
                break  # sample it instead: it may be forbidden
            if is_last and (sequence.details is not None or (sequence.needs_logprobs and not masked)):
                break  # sample the last token instead: no later step would score it
            entries = TokenLogprobs([(token, 0.0, 1)]) if masked and sequence.needs_logprobs else None
            ended = sequence.append(token, entries, (1, None))
            self.stats.forced_tokens += 1
            if not sequence.params.is_greedy:
                next(sequence.uniforms)  # as if it were sampled
            if ended:
                return
        if edit.stop:
            sequence.finish(SequenceStatus.FINISHED_STOPPED)

    def _drop_ended(self, batch: Batch) -> None:
        self.scheduler.drop_finished()
        for sequence in batch.sequences:
            if sequence.is_finished() and sequence.group.request_id in self.groups:
                if sequence.group.is_finished():
                    self._forget(sequence.group)
                else:
                    self.processor.free_sequence(sequence.seq_id)

    # -- ends

    def _fail(self, group: SequenceGroup, error: GuidedError) -> None:
        if group.is_finished():
            return
        self.stats.failures[error.code] = self.stats.failures.get(error.code, 0) + 1
        self._end(group, SequenceStatus.FINISHED_INTERNAL_ERROR, error)

    def _end(self, group: SequenceGroup, status: SequenceStatus, error: GuidedError | None = None) -> None:
        for sequence in group.sequences:
            sequence.finish(status, error)
        self._changed[group] = None
        self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        """Release everything that belongs to a group that has ended."""
        group.finished_time = time.monotonic()
        self.scheduler.remove(group)
        if self.groups.pop(group.request_id, None) is not None:
            self.processor.free(group.request_id)


_LEAST_DEADLINE = 0.001
_DEADLINE_SHARE = 0.05
"""Mask deadline: seconds, or this share of the mean step, whichever is more."""
_SCORED_ROWS = 256
"""Maximum number of prompt tokens that are scored at once: each takes a row of logits."""
