"""Job: the generations of one HTTP request, which are admitted together, merged into
one stream, and ended together."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.context import ServerContext
from engine.server.http_errors import FieldNames, QueueFull, ShuttingDown
from engine.server.request.bodies import (
    ChoicesRequest,
    GenerationRequest,
    GuidedInfo,
    Reported,
)
from engine.server.request.constraints import RequestedConstraint
from engine.server.request.fields import ConstraintFields
from engine.step.sequence import SequenceGroup
from guided.constraint import KINDS, Constraint
from guided.errors import (
    CompileTimeout,
    ConstraintNotMet,
    GuidedError,
    InternalError,
    InvalidConstraint,
    InvalidRequest,
)
from guided.tools.output_parser import OutputParser

logger = logging.getLogger("guided.server")

_MAX_OUTPUTS = 256
"""Maximum number of outputs of a request."""
_MAX_LOGPROBS = 200_000
"""Maximum number of log-probabilities that an answer with several choices can have."""
_CONVERTED = {
    *KINDS,
    "backend",
    "whitespace_pattern",
    "open_objects",
    "strict_schema",
    "max_tokens",
    "logprobs",
}
_SAME_NAME = sorted(
    {param.name for param in fields(SamplingParams)}
    & ChoicesRequest.model_fields.keys() - _CONVERTED
)
"""Fields that mean the same in a request and in `SamplingParams`."""


def check_size(
    context: ServerContext,
    body: GenerationRequest,
    prompts: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> None:
    """Refuse a request with too many outputs, or with several that can have too many
    log-probabilities."""
    n = body.n or 1
    limit = min(_MAX_OUTPUTS, context.settings.max_requests)
    if prompts * max(n, body.best_of or 1) > limit:
        param = "best_of"
        if prompts > 1:
            param = "prompt"
        elif n > limit:
            param = "n"
        raise InvalidRequest(
            f"prompts times n or best_of is more than the limit of {limit} outputs",
            param=param,
        )
    outputs = prompts * n
    if logprobs is None or outputs == 1:
        return
    count = outputs * (max_tokens or context.llm.max_model_len) * (logprobs + 1)
    if count > _MAX_LOGPROBS:
        raise InvalidRequest(
            f"prompts, n, max_tokens and logprobs together allow {count} log-probabilities; the limit for several "
            f"choices is {_MAX_LOGPROBS}",
            param="logprobs",
        )


def sampling_params(
    request: ChoicesRequest,
    requested: RequestedConstraint,
    form: OutputForm,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    context: ServerContext,
) -> SamplingParams:
    """Build and check the sampling parameters. An absent field takes the default of the
    model, else that of OpenAI."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    given = {name: value for name, value in given.items() if value is not None}
    if form.shows_special_tokens:
        given |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    is_used = bool(context.llm.engine.sampler.processors.classes)
    for name in request.vllm_xargs or ():
        if is_used and name not in ConstraintFields.model_fields:
            continue
        message = "vllm_xargs needs a custom logits processor that has this argument: see --logits-processors"
        if meant := request.hint(name):
            message += f"; did you mean {meant}, beside vllm_xargs?"
        raise InvalidRequest(message, param="vllm_xargs")
    if request.stream:
        _check_stream(request)
    if not _has_free_text(requested):
        given.pop("stop", None)
    parser = None
    if requested.constraint is None and form.parser is not OutputParser:
        parser = form.parser
    return SamplingParams(
        **{**context.settings.sampling_defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        constraint=form.constraint,
        backend=requested.backend,
        extra_args=request.vllm_xargs,
        parser=parser,
    )


def _check_stream(request: ChoicesRequest) -> None:
    """Refuse what compares or reports on whole outputs."""
    whole = {
        "use_beam_search": bool(request.use_beam_search),
        "best_of": (request.best_of or 1) > (request.n or 1),
        "prompt_logprobs": request.prompt_logprobs is not None,
    }
    for name, is_set in whole.items():
        if is_set:
            raise InvalidRequest(
                f"{name} is not available with stream: true: it needs whole outputs",
                param=name,
            )


def ignored_fields(
    request: ChoicesRequest, requested: RequestedConstraint, form: OutputForm
) -> list[str]:
    """Return the fields that have no effect on constrained text. Beside calls, `stop`
    still ends free text."""
    if request.stop and (form.kind == "tools" or not _has_free_text(requested)):
        return ["stop"]
    return []


def _has_free_text(requested: RequestedConstraint) -> bool:
    """Return whether an answer without calls may have free text."""
    return requested.constraint is None or requested.constraint.kind == "structural_tag"


@dataclass(frozen=True)
class OutputForm:
    """The constraint on a whole output, and the parser that reads the output."""

    constraint: Constraint | None = None
    """The constraint on the whole output."""
    kind: str | None = None
    """The kind of constraint that the answer names. None: the kind of `constraint`."""
    parser: Callable[[], OutputParser] = OutputParser
    """Makes the parser of a choice's output."""
    shows_special_tokens: bool = False
    """Whether the parser reads special tokens."""
    id_length: int = 29
    """Number of characters of a call's id."""


@dataclass(frozen=True)
class Job:
    """The work of one HTTP request: one engine request per prompt, all with the same
    parameters.

    The job keeps the parts of the body that the answer needs, but not the body, which
    may be large.
    """

    request_id: str
    """The id of the engine's request, and the `id` of the answer."""
    http_id: str
    """The header `x-request-id` of the answer."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    stream: bool
    reported: Reported = field(default_factory=Reported)
    echoed: Sequence[str] = ()
    """The text of each prompt, if the answer repeats it."""
    groups: Sequence[SequenceGroup] = ()
    """The engine's requests, one per prompt. `admitted` sets them."""
    form: OutputForm = field(default_factory=OutputForm)
    ignored: Sequence[str] = ()
    """Fields that have no effect: see `ignored_fields`."""
    at_admission: bool = False
    """Whether the answer only reports on the admission. The job is aborted after it."""
    relax: Callable[[InvalidConstraint], Job] | None = None
    """Builds the job again, with any value allowed at the place of the error. This
    place must be in the arguments of a function that is not strict; otherwise the error
    is raised."""

    @property
    def log_ids(self) -> dict[str, str]:
        """Fields of log records about this job."""
        return {"request_id": self.request_id, "x_request_id": self.http_id}

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def new_call_id(self) -> str:
        """Make the id of a function call."""
        return f"call_{uuid.uuid4().hex[:24]}"[-self.form.id_length :]

    def admitted(self, context: ServerContext) -> Job:
        """Return this job with its engine requests. Raises `InvalidRequest` if the
        engine rejects one."""
        scored = self.params.prompt_logprobs
        if (
            scored
            and len(self.prompts) > 1
            and sum(map(len, self.prompts)) * scored > _MAX_LOGPROBS
        ):
            message = f"several prompts have at most {_MAX_LOGPROBS} log-probabilities"
            raise InvalidRequest(message, param="prompt_logprobs")
        groups = []
        for number, prompt in enumerate(self.prompts):
            request_id = self.request_id
            if len(self.prompts) > 1:
                request_id = f"{request_id}-{number}"
            stream = self.stream or self.at_admission
            try:
                groups.append(
                    context.llm.engine.admit(
                        request_id, prompt, self.params, stream=stream
                    )
                )
            except GuidedError as error:
                raise self.located(error, number) from None
        return replace(self, groups=groups)

    def located(self, error: GuidedError, prompt: int) -> GuidedError:
        """Return an error that names the field that the constraint comes from, and the
        prompt if there are several."""
        if isinstance(error, InvalidConstraint):
            error = copy(error)  # the error of a compilation is kept for other requests
        constraint = self.params.constraint
        about_constraint = isinstance(
            error, InvalidConstraint | ConstraintNotMet
        ) and error.param in (None, *KINDS)
        if about_constraint and constraint is not None:
            name, error.pointer = constraint.place(error.pointer)
            error.param = name or error.param
        if isinstance(error, ConstraintNotMet) and (
            self.params.seed is not None or self.params.is_greedy
        ):
            error.retryable = False  # the output would be the same
        if error.param == "prompt" and len(self.prompts) > 1:
            error.param = f"prompt[{prompt}]"
        return error


def guided_info(job: Job, first: RequestOutput, names: FieldNames) -> GuidedInfo | None:
    """Describe how a job is constrained."""
    constraint = job.params.constraint
    backend = first.backend
    if constraint is None or backend is None:
        return None

    def place(pointer: str) -> str:
        """Translate a pointer into the constraint to one into the field, with the
        field's name before it for a tool."""
        name, inner = constraint.place(pointer)
        if "[" not in name:
            return str(inner)
        return f"{names.of(name)}{inner}"

    return GuidedInfo(
        kind=job.form.kind or constraint.kind,
        backend=backend,
        not_enforced=[*map(place, constraint.not_enforced)],
        checked=[*map(place, first.checked)] or None,
        closed=[*map(place, constraint.closed)] or None,
    )


def report(job: Job, error: GuidedError) -> None:
    """Log an error that an operator can act on. Errors in the request itself are not
    logged."""
    if isinstance(error, ShuttingDown | QueueFull) or (
        error.status < 500 and not isinstance(error, CompileTimeout)
    ):
        return
    kind = "none"
    if job.params.constraint is not None:
        kind = job.params.constraint.kind
    backend = job.groups[0].backend or job.params.backend
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    logger.warning(
        "request %s (x-request-id %s) failed: %s: %s%s; constraint %s, backend %s",
        *(job.request_id, job.http_id, error.code, error, where, kind, backend),
        extra={**job.log_ids, "code": error.code},
    )


Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def outputs_of(context: ServerContext, job: Job) -> Outputs:
    """Run a job: yield (index of the prompt, its output so far), and raise the error
    that ends an output. The first output comes when the constraint is compiled.

    The server's shutdown becomes a 503, because a retry elsewhere or later would
    succeed.
    """
    numbers = {group.request_id: number for number, group in enumerate(job.groups)}
    number = 0
    try:
        async with aclosing(
            context.metrics.observed(context.llm.run(job.groups), job.params)
        ) as outputs:
            async for output in outputs:
                number = numbers[output.request_id]
                for completion in output.outputs:
                    if (error := completion.error or output.error) is not None:
                        raise error
                    if completion.finish_reason == "abort":
                        raise InternalError("the generation was aborted")
                # The choices are in the order of the sequences, or of their ranks with
                # `best_of`.
                if job.params.width == job.params.n:
                    output.outputs.sort(key=lambda completion: completion.index)
                for choice, completion in enumerate(output.outputs):
                    completion.index = choice
                yield number, output
    except GuidedError as error:
        if context.shutting_down and isinstance(error, InternalError):
            raise ShuttingDown("the server is shutting down") from error
        raise job.located(error, number) from None
