"""Request and response bodies of the HTTP API: OpenAI's, with vLLM's sampling fields and all spellings of a constraint.

A known field that would change the answer, and is not supported, is rejected with 400. An unknown field is ignored, and
the answer says so; with `--strict-fields` it is rejected.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from guided.errors import InvalidRequest, bounded

REFUSED = {
    "tools": "functions are called in chats: use /v1/chat/completions or /v1/responses",
    "tool_choice": "functions are called in chats",
    "functions": "this former name of tools is known in /v1/chat/completions only",
    "function_call": "this former name of tool_choice is known in /v1/chat/completions only",
    "modalities": "the only modality is text",
    "audio": "audio is not supported",
    "suffix": "the models served here don't fill in the middle",
    "web_search_options": "web search is not supported",
    "chat_template": "a request can't bring its own chat template",
    "prompt_embeds": "prompt embeddings are not supported",
    "prompt_logprobs": "log-probabilities of prompts are not available over HTTP: use LLM",
    "truncate_prompt_tokens": "prompts are not truncated: send a shorter one",
    "previous_response_id": "the server stores no responses: send the whole conversation in input",
    "conversation": "the server stores no conversations: send the whole conversation in input",
    "background": "the server stores no responses: ask for a stream",
    "mcp_servers": "the server calls no MCP servers: list their tools, and run the calls",
}
"""Known fields that would change the answer, and why they are rejected."""

NESTED = dict.fromkeys(
    ("tools", "functions"), "functions stand side by side in the request's own tools, not within something else"
)
"""Why such a field is rejected elsewhere than in the request itself, if the reason is another one."""

_NEUTRAL: tuple[Any, ...] = (None, [], "", False, "none", "auto", ["text"])
"""Values with which such a field, and an unknown one, has no effect."""

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "verbosity", "cache_control", "inference_geo", "speed"),
    *("caller", "citations", "is_error", "signature"),  # of blocks in Anthropic's API, and of its tools:
    *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
)
"""Known fields that can't change the answer. They are accepted with `--strict-fields` too."""

CHAT_EXAMPLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Maria Keller is 34 years old and lives in Lisbon."}],
    "json_schema": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}
COMPLETION_EXAMPLE: dict[str, Any] = {"prompt": "A date: ", "regex": "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"}
"""Examples on the documentation page, which `guided serve` prints too."""


