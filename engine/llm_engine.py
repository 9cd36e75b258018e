"""LLMEngine: runs requests step by step. Synchronous and single-threaded; `AsyncLLM`
gives it a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.admission import Admission, Prompt
from engine.beams import advance_beams, show_result
from engine.config import EngineConfig
from engine.edits import Edits
from engine.keywords import accept
from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.logits_processors.loading import bundle, describe, load_classes
from engine.memory.block_manager import BlockManager
from engine.memory.kv_cache import plan_cache
from engine.model.loader import LoadedModel
from engine.model.runner import ModelRunner
from engine.outputs import RequestOutput
from engine.requests import Requests
from engine.sampling.output import SamplerOutput
from engine.sampling.sampler import Sampler
from engine.sampling.scoring import score_tokens
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.step.scheduler import Batch, Scheduler
from engine.step.sequence import SequenceGroup, SequenceStatus
from guided.errors import DeadEnd, GuidedError, InternalError, bounded
from guided.pools.protocol import MaskPool
from guided.processors.logit_post_processor import ApplyReport, LogitPostProcessor

logger = logging.getLogger(__name__)

_LEAST_DEADLINE = 0.001
_DEADLINE_SHARE = 0.05
"""Mask deadline: seconds, or this share of the mean step, whichever is more."""


class LLMEngine:
    """Runs requests, one step at a time. `pool` computes the masks; the engine does not
    shut it down. `processor` works beside the standard post-processor. If both are
    None, the engine rejects constraints."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig = EngineConfig(),  # noqa: B008  it is frozen
        pool: MaskPool | None = None,
        processor: LogitPostProcessor | None = None,
    ) -> None:
        self.model = model
        self.max_model_len = model.context_length(config.max_model_len)
        self.runner = ModelRunner(model, config.block_size, config.enforce_eager)
        num_blocks, max_num_seqs = plan_cache(
            config,
            model.layers,
            model.layout,
            self.max_model_len,
            model.dtype,
            lambda: self.runner.available_memory(config, self.max_model_len),
        )
        self.config = config = replace(config, max_num_seqs=max_num_seqs)
        self.blocks = BlockManager(
            num_blocks,
            config.block_size,
            max_seqs=max_num_seqs,
            max_blocks=-(-self.max_model_len // config.block_size),
            prefix_cache=config.enable_prefix_caching and model.layout is None,
        )
        self.runner.start(self.blocks)
        description = describe(model, config, self.max_model_len)
        self.logits_processors = CustomLogitsProcessors(
            description, model.device, load_classes(config)
        )
        self.sampler = Sampler(self.logits_processors, model.vocabulary.stop_token_ids)
        self.processor = bundle(pool, processor)
        on_cpu = model.device.type == "cpu"
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.tokens_per_step(on_cpu),
            max_tokens_of_prefills=config.tokens_per_step(
                on_cpu, delays_decoding=False
            ),
            layout=model.layout,
        )
        self.stats = EngineStats()
        self.requests = Requests(
            self.processor,
            self.scheduler,
            self.stats,
            model.vocabulary.stop_token_ids[0],
        )
        self.groups = self.requests.groups
        self.awake = self.requests.awake
        self.submit = self.requests.submit
        self.edits = Edits(
            self.processor,
            self.scheduler,
            self.requests,
            self.stats,
            model.vocabulary.padded_vocab_size,
        )
        admission = Admission(
            model,
            config,
            self.max_model_len,
            num_blocks,
            self.logits_processors.validate,
        )
        self.texts = admission.texts
        self.admit = admission.admit
        """Check a request and tokenize its prompt, without queueing it. Call it from
        any thread."""
        self._preparing = 0.0
        """Seconds that the last `prepare` took."""

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
        """Admit and submit a request. With `prompt_token_ids`, `prompt` is only
        repeated in the output. `arrival_time` is in seconds of `time.monotonic()`.
        `others` are refused: the error says what to use instead."""
        accept("add_request()", others, ("prompt_token_ids", "arrival_time", "stream"))
        if prompt is None or prompt_token_ids is not None:
            text = prompt if isinstance(prompt, str) else None
            prompt = {"prompt": text, "prompt_token_ids": prompt_token_ids}
        group = self.admit(request_id, prompt, sampling_params, stream=stream)
        if arrival_time is not None:
            group.arrival_time = arrival_time
        self.submit(group)
        return group

    def abort_request(self, request_id: str) -> None:
        """End a request as `FINISHED_ABORTED`. An unknown id is ignored."""
        if request_id in self.groups:
            self.requests.end(self.groups[request_id], SequenceStatus.FINISHED_ABORTED)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or its end was not reported yet."""
        return bool(self.groups or self.requests.changed)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now. If not, `awake` is set as soon as it
        would."""
        return self.requests.has_news or self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Run one step, if a sequence can run. Returns requests that have changed;
        without `stream`, at their end."""
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
                self.stats.note_step(
                    time.perf_counter() - started, report.wait_seconds, batch.computes
                )
        self.stats.late = len(self.scheduler.late)
        return self.requests.report()

    @contextlib.contextmanager
    def _surviving(self, batch: Batch) -> Iterator[None]:
        """If the device runs out of memory, fail the newest group. The others, as after
        any exception, start again."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            logger.exception("a step ran out of memory")
            newest = max(
                batch.all_sequences, key=lambda sequence: sequence.group.arrival_time
            )
            self.requests.fail(
                newest.group,
                InternalError(f"the device ran out of memory: {bounded(error)}"),
            )
            self._abandon(batch)
            torch.cuda.empty_cache()
        except BaseException:  # for example Ctrl-C
            self._abandon(batch)
            raise

    def _abandon(self, batch: Batch) -> None:
        """Give a step up. Its sequences are prefilled again."""
        # it may have blocks that this step did not compute
        self.blocks.forget_content()
        for sequence in batch.all_sequences:
            if sequence in self.scheduler.running:
                sequence.computed = 0
                self.scheduler.preempt(sequence)

    def schedule(self) -> Batch:
        """Queue groups with a new grammar, end groups that lost a matcher, and select
        the sequences that run. Late ones run once their mask is decided, or if nothing
        else can run: the step then waits for the first mask."""
        self.requests.update()
        late = [sequence.seq_id for sequence in self.scheduler.late]
        if late:
            self.scheduler.resume(self.processor.decided(late))
        batch = self.scheduler.schedule()
        if late and batch.is_empty:
            self.scheduler.resume(late)
            batch = self.scheduler.schedule()
        return batch

    def prepare(self, batch: Batch) -> None:
        """Ask the post-processor for the masks of constrained rows, and announce the
        batch to the logits processors."""
        if batch.processed:
            started = time.perf_counter()
            self.processor.prepare(batch.processed, batch.processed_rows, batch.number)
            self._preparing = time.perf_counter() - started
            self.stats.prepare_seconds += self._preparing
        self.logits_processors.begin(batch)

    def execute(self, batch: Batch) -> Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`. Rows that have kept
        theirs need none."""
        self.stats.steps += batch.computes
        return self.runner.execute(batch)

    def compute_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute the logits of the sampled rows, float32 `[rows, vocab]`, with
        everything applied but the mask."""
        score_tokens(batch, hidden, self.runner)
        batch.hidden = self.runner.select(hidden, batch.selected, batch.kept)
        return self.sampler.adjust(
            lambda: self.runner.compute_logits(batch.hidden), batch
        )

    def apply(self, logits: Tensor, batch: Batch) -> ApplyReport:
        """Wait for the masks until the step's deadline, and apply them to `logits` in
        place."""
        if not batch.processed:
            return ApplyReport()
        report = self.processor.apply(
            logits, max(_LEAST_DEADLINE, _DEADLINE_SHARE * self.stats.mean_step)
        )
        self.stats.note_masks(report)
        for details in batch.details:
            details.exposed_seconds += (
                self._preparing + report.wait_seconds + report.kernel_seconds
            )
        return report

    def sample(
        self, logits: Tensor, batch: Batch, report: ApplyReport
    ) -> SamplerOutput:
        """Sample a token for each row that has its mask. Groups of rows with a failed
        logits processor, or without a token that is allowed, end."""
        unsampled: frozenset[int] = frozenset()
        failed = self.logits_processors.failed
        if report.failed or report.late or report.vetoes or failed or batch.beams:
            unsampled = self.edits.leave_out(batch, report, failed)
        sampled = self.sampler.sample(
            logits, batch, unsampled, partial(self.runner.launch_next, batch)
        )
        for row, (_, kept_mass) in sampled.measured.items():
            if batch.sequences[row].params.constraint is not None:
                self.stats.note_kept_mass(kept_mass)
        for row, failure in failed.items():
            self.requests.fail(batch.sequences[row].group, failure)
        for row in sampled.broken:
            group = batch.sequences[row].group
            error: GuidedError = InternalError(
                "no token of this step has a finite logit"
            )
            if group.restriction is not None:
                error = DeadEnd(
                    "allowed_token_ids or bad_words forbid every token that the constraint allows"
                )
            self.requests.fail(group, error)
        return sampled

    def append(self, sampled: SamplerOutput, batch: Batch) -> None:
        """Append the tokens, apply the post-processor's edits, continue beams, end what
        is complete."""
        any_ended = self._append_tokens(sampled, batch)
        if batch.processed:
            any_ended |= self.edits.apply(sampled, batch)
        if batch.beams:
            for group, finished in advance_beams(
                sampled, batch, self.blocks, self.processor
            ).items():
                self.requests.release(group)
                show_result(group, finished)
        if any_ended:
            self.requests.drop_finished(batch.sequences)

    def _append_tokens(self, sampled: SamplerOutput, batch: Batch) -> bool:
        """Append a token to each sequence but beams. Returns whether a sequence has
        ended."""
        now = time.monotonic()
        running = SequenceStatus.RUNNING
        changed = self.requests.changed
        unsampled = sampled.unsampled
        any_ended = False
        for row, (sequence, token) in enumerate(
            zip(batch.sequences, sampled.token_ids, strict=True)
        ):
            if row in unsampled or sequence.status is not running:
                continue
            group = sequence.group
            changed[group] = None
            if group.sampling_params.use_beam_search:
                continue
            if group.first_token_time is None:
                group.first_token_time = now
            any_ended |= sequence.append(
                token, sampled.logprobs.get(row), sampled.measured.get(row)
            )
        return any_ended
