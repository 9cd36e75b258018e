"""Structural tags: what is accepted, what is refused, and where the error is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import (
    ConstraintTooLarge,
    InvalidConstraint,
    TokenRejected,
    UnsupportedConstraint,
)
from guided.limits import LIMITS
from guided.vocabulary import Vocabulary

TEXT: dict[str, Any] = {"type": "any_text"}
TAG: dict[str, Any] = {"type": "tag", "begin": "<a>", "content": TEXT, "end": "</a>"}


def of(form: Any, **fields: Any) -> Constraint:
    return Constraint.structural_tag(
        {"type": "structural_tag", "format": form}, **fields
    )


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], **fields}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "plus", "content": TAG},
        {
            "type": "dispatch",
            "rules": [["<x", {"type": "regex", "pattern": "a"}]],
            "loop": False,
        },
        {
            **TAG,
            "begin": {"type": "token", "token": "<|x|>"},
            "end": [{"type": "token", "token": 7}, "x"],
        },
        {
            "type": "json_schema",
            "json_schema": {"type": "integer"},
            "style": "json",
            "any_order": False,
        },
        {
            "type": "json_schema",
            "json_schema": {"type": "object"},
            "style": "kimi_k3_xml",
            "excludes": ["<|open|>"],
        },
        {**TAG, "content": {"type": "any_tokens", "exclude_tokens": ["</a>"]}},
        triggered(at_least_one=True, stop_after_first=True, excludes=["x"]),
    ],
)
def test_formats(form: dict[str, Any]) -> None:
    constraint = of(form)
    assert constraint.kind == "structural_tag"
    assert Constraint.structural_tag(constraint.source) == constraint


def test_whitespace_is_that_of_its_schemas() -> None:
    compact = of({"type": "json_object"}, whitespace="")
    assert compact.key != of({"type": "json_object"}).key


@pytest.mark.parametrize(
    ("form", "pointer", "words"),
    [
        ({"type": "nonesuch"}, "/format/type", ["nonesuch", "any_text"]),
        ({"type": "const_string", "value": 1}, "/format/value", ["`str`"]),
        ({"type": "any_text", "exclude": ["x"]}, "/format", ["`exclude`"]),
        (
            {"type": "sequence", "elements": [TEXT, {"type": "x"}]},
            "/format/elements/1/type",
            ["'x'"],
        ),
        (
            {**TAG, "content": {"type": "regex", "pattern": ""}},
            "/format/content/pattern",
            ["empty"],
        ),
        (
            {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "x"}}},
            "/format/content/json_schema/type",
            [],
        ),
        (
            {"type": "json_schema", "json_schema": {}, "style": "x_xml"},
            "/format/style",
            ["x_xml", "qwen_xml"],
        ),
        (
            {"type": "json_schema", "json_schema": {}, "excludes": ["x"]},
            "/format/excludes",
            ["style"],
        ),
        (triggered(triggers=["<b"]), "/format/tags/0/begin", ["never can be produced"]),
        (
            triggered(triggers=["<a", "<a>"]),
            "/format",
            ["never can be produced", "contains"],
        ),
        (
            {**TAG, "end": {"type": "token", "token": 2**61}},
            "/format/end/token",
            ["<= 2147483647"],
        ),
        (
            {
                "type": "dispatch",
                "rules": [["a" * 500 + str(number), TEXT] for number in range(1_000)],
            },
            "/format",
            ["too long"],
        ),
    ],
)
def test_errors_say_where(form: Any, pointer: str, words: list[str]) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        of(form, param="response_format")
    assert (caught.value.param, caught.value.pointer) == ("response_format", pointer)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("tag", "pointer"),
    [
        ([], ""),
        ({"type": "structural_tag", "format": TEXT, "triggers": []}, ""),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "<a"}],
                "triggers": ["<a"],
            },
            "/structures/0",
        ),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "a", "schema": {}, "end": ""}],
                "triggers": ["b"],
            },
            "/format/tags/0/begin",
        ),
        ({"structures": [], "triggers": []}, "/triggers"),
        ("{", None),
    ],
)
def test_documents_that_are_none(tag: Any, pointer: str | None) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        Constraint.structural_tag(tag)
    assert caught.value.pointer == pointer


def forms(size: int) -> list[dict[str, Any]]:
    """Return a format of each kind that has a limit: `size` is in alternatives."""
    deep: dict[str, Any] = TEXT
    for _ in range(size // 32):
        deep = {"type": "optional", "content": deep}
    tags = [
        {"begin": f"<{index}>", "content": TEXT, "end": "</>"}
        for index in range(size // 4)
    ]
    return [
        deep,
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": str(index)} for index in range(size)
            ],
        },
        {"type": "repeat", "min": 0, "max": 5 * size, "content": TEXT},
        {
            "type": "json_schema",
            "json_schema": {"anyOf": [{"const": index} for index in range(size)]},
        },
        {
            "type": "triggered_tags",
            "triggers": [tag["begin"] for tag in tags],
            "tags": tags,
        },
    ]


def test_limits() -> None:
    for within, over in zip(
        forms(LIMITS.max_alternatives), forms(3 * LIMITS.max_alternatives), strict=True
    ):
        of(within)
        with pytest.raises(ConstraintTooLarge):
            of(over)
    many = {
        "format": {"type": "sequence", "elements": [TEXT] * (LIMITS.max_values // 2)}
    }
    with pytest.raises(ConstraintTooLarge, match="values"):
        Constraint.structural_tag(json.dumps(many))
    with pytest.raises(ConstraintTooLarge, match="bytes"):
        of({"type": "const_string", "value": "x" * LIMITS.max_constraint_bytes})


FAMILIES = [
    *(
        "llama",
        "kimi",
        "kimi_k3",
        "deepseek_r1",
        "deepseek_v3_1",
        "qwen_3_5",
        "qwen_3_coder",
        "mimo",
        "qwen_3",
    ),
    *(
        "harmony",
        "deepseek_v3_2",
        "minimax",
        "minimax_m3",
        "glm_4_7",
        "deepseek_v4",
        "deepseek_v4_1",
        "cohere",
        "exaone",
    ),
]


def arguments(style: str, schema: Any) -> Constraint:
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    return of({"type": "tag", "begin": "<f>", "content": content, "end": "</f>"})


NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"type": "string"}},
}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tags_of_all_families(
    backends: Backends, family: str, backend: str
) -> None:
    from xgrammar.builtin_structural_tag import get_model_structural_tag

    tools = [
        {"type": "function", "function": {"name": name, "parameters": NAMED}}
        for name in ("f", "f_2")
    ]
    for choice, reasoning in (
        ("auto", "enabled"),
        ("required", "auto"),
        ("auto", "disabled"),
    ):
        tag = get_model_structural_tag(family, tools, choice, reasoning)
        backends[backend].compile(Constraint.structural_tag(tag.model_dump()))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("style", "schema", "output", "allowed"),
    [
        ("qwen_xml", NAMED, "<parameter=a>\n3\n</parameter>\n", True),
        ("qwen_xml", NAMED, "<parameter=a>\n2\n</parameter>\n", False),
        ("qwen_xml", NAMED, '<parameter=b>\n"</x>\n\n</parameter>\n', True),
        ("qwen_xml", {**NAMED, "required": ["a"]}, "", False),
        (
            "deepseek_xml",
            NAMED,
            '<\uff5cDSML\uff5cparameter name="a" string="true">3',
            False,
        ),
        (
            "glm_xml",
            {"type": "object"},
            "<arg_key>x y</arg_key><arg_value>z</arg_value>",
            True,
        ),
        (
            "mimo_xml",
            {"properties": {"a": {"type": "string", "pattern": "^x+$"}}},
            "<parameter=a>xx</parameter>",
            True,
        ),
        (
            "mimo_xml",
            {
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"const": "y"}},
            },
            "<parameter=a>y",
            None,
        ),
    ],
)
def test_arguments_in_a_style_are_enforced(
    backends: Backends,
    vocabulary: Vocabulary,
    backend: str,
    style: str,
    schema: Any,
    output: str,
    allowed: bool | None,
) -> None:
    matcher = (
        backends[backend]
        .compile(arguments(style, {"type": "object", **schema}))
        .matcher()
    )
    text = f"<f>{output}" + ("" if allowed is None else "</f>")
    if allowed is False:
        with pytest.raises(TokenRejected):
            matcher.accept_tokens(vocabulary.encode(text))
    else:
        matcher.accept_tokens(vocabulary.encode(text))
        assert matcher.is_accepting() is (allowed is True)


@pytest.mark.parametrize(
    ("style", "schema", "pointer"),
    [
        ("qwen_xml", {**NAMED, "minProperties": 1}, "/minProperties"),
        ("qwen_xml", {"type": "object", "properties": {"<": {}}}, ""),
        ("qwen_xml", {"type": "array"}, ""),
        (
            "cohere_xml",
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            "/properties/a/uniqueItems",
        ),
    ],
)
def test_what_a_style_cannot_enforce_is_refused(
    backends: Backends, style: str, schema: Any, pointer: str
) -> None:
    for backend in ("llguidance", "xgrammar"):
        with pytest.raises(UnsupportedConstraint) as caught:
            backends[backend].compile(arguments(style, schema))
        assert caught.value.pointer == "/format/content/json_schema" + pointer


def test_what_masks_leave_out_of_arguments_is_checked(
    backends: Backends, vocabulary: Vocabulary
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
    }
    grammar = backends["llguidance"].compile(arguments("glm_xml", schema))
    assert grammar.checked == ("/format/content/json_schema/properties/a/uniqueItems",)
    for written, valid in (("[1, 2]", True), ("[1, 1]", False)):
        matcher = grammar.matcher()
        matcher.accept_tokens(
            vocabulary.encode(
                f"<f><arg_key>a</arg_key><arg_value>{written}</arg_value></f>"
            )
        )
        assert matcher.is_accepting() is valid
