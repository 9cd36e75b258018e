"""Request and response bodies of OpenAI's API, with vLLM's sampling fields and all
spellings of a constraint.

A known field that would change the answer, and is not supported, is rejected with 400.
An unknown field is ignored, and the answer says so; with `--strict-fields` it is
rejected.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.server.request.fields import (
    REFUSED,
    Body,
    ConstraintFields,
    Many,
    NonEmpty,
    NvextFields,
    SglangFields,
    name_here,
)
from guided.errors import InvalidRequest
from guided.json_text import JsonObject

CHAT_EXAMPLE: JsonObject = {
    "messages": [
        {"role": "user", "content": "Maria Keller is 34 years old and lives in Lisbon."}
    ],
    "json_schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "city": {"type": "string"},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}
COMPLETION_EXAMPLE: JsonObject = {
    "prompt": "A date: ",
    "regex": "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]",
}
"""Examples on the documentation page, which `guided serve` prints too."""


class TypedBody(Body):
    """An object of one of several types."""

    required: ClassVar[Mapping[str, tuple[str, ...]]]
    """Type -> the fields that an object of this type must have."""
    type: str

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        missing = [
            name for name in self.required[self.type] if getattr(self, name) is None
        ]
        if missing:
            raise PydanticCustomError(
                "missing", f"type {self.type} needs {', '.join(missing)}"
            )
        return self


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Padding of the events. Without effect."""


TokenLimit = Annotated[
    int | None, AfterValidator(lambda limit: None if limit == -1 else limit)
]
"""A number of tokens. -1 means that the field is absent."""


class GenerationRequest(ConstraintFields):
    """Fields of both chat and text completions."""

    model: str | None = None
    """Name of the served model; see /v1/models."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Options of the constraint. The constraint itself is one of `ConstraintFields`.
    backend: str | None = None
    """Grammar library: auto, llguidance, xgrammar, outlines or lm-format-enforcer."""
    guided_decoding_backend: str | None = None
    """vLLM's older name of `backend`."""
    open_objects: bool | None = None
    """Whether objects may have properties that their schema neither names nor
    excludes."""
    strict_schema: bool | None = None
    """Whether formats that are not in the specification are refused."""
    complete: bool | None = None
    """Whether the output is completed within max_tokens."""
    nvext: NvextFields | None = None
    """Further fields, where clients of NVIDIA's servers send them."""
    sampling_params: SglangFields | None = None
    """Further fields, where SGLang's clients send them."""

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
    allowed_token_ids: Many[int] | None = None
    """The only tokens that the output may have, besides those that end it."""
    bad_words: str | Many[str] | None = None
    """Texts that no token may complete."""
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = (
        None  # JSON has strings as keys
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    best_of: int | None = None
    resample: bool | None = None
    """Whether the n outputs are drawn from best_of, weighted by their kept mass."""
    use_beam_search: bool | None = None
    """Whether to search with best_of beams, at temperature 0."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    logprobs_mode: Literal["raw", "masked"] | None = None
    """Log-probabilities of the model (raw), or after the mask."""
    mask_details: bool | None = None
    """Whether the answer reports what each mask allowed, and its time."""
    vllm_xargs: JsonObject | None = None
    """The `extra_args` of the server's custom logits processors."""

    @classmethod
    def gathered(cls, data: JsonObject, names: MutableMapping[str, str]) -> JsonObject:
        """Move known fields of `nvext` and `sampling_params` into the body. Its own
        fields have priority. Constraints stay in their place, and so do fields that
        will be named in `ignored`."""
        data = {**data}
        for place in ("nvext", "sampling_params"):
            inner = data.get(place)
            if not isinstance(inner, dict):
                continue
            rest: JsonObject = {}
            for name, value in inner.items():
                field = name_here(name, cls)
                if (
                    field is None
                    or field in ConstraintFields.model_fields
                    or data.get(field) is not None
                ):
                    rest[name] = value
                else:
                    data[field] = value
                    names[field] = f"{place}.{name}"
            data[place] = rest
        older = "guided_decoding_backend"
        if data.get("backend") is None and older in data:
            data["backend"] = data.pop(older)
            names["backend"] = names.get(older, older)
        return data

    def fields_of(self, kind: type[BaseModel]) -> JsonObject:
        """Return the fields of `kind` that the request sets."""
        names = kind.model_fields.keys() & self.model_fields_set
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options requires stream: true", param="stream_options"
            )
        return self


