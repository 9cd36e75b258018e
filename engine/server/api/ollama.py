"""POST /api/chat, /api/generate and /api/show, GET /api/tags and /api/version: Ollama's
API.

A request is translated to a chat. The output of the chat becomes lines of JSON, or one
object with their fields joined.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BaseModel, Field, model_validator

from engine.outputs import CompletionOutput, RequestMetrics
from engine.server.api.answers import Events, Finished, PartsAnswer, to_json
from engine.server.api.chat import build_job_that_fits
from engine.server.api.routes import BodyRoute, JobResponse, RouteResponses
from engine.server.context import Context, ServerContext
from engine.server.http_errors import OLLAMA_PATH, ollama_error
from engine.server.request.bodies import ChatRequest, Message, thinking_variables
from engine.server.request.fields import Body, Many, Schema
from guided.errors import GuidedError
from guided.json_text import JsonObject

_RESPONSES: RouteResponses = {200: {"content": {"application/x-ndjson": {}}}}
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Option -> name of the same field in a chat."""


class OllamaRequest(ChatRequest):
    """Body of `POST /api/chat`. Without messages, the answer says that the model is
    loaded."""

    place: ClassVar[str] = "messages"
    """The name of the field that holds the prompt."""
    unused: ClassVar[Collection[str]] = (
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
    )
    messages: Many[Message] = Field(default=[])
    stream: bool = True
    """Whether the answer is a stream of lines of JSON."""
    format: Schema = None
    """A schema, or "json": the output is a JSON object."""
    options: JsonObject | None = None
    """Sampling parameters; num_predict is max_tokens."""
    think: bool | str | None = None
    """Whether to think, or an effort."""
    keep_alive: str | float | None = None
    """Time for which the model stays loaded. Without effect: it always does."""
    # An answer has one output, while a chat may have several.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None

    @classmethod
    def gathered(cls, data: JsonObject, names: MutableMapping[str, str]) -> JsonObject:
        """Move `options` into the body. Its own fields have priority. Replace `format`
        "json" by `json_object`."""
        data = super().gathered(data, names)
        options = data.get("options")
        if not isinstance(options, dict):
            options = {}
        for name, value in options.items():
            field = _OPTIONS.get(name, name)
            is_unlimited = field == "max_tokens" and value in (0, -1, -2)
            if data.get(field) is None and not is_unlimited:
                data[field] = value
                names[field] = f"options.{name}"
        if data.get("format") in ("json", ""):
            data["json_object"] = data.pop("format") == "json" or data.get(
                "json_object"
            )
            names["json_object"] = names.get("format", "format")
        return data

    def prepare(self, thinks: bool) -> None:
        """Set the fields of a chat. `thinks`: the model has a thinking phase."""
        if self.think is not None:
            on = self.think is not False
            self.chat_template_kwargs = {
                **thinking_variables(on),
                **(self.chat_template_kwargs or {}),
            }
            if isinstance(self.think, str):
                self.reasoning_effort = self.think
            if thinks and not on:
                self.max_reasoning_tokens = 0
        # Ollama's clients send no ids of calls. The results are in the order of the
        # calls.
        calls = count()
        results = count()
        for message in self.messages:
            for call in message.tool_calls or ():
                call.id = call.id or f"call{next(calls):05}"
            if message.role == "tool":
                message.tool_call_id = message.tool_call_id or f"call{next(results):05}"


class GenerateRequest(OllamaRequest):
    """Body of `POST /api/generate`. Without a prompt, the answer says that the model is
    loaded."""

    place = "prompt"
    unused = (*OllamaRequest.unused, "messages")
    prompt: str = ""
    system: str | None = None
    # These fields are refused. Use /v1/completions for prompts without a template, and
    # /api/chat for conversations.
    raw: Literal[False] = False
    template: None = None
    context: None = None

    @model_validator(mode="after")
    def _as_chat(self) -> Self:
        self.messages = []
        if self.prompt and self.system:
            self.messages.append(Message(role="system", content=self.system))
        if self.prompt:
            self.messages.append(Message(role="user", content=self.prompt))
        return self


class ShowRequest(Body):
    model: str = Field(validation_alias=AliasChoices("model", "name"))


class OllamaError(BaseModel):
    """The body of every error, and the line that ends a stream."""

    error: str


_ERRORS: RouteResponses = {status: {"model": OllamaError} for status in ("4XX", "5XX")}
router = APIRouter(
    prefix=OLLAMA_PATH, tags=["generation"], route_class=BodyRoute, responses=_ERRORS
)
models = APIRouter(prefix=OLLAMA_PATH, tags=["models"], responses=_ERRORS)


@router.post("/generate", responses=_RESPONSES)
def answer_prompt(
    body: GenerateRequest, request: Request, context: Context
) -> Response:
    """Answer a prompt in the shape of Ollama's API."""
    return answer_chat(body, request, context)


