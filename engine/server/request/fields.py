"""The fields of requests: how objects are read, and the table of the fields that hold a
constraint.

The table consists of three classes. `ConstraintFields` has the fields of a body, of
`nvext` and of `sampling_params`; `StructuredOutputs` and `ResponseFormat` are objects
among these fields. A field is a row if its type has a `Kind`: the type tells the kind
of the constraint, and the class tells where the field stands. `constraints.py` reads
the rows, `Body.hint` compares unknown fields with them, and `benchmarks/fields.py`
writes docs/http-reference.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from guided.constraint import ConstraintKind
from guided.errors import bounded
from guided.json_text import JsonObject

REFUSED = {
    "tools": "functions are called in chats: use /v1/chat/completions or /v1/responses",
    "tool_choice": "functions are called in chats",
    "functions": "this former name of tools is known in /v1/chat/completions only",
    "function_call": "this former name of tool_choice is known in /v1/chat/completions only",
    "modalities": "the only modality is text",
    "audio": "audio is not supported",
    "images": "images are not supported: the models served here read text",
    "suffix": "the models served here don't fill in the middle",
    "web_search_options": "web search is not supported",
    "chat_template": "a request can't bring its own chat template",
    "prompt_embeds": "prompt embeddings are not supported",
    "prompt_logprobs": "log-probabilities of prompts are not available here: use /v1/chat/completions",
    "truncate_prompt_tokens": "prompts are not truncated: send a shorter one",
    "previous_response_id": "the server stores no responses: send the whole conversation in input",
    "conversation": "the server stores no conversations: send the whole conversation in input",
    "background": "the server stores no responses: ask for a stream",
    "mcp_servers": "the server calls no MCP servers: list their tools, and run the calls",
}
"""Known fields that would change the answer -> why they are rejected."""

_NEUTRAL: tuple[Any, ...] = (None, [], "", False, "none", "auto", ["text"])
"""Values that leave a rejected or unknown field without effect, so that the field is
dropped."""

WITHOUT_EFFECT = (
    *(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "truncation",
        "cache_salt",
    ),
    *(
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "cache_control",
        "inference_geo",
        "speed",
    ),
    "max_tool_calls",  # limits the tools that a server runs
    # in `structured_outputs`: a named backend is never replaced by another
    "disable_fallback",
    *(
        "caller",
        "citations",
        "is_error",
        "signature",
    ),  # fields of blocks and tools in Anthropic's API
    *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
)
"""Known fields that can't change the answer. They are accepted with `--strict-fields`
too."""

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is validated up to its first error, so that a long list does not give an
error for each element."""
NonEmpty = Annotated[list[T], Field(fail_fast=True, min_length=1)]
"""The same with at least one element."""

MAX_IGNORED = 20
"""Maximum number of ignored fields that an answer names."""


MISNAMED = {
    **dict.fromkeys(
        (
            *(
                "format",
                "text",
                "text_format",
                "output_format",
                "output_config",
                "output_type",
                "output_model",
            ),
            *(
                "response_model",
                "response_type",
                "response_mime_type",
                "responseMimeType",
                "result_type",
            ),
        ),
        "response_format",
    ),
    "enum": "choice",
    "guided_schema": "guided_json",
    "extra_body": "its fields, beside the others",
    "stop_regex": "stop",
}
"""Names that mean a constraint but do not resemble the names of its fields."""
_COMMON = ("format", "text", "enum", "type", "properties")
"""Names that mean something else within an unknown object."""
_TYPES = ("json_schema", "json_object", "structural_tag", "regex", "grammar")
"""Types of objects that are constraints."""
MARKS: Mapping[str, ConstraintKind | None] = {
    "jsonobject": "json_object",
    "regex": "regex",
    "regularexpression": "regex",
    "pattern": "regex",
    "grammar": "grammar",
    "bnf": "grammar",
    "lark": "grammar",
    "structuraltag": "structural_tag",
    "schema": "json_schema",
    "properties": "json_schema",
    "json": "json_schema",
    "choices": "choice",
    "guided": None,
    "structured": None,
    "constrain": None,
}
"""Parts of names that mean a constraint -> the kind of the constraint, if the part
tells it."""


@dataclass(frozen=True)
class Kind:
    """Marks the type of a field that holds a constraint. `name` is None for an object
    with fields of several kinds."""

    name: ConstraintKind | None


Schema = Annotated[JsonObject | str | bool | None, Kind("json_schema")]
AnyObject = Annotated[bool | None, Kind("json_object")]
Regex = Annotated[str | None, Kind("regex")]
Choice = Annotated[Many[str] | None, Kind("choice")]
Grammar = Annotated[str | None, Kind("grammar")]
Tag = Annotated[JsonObject | str | None, Kind("structural_tag")]
TagPart = Annotated[Any, Kind("structural_tag")]


