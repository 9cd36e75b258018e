"""POST /v1/messages and /v1/messages/count_tokens: a chat in the shape of Anthropic's
API, without state on the server.

The request is translated to a chat. The output of the chat becomes content blocks, and
events about them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, field_validator, model_validator

from engine.outputs import CompletionOutput
from engine.server.api.answers import Events, Finished, PartsAnswer, usage_of
from engine.server.api.chat import build_job_that_fits
from engine.server.api.routes import RESPONSES, BodyRoute, JobResponse, RouteResponses
from engine.server.context import Context, ServerContext
from engine.server.http_errors import MESSAGES_PATH, message_error
from engine.server.options import DEFAULT_MODEL
from engine.server.request.bodies import (
    CHAT_EXAMPLE,
    CalledFunction,
    ChatRequest,
    GenerationRequest,
    Message,
    OfferedTool,
    TemplateVariables,
    TextPart,
    Tool,
    ToolCall,
    TypedBody,
    is_hosted,
    joined,
    offered,
    thinking_variables,
)
from engine.server.request.fields import (
    Body,
    FormatHolder,
    Many,
    NonEmpty,
    ResponseFormat,
)
from engine.server.request.job import Job
from guided.errors import GuidedError, InvalidRequest
from guided.json_text import JsonObject
from guided.tools.output_parser import Piece

EXAMPLE = {
    "model": DEFAULT_MODEL,
    "messages": CHAT_EXAMPLE["messages"],
    "max_tokens": 200,
    "output_config": {
        "format": {"type": "json_schema", "schema": CHAT_EXAMPLE["json_schema"]}
    },
}


class Block(TypedBody):
    """A content block. Clients can send the blocks of an answer back unchanged."""

    required: ClassVar = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": ("data",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    """Thoughts that are not shown. Without effect."""
    id: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    input: JsonObject | None = None
    tool_use_id: str | None = Field(default=None, min_length=1)
    content: str | Many[TextPart] | None = None
    """The result of a tool."""

    def as_call(self) -> ToolCall:
        """Return the call of a chat that a block of the type `tool_use` describes."""
        return ToolCall(
            id=self.id,
            function=CalledFunction(name=self.name or "", arguments=self.input or {}),
        )


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: NonEmpty[Block]
    """A text, or a list of blocks."""

    @field_validator("content", mode="before", json_schema_input_type=str | list[Block])
    @classmethod
    def _as_blocks(cls, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content

    def for_chat(self) -> Iterator[Message]:
        """Yield the messages of a chat, in which each result of a tool is a separate
        message."""
        for is_result, group in groupby(
            self.content, lambda block: block.type == "tool_result"
        ):
            blocks = list(group)
            if is_result:
                for block in blocks:
                    yield Message(
                        role="tool",
                        tool_call_id=block.tool_use_id,
                        content=joined(block.content),
                    )
                continue
            message = Message.model_construct(role=self.role, content=None)
            texts = [block for block in blocks if block.type == "text"]
            if texts:
                message.content = joined(texts)
            message.reasoning_content = (
                "".join(block.thinking or "" for block in blocks) or None
            )
            calls = [block for block in blocks if block.type == "tool_use"]
            message.tool_calls = [block.as_call() for block in calls] or None
            yield message


class InputTool(OfferedTool):
    """A tool that the client runs, or a hosted tool."""

    parameters: JsonObject | None = Field(default=None, alias="input_schema")

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.parameters is None and not is_hosted(self.type):
            message = f"{self.name} has no input_schema, and this server has none of Anthropic's own tools"
            raise InvalidRequest(message, param="tools")
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | JsonObject:
        """Return the `tool_choice` of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        if self.type == "any":
            return "required"
        return self.type


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens after which thinking ends."""


class OutputConfig(FormatHolder):
    path = "output_config"
    format: ResponseFormat | None = None
    effort: str | None = None
    """Effort of the thinking phase, which the chat template gets as
    `reasoning_effort`."""


class CountTokensRequest(GenerationRequest):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: NonEmpty[InputMessage]
    system: str | Many[TextPart] | None = None
    max_tokens: int | None = None
    stop_sequences: Many[str] | None = None
    tools: Many[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    """The former place of `output_config.format`."""
    chat_template_kwargs: TemplateVariables | None = None
    thread: JsonObject | None = None
    """Refused: send all messages of the conversation."""
    # A message has one output, while a chat may have several.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None

    def as_chat(self, thinks: bool) -> ChatRequest:
        """Return the chat with the same meaning. `thinks`: the model has a thinking
        phase."""
        fields = self.fields_of(GenerationRequest)
        config = self.output_config or OutputConfig()
        choice = self.tool_choice or ToolChoice()
        if config.format or self.output_format:
            fields["response_format"] = config.format or self.output_format
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        variables: JsonObject = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            on = self.thinking.type == "enabled"
            variables = thinking_variables(on)
            if not thinks:
                fields["max_reasoning_tokens"] = None
            elif on:
                fields["max_reasoning_tokens"] = self.thinking.budget_tokens
            else:
                fields["max_reasoning_tokens"] = 0
        messages = []
        if self.system is not None:
            messages.append(Message(role="system", content=joined(self.system)))
        for message in self.messages:
            messages += message.for_chat()
        continued = (
            self.messages[-1].role == "assistant"
            and self.messages[-1].content[-1].type == "text"
        )
        return ChatRequest.model_construct(
            **fields,
            messages=messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            max_tokens=self.max_tokens,
            chat_template_kwargs={**variables, **(self.chat_template_kwargs or {})},
            reasoning_effort=config.effort,
            tools=[
                Tool.model_construct(type="function", function=tool)
                for tool in offered(self.tools).values()
            ],
            tool_choice=choice.for_chat(),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
        )


class MessagesRequest(CountTokensRequest, json_schema_extra={"examples": [EXAMPLE]}):
    """Body of `POST /v1/messages`. The server keeps no state between requests."""

    max_tokens: int
    """Limit of output tokens, or the rest of the context if that is less."""


class InputTokens(BaseModel):
    input_tokens: int


class MessageErrorDetail(BaseModel, use_attribute_docstrings=True):
    type: str
    message: str
    details: dict[str, str | None]
    """`error_code`, `param` and `pointer`."""


class MessageError(BaseModel):
    """The body of every error, and the payload of the event that ends a stream."""

    type: Literal["error"]
    error: MessageErrorDetail


_ERRORS: RouteResponses = {status: {"model": MessageError} for status in ("4XX", "5XX")}
router = APIRouter(tags=["generation"], route_class=BodyRoute, responses=_ERRORS)


@router.post(MESSAGES_PATH, responses=RESPONSES)
def create_message(
    body: MessagesRequest, request: Request, context: Context
) -> JobResponse:
    """Answer a chat in the shape of Anthropic's API. The server stores nothing."""
    return JobResponse(_MessageAnswer, _job(body, request, context), request, context)


