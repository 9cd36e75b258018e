"""POST /v1/responses: a chat in the shape of OpenAI's newer API, without state on the
server.

The request is translated to a chat. The output of the chat becomes items, and events
about them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import Any, ClassVar, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import BaseModel, field_validator
from pydantic_core import PydanticCustomError

from engine.outputs import CompletionOutput
from engine.server.api.answers import Events, Finished, PartsAnswer, usage_of
from engine.server.api.chat import build_job
from engine.server.api.routes import RESPONSES, BodyRoute, JobResponse
from engine.server.context import Context, ServerContext
from engine.server.request.bodies import (
    CHAT_EXAMPLE,
    CalledFunction,
    ChatRequest,
    Message,
    OfferedTool,
    ReasoningConfig,
    TokenLimit,
    Tool,
    ToolCall,
    TurnRequest,
    TypedBody,
    is_hosted,
    joined,
    offered,
)
from engine.server.request.fields import (
    Body,
    FormatHolder,
    Many,
    NonEmpty,
    ResponseFormat,
)
from engine.server.request.job import Job
from guided.errors import GuidedError, error_body
from guided.json_text import JsonObject
from guided.tools.output_parser import Piece

EXAMPLE = {
    "input": CHAT_EXAMPLE["messages"][0]["content"],
    "text": {
        "format": {
            "type": "json_schema",
            "name": "person",
            "schema": CHAT_EXAMPLE["json_schema"],
        }
    },
}


class InputPart(Body):
    """A part of the text of a message, a function's output or thoughts."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputItem(TypedBody):
    """A message, a call, the output of a call, or thoughts. Clients can send the items
    of an answer back unchanged."""

    required: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("name", "arguments", "call_id"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("name", "input", "call_id"),
        "custom_tool_call_output": ("call_id", "output"),
        "reasoning": (),
    }
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[InputPart] | None = None
    summary: Many[InputPart] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: str | Many[InputPart] | None = None
    # These fields have no effect.
    id: str | None = None
    status: str | None = None

    @property
    def is_of_model(self) -> bool:
        """Whether the model wrote this item."""
        if self.type == "message":
            return self.role == "assistant"
        return self.type in ("function_call", "custom_tool_call", "reasoning")


class TextConfig(FormatHolder):
    path = "text"
    format: ResponseFormat | None = None


class FunctionTool(OfferedTool):
    """A function or a custom tool that the model may call, or a hosted tool."""

    type: str

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str) -> str:
        if kind not in ("function", "custom") and not is_hosted(kind):
            raise PydanticCustomError(
                "literal_error",
                "it is 'function' or 'custom', or that of a hosted tool",
            )
        return kind


class ResponsesRequest(TurnRequest, json_schema_extra={"examples": [EXAMPLE]}):
    """Body of `POST /v1/responses`. The server keeps no state between requests."""

    input: NonEmpty[InputItem]
    """A text, or a list of items."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: TokenLimit = None
    """Maximum number of output tokens. Default: the rest of the context."""
    text: TextConfig | None = None
    tools: Many[FunctionTool] | None = None
    reasoning: ReasoningConfig | None = None
    include: Many[str] | None = None
    """message.output_text.logprobs; other values have no effect."""
    top_logprobs: int | None = None
    """Number of alternatives with log-probabilities."""
    # A response has one output, while a chat may have several.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    resample: Literal[False] | None = None

    @field_validator(
        "input", mode="before", json_schema_input_type=str | list[InputItem]
    )
    @classmethod
    def _as_items(cls, content: Any) -> Any:
        if isinstance(content, str):
            return [{"role": "user", "content": content}]
        return content

    def as_chat(self) -> ChatRequest:
        """Return the chat with the same meaning."""
        same = self.fields_of(TurnRequest)
        if self.text is not None and self.text.format is not None:
            same["response_format"] = self.text.format
        if self.reasoning is not None:
            same["reasoning_effort"] = self.reasoning.effort
        return ChatRequest.model_construct(
            **same,
            messages=list(self._messages()),
            max_tokens=self.max_output_tokens,
            logprobs="message.output_text.logprobs" in (self.include or ())
            or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            tools=[
                Tool(type=tool.type, function=tool.model_copy())
                for tool in offered(self.tools).values()
            ],
        )

    def _messages(self) -> Iterator[Message]:
        """Yield the messages of the chat. The thoughts, texts and calls of one turn
        form one message."""
        if self.instructions is not None:
            yield Message(role="system", content=self.instructions)
        for of_model, items in groupby(self.input, lambda item: item.is_of_model):
            if of_model:
                yield _turn(list(items))
            else:
                yield from map(_message, items)


def _message(item: InputItem) -> Message:
    """Return the message of an item that the model did not write."""
    if item.type == "message":
        return Message.model_construct(role=item.role, content=joined(item.content))
    return Message(role="tool", tool_call_id=item.call_id, content=joined(item.output))


def _turn(items: Sequence[InputItem]) -> Message:
    """Return the assistant's message that consists of `items`."""
    turn = Message(role="assistant")
    texts = []
    calls = []
    for item in items:
        if item.type == "message":
            texts.append(joined(item.content))
        elif item.type == "reasoning":
            turn.reasoning_content = (turn.reasoning_content or "") + joined(
                item.content or item.summary
            )
        else:
            called = CalledFunction(
                name=item.name or "", arguments=item.arguments or "", input=item.input
            )
            calls.append(ToolCall(id=item.call_id, function=called))
    if texts:
        turn.content = "\n".join(filter(None, texts))
    turn.tool_calls = calls or None
    return turn