T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is validated up to its first error, so that a long list does not give an error for each element."""

MAX_IGNORED = 20
"""Maximum number of ignored fields that an answer names."""

_CONSTRAINTS = (
    *("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_MISNAMED = {
    "schema": "json_schema",
    "format": "response_format",
    "text": "response_format",
    "guided_schema": "guided_json",
    "guided_decoding": "structured_outputs",
    "extra_body": "its fields, beside the others",
}


@lru_cache(1024)
def constraint_meant(name: str) -> str | None:
    """Return the field of a constraint that an unknown field of a request probably stands for."""
    if len(name) > 40:
        return None
    return _MISNAMED.get(name) or next(iter(get_close_matches(name, _CONSTRAINTS, 1, 0.8)), None)


class Body(BaseModel):
    """A body with strict types: no "3" for 3. Fields are dropped if their value has no effect.

    Unknown fields are dropped, and noted in the list `ignored` of the validation context. Without this list they are
    rejected, as they are where `tolerant` is False.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    tolerant: ClassVar[bool] = True
    constrained: ClassVar[bool] = False
    """An unknown field that could be meant as a constraint is rejected."""

    @model_validator(mode="before")
    @classmethod
    def _drop_without_effect(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        names, ignored = _names(cls), (info.context or {}).get("ignored") if cls.tolerant else None
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in names:
                kept[name] = value
            elif value in _NEUTRAL:
                continue
            elif name in REFUSED or (name not in WITHOUT_EFFECT and cls._is_error(name, ignored)):
                return {name: value}  # the first one is reported: a million of them would be a million errors
            elif ignored is not None and name not in ignored and len(ignored) < MAX_IGNORED:
                ignored.append(bounded(name, 60))
        return kept

    @classmethod
    def _is_error(cls, name: str, ignored: list[str] | None) -> bool:
        """Whether an unknown field is rejected: all are, or it could be meant as a constraint."""
        if ignored is None or not cls.constrained or len(ignored) == MAX_IGNORED:
            return ignored is None
        return constraint_meant(name) is not None


@cache
def _names(body: type[Body]) -> frozenset[Any]:
    """Return the names and aliases of the fields of a kind of object."""
    aliases = [field.validation_alias for field in body.model_fields.values()]
    all_of = [each.choices if isinstance(each, AliasChoices) else [each] for each in aliases]
    return frozenset([*body.model_fields, *chain.from_iterable(all_of)])


class TypedBody(Body):
    """An object of one of several types."""

    required: ClassVar[Mapping[str, tuple[str, ...]]]
    """Types -> the fields that each must have."""
    type: str

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        missing = [name for name in self.required[self.type] if getattr(self, name) is None]
        if missing:
            raise PydanticCustomError("missing", f"type {self.type} needs {', '.join(missing)}")
        return self


class JsonSchemaFormat(Body):
    """OpenAI's `response_format.json_schema`. The schema is always enforced, `strict` or not."""

    tolerant = False
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | str | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`, and the forms of other servers."""

    tolerant = False
    path: ClassVar[str] = "response_format"
    """What errors call this field. `schema_path` is that of its schema."""
    schema_path: ClassVar[str] = "response_format.json_schema.schema"
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema", description="llama.cpp's place.")
    format: Any = Field(default=None, description="The format of a structural tag.")
    structures: Any = Field(default=None, description="vLLM's older form of a structural tag.")
    triggers: Any = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the constraint fields."""

    tolerant = False
    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = Field(default=None, description="Accepted, without effect.")


ExtraArg = str | int | float | bool


class GenerationRequest(Body):
    """Fields of both chat and text completions."""

    constrained = True
    model: str | None = Field(default=None, description="Name of the served model; see /v1/models.")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    # The constraint, one of these. Our own names ...
    json_schema: dict[str, Any] | str | bool | None = Field(default=None, description="A schema, or its JSON text.")
    json_object: bool | None = Field(default=None, description="The output is a JSON object.")
    regex: str | None = Field(default=None, description="The whole output matches.")
    choice: Many[str] | None = Field(default=None, description="The output is one of these.")
    grammar: str | None = Field(default=None, description="Lark, or GBNF/EBNF with a root rule.")
    structural_tag: dict[str, Any] | str | None = Field(default=None, description="Free text with constrained parts.")
    backend: str | None = Field(default=None, description="auto, llguidance, xgrammar, outlines or lm-format-enforcer.")
    whitespace_pattern: str | None = Field(default=None, description="Regex of whitespace between JSON tokens.")
    open_objects: bool | None = Field(
        default=None, description="Whether objects with named properties may have others where the schema does not say."
    )
    strict_schema: bool | None = Field(default=None, description="Reject formats that are not in the specification.")
    complete: bool | None = Field(default=None, description="Complete the constraint within max_tokens.")
    # ... OpenAI's, vLLM's ...
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # ... and vLLM's older names.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    # Sampling.
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None  # JSON has strings as keys
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    best_of: int | None = None
    resample: bool | None = Field(default=None, description="Draw n of best_of outputs, weighted by their kept mass.")
    use_beam_search: bool | None = Field(default=None, description="With temperature 0, and best_of beams.")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    logprobs_mode: Literal["raw", "masked"] | None = Field(default=None, description="Of the model, or after the mask.")
    mask_details: bool | None = Field(default=None, description="Report what each mask allowed, and its time.")
    vllm_xargs: dict[str, ExtraArg | Many[ExtraArg]] | None = Field(
        default=None, description="For the server's custom logits processors: their `extra_args`."
    )


class TextPart(Body):
    type: Literal["text"]
    text: str


def joined(content: str | list[Any] | None) -> str:
    """Return a message's content as one string. Newlines join the parts."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""
    input: str | None = Field(default=None, description="Of a custom tool, instead of arguments.")

    def for_template(self) -> dict[str, Any]:
        """Convert to the form of chat templates: the arguments are an object there."""
        arguments: Any = self.arguments if self.input is None else {"input": self.input}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


_BY_TYPE = AliasChoices("function", "custom")
"""The field with what a tool or a call is has the name of its type."""


class ToolCall(Body):
    """A call of a function or of a custom tool in an assistant's message."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction = Field(validation_alias=_BY_TYPE)
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = Field(default=None, description="The former form of a tool call.")
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Convert to the form of chat templates. `developer` is OpenAI's newer name for `system`, and `function` the
        former one for `tool`."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls", "function_call"})
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message |= {"content": joined(self.content), "role": role}
        calls = self.tool_calls or [ToolCall(function=called) for called in (self.function_call,) if called is not None]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()} for call in calls
            ]
        return message


class InputFormat(Body):
    """What a custom tool takes: any text, or that of a grammar."""

    tolerant = False
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""

    @model_validator(mode="before")
    @classmethod
    def _take_grammar(cls, data: Any) -> Any:
        """Chats have the fields of the grammar in `grammar`, responses beside `type`."""
        if isinstance(data, dict) and isinstance(grammar := data.get("grammar"), dict):
            return {**{name: value for name, value in data.items() if name != "grammar"}, **grammar}
        return data

    def input_schema(self) -> dict[str, Any]:
        """Return the schema of the text, as the model is told of it."""
        if self.type == "text":
            return {"type": "string"}
        if self.syntax == "regex":
            return {"type": "string", "pattern": f"^(?:{self.definition})$"}
        return {"type": "string", "description": f"Text in this Lark grammar:\n{self.definition}"}


class FunctionDefinition(Body):
    name: str = Field(pattern="^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="true: refuse a schema that can't be enforced.")
    format: InputFormat | None = Field(default=None, description="Of a custom tool's input. Default: any text.")


_HOSTED = re.compile(
    "(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|mcp_toolset|tool_search)"
    r"(_(preview|tool|regex|bm25|\d+))*"
)


def is_hosted(kind: Any) -> bool:
    """Whether tools of this type are run by OpenAI's or Anthropic's servers, not by the client."""
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


class OfferedTool(FunctionDefinition):
    """A tool in a list that may have hosted ones too. These are only named in the answer."""

    type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, data: Any, info: ValidationInfo) -> Any:
        """Note a hosted tool, and say where the fields of a function are that has the form of chats."""
        kind = data.get("type") if isinstance(data, dict) else None
        if kind in ("function", "custom") and kind in data:
            message = (
                f"this is the form of /v1/chat/completions: here 'name' and the others of '{kind}' stand beside 'type'"
            )
            raise PydanticCustomError("missing", message)
        if not is_hosted(kind):
            return data
        ignored = (info.context or {}).get("ignored")
        if ignored is None:
            raise InvalidRequest(f"{kind}: {_RUNS_NONE}", param="tools", code="unsupported_parameter")
        ignored.append(kind)
        return {"type": kind, "name": kind}


_RUNS_NONE = "this server runs no tools itself: offer functions, which the client runs"


def offered(tools: Sequence[OfferedTool] | None) -> dict[int, Any]:
    """Return the tools that the client runs, by their places in the list. Raises `InvalidRequest` if there are only
    hosted ones."""
    functions = {place: tool for place, tool in enumerate(tools or ()) if not is_hosted(tool.type)}
    if tools and not functions:
        raise InvalidRequest(f"there is no function beside {tools[0].type}: {_RUNS_NONE}", param="tools")
    return functions


class Tool(Body):
    """A function or a custom tool that the model may call."""

    type: Literal["function", "custom"]
    function: FunctionDefinition = Field(validation_alias=_BY_TYPE)

    @model_validator(mode="after")
    def _describe_input(self) -> Self:
        """Give a custom tool the parameters of a function with its input as the only argument."""
        if self.type == "custom":
            text = (self.function.format or InputFormat(type="text")).input_schema()
            schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            self.function.parameters, self.function.strict = {**schema, "additionalProperties": False}, True
        return self

    def input_grammar(self, syntax: str) -> str | None:
        """Return the grammar of a custom tool's input, if it has one in this syntax."""
        form = self.function.format if self.type == "custom" else None
        return form.definition if form is not None and (form.type, form.syntax) == ("grammar", syntax) else None

    def for_template(self) -> dict[str, Any]:
        """Convert to the form of chat templates."""
        described = self.function.model_dump(exclude_none=True, exclude={"strict", "format", "type"})
        return {"type": "function", "function": described}


class TurnRequest(GenerationRequest):
    """Fields of both chats and responses."""

    tool_choice: str | dict[str, Any] | None = Field(default=None, description="A mode, a function, or allowed_tools.")
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    max_reasoning_tokens: int | None = Field(default=None, ge=0, description="Tokens after which thinking ends.")
    include_reasoning: bool | None = Field(default=None, description="false: the answer has no thoughts.")


class ChatRequest(TurnRequest):
    """Body of `POST /v1/chat/completions`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"examples": [CHAT_EXAMPLE]})

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    max_tokens: int | None = Field(default=None, description="Default: what remains of the context.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Many[Tool] | None = None
    functions: Many[FunctionDefinition] | None = Field(default=None, description="The former name of `tools`.")
    function_call: str | dict[str, Any] | None = Field(default=None, description="The former name of `tool_choice`.")
    reasoning: Literal["free", "constrained"] | None = Field(
        default=None, description="Where the constraint starts: after the thinking phase (free), or at the first token."
    )
    reasoning_effort: str | None = Field(default=None, description="Passed to the chat template.")

    @model_validator(mode="after")
    def _take_functions(self) -> Self:
        """Read the former fields as tools and a choice among them. Their answer has one call."""
        functions, choice = self.functions or [], self.function_call
        if not functions and choice is None:
            return self
        if self.tools:
            name, now = ("functions", "tools") if functions else ("function_call", "tool_choice")
            raise InvalidRequest(f"tools do not go with {name}, a former field: use {now}", param=name)
        self.tools = [Tool(type="function", function=each) for each in functions]
        self.tool_choice = {"type": "function", **choice} if isinstance(choice, dict) else choice
        self.parallel_tool_calls = False
        return self


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"examples": [COMPLETION_EXAMPLE]})

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: int | None = Field(
        default=None, description="Default: 16, as OpenAI's; with a constraint, what remains of the context."
    )
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    add_special_tokens: bool = Field(default=True, description="Of a prompt. Those of messages are the template's.")
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Many[int]


class ErrorDetail(BaseModel):
    """An error. `docs/http-reference.md` lists the codes."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field at fault, as the request spelled it.")
    code: str
    pointer: str | None = Field(description="RFC 6901 JSON pointer into the schema.")


class ErrorAnswer(BaseModel):
    """The body of every error, and the payload of the error event that ends a stream."""

    error: ErrorDetail


class MaskTimes(BaseModel):
    """Seconds. `exposed` is the time by which masks have lengthened the steps of this request's sequences. `total` is
    the time from the end of the compilation to the end of the request."""

    compile: float = Field(description="The time that compiling the grammar took, now or before.")
    computed: float = Field(description="The time that the workers took for this request's masks.")
    exposed: float
    total: float


class GuidedInfo(BaseModel):
    """How the output was constrained, and what of the request had no effect. Null if neither applies."""

    kind: str | None = None
    backend: str | None = None
    not_enforced: list[str] = Field(
        default=[],
        description="JSON pointers of unknown formats, misspelt keywords, and parts of tools that may have any value.",
    )
    checked: list[str] | None = None
    """JSON pointers of keywords that are checked when the output ends, not enforced by the mask."""
    closed: list[str] | None = None
    """JSON pointers of objects without other properties than those that the schema names (`open_objects`)."""
    masks: MaskTimes | None = None
    """With `mask_details`, in a stream in the last chunk of a choice."""
    kept_mass: float | None = None
    """With `mask_details`: the mean over the tokens of the probability that the model gave to the allowed ones."""
    effective_samples: float | None = None
    """With `resample`: the effective number of the `best_of` outputs; of several prompts the smallest."""
    completed_early: bool | None = None
    """With `complete`: tokens were forbidden because the rest would not have fit in `max_tokens`."""
    ignored: list[str] | None = None
    """Fields of the request that are unknown or have no effect."""


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "guided"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str
