"""Request and response bodies of `/v1/responses`, and the translation of a request to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.server.protocol import (
    CHAT_EXAMPLE,
    MISPLACED,
    UNSUPPORTED,
    Body,
    CalledFunction,
    ChatRequest,
    FunctionDefinition,
    GenerationRequest,
    Many,
    Message,
    ResponseFormat,
    TemplateValue,
    TextPart,
    Tool,
    ToolCall,
    Typed,
    joined,
)

_SCHEMA = {"type": "json_schema", "name": "person", "schema": CHAT_EXAMPLE["json_schema"]}
EXAMPLE = {"input": CHAT_EXAMPLE["messages"][0]["content"], "text": {"format": _SCHEMA}}


class InputPart(TextPart):
    """A part of a text: of a message, of a function's output or of thoughts."""

    kinds: ClassVar[tuple[str, ...]] = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
    annotations: Any = None
    logprobs: Any = None


_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Types of input items, and the fields that each must have."""


class InputItem(Typed):
    """A message, a function call, its output, or thoughts. Items of an answer can be sent back as they are."""

    kinds: ClassVar[tuple[str, ...]] = tuple(_REQUIRED)
    noun: ClassVar[str] = "input items"
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[InputPart] | None = None
    summary: Many[InputPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | Many[InputPart] | None = None
    # Accepted, without effect.
    id: str | None = None
    status: str | None = None

    @property
    def is_of_model(self) -> bool:
        """The model wrote it."""
        return self.type in ("function_call", "reasoning") or (self.type == "message" and self.role == "assistant")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        missing = [name for name in _REQUIRED[self.type] if getattr(self, name) is None]
        if missing:
            text = "an input item of type {kind} needs {missing}"
            raise PydanticCustomError(MISPLACED, text, {"kind": self.type, "missing": ", ".join(missing)})
        return self


class TextFormat(ResponseFormat):
    """OpenAI's `text.format`: the schema stands beside its name."""

    path: ClassVar[str] = "text.format"
    schema_path: ClassVar[str] = "text.format.schema"
    name: str | None = None
    description: str | None = None
    strict: bool | str | None = None


class TextConfig(Body):
    format: TextFormat | None = None


class ReasoningConfig(Body):
    effort: str | None = Field(default=None, description="Passed to the chat template.")


class FunctionTool(Typed, FunctionDefinition):
    """A function that the model may call."""

    kinds: ClassVar[tuple[str, ...]] = ("function",)
    noun: ClassVar[str] = "tools"
    type: Literal["function"]


class ResponsesRequest(GenerationRequest):
    """Body of `POST /v1/responses`. The server keeps no state between requests."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    input: Annotated[Many[InputItem], Field(min_length=1, description="A text, or a list of items.")]
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: int | None = Field(default=None, description="Default: what remains of the context.")
    text: TextConfig | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = Field(default=None, description="A mode, a function, or allowed_tools.")
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    max_reasoning_tokens: int | None = Field(default=None, ge=0)
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    # One output, without log-probabilities: a chat can have more.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    prompt_logprobs: None = None
    top_logprobs: Literal[0] | None = None
    include: Many[str] | None = Field(default=None, description="Without effect.")

    @field_validator("input", mode="before")
    @classmethod
    def _as_items(cls, given: Any) -> Any:
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @field_validator("include")
    @classmethod
    def _without_logprobs(cls, include: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (include or ()):
            raise PydanticCustomError(UNSUPPORTED, "log-probabilities are not available here: use /v1/chat/completions")
        return include

    def as_chat(self) -> ChatRequest:
        """Return the chat with the same meaning. `CHAT_FIELDS` has its fields' names in this request."""
        same = {name: getattr(self, name) for name in GenerationRequest.model_fields if name in self.model_fields_set}
        if self.text is not None and self.text.format is not None:
            same["response_format"] = self.text.format
        return ChatRequest.model_construct(
            **same,
            messages=list(self._messages()),
            max_tokens=self.max_output_tokens,
            tools=None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            max_reasoning_tokens=self.max_reasoning_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _messages(self) -> Iterator[Message]:
        """Yield the messages of the chat. Thoughts, text and calls of one turn are one message."""
        if self.instructions is not None:
            yield Message(role="system", content=self.instructions)
        for of_model, items in groupby(self.input, lambda item: item.is_of_model):
            if of_model:
                yield _turn(list(items))
            else:
                yield from map(_message, items)


def _message(item: InputItem) -> Message:
    """Return the message of an item that is not the model's."""
    if item.type == "message":
        return Message.model_construct(role=item.role, content=joined(item.content))
    return Message(role="tool", tool_call_id=item.call_id, content=joined(item.output))


def _turn(items: Sequence[InputItem]) -> Message:
    """Return the assistant's message that has all these items."""
    texts = [joined(item.content) for item in items if item.type == "message"]
    thoughts = [joined(item.content or item.summary) for item in items if item.type == "reasoning"]
    calls = [
        ToolCall(id=item.call_id, function=CalledFunction(name=item.name or "", arguments=item.arguments or ""))
        for item in items
        if item.type == "function_call"
    ]
    return Message.model_construct(
        role="assistant",
        content="\n".join(filter(None, texts)) if texts else None,
        reasoning_content="".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _chat_tool(tool: FunctionTool) -> Tool:
    given = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return Tool(type="function", function=FunctionDefinition.model_construct(**given))


CHAT_FIELDS = {**dict.fromkeys(("messages", "prompt"), "input"), "max_tokens": "max_output_tokens"}
"""Fields of a chat -> their names in this endpoint's errors."""