@router.post(f"{MESSAGES_PATH}/count_tokens")
def count_tokens(
    body: CountTokensRequest, request: Request, context: Context
) -> InputTokens:
    """Count the tokens of a message's prompt."""
    return InputTokens(input_tokens=len(_job(body, request, context).prompts[0]))


def _job(body: CountTokensRequest, request: Request, context: ServerContext) -> Job:
    if body.thread is not None:
        message = (
            "the server stores no conversations: send all messages, without thread"
        )
        # clients then send all
        raise InvalidRequest(message, param="thread", code="thread_unsupported_request")
    names = request.state.field_names
    names |= {"prompt": "messages", "stop": "stop_sequences"}
    config = body.output_config or OutputConfig()
    for field, form in (
        ("output_config.format", config.format),
        ("output_format", body.output_format),
    ):
        if form is not None:
            names |= {
                "response_format.json_schema.schema": f"{field}.schema",
                "response_format": field,
            }
            break
    for index, place in enumerate(offered(body.tools)):
        names[f"tools[{index}].function.name"] = f"tools[{place}].name"
        names[f"tools[{index}].function.parameters"] = f"tools[{place}].input_schema"
    thinks = context.reasoning_format is not None
    if body.thinking is not None and not thinks:
        request.state.ignored.append("thinking")
    chat = body.as_chat(thinks)
    return build_job_that_fits(chat, context, "msg_", request.state.request_id)


