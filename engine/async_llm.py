"""AsyncLLM: runs the engine on its own thread and streams outputs to asyncio. The
server uses it."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.admission import Prompt
from engine.base_llm import AsyncEngineArgs, BaseLLM
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.step.sequence import SequenceGroup
from guided.errors import GuidedError, InternalError, bounded
from guided.pools.status import PoolStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot of the engine, for `/health` and the metrics.

    `error` is the error that has ended the engine's thread. `num_running` counts
    sequences; `num_waiting` counts groups that could run, and preempted sequences.
    """

    error: str | None
    alive: bool
    pool: PoolStatus
    num_running: int
    num_waiting: int
    num_waiting_for_grammar: int
    stats: EngineStats


class _Stream:
    """The consumer's end of one or several requests. It keeps only the newest output of
    each request, because outputs are complete snapshots."""

    def __init__(self, groups: Sequence[SequenceGroup]) -> None:
        self.groups = groups
        self.loop = asyncio.get_running_loop()
        self._newest: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Deliver an output or the final error. Runs on the consumer's event loop."""
        if isinstance(output, RequestOutput):
            self._newest[output.request_id] = output
        else:
            self._error = output
        self._ready.set()

    async def get(self) -> list[RequestOutput]:
        """Wait for outputs, and return the outputs since the last call."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        newest = self._newest
        self._newest = {}
        return list(newest.values())


class AsyncLLM(BaseLLM):
    """Generate from asyncio. The arguments are those of `BaseLLM`. The constructor
    starts the engine's thread, and `shutdown` ends it. If the thread dies of an error,
    every stream raises, and `health().alive` stays False."""

    def _start(self) -> None:
        self._inbox: deque[_Stream | str] = deque()
        """Messages from other threads: streams with requests to submit, and ids of
        requests to abort."""
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        """Prevents additions to the inbox after the engine's thread has emptied it for
        the last time."""
        self._ended = self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Create an `AsyncLLM` from vLLM's object of arguments."""
        return cls(engine_args.model, **engine_args.options)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield snapshots of its output, beginning when the
        constraint is compiled.

        The last snapshot has `finished`; without `stream`, it is the only one. Leaving
        or cancelling the iteration aborts the request.

        Raises:
            GuidedError: the request failed before it was admitted, or at any time if
                `stream` is False. A later failure of a stream is the `error` of its
                last snapshot.
            InternalError: the engine's thread has died.
        """
        group = self.engine.admit(
            request_id or uuid.uuid4().hex, prompt, sampling_params, stream=stream
        )
        admitted = False
        async with aclosing(self.run([group])) as outputs:
            async for output in outputs:
                # Newer snapshots replace unread ones, so the first snapshot that is
                # read may be the last.
                admitted = admitted or (
                    group.stream and group.first_token_time is not None
                )
                if output.error is not None and not admitted:
                    raise output.error
                admitted = True
                yield output

    async def run(
        self, groups: Sequence[SequenceGroup]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run requests that `engine.admit` has admitted, and yield their snapshots as
        `generate` does. Any failure of a request is the `error` of its last
        snapshot."""
        unfinished = {group.request_id for group in groups}
        consumer = _Stream(groups)
        self._send(consumer)
        try:
            while unfinished:
                for output in await consumer.get():
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            for request_id in unfinished:
                self._send(request_id)

    def abort(self, request_id: str) -> None:
        """End a request. Its stream ends with `finish_reason` abort. Any thread may
        call this method."""
        self._send(request_id)

    def _send(self, item: _Stream | str) -> None:
        with self._lock:
            if not self._ended:
                self._inbox.append(item)
                self.engine.awake.set()
            elif isinstance(item, _Stream):
                raise self._ended_error()

    def health(self) -> EngineHealth:
        """Take a snapshot of the engine. Any thread may call this method."""
        scheduler = self.engine.scheduler
        waiting = list(scheduler.prefills.waiting)
        for_grammar = sum(group.waits_for_grammar for group in waiting)
        return EngineHealth(
            None
            if self._death is None
            else bounded(f"{type(self._death).__name__}: {self._death}"),
            self._death is None and self._thread.is_alive(),
            pool=self.pool.status(),
            num_running=len(scheduler.running),
            num_waiting=len(waiting) - for_grammar + len(scheduler.prefills.preempted),
            num_waiting_for_grammar=for_grammar,
            stats=self.engine.stats,
        )

    def shutdown(self) -> None:
        """End all requests and the thread, and shut the pool down if this object has
        started it. Idempotent."""
        self._closing = True
        self.engine.awake.set()
        self._thread.join()
        super().shutdown()

    def _run(self) -> None:
        """Run the engine. This method and those below run on the engine's thread."""
        try:
            while not self._closing:
                self.engine.awake.clear()
                while self._inbox:
                    self._take(self._inbox.popleft())
                if self.engine.has_work:
                    outputs = self.engine.step()
                    self._post(
                        [
                            (self._streams[output.request_id], output)
                            for output in outputs
                        ]
                    )
                    for output in outputs:
                        if output.finished:
                            del self._streams[output.request_id]
                else:
                    self.engine.awake.wait()
        except BaseException as error:
            self._death = error
            logger.exception("the engine's thread has died")
        self._end_all()

    def _take(self, item: _Stream | str) -> None:
        if isinstance(item, str):
            self.engine.abort_request(item)
            return
        try:
            for group in item.groups:
                if group.request_id in self._streams:
                    raise ValueError(f"request {group.request_id!r} is running already")
                self.engine.submit(group)
                self._streams[group.request_id] = item
        except Exception as error:  # the error of a request never ends the thread
            known = isinstance(error, GuidedError | ValueError)
            self._post(
                [(item, error if known else InternalError(bounded(repr(error))))]
            )

    def _post(
        self, items: Sequence[tuple[_Stream, RequestOutput | BaseException]]
    ) -> None:
        """Put each output into its stream, with one call into each event loop."""

        def put(mine: list[tuple[_Stream, RequestOutput | BaseException]]) -> None:
            for stream, output in mine:
                stream.put(output)

        for loop in {stream.loop for stream, _ in items}:
            mine = [item for item in items if item[0].loop is loop]
            try:
                loop.call_soon_threadsafe(put, mine)
            except RuntimeError:  # the event loop is closed
                for stream, _ in mine:
                    for group in stream.groups:
                        self.engine.abort_request(group.request_id)

    def _end_all(self) -> None:
        """End all streams with an error."""
        with self._lock:
            self._ended = True
        left = {
            *self._streams.values(),
            *(item for item in self._inbox if isinstance(item, _Stream)),
        }
        self._inbox.clear()
        self._streams.clear()
        self._post([(stream, self._ended_error()) for stream in left])

    def _ended_error(self) -> InternalError:
        if self._death is None:
            why = "is shutting down"
        else:
            why = f"has died: {bounded(self._death)}"
        return InternalError(f"the engine {why}")