router = APIRouter(tags=["generation"], route_class=BodyRoute)


@router.post("/v1/responses", responses=RESPONSES)
def create_response(
    body: ResponsesRequest, request: Request, context: Context
) -> JobResponse:
    """Answer a chat in the shape of OpenAI's Responses API. The server stores
    nothing."""
    job = _job(body, request, context)
    return JobResponse(
        partial(_ResponseAnswer, settings=_settings(body, job)), job, request, context
    )


class InputTokenCount(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post("/v1/responses/input_tokens")
def count_input_tokens(
    body: ResponsesRequest, request: Request, context: Context
) -> InputTokenCount:
    """Count the tokens of a response's prompt."""
    return InputTokenCount(input_tokens=len(_job(body, request, context).prompts[0]))


def _job(body: ResponsesRequest, request: Request, context: ServerContext) -> Job:
    names = request.state.field_names
    names |= {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }
    if body.text is not None and body.text.format is not None:
        names |= {
            "response_format.json_schema.schema": "text.format.schema",
            "response_format": "text.format",
        }
    for index, (place, tool) in enumerate(offered(body.tools).items()):
        for field in ("name", "format", "parameters"):
            names[f"tools[{index}].{tool.type}.{field}"] = f"tools[{place}].{field}"
    return build_job(body.as_chat(), context, "resp_", request.state.request_id)


def _settings(body: ResponsesRequest, job: Job) -> JsonObject:
    """Return the settings of the request that the answer repeats."""
    text: JsonObject = {"format": {"type": "text"}}
    if body.text is not None and body.text.format is not None:
        text = body.text.model_dump(by_alias=True, exclude_unset=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {
            "effort": body.reasoning and body.reasoning.effort,
            "summary": None,
        },
        "store": False,
        "temperature": job.params.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in offered(body.tools).values()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
    }


class _ItemKind(NamedTuple):
    """The form of the items of one kind."""

    item: JsonObject
    """Constant fields of the item."""
    prefix: str
    """Prefix of the item's id."""
    events: str
    """First part of the names of the events about the item's text."""
    part: JsonObject | None = None
    """Constant fields of the item's only content part. None: the item is a call, which
    has the text in a field."""
    field: str = "text"
    """Field of the text in the item or its content part, and in the event that ends the
    text."""


_TEXT = {"type": "output_text", "annotations": []}
_THOUGHT = {"type": "reasoning_text"}
_KINDS = {
    "text": _ItemKind(
        {"type": "message", "role": "assistant"}, "msg", "response.output_text", _TEXT
    ),
    "reasoning": _ItemKind(
        {"type": "reasoning", "summary": []}, "rs", "response.reasoning_text", _THOUGHT
    ),
    "call": _ItemKind(
        {"type": "function_call"},
        "fc",
        "response.function_call_arguments",
        field="arguments",
    ),
    "custom": _ItemKind(
        {"type": "custom_tool_call"},
        "ctc",
        "response.custom_tool_call_input",
        field="input",
    ),
}
"""Kind of the piece that begins an item -> kind of the item."""


@dataclass
class _ResponseAnswer(PartsAnswer):
    """An answer of the Responses API. The parts are items."""

    settings: JsonObject
    """The settings of the request, which the answer repeats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logprobs: list[JsonObject] = []
        """Log-probabilities of the tokens of the open part."""
        self._numbers = count()

    def first_events(self) -> Events:
        for status in ("created", "in_progress"):
            yield {
                "type": f"response.{status}",
                "response": self._response("in_progress"),
            }

    def last_events(self, finished: Finished) -> Events:
        response = self.ended(finished)
        yield {"type": f"response.{response['status']}", "response": response}

    def failure(self, error: GuidedError) -> JsonObject:
        response = self._response("failed", error=error_body(error)["error"])
        return {"type": "response.failed", "response": response}

    def event(self, data: JsonObject) -> bytes:
        return super().event({**data, "sequence_number": next(self._numbers)})

    def begin(self, piece: Piece) -> Events:
        kind = _KINDS[piece.kind]
        item = {
            "id": f"{kind.prefix}_{uuid.uuid4().hex}",
            **kind.item,
            "status": "in_progress",
        }
        if kind.part is None:
            item |= {
                "call_id": self.job.new_call_id(),
                "name": piece.text,
                kind.field: "",
            }
        else:
            item |= {"content": []}
        self.parts.append(item)
        self._logprobs = []
        yield self._about_item("response.output_item.added", item=item)
        if kind.part is not None:
            yield self._about_text(
                "response.content_part.added", part={**kind.part, kind.field: ""}
            )

    def grow(self, text: str, logprobs: list[JsonObject]) -> Events:
        self._logprobs += logprobs
        yield self._about_text(
            f"{self._kind.events}.delta", delta=text, logprobs=logprobs
        )

    def close(self, completion: CompletionOutput | None) -> Events:
        kind = self._kind
        item = self.parts[-1]
        text = {kind.field: self.text}
        item["status"] = _status(completion)
        yield self._about_text(f"{kind.events}.done", **text, logprobs=self._logprobs)
        if kind.part is None:
            item |= text
        else:
            part = {**kind.part, **text}
            if self._logprobs:
                part["logprobs"] = self._logprobs
            item["content"] = [part]
            yield self._about_text("response.content_part.done", part=part)
        yield self._about_item("response.output_item.done", item=item)

    def ended(self, finished: Finished) -> JsonObject:
        [completion] = finished[0].outputs
        status = _status(completion)
        counted = usage_of(finished)
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                **counted["prompt_tokens_details"],
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._num_thinking_tokens(completion)
            },
            "total_tokens": counted["total_tokens"],
        }
        response = self._response(
            status, usage=usage, guided=self.guided_info(finished, [completion])
        )
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, **fields: Any) -> JsonObject:
        response = {
            "id": self.job.request_id,
            "created_at": self.created,
            "model": self.context.settings.model_name,
            "object": "response",
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "status": status,
            "output": self.parts,
            "guided": self.guided_info(),
        }
        return response | fields | self.settings

    def _num_thinking_tokens(self, completion: CompletionOutput) -> int:
        """Count the tokens up to the end of the thoughts."""
        thoughts = self.parser.thoughts
        rest = len(thoughts.encode()) + completion.text.find(thoughts)
        for number, token in enumerate(completion.token_ids):
            if rest <= 0 or not thoughts:
                return number
            rest -= len(self.context.texts.bytes_of(token))
        return len(completion.token_ids)

    @property
    def _kind(self) -> _ItemKind:
        return _KINDS[self.open.kind]

    def _about_item(self, event: str, **fields: Any) -> JsonObject:
        return {"type": event, "output_index": len(self.parts) - 1, **fields}

    def _about_text(self, event: str, **fields: Any) -> JsonObject:
        if self._kind.part is not None:
            fields["content_index"] = 0
        return self._about_item(event, item_id=self.parts[-1]["id"], **fields)


def _status(completion: CompletionOutput | None) -> str:
    if completion is not None and completion.finish_reason == "length":
        return "incomplete"
    return "completed"
