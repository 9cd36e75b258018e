"""One HTTP request's generations: admitted together, merged into one stream, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.constraints import Asked
from engine.server.context import ServerContext
from engine.server.errors import ShuttingDown
from engine.server.protocol import GuidedInfo, Usage
from guided.errors import CompileTimeout, GuidedError, InternalError

__all__ = [
    "ClientGone",
    "Job",
    "Outputs",
    "guided_headers",
    "report",
    "running",
    "to_nobody",
    "unless_gone",
    "usage_of",
]

logger = logging.getLogger("guided.server")

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What one HTTP request has the engine do: one request a prompt, all with the same parameters."""

    request_id: str
    """The engine's, and the answer's `id`."""
    http_id: str
    """The answer's `x-request-id`."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    asked: Asked
    stream: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass
class Outputs:
    """A job that was admitted: its constraint is compiled."""

    guided: GuidedInfo | None
    stream: AsyncIterator[tuple[int, RequestOutput]]
    """(which prompt, its output so far), until all are finished. Raises what ended a request otherwise."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@asynccontextmanager
async def running(context: ServerContext, job: Job) -> AsyncIterator[Outputs]:
    """Start the job and wait until it is admitted; at the end whatever still runs of it is aborted.

    Raises:
        GuidedError: it was refused (what the compilation says included), or fails later, from the stream. It is in the
            log; one that is raised within the context too, and the handler counts it.
    """
    guided = None
    try:
        async with _running(context, job) as outputs:
            guided = outputs.guided
            yield outputs
    except GuidedError as error:
        if error.param == "extra_args":
            error.param = "vllm_xargs"  # as the request spells it
        report(job, error, guided)
        raise


def report(job: Job, error: GuidedError, guided: GuidedInfo | None) -> None:
    """Write into the log what an operator can do something about: not what is wrong with a request."""
    if isinstance(error, ShuttingDown) or (error.status < 500 and not isinstance(error, CompileTimeout)):
        return
    constraint = job.asked.constraint
    kind = "none" if constraint is None else constraint.kind
    backend = job.asked.backend if guided is None else guided.backend
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    logger.warning(
        "request %s (x-request-id %s) failed: %s: %s%s; constraint %s, backend %s",
        *(job.request_id, job.http_id, error.code, error, where, kind, backend),
    )


@asynccontextmanager
async def _running(context: ServerContext, job: Job) -> AsyncIterator[Outputs]:
    with context.admit(len(job.prompts)):
        ids = [job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{i}" for i in range(len(job.prompts))]
        streams = [
            context.metrics.observed(
                context.engine.generate(prompt, job.params, request_id, stream=job.stream), job.params
            )
            for prompt, request_id in zip(job.prompts, ids, strict=True)
        ]
        checked = None
        try:
            first = await _all_first(streams, job)
            backend = first[0].backend
            constraint = job.asked.constraint
            info = None
            if constraint is not None and backend is not None:
                info = GuidedInfo(kind=constraint.kind, backend=backend)
            checked = _checked(context, _merged(first, streams), job)
            yield Outputs(info, checked)
        finally:
            if checked is not None:
                await checked.aclose()
            for stream in streams:
                await stream.aclose()  # aborts what still runs


def to_nobody(context: ServerContext, job: Job) -> Response:
    """What a client is answered that has gone away."""
    context.metrics.abandoned("disconnected")
    logger.info("request %s (x-request-id %s): the client went away", job.request_id, job.http_id)
    return Response(status_code=499)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client disconnects.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


def usage_of(finished: Sequence[RequestOutput]) -> Usage:
    """Tokens in and out. Prompts are counted once, whatever n is."""
    prompt = sum(len(output.prompt_token_ids) for output in finished)
    completion = sum(len(each.token_ids) for output in finished for each in output.outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def guided_headers(info: GuidedInfo | None) -> dict[str, str]:
    """The backend as a header too, for those who don't read bodies."""
    return {} if info is None else {"x-guided-backend": info.backend}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all_first(streams: Sequence[AsyncIterator[RequestOutput]], job: Job) -> list[RequestOutput]:
    """The admissions of all; where one is refused, the others' are given up."""
    tasks = [asyncio.ensure_future(_first(stream, job)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(stream: AsyncIterator[RequestOutput], job: Job) -> RequestOutput:
    try:
        return await anext(stream)
    except GuidedError as error:
        raise job.asked.respell(error) from None
    except StopAsyncIteration:
        raise InternalError("the engine ended the request before it began") from None


async def _merged(
    first: Sequence[RequestOutput], streams: Sequence[AsyncIterator[RequestOutput]]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    for number, output in enumerate(first):
        yield number, output
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # Outputs are snapshots: of each stream the newest is kept, however slow the reader is.
    newest: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def pump(number: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                newest[number] = output
                news.set()
        finally:
            news.set()

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        while newest or not all(task.done() for task in pumps):
            await news.wait()
            news.clear()
            while newest:
                number = next(iter(newest))
                yield number, newest.pop(number)
            for task in pumps:
                if task.done():
                    task.result()  # raises what it ended with
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _checked(
    context: ServerContext, outputs: AsyncGenerator[tuple[int, RequestOutput], None], job: Job
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Pass outputs on; raise where one ended by a failure."""
    async with aclosing(_unless_shut_down(context, outputs)) as outputs:
        async for number, output in outputs:
            for completion in output.outputs:
                error = completion.error or output.error
                if error is not None:
                    raise job.asked.respell(error)
                if completion.finish_reason == "abort":
                    raise InternalError("the generation was aborted")
                if completion.finish_reason == "error":
                    raise InternalError("the generation failed")
            yield number, output


async def _unless_shut_down(
    context: ServerContext, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """A generation that ends because the server does is a 503: elsewhere, or later, it would go through."""
    try:
        async with aclosing(outputs):
            async for each in outputs:
                yield each
    except InternalError as error:
        if context.shutting_down:
            raise ShuttingDown("the server is shutting down") from error
        raise
