"""Requests: the requests of an engine from `submit` to their end, with the compilations
of their constraints."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future

from engine.outputs import RequestOutput
from engine.stats import EngineStats
from engine.step.scheduler import Scheduler
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.errors import BackendError, GuidedError, bounded
from guided.pools.protocol import CLIENT, Grammar
from guided.processors.post_processors import PostProcessors


class Requests:
    """The groups that have not ended, and those that have changed since the last
    report. `eos_token_id` is the model's first stop token."""

    def __init__(
        self,
        processor: PostProcessors,
        scheduler: Scheduler,
        stats: EngineStats,
        eos_token_id: int,
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        """Requests that have not finished, by id."""
        self.changed: dict[SequenceGroup, None] = {}
        """Requests to report, in the order of their first change."""
        self.awake = threading.Event()
        """Set when a step could do something new."""
        self._processor = processor
        self._scheduler = scheduler
        self._stats = stats
        self._eos_token_id = eos_token_id
        self._compiled: deque[tuple[SequenceGroup, Future[Grammar]]] = deque()

    @property
    def has_news(self) -> bool:
        """Whether there is a request to report, or a grammar has been compiled."""
        return bool(self.changed or self._compiled)

    def submit(self, group: SequenceGroup) -> None:
        """Queue an admitted request. If its prompt is too long for the context, it is
        `FINISHED_IGNORED` already.

        Raises:
            InvalidRequest: the backend does not support the constraint.
            ValueError: the id is in use.
        """
        if group.request_id in self.groups:
            raise ValueError(f"request {group.request_id!r} is running already")
        constrained = group.sampling_params.constraint is not None
        if constrained or self._processor.all_rows:
            group.held_back = max(0, self._processor.max_rollback - 1)
            group.show(self._eos_token_id, self._processor.needs_samples)
        if constrained and not group.is_finished():
            group.set_status(SequenceStatus.WAITING_FOR_GRAMMAR)
            self._compile(group)
        else:
            self.changed[group] = None
        if not group.is_finished():
            self.groups[group.request_id] = group
            self._scheduler.add(group)
        self.awake.set()

    def _compile(self, group: SequenceGroup) -> None:
        params = group.sampling_params
        assert params.constraint is not None
        CLIENT.set(group.client)
        future = self._processor.initialize(
            group.request_id, params.constraint, params.backend
        )

        def done(compiled: Future[Grammar]) -> None:  # on a thread of the pool
            self._compiled.append((group, compiled))
            self.awake.set()

        future.add_done_callback(done)

    def update(self) -> None:
        """Let groups with a new grammar run, and fail those that the post-processors
        have lost."""
        while self._compiled:
            group, compiled = self._compiled.popleft()
            if group.is_finished():
                continue
            try:
                self._start(group, compiled.result())
            except GuidedError as error:
                self.fail(group, error)
            except Exception as error:
                self.fail(
                    group, BackendError(f"compiling failed: {bounded(repr(error))}")
                )
        for request_id, failure in self._processor.failures().items():
            if request_id in self.groups:
                self.fail(self.groups[request_id], failure)

    def _start(self, group: SequenceGroup, grammar: Grammar) -> None:
        group.backend = grammar.backend
        if grammar.compiled_at >= group.arrival_time:
            group.compile_seconds = grammar.compile_seconds
        group.checked = grammar.checked
        if grammar.checked and not group.sampling_params.use_beam_search:
            for sequence in group.sequences:
                if sequence.view is not None:
                    sequence.view.final = 0
        group.compiled_time = time.monotonic()
        group.set_status(SequenceStatus.WAITING)
        # with it, the first mask tells whether `max_tokens` suffices
        if not group.sampling_params.complete:
            self.changed[group] = None

    def fail(self, group: SequenceGroup, error: GuidedError) -> None:
        """End a group with an error, unless it has ended."""
        if group.is_finished():
            return
        self._stats.failures[error.code] += 1
        self.end(group, SequenceStatus.FINISHED_INTERNAL_ERROR, error)

    def end(
        self,
        group: SequenceGroup,
        status: SequenceStatus,
        error: GuidedError | None = None,
    ) -> None:
        """End the sequences of a group that have not ended, and release the group."""
        group.error = error
        for sequence in group.sequences:
            sequence.finish(status)
        self.changed[group] = None
        self.release(group)

    def release(self, group: SequenceGroup) -> None:
        """Release everything that belongs to a group that has ended."""
        group.finished_time = time.monotonic()
        self._scheduler.remove(group)
        if self.groups.pop(group.request_id, None) is not None:
            self._processor.free(group.request_id)

    def drop_finished(self, sequences: list[Sequence]) -> None:
        """Release those of `sequences` that have ended, and their groups with the last
        one."""
        self._scheduler.drop_finished()
        for sequence in sequences:
            if sequence.is_finished() and sequence.group.request_id in self.groups:
                if sequence.group.is_finished():
                    self.release(sequence.group)
                else:
                    self._processor.free_sequence(sequence.seq_id)

    def report(self) -> list[RequestOutput]:
        """Return a snapshot of each request that has changed since the last report;
        without `stream`, at its end."""
        changed = self.changed
        self.changed = {}
        return [
            RequestOutput.from_seq_group(group)
            for group in changed
            if group.stream or group.is_finished()
        ]