class Reported(NamedTuple):
    """Options of what an answer reports beside the text."""

    usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""
    usage_in_chunks: bool = False
    """Whether, with `usage`, each chunk has the usage of its choice so far."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether tokens of log-probabilities are written as `token_id:123`."""


class ChunkOptions(StreamOptions):
    continuous_usage_stats: bool = False
    """Whether each chunk has the usage, with include_usage."""


class ChoicesRequest(GenerationRequest):
    """Fields of chat and text completions that ask for a report beside the text."""

    stream_options: ChunkOptions | None = None
    prompt_logprobs: int | None = None
    """Alternatives for each token of the prompt."""
    return_token_ids: bool | None = None
    """Whether the answer has the ids of the tokens."""
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens of log-probabilities are written as "token_id:123"."""

    @property
    def reported(self) -> Reported:
        options = self.stream_options or ChunkOptions()
        return Reported(
            usage=options.include_usage,
            usage_in_chunks=options.include_usage
            and getattr(
                options, "continuous_usage_stats", False
            ),  # responses have other options
            token_ids=self.return_token_ids is True,
            tokens_as_ids=self.return_tokens_as_token_ids is True,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


def joined(content: str | list[Any] | None) -> str:
    """Return a message's content as one string. Newlines join the parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())


class CalledFunction(Body):
    name: str
    arguments: str | JsonObject = ""
    input: str | None = None
    """The input of a custom tool, instead of arguments."""

    def for_template(self) -> JsonObject:
        """Convert to the form of chat templates: the arguments are an object there."""
        arguments: Any = self.arguments
        if self.input is not None:
            arguments = {"input": self.input}
        elif isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


_BY_TYPE = AliasChoices("function", "custom")
"""The type of a tool or a call is also the name of the field that describes it."""


class ToolCall(Body):
    """A call of a function or of a custom tool in an assistant's message."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction = Field(validation_alias=_BY_TYPE)
    index: int | None = None


class Message(Body):
    """A message. `tool_name` and `thinking` are Ollama's names."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[TextPart] | None = None
    name: str | None = Field(
        default=None, validation_alias=AliasChoices("name", "tool_name")
    )
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """The former form of a tool call."""
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "thinking")
    )

    def for_template(self) -> JsonObject:
        """Convert to the form of chat templates. `developer` is OpenAI's newer name for
        `system`, and `function` the former name for `tool`."""
        message = self.model_dump(
            exclude_none=True, exclude={"tool_calls", "function_call"}
        )
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message |= {"content": joined(self.content), "role": role}
        calls = self.tool_calls or []
        if not calls and self.function_call is not None:
            calls = [ToolCall(function=self.function_call)]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": call.function.for_template(),
                }
                for call in calls
            ]
        return message


class InputFormat(Body):
    """The input of a custom tool: any text, or text in a grammar."""

    tolerant = False
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""

    @model_validator(mode="before")
    @classmethod
    def _take_grammar(cls, data: Any) -> Any:
        """Move the fields of the object `grammar`, which chats have, beside `type`,
        where responses have them."""
        if not isinstance(data, dict) or not isinstance(data.get("grammar"), dict):
            return data
        beside = dict(data)
        grammar = beside.pop("grammar")
        return {**beside, **grammar}

    def input_schema(self) -> JsonObject:
        """Return the schema of the text for the chat template."""
        if self.type == "text":
            return {"type": "string"}
        if self.syntax == "regex":
            return {"type": "string", "pattern": f"^(?:{self.definition})$"}
        return {
            "type": "string",
            "description": f"Text in this Lark grammar:\n{self.definition}",
        }