class Body(BaseModel, strict=True, use_attribute_docstrings=True):
    """A body with strict types: "3" is not accepted for 3. Fields are dropped if their
    value has no effect.

    Unknown fields are dropped, and noted in the list `ignored` of the validation
    context. They are rejected if there is no such list, if `tolerant` is False, or if
    they could be meant as another field (`hint`).
    """

    tolerant: ClassVar[bool] = True
    prefix: ClassVar[str] = ""
    """Prefix of the names of unknown fields of this object in `ignored`."""
    unused: ClassVar[Collection[str]] = ()
    """Names of inherited fields that requests with this body cannot set."""
    refused: ClassVar[Mapping[str, str]] = REFUSED

    @model_validator(mode="before")
    @classmethod
    def _drop_without_effect(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        names = names_of(cls)
        context = info.context or {}
        ignored: list[str] | None = context.get("ignored")
        kept: JsonObject = {}
        for name, value in cls.gathered(data, context.get("names", {})).items():
            if name in names and value is not None:
                kept[name] = value
            elif value not in _NEUTRAL or (value == 0 and value is not False):
                cls._check_unknown(name, value, ignored)
                noted = bounded(cls.prefix + name, 60)
                if (
                    ignored is not None
                    and noted not in ignored
                    and len(ignored) < MAX_IGNORED
                ):
                    ignored.append(noted)
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe that an optional field may be null, which means that it is
        absent."""
        described = handler(core)
        fields = handler.resolve_ref_schema(described)
        for name, value in fields.get("properties", {}).items():
            if name not in fields.get("required", ()) and {
                "type": "null"
            } not in value.get("anyOf", ()):
                fields["properties"][name] = {"anyOf": [value, {"type": "null"}]}
        return described

    @classmethod
    def gathered(cls, data: JsonObject, names: MutableMapping[str, str]) -> JsonObject:
        """Return all fields of a body. `names` receives fields that stood elsewhere ->
        their names in the request."""
        return data

    @classmethod
    def _check_unknown(cls, name: str, value: Any, ignored: list[str] | None) -> None:
        """Raise the error for an unknown field that is not ignored."""
        if name in cls.refused:
            raise PydanticCustomError(
                "unsupported_parameter",
                "{why}",
                {"name": name, "why": cls.refused[name]},
            )
        if name in WITHOUT_EFFECT:
            return
        meant = cls.hint(
            name, thorough=len(ignored or ()) < MAX_IGNORED and len(name) <= 40
        )
        if meant is None:
            name, meant = next(cls._within(name, value), (name, None))
        if meant is not None or ignored is None or not cls.tolerant:
            raise PydanticCustomError(
                "unknown_parameter",
                "{why}",
                {"name": bounded(name), "why": meant or ""},
            )

    @classmethod
    def _within(
        cls, place: str, value: Any, depth: int = 4
    ) -> Iterator[tuple[str, str]]:
        """Yield the places in an unknown field that could be meant as constraints, and
        the fields they stand for."""
        if isinstance(value, list) and depth:
            for item in value:
                yield from cls._within(place, item, depth - 1)
        if not isinstance(value, dict) or not depth:
            return
        is_schema = "$schema" in value or (
            value.get("type") == "object" and "properties" in value
        )
        if (is_schema or value.get("type") in _TYPES) and (
            meant := cls.hint("response_format", thorough=False)
        ):
            yield place, meant
        for name, inner in value.items():
            below = f"{place}.{bounded(name, 60)}"
            if name not in _COMMON and (meant := cls.hint(name, thorough=False)):
                yield below, meant
            yield from cls._within(below, inner, depth - 1)

    @classmethod
    def hint(cls, name: str, thorough: bool = True) -> str | None:
        """Return the field that an unknown field probably stands for. `thorough`:
        recognize misspelt names and names of other APIs too."""
        if name in MISNAMED and "response_format" in names_of(cls):
            return MISNAMED[name]
        if not thorough:
            return _field_of(name, cls)
        similar = get_close_matches(name, [row.name for row in rows(cls)], 1, 0.8)
        return name_here(name, cls) or next(iter(similar), None) or _field_of(name, cls)


def plain(name: str) -> str:
    """Return a name in lower case, without underscores and hyphens."""
    return name[:100].lower().replace("_", "").replace("-", "")


@cache
def names_of(body: type[Body]) -> frozenset[Any]:
    """Return the names that the fields of a body have in requests."""
    names: set[Any] = set()
    for name, field in body.model_fields.items():
        alias = field.validation_alias or name
        names.update(getattr(alias, "choices", [alias]))
    return frozenset(names.difference(body.unused))


class Row(NamedTuple):
    """A field that holds a constraint."""

    name: str
    """The field's name in requests."""
    attribute: str
    kind: ConstraintKind | None


@cache
def rows(body: type[Body]) -> tuple[Row, ...]:
    """Return the rows of the table for the fields of a body."""
    table = []
    for attribute, field in body.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Kind):
                table.append(Row(field.alias or attribute, attribute, mark.name))
    return tuple(table)


