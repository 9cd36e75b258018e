"""POST /v1/chat/completions, and /v1/check: admission and compilation of a chat
request, without its answer."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel

from engine.outputs import CompletionOutput
from engine.server.api.answers import ChoicesAnswer, Finished
from engine.server.api.routes import RESPONSES, BodyRoute, JobResponse
from engine.server.context import Context, ServerContext
from engine.server.request.bodies import ChatRequest, GuidedInfo
from engine.server.request.constraints import requested_constraint
from engine.server.request.job import Job, check_size, ignored_fields, sampling_params
from engine.server.request.prompts import encode_body
from engine.server.request.tools import output_form, requested_calls
from guided.errors import ContextLengthExceeded, InvalidConstraint, InvalidRequest
from guided.json_text import JsonObject
from guided.tools.output_parser import Piece

MAX_TRIES = 16
"""Number of times that a job is built again with a part of a schema left out. After
that, the schemas of functions that are not strict are not enforced at all."""
router = APIRouter(tags=["generation"], route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=RESPONSES)
def create_chat_completion(
    body: ChatRequest, request: Request, context: Context
) -> JobResponse:
    """Answer a chat, constrained or not. A stream begins once the constraint is
    compiled."""
    kind = _ChatAnswer
    if body.functions:
        kind = _FunctionsAnswer
    return JobResponse(kind, _chat_job(body, request, context), request, context)


class CheckedRequest(BaseModel, use_attribute_docstrings=True):
    """The report on a request that is accepted, which means that its constraint is
    compiled."""

    guided: GuidedInfo | None = None
    compile_seconds: float
    """The time that compiling the grammar took; 0 if it was compiled before."""
    prompt_tokens: int


@router.post("/v1/check", response_model=CheckedRequest)
def check_request(body: ChatRequest, request: Request, context: Context) -> JobResponse:
    """Take a chat request through admission and compilation only. A refused request
    gets its error."""
    body.stream = False
    return JobResponse(
        _CheckAnswer,
        _chat_job(body, request, context, at_admission=True),
        request,
        context,
    )


def _chat_job(
    body: ChatRequest,
    request: Request,
    context: ServerContext,
    at_admission: bool = False,
) -> Job:
    names = request.state.field_names
    names |= {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.function_call is not None:
        names["tool_choice"] = "function_call"
    for index, _ in enumerate(body.functions or ()):
        for field in ("name", "parameters"):
            names[f"tools[{index}].function.{field}"] = f"functions[{index}].{field}"
    return build_job(body, context, "chatcmpl-", request.state.request_id, at_admission)


def build_job_that_fits(
    body: ChatRequest, context: ServerContext, prefix: str, http_id: str
) -> Job:
    """Build the job of a chat in which `max_tokens` may be more than the rest of the
    context."""
    build = partial(build_job, body, context, prefix, http_id)
    try:
        return build()
    except ContextLengthExceeded:
        body.max_tokens = None
        return build()


def build_job(
    body: ChatRequest,
    context: ServerContext,
    prefix: str,
    http_id: str,
    at_admission: bool = False,
) -> Job:
    """Build the job of a chat. Its `request_id` begins with `prefix`. The other
    arguments are fields of `Job`."""
    jobs = _jobs(body, context, f"{prefix}{uuid.uuid4().hex}", http_id, at_admission)
    return replace(next(jobs), relax=jobs.send)


def _jobs(
    body: ChatRequest,
    context: ServerContext,
    request_id: str,
    http_id: str,
    at_admission: bool,
) -> Generator[Job, InvalidConstraint, None]:
    """Yield the job of a chat. For each error sent, yield the job without the parts of
    schemas that errors named.

    Raises an error that names no schema of a function that is not strict.
    """
    requested = requested_constraint(body, context.settings)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs requires logprobs: true", param="top_logprobs"
        )
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    limit = body.max_completion_tokens
    if limit is None:
        limit = body.max_tokens
    check_size(context, body, 1, limit, logprobs)
    prompt = encode_body(context, body, body.messages)
    # the generator keeps the body, which may be large
    body = body.model_copy(update={"messages": []})
    refused: dict[str, list[str]] = {}
    tries = 0
    while True:
        calls = requested_calls(body, context, requested, refused)
        form = output_form(body, context, requested, calls, prompt)
        params = sampling_params(
            body, requested, form, max_tokens=limit, logprobs=logprobs, context=context
        )
        job = Job(
            request_id,
            http_id,
            [prompt],
            params,
            body.stream,
            reported=body.reported,
            form=form,
            ignored=ignored_fields(body, requested, form),
            at_admission=at_admission,
        )
        error = yield job.admitted(context)
        if error.param not in refused or tries > MAX_TRIES:
            raise error
        refused[error.param].append(error.pointer or "")
        if tries == MAX_TRIES:
            for places in refused.values():
                places.append("")
        tries += 1


_CALLS = {"call": ("function", "arguments"), "custom": ("custom", "input")}
"""Kind of the piece that begins a call -> type of the call, and the field of its text.
The pieces that follow have the name of this field as their kind."""
_OWNERS = {field: kind for kind, field in _CALLS.values()}
"""Field of the text of a call -> type of the call."""


class _ChatAnswer(ChoicesAnswer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    last_part: ClassVar = {"delta": {}}

    def message(self, index: int, pieces: Sequence[Piece]) -> JsonObject:
        calls = []
        texts = {"text": "", "reasoning": ""}
        for piece in pieces:
            if piece.kind in _CALLS:
                calls.append(self._call(piece))
            elif piece.kind in texts:
                texts[piece.kind] += piece.text
            else:
                calls[piece.index][_OWNERS[piece.kind]][piece.kind] += piece.text
        message: JsonObject = {
            "role": "assistant",
            "content": texts["text"],
            "refusal": None,
        }
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
            message["content"] = texts["text"] or None
        return {"message": message}

    def _call(self, piece: Piece) -> JsonObject:
        kind, field = _CALLS[piece.kind]
        return {
            "id": self.job.new_call_id(),
            "type": kind,
            kind: {"name": piece.text, field: ""},
        }

    def part(self, piece: Piece) -> JsonObject:
        return {"delta": self.delta(piece)}

    def delta(self, piece: Piece) -> JsonObject:
        """Build the delta of a chunk for a piece of the output."""
        match piece.kind:
            case "text":
                return {"content": piece.text}
            case "reasoning":
                return {"reasoning_content": piece.text}
            case "call" | "custom":
                return {"tool_calls": [{"index": piece.index, **self._call(piece)}]}
            case field:
                return {
                    "tool_calls": [
                        {"index": piece.index, _OWNERS[field]: {field: piece.text}}
                    ]
                }

    def finish_reason(self, index: int, output: CompletionOutput) -> str | None:
        parser = self.parsers[index]
        called = parser.num_calls and parser.complete
        if called and output.finish_reason == "stop":
            return "tool_calls"
        return output.finish_reason

    def opening(self, index: int) -> JsonObject:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(
        self, index: int, output: CompletionOutput, which: slice
    ) -> JsonObject | None:
        if output.logprobs is None:
            return None
        places = range(len(output.token_ids))[which]
        return {"content": self.token_logprobs(output, places), "refusal": None}


class _FunctionsAnswer(_ChatAnswer):
    """The answer to a request with `functions`, the former name of tools: a message has
    one `function_call`."""

    def message(self, index: int, pieces: Sequence[Piece]) -> JsonObject:
        message = super().message(index, pieces)["message"]
        for call in message.pop("tool_calls", []):
            message["function_call"] = call["function"]
        return {"message": message}

    def delta(self, piece: Piece) -> JsonObject:
        delta = super().delta(piece)
        if "tool_calls" in delta:
            return {"function_call": delta["tool_calls"][0]["function"]}
        return delta

    def finish_reason(self, index: int, output: CompletionOutput) -> str | None:
        reason = super().finish_reason(index, output)
        if reason == "tool_calls":
            return "function_call"
        return reason


class _CheckAnswer(_ChatAnswer):
    """A report on the admission, instead of the answer."""

    def whole(self, finished: Finished) -> bytes:
        [first] = finished
        prompt_tokens = len(first.prompt_token_ids)
        seconds = first.compile_seconds
        checked = CheckedRequest(
            guided=self.guided, compile_seconds=seconds, prompt_tokens=prompt_tokens
        )
        return checked.model_dump_json(exclude_none=True).encode()