class FunctionDefinition(Body):
    name: str = Field(pattern="^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Whether a schema that can't be enforced is refused."""
    format: InputFormat | None = None
    """The format of a custom tool's input. Default: any text."""


_HOSTED = re.compile(
    "(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|mcp_toolset|tool_search)"
    r"(_(preview|tool|regex|bm25|\d+))*"
)


def is_hosted(kind: Any) -> bool:
    """Return whether OpenAI's or Anthropic's servers, and not clients, run tools of
    this type."""
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


_RUNS_NONE = "this server runs no tools itself: offer functions, which the client runs"
_OF_CHATS = (
    "this is the form of /v1/chat/completions: here its fields stand beside 'type'"
)
_NESTED = (
    "functions stand side by side in the request's own tools, not within something else"
)


class OfferedTool(FunctionDefinition):
    """A tool in a list that may contain hosted tools. Hosted tools are only named in
    the answer, as ignored."""

    refused: ClassVar = {
        **REFUSED,
        "function": _OF_CHATS,
        "custom": _OF_CHATS,
        "tools": _NESTED,
        "functions": _NESTED,
    }
    type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _note_hosted(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or not is_hosted(data.get("type")):
            return data
        kind = data["type"]
        ignored = (info.context or {}).get("ignored")
        if ignored is None:
            raise InvalidRequest(
                f"{kind}: {_RUNS_NONE}", param="tools", code="unsupported_parameter"
            )
        ignored.append(kind)
        return {"type": kind, "name": kind}


def offered(tools: Sequence[OfferedTool] | None) -> dict[int, Any]:
    """Return the tools that the client runs, by their places in the list. Raises
    `InvalidRequest` if all tools are hosted."""
    functions = {
        place: tool
        for place, tool in enumerate(tools or ())
        if not is_hosted(tool.type)
    }
    if tools and not functions:
        raise InvalidRequest(
            f"there is no function beside {tools[0].type}: {_RUNS_NONE}", param="tools"
        )
    return functions


class Tool(Body):
    """A function or a custom tool that the model may call."""

    type: Literal["function", "custom"]
    function: FunctionDefinition = Field(validation_alias=_BY_TYPE)

    @model_validator(mode="after")
    def _describe_input(self) -> Self:
        """Give a custom tool the parameters of a function with its input as the only
        argument."""
        if self.type == "custom":
            text = (self.function.format or InputFormat(type="text")).input_schema()
            schema = {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
            }
            self.function.parameters = {**schema, "additionalProperties": False}
            self.function.strict = True
        return self

    def input_grammar(self, syntax: str) -> str | None:
        """Return the grammar of a custom tool's input, if it has one in this syntax."""
        form = self.function.format
        if (
            self.type == "custom"
            and form is not None
            and (form.type, form.syntax) == ("grammar", syntax)
        ):
            return form.definition
        return None

    def for_template(self) -> JsonObject:
        """Convert to the form of chat templates."""
        described = self.function.model_dump(
            exclude_none=True, exclude={"strict", "format", "type"}
        )
        return {"type": "function", "function": described}


def thinking_variables(on: bool) -> JsonObject:
    """Return the variables that turn thinking on or off in the chat templates of Qwen
    and of DeepSeek."""
    return {"enable_thinking": on, "thinking": on}


class ReasoningConfig(Body):
    effort: str | None = None
    """Effort of the thinking phase, which the chat template gets."""


TemplateVariables = dict[str, str | int | float | bool | None]
"""Variables of a chat template."""


class TurnFields(Body):
    tool_choice: str | JsonObject | None = None
    """A mode, a function, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class TurnRequest(GenerationRequest, TurnFields):
    """Fields of both chats and responses."""

    max_reasoning_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens after which thinking ends."""
    include_reasoning: bool | None = None
    """Whether the answer has the thoughts."""


class PromptFields(TurnFields):
    """Fields that determine the prompt of a chat, beside the messages."""

    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. Default: unless
    continue_final_message."""
    continue_final_message: bool = False
    tools: Many[Tool] | None = None
    functions: Many[FunctionDefinition] | None = None
    """The former name of `tools`."""
    function_call: str | JsonObject | None = None
    """The former name of `tool_choice`."""
    reasoning: Literal["free", "constrained"] | ReasoningConfig | None = None
    """Whether a constraint starts after the thinking phase (free) or at the first token
    (constrained). An object has the effort."""
    reasoning_effort: str | None = None
    """Effort of the thinking phase, which the chat template gets."""

    @model_validator(mode="after")
    def _take_functions(self) -> Self:
        """Read the former fields `functions` and `function_call` as tools. Their answer
        has one call."""
        functions = self.functions or []
        choice = self.function_call
        if not functions and choice is None:
            return self
        if self.tools and functions:
            raise InvalidRequest(
                "tools do not go with functions, a former field: use tools",
                param="functions",
            )
        if self.tools:
            message = (
                "tools do not go with function_call, a former field: use tool_choice"
            )
            raise InvalidRequest(message, param="function_call")
        self.tools = [
            Tool(type="function", function=function) for function in functions
        ]
        if isinstance(choice, dict):
            self.tool_choice = {"type": "function", **choice}
        else:
            self.tool_choice = choice
        self.parallel_tool_calls = False
        return self


class ChatRequest(
    ChoicesRequest,
    TurnRequest,
    PromptFields,
    json_schema_extra={"examples": [CHAT_EXAMPLE]},
):
    """Body of `POST /v1/chat/completions`."""

    messages: NonEmpty[Message]
    max_completion_tokens: TokenLimit = None
    max_tokens: TokenLimit = None
    """Maximum number of output tokens. Default: the rest of the context."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(
    ChoicesRequest, json_schema_extra={"examples": [COMPLETION_EXAMPLE]}
):
    """Body of `POST /v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: TokenLimit = None
    """Maximum number of output tokens. Default: 16, or the rest of the context with a
    constraint."""
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TokenizeRequest(PromptFields):
    """Body of `POST /tokenize`: a prompt, or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    add_special_tokens: bool = True
    """Whether a prompt gets special tokens. The template adds those of messages."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Many[int]


class ErrorDetail(BaseModel, use_attribute_docstrings=True):
    """An error. `docs/http-reference.md` lists the codes."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field at fault, as the request spelled it."""
    code: str
    pointer: str | None
    """RFC 6901 JSON pointer into the schema."""


class ErrorAnswer(BaseModel):
    """The body of every error, and the payload of the error event that ends a
    stream."""

    error: ErrorDetail


class MaskTimes(BaseModel, use_attribute_docstrings=True):
    """Times in seconds. `exposed` is the time by which masks have lengthened the steps
    of this request's sequences. `total` is the time from the end of the compilation to
    the end of the request."""

    compile: float
    """The time that compiling the grammar took, for this request or an earlier one."""
    computed: float
    """The time that the workers took for this request's masks."""
    exposed: float
    total: float


class GuidedInfo(BaseModel, use_attribute_docstrings=True):
    """A report on how the output was constrained, and which fields had no effect. Null
    if neither applies."""

    kind: str | None = None
    backend: str | None = None
    not_enforced: list[str] = []
    """JSON pointers of unknown formats, misspelt keywords, and parts of tools that may
    have any value."""
    checked: list[str] | None = None
    """JSON pointers of keywords that are checked when the output ends, not enforced by
    the mask."""
    closed: list[str] | None = None
    """JSON pointers of objects that have only the properties that the schema names
    (`open_objects`)."""
    masks: MaskTimes | None = None
    """Times of the masks, with `mask_details`. A stream has them in the last chunk of a
    choice."""
    kept_mass: float | None = None
    """Mean over the tokens of the probability that the model gave to the allowed
    tokens, with `mask_details`."""
    effective_samples: float | None = None
    """Effective number of the `best_of` outputs, the smallest of several prompts, with
    `resample`."""
    completed_early: bool | None = None
    """Whether tokens were forbidden because the rest would not have fit in
    `max_tokens`, with `complete`."""
    vetoes: dict[str, int] | None = None
    """Keyword in `checked` -> number of times that tokens were taken back because they
    violated it."""
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


class TokenizeResponse(BaseModel, use_attribute_docstrings=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    guided: JsonObject | None = None
    """The fields without effect, in `ignored`."""


class DetokenizeResponse(BaseModel):
    prompt: str