def _field_of(name: str, body: type[Body]) -> str | None:
    """Return the constraint field that has this name, or that a part of the name points
    to."""
    kinds = [kind for mark, kind in MARKS.items() if mark in plain(name)]
    exact = [row.name for row in rows(body) if row.name == name]
    of_kind = [row.name for row in rows(body) if row.kind in kinds[:1]]
    return next(iter(exact + of_kind), None)


class JsonSchemaFormat(Body):
    """OpenAI's `response_format.json_schema`. The schema is always enforced, `strict`
    or not."""

    tolerant = False
    schema_: Schema = Field(default=None, alias="schema")
    """The schema, in Responses and llama.cpp beside the type."""
    # These fields have no effect.
    name: str | None = None
    description: str | None = None
    strict: bool | str | None = None

    @classmethod
    def hint(cls, name: str, thorough: bool = True) -> str | None:
        if name == "type":
            return "schema"
        return super().hint(name, thorough) or _field_of(name, ConstraintFields)


class ResponseFormat(JsonSchemaFormat):
    """OpenAI's `response_format`, and the forms of other servers."""

    type: Literal["text", "json_object", "json_schema", "json", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, Kind("json_schema")] = None
    value: Schema = None
    """The schema in requests of TGI's clients."""
    format: TagPart = None
    """The format of a structural tag."""
    structures: TagPart = None
    """The structures of a tag in vLLM's older form."""
    triggers: TagPart = None


class FormatHolder(Body):
    """An object with a `format`, in Responses and Messages. Fields of the format are
    refused beside `format`."""

    path: ClassVar[str]
    """The field's name."""

    @classmethod
    def hint(cls, name: str, thorough: bool = True) -> str | None:
        if name == "type" or _field_of(name, ConstraintFields):
            return f"{cls.path}.format"
        return None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the constraint fields."""

    tolerant = False
    prefix = "structured_outputs."
    json_: Schema = Field(default=None, alias="json")
    regex: Regex = None
    choice: Choice = None
    grammar: Grammar = None
    json_object: AnyObject = None
    structural_tag: Tag = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class ConstraintFields(Body):
    """The fields of a constraint in a body, and of its parts `nvext` and
    `sampling_params`."""

    # The names of this server, some of which SGLang shares, ...
    json_schema: Schema = None
    """A schema, or its JSON text."""
    json_object: AnyObject = None
    """The output is a JSON object."""
    regex: Regex = None
    """A regex that the whole output matches."""
    choice: Choice = None
    """The output is one of these texts."""
    grammar: Grammar = None
    """A grammar in Lark, or in GBNF/EBNF with a root rule."""
    structural_tag: Tag = None
    """Free text with constrained parts."""
    whitespace_pattern: str | None = None
    """Regex of whitespace between JSON tokens."""
    # ... of vLLM and of OpenAI ...
    structured_outputs: Annotated[StructuredOutputs | None, Kind(None)] = None
    response_format: Annotated[ResponseFormat | None, Kind(None)] = None
    # ... and SGLang's and vLLM's older names.
    ebnf: Grammar = None
    """SGLang's name of a grammar."""
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Choice = None
    guided_grammar: Grammar = None
    guided_whitespace_pattern: str | None = None


class NvextFields(ConstraintFields):
    """`nvext` of NVIDIA's servers."""

    prefix = "nvext."


class SglangFields(ConstraintFields):
    """`sampling_params` of SGLang."""

    prefix = "sampling_params."


SAME_MEANING = (
    ("messages", "prompt", "input", "inputs"),
    (
        "instructions",
        "system",
        "messages",
        "prompt",
        "system_prompt",
        "system_instruction",
    ),
    (
        *(
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "max_tokens_to_sample",
        ),
        *("max_length", "n_predict", "num_predict"),
    ),
    ("stop", "stop_sequences"),
    ("parameters", "input_schema"),
)
"""Groups of names that different APIs give to the same field."""
_GROUPS = {plain(name): group for group in reversed(SAME_MEANING) for name in group}


def name_here(name: str, body: type[Body]) -> str | None:
    """Return the name in `body` of a field that is spelled differently or comes from
    another API; None without one."""
    names = {plain(known): known for known in names_of(body)}
    group = map(plain, (name, *_GROUPS.get(plain(name), ())))
    return next((names[spelling] for spelling in group if spelling in names), None)