@router.post("/chat", responses=_RESPONSES)
def answer_chat(body: OllamaRequest, request: Request, context: Context) -> Response:
    """Answer a chat in the shape of Ollama's API."""
    if not body.messages:
        loaded = _record(context, _shaped(body.place), done=True, done_reason="load")
        return JSONResponse(loaded)
    names = request.state.field_names
    names |= {"messages": body.place, "prompt": body.place, "logprobs": "top_logprobs"}
    thinks = context.reasoning_format is not None
    if body.think and not thinks:
        request.state.ignored.append("think")
    body.prepare(thinks)
    job = build_job_that_fits(body, context, "ollama-", request.state.request_id)
    return JobResponse(partial(_OllamaAnswer, place=body.place), job, request, context)


@models.get("/version")
def get_version() -> dict[str, str]:
    return {"version": version("guided")}


@models.get("/tags")
def list_models(context: Context) -> JsonObject:
    """List the served model, as Ollama does."""
    name = context.settings.model_name
    # clients show its first characters
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {
        "models": [
            {"name": name, "model": name, "digest": digest, **_described(context)}
        ]
    }


@router.post("/show")
def show_model(body: ShowRequest, request: Request, context: Context) -> Response:
    """Describe the served model, as Ollama does."""
    family = context.llm.model.config.model_type
    capabilities = ["completion"]
    if context.tool_format is not None:
        capabilities.append("tools")
    if context.reasoning_format is not None:
        capabilities.append("thinking")
    description = {
        **_described(context),
        "template": context.llm.tokenizer.chat_template or "",
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": context.llm.max_model_len,
        },
        "capabilities": capabilities,
    }
    return JSONResponse(description)


def _described(context: ServerContext) -> JsonObject:
    details = {"family": context.llm.model.config.model_type}
    return {"modified_at": _written(context.created), "details": details}


_FIELDS = {"text": "content", "reasoning": "thinking"}
"""Kind of a piece -> field of a message."""


@dataclass
class _OllamaAnswer(PartsAnswer):
    """An answer of Ollama's API. The parts are fields of its lines: `content`,
    `thinking`, `tool_calls`, `logprobs`."""

    stream_type = "application/x-ndjson"

    place: str
    """The name of the field that holds the prompt."""

    def first_events(self) -> Events:
        if self.guided is not None:
            yield self._line({}, guided=self.guided_info())

    def last_events(self, finished: Finished) -> Events:
        self.parts.clear()
        yield self.ended(finished)

    def failure(self, error: GuidedError) -> JsonObject:
        return ollama_error(error)

    def event(self, data: JsonObject) -> bytes:
        return to_json(data) + b"\n"

    def grow(self, text: str, logprobs: list[JsonObject]) -> Events:
        if self.open.kind in _FIELDS:
            part: JsonObject = {_FIELDS[self.open.kind]: text}
            if logprobs:
                part["logprobs"] = logprobs
            self.parts.append(part)
            yield self._line(part)

    def close(self, completion: CompletionOutput | None) -> Events:
        if self.open.kind == "call":
            # a call that was cut off is left out
            with contextlib.suppress(ValueError, RecursionError):
                function = {"name": self.open.text, "arguments": json.loads(self.text)}
                self.parts.append(
                    {
                        "tool_calls": [
                            {"id": self.job.new_call_id(), "function": function}
                        ]
                    }
                )
                yield self._line(self.parts[-1])

    def ended(self, finished: Finished) -> JsonObject:
        whole: JsonObject = {}
        for part in self.parts:
            for name, value in part.items():
                whole[name] = whole.get(name, type(value)()) + value
        [output] = finished
        [completion] = output.outputs
        fields = {
            "done_reason": completion.finish_reason,
            "prompt_eval_count": len(output.prompt_token_ids),
            "eval_count": len(completion.token_ids),
            "guided": self.guided_info(finished, [completion]),
        }
        return self._line(whole, done=True, **fields, **_durations(output.metrics))

    def _line(self, part: JsonObject, done: bool = False, **fields: Any) -> JsonObject:
        return _record(self.context, _shaped(self.place, **part), done=done, **fields)


def _shaped(
    place: str, content: str = "", logprobs: Any = None, **others: Any
) -> JsonObject:
    """Return a part of the output in the shape for messages, or for a prompt."""
    shaped: JsonObject = {
        "message": {"role": "assistant", "content": content, **others}
    }
    if place == "prompt":
        shaped = {"response": content, **others}
    if logprobs is not None:
        shaped["logprobs"] = logprobs
    return shaped


def _record(context: ServerContext, shaped: JsonObject, **fields: Any) -> JsonObject:
    return {
        "model": context.settings.model_name,
        "created_at": _written(time.time()),
        **shaped,
        **fields,
    }


def _durations(times: RequestMetrics | None) -> dict[str, int]:
    """Return the times of a request in nanoseconds. `load_duration` is the time until
    its constraint was compiled."""
    if times is None:
        return {}
    ended = times.finished_time or time.monotonic()
    begun = times.first_token_time or ended
    compiled = times.compiled_time or times.arrival_time
    seconds = {
        "total_duration": ended - times.arrival_time,
        "load_duration": compiled - times.arrival_time,
        "prompt_eval_duration": begun - compiled,
        "eval_duration": ended - begun,
    }
    return {name: round(1e9 * value) for name, value in seconds.items()}


def _written(seconds: float) -> str:
    """Write a time, given in seconds since 1970, in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
