"""The generations of one HTTP request: admitted together, merged into one stream, ended together."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceGroup
from engine.server.context import ServerContext
from engine.server.errors import QueueFull, ShuttingDown
from engine.server.prompts import name_prompt
from engine.server.protocol import GuidedInfo
from guided.constraint import KINDS, Constraint
from guided.errors import CompileTimeout, ConstraintNotMet, GuidedError, InternalError, InvalidConstraint
from guided.tools.parser import OutputParser

logger = logging.getLogger("guided.server")


@dataclass(frozen=True)
class OutputForm:
    """What an output consists of, and how it is read."""

    constraint: Constraint | None = None
    """On the whole output."""
    kind: str | None = None
    """What the answer calls the constraint, if the request's own is only a part of it."""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """JSON pointers into the constraint -> the field that describes this place, and the pointer in the field."""
    parser: Callable[[], OutputParser] = OutputParser
    """Makes the parser of a choice's output."""
    shows_special_tokens: bool = False
    """The parser reads special tokens."""
    id_length: int = 29
    """Number of characters of a call's id."""


@dataclass(frozen=True)
class Job:
    """The work of one HTTP request: one engine request per prompt, all with the same parameters.

    It holds what the answer needs of the body, but not the body, which may be large.
    """

    request_id: str
    """Id of the engine's request, and `id` of the answer."""
    http_id: str
    """`x-request-id` of the answer."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    constraint_field: str | None
    """The field that holds the constraint, as the request spells it."""
    stream: bool
    include_usage: bool = False
    echoed: Sequence[str] = ()
    """The text of each prompt, if the answer repeats it."""
    groups: Sequence[SequenceGroup] = ()
    """One per prompt. `admitted` sets them."""
    form: OutputForm = field(default_factory=OutputForm)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether `logprobs` covers the prompt too."""
        return bool(self.echoed) and self.params.logprobs is not None

    @property
    def log_ids(self) -> dict[str, str]:
        """Fields of its log records."""
        return {"request_id": self.request_id, "x_request_id": self.http_id}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def new_call_id(self) -> str:
        """Make the id of a function call."""
        return f"call_{uuid.uuid4().hex[:24]}"[-self.form.id_length :]

    def admitted(self, context: ServerContext) -> Job:
        """Return this job with its engine requests.

        Raises:
            InvalidRequest: the engine rejects one.
        """
        if (alternatives := self.params.prompt_logprobs) is not None:
            tokens = sum(map(len, self.prompts)) * self.params.n
            context.check_logprobs(self.num_choices, tokens, alternatives, "prompt_logprobs")
        groups = []
        for number, prompt in enumerate(self.prompts):
            request_id = self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{number}"
            try:
                groups.append(context.engine.engine.admit(request_id, prompt, self.params, stream=self.stream))
            except GuidedError as error:
                raise self.respell(error, number) from None
        return replace(self, groups=groups)

    def respell(self, error: GuidedError, prompt: int) -> GuidedError:
        """Name the field of the constraint as the request spells it, and the prompt if there are several."""
        if isinstance(error, InvalidConstraint | ConstraintNotMet) and (error.param is None or error.param in KINDS):
            error.param = self.constraint_field or error.param
            locate(error, self.form.places)
        if isinstance(error, ConstraintNotMet) and (self.params.seed is not None or self.params.is_greedy):
            error.retryable = False  # the output would be the same
        name_prompt(error, prompt, len(self.prompts))
        return error


def locate(error: GuidedError, places: Mapping[str, tuple[str, str]]) -> None:
    """If an error's pointer is within one of `places`, replace its field and pointer by those of the request."""
    if error.pointer is not None and (found := _field_at(error.pointer, places)) is not None:
        error.param, error.pointer = found