_BLOCKS: dict[str, JsonObject] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "call": {"type": "tool_use", "input": {}},
}
"""Kind of a piece -> the block that it begins."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block -> the type of the delta that adds text to it, and the field of this
text."""


class _MessageAnswer(PartsAnswer):
    """An answer of Anthropic's API. The parts are content blocks."""

    def first_events(self) -> Events:
        usage = {"input_tokens": len(self.job.prompts[0]), "output_tokens": 0}
        yield {
            "type": "message_start",
            "message": self._message(usage=usage, guided=self.guided_info()),
        }

    def last_events(self, finished: Finished) -> Events:
        message = self.ended(finished)
        stop = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {
            "type": "message_delta",
            "delta": stop,
            "usage": message["usage"],
            "guided": message["guided"],
        }
        yield {"type": "message_stop"}

    def failure(self, error: GuidedError) -> JsonObject:
        return message_error(error)

    def begin(self, piece: Piece) -> Events:
        block = {**_BLOCKS[piece.kind]}
        if piece.kind == "call":
            block |= {"id": self.job.new_call_id(), "name": piece.text}
        self.parts.append(block)
        yield self._event("start", content_block=block)

    def grow(self, text: str, logprobs: list[JsonObject]) -> Events:
        name, field = _DELTAS[self.open.kind]
        yield self._event("delta", delta={"type": name, field: text})

    def close(self, completion: CompletionOutput | None) -> Events:
        block = self.parts[-1]
        match self.open.kind:
            case "call":
                # a call that was cut off has no input
                with contextlib.suppress(ValueError, RecursionError):
                    block["input"] = json.loads(self.text)
            case "reasoning":
                # Clients drop thoughts without a signature. The server does not read
                # the signature when they come back.
                block |= {"thinking": self.text, "signature": self.job.request_id}
                yield self._event(
                    "delta",
                    delta={"type": "signature_delta", "signature": self.job.request_id},
                )
            case _:
                block["text"] = self.text
        yield self._event("stop")

    def ended(self, finished: Finished) -> JsonObject:
        [completion] = finished[0].outputs
        counted = usage_of(finished)
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        message = self._message(
            stop_reason=self._stop_reason(completion),
            usage={
                "input_tokens": counted["prompt_tokens"]
                - cached,  # Anthropic counts cached tokens separately
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": counted["completion_tokens"],
            },
            guided=self.guided_info(finished, [completion]),
        )
        if message["stop_reason"] == "stop_sequence":
            message["stop_sequence"] = completion.stop_reason
        return message

    def _message(self, **fields: Any) -> JsonObject:
        message = {
            "id": self.job.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.context.settings.model_name,
            "content": self.parts,
            "stop_reason": None,
            "stop_sequence": None,
        }
        return message | fields

    def _stop_reason(self, completion: CompletionOutput) -> str:
        if completion.finish_reason == "length":
            if self.job.params.max_tokens is None:
                return "model_context_window_exceeded"
            return "max_tokens"
        if self.parser.num_calls and self.parser.complete:
            return "tool_use"
        if isinstance(completion.stop_reason, str):
            return "stop_sequence"
        return "end_turn"

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        """Build an event about the last block."""
        return {"type": f"content_block_{kind}", "index": len(self.parts) - 1, **fields}
