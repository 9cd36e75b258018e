"""POST /v1/chat/completions, and /v1/check: admission and compilation of a chat request, without its answer."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from engine.outputs import CompletionOutput
from engine.server.answers import Answer, ChoicesAnswer
from engine.server.constraints import RequestedConstraint, requested_constraint
from engine.server.context import Context, ServerContext
from engine.server.endpoint import RESPONSES, GenerationRoute, Prepared
from engine.server.generation import Job, Outputs
from engine.server.logprobs import chat_logprobs
from engine.server.prompts import encode_chat
from engine.server.protocol import ChatRequest, GuidedInfo, Message
from engine.server.sampling import sampling_params
from engine.server.tools import output_form, requested_calls
from guided.errors import InvalidRequest
from guided.tools.formats import ToolFormat
from guided.tools.parser import Piece


class _CheckRoute(GenerationRoute):
    """A route that ends a request once it is admitted. A rejected request is answered with its error."""

    async def whole(self, outputs: Outputs, answer: Answer, context: ServerContext) -> bytes:
        """Return what is known at the admission. The end of the answer aborts the request."""
        _, first = await anext(outputs)
        prompt_tokens = len(first.prompt_token_ids)
        checked = CheckedRequest(
            guided=answer.guided, compile_seconds=first.compile_seconds, prompt_tokens=prompt_tokens
        )
        return checked.model_dump_json(exclude_none=True).encode()


router = APIRouter(tags=["generation"], route_class=GenerationRoute)
checks = APIRouter(tags=["generation"], route_class=_CheckRoute)


@router.post("/v1/chat/completions", response_model=None, responses=RESPONSES)
def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Prepared:
    """Answer a chat, constrained or not. With `stream`, the status is sent once the constraint is compiled."""
    names = request.state.field_names
    names |= {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None and body.max_tokens in (None, body.max_completion_tokens):
        names["max_tokens"] = "max_completion_tokens"
    return _ChatAnswer, build_job(body, context, f"chatcmpl-{uuid.uuid4().hex}", request.state.request_id)


class CheckedRequest(BaseModel):
    """A request that is accepted: its constraint is compiled."""

    guided: GuidedInfo | None = None
    compile_seconds: float = Field(description="The time that compiling the grammar took; 0 if it was compiled before.")
    prompt_tokens: int


@checks.post("/v1/check", response_model=CheckedRequest)
def check_request(body: ChatRequest, request: Request, context: Context) -> Prepared:
    """Take a chat request through admission and compilation only. A request that is refused gets its error."""
    body.stream, body.stream_options = False, None
    answer, job = create_chat_completion(body, request, context)
    for group in job.groups:
        group.stream = True  # the first output comes at the admission
    return answer, job


def build_job(body: ChatRequest, context: ServerContext, request_id: str, http_id: str) -> Job:
    """Build the work of a chat. The last arguments are `request_id` and `http_id` of `Job`."""
    wanted = requested_constraint(body, context.settings.backend, context.limits)
    limit, logprobs = _max_tokens(body), _logprobs(body)
    choices = body.n or 1
    context.check_logprobs(choices, choices * (limit or context.engine.max_model_len), logprobs, "logprobs")
    calls = requested_calls(body, context.tool_format, wanted.constraint)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    prompt = encode_chat(
        context.engine.tokenizer,
        _described(body, context, wanted),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables={**effort, **(body.chat_template_kwargs or {})},
        tools=body.tools or () if calls is not None else (),
        limit=context.text_limit,
    )
    form = output_form(body, context, wanted, calls, prompt)
    params = sampling_params(
        body, replace(wanted, constraint=form.constraint), max_tokens=limit, logprobs=logprobs, context=context
    )
    if form.shows_special_tokens:
        params = replace(params, skip_special_tokens=False, spaces_between_special_tokens=False)
    job = Job(
        request_id,
        http_id,
        [prompt],
        params,
        wanted.param or (None if calls is None else "tools"),
        body.stream,
        include_usage=body.wants_usage,
        form=form,
    )
    return job.admitted(context)


def _described(body: ChatRequest, context: ServerContext, wanted: RequestedConstraint) -> list[Message]:
    """Return the messages, with the JSON schema in a system message if that is asked for."""
    constraint = wanted.constraint
    if constraint is None or constraint.kind != "json_schema":
        if body.describe_schema:
            raise InvalidRequest("describe_schema needs a JSON schema", param="describe_schema")
        return body.messages
    if not (context.settings.describe_schema if body.describe_schema is None else body.describe_schema):
        return body.messages
    form = ToolFormat.schema_text if context.tool_format is None else context.tool_format.schema_text
    text = form.replace("{schema}", constraint.source)
    first, *others = body.messages
    if first.role not in ("system", "developer"):
        return [Message(role="system", content=text), *body.messages]
    return [first.model_copy(update={"content": f"{first.text}\n\n{text}"}), *others]


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens differ: choose one", param="max_tokens")
    return body.max_completion_tokens


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs requires logprobs: true", param="top_logprobs")
    return None


class _ChatAnswer(ChoicesAnswer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, context: ServerContext, job: Job, guided: GuidedInfo | None) -> None:
        super().__init__(context, job, guided)
        self._parsers = [job.form.parser() for _ in range(job.num_choices)]

    def message(self, index: int, text: str) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        parts = {"text": "", "reasoning": ""}
        for piece in self._parsers[index].feed(text, finished=True):
            if piece.kind == "call":
                calls.append(self._call(piece.text))
            elif piece.kind == "arguments":
                calls[piece.index]["function"]["arguments"] += piece.text
            else:
                parts[piece.kind] += piece.text
        content = parts["text"] if parts["text"] or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": parts["reasoning"]} if parts["reasoning"] else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"message": message}

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self.job.new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}

    def contents(self, index: int, output: CompletionOutput, sent: int) -> list[dict[str, Any]]:
        pieces = self._parsers[index].feed(output.text, output.finish_reason is not None)
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece.kind:
            case "call":
                delta: dict[str, Any] = {"tool_calls": [{"index": piece.index, **self._call(piece.text)}]}
            case "arguments":
                delta = {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
            case "reasoning":
                delta = {"reasoning_content": piece.text}
            case _:
                delta = {"content": piece.text}
        return {"delta": delta}

    def finish_reason(self, index: int, output: CompletionOutput) -> str | None:
        parser = self._parsers[index]
        called = parser.num_calls and parser.complete
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason

    def opening(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def content(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def logprobs(self, index: int, output: CompletionOutput, which: slice) -> dict[str, Any] | None:
        return chat_logprobs(output, self.context.texts, self.job.params.logprobs or 0, which)