def _field_at(pointer: str, places: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """Return the request's field that a pointer into a constraint belongs to, and the pointer within that field."""
    for place, (field_name, inner) in places.items():
        if f"{pointer}/".startswith(f"{place}/"):
            return field_name, inner + pointer[len(place) :]
    return None


def _not_enforced(pointer: str, places: Mapping[str, tuple[str, str]]) -> str:
    """Translate a pointer into a constraint to one into the request's field, after the field's name if it is a tool."""
    name, inner = _field_at(pointer, places) or ("", pointer)
    return (name if name.startswith("tools[") else "") + inner


Outputs = AsyncIterator[tuple[int, RequestOutput]]
"""(index of the prompt, its output so far) until all are finished. Raises the error that ended a generation."""


@asynccontextmanager
async def running(
    context: ServerContext, job: Job, headers: Mapping[str, str]
) -> AsyncIterator[tuple[GuidedInfo | None, Outputs]]:
    """Start a job and wait until it is admitted: its constraint is compiled. At the end, abort what still runs of it.

    Raises the error of a job that is rejected or fails later, and logs it if an operator can act on it. The request's
    `headers` may name the parent of its spans.
    """
    guided = failure = None
    try:
        with context.admit(len(job.prompts) * job.params.width):
            async with aclosing(
                _merged([_stream(context, job, number) for number in range(len(job.groups))])
            ) as merged:
                _, first = await anext(merged)
                guided = _guided_info(job, first)
                yield guided, merged
    except GuidedError as error:
        failure = error
        report(job, error, guided)
        raise
    finally:
        if context.tracing is not None:
            for group in job.groups:
                context.tracing.record(group, headers, failure)


def _guided_info(job: Job, first: RequestOutput) -> GuidedInfo | None:
    """Describe how a job is constrained."""
    constraint, backend = job.params.constraint, first.backend
    if constraint is None or backend is None:
        return None
    unknown = [_not_enforced(each, job.form.places) for each in constraint.not_enforced]
    at_end = [_not_enforced(each, job.form.places) for each in first.checked] or None
    return GuidedInfo(kind=job.form.kind or constraint.kind, backend=backend, not_enforced=unknown, checked=at_end)


def report(job: Job, error: GuidedError, guided: GuidedInfo | None) -> None:
    """Log an error that an operator can act on. What is wrong with a request itself is not logged."""
    if isinstance(error, ShuttingDown | QueueFull) or (error.status < 500 and not isinstance(error, CompileTimeout)):
        return
    constraint = job.params.constraint
    kind = "none" if constraint is None else constraint.kind
    backend = job.params.backend if guided is None else guided.backend
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    logger.warning(
        "request %s (x-request-id %s) failed: %s: %s%s; constraint %s, backend %s",
        *(job.request_id, job.http_id, error.code, error, where, kind, backend),
        extra={**job.log_ids, "code": error.code},
    )


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(context: ServerContext, job: Job, number: int) -> AsyncGenerator[RequestOutput, None]:
    """Run one prompt of a job. Yields snapshots of its output, and raises the error that ends it.

    The server's shutdown becomes a 503: a retry elsewhere, or later, would succeed.
    """
    try:
        async with aclosing(context.metrics.observed(context.engine.run(job.groups[number]), job.params)) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    if (error := completion.error or output.error) is not None:
                        raise error
                    if completion.finish_reason == "abort":
                        raise InternalError("the generation was aborted")
                _number_choices(output, job)
                yield output
    except GuidedError as error:
        if context.shutting_down and isinstance(error, InternalError):
            raise ShuttingDown("the server is shutting down") from error
        raise job.respell(error, number) from None


def _number_choices(output: RequestOutput, job: Job) -> None:
    """Put the outputs in the order of their choices: that of the sequences, or of their ranks with `best_of`."""
    if job.params.width == job.params.n:
        output.outputs.sort(key=lambda completion: completion.index)
    for number, completion in enumerate(output.outputs):
        completion.index = number


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the number of a stream and its output, of all streams as they come.

    Once each stream has an output, yields one of these, which comes again.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            is_first = True
            async for output in only:
                if is_first:
                    yield 0, output
                    is_first = False
                yield 0, output
        return
    # Outputs are snapshots: only the newest of each stream is kept, however slow the reader is.
    newest: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):  # aborts what still runs
                async for output in stream:
                    newest[number] = output
                    news.set()
        finally:
            news.set()

    async def wait() -> None:
        await news.wait()
        news.clear()
        for task in pumps:
            if task.done():
                task.result()  # raises the error of its stream

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        while len(newest) < len(pumps):
            await wait()
        yield 0, newest[0]
        while newest or not all(task.done() for task in pumps):
            if newest:
                number = next(iter(newest))
                yield number, newest.pop(number)
            else:
                await wait()
        for task in pumps:
            task.result()
    finally:
        await cancel(pumps)
