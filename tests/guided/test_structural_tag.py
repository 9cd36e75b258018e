"""Structural tags: what is accepted, what is refused, and where the error is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, InvalidConstraint
from guided.limits import Limits

TEXT: dict[str, Any] = {"type": "any_text"}
TAG: dict[str, Any] = {"type": "tag", "begin": "<a>", "content": TEXT, "end": "</a>"}


def of(form: Any, **fields: Any) -> Constraint:
    return Constraint.structural_tag({"type": "structural_tag", "format": form}, **fields)


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], **fields}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "plus", "content": TAG},
        {"type": "dispatch", "rules": [["<x", {"type": "regex", "pattern": "a"}]], "loop": False},
        {**TAG, "begin": {"type": "token", "token": "<|x|>"}, "end": [{"type": "token", "token": 7}, "x"]},
        {"type": "json_schema", "json_schema": {"type": "integer"}, "style": "json", "any_order": False},
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
        ({"type": "const_string", "value": "\x00"}, "/format/value", ["x00"]),
        ({"type": "any_text", "max_tokens": -1}, "/format/max_tokens", [">= 0"]),
        ({"type": "any_text", "exclude": ["x"]}, "/format", ["`exclude`"]),
        ({"type": "sequence", "elements": [TEXT, {"type": "x"}]}, "/format/elements/1/type", ["'x'"]),
        ({**TAG, "content": {"type": "regex", "pattern": ""}}, "/format/content/pattern", ["empty"]),
        (
            {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "x"}}},
            "/format/content/json_schema/type",
            [],
        ),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "/format/style", ["qwen_xml"]),
        (triggered(triggers=["<b"]), "/format/tags/0/begin", ["never can be produced"]),
        (triggered(triggers=["<a", "<b"]), "/format", ["no tag begins", "<b"]),
        (triggered(triggers=["<a", "<a>"]), "/format", ["never can be produced", "contains"]),
        (triggered(at_least_one="yes"), "/format/at_least_one", ["`bool`"]),
        ({**TAG, "end": {"type": "token", "token": 2**61}}, "/format/end/token", ["<= 2147483647"]),
        (
            {"type": "dispatch", "rules": [["a" * 500 + str(number), TEXT] for number in range(1_000)]},
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
        ({"type": "json"}, "/type"),
        ({"type": "structural_tag", "format": TEXT, "triggers": []}, ""),
        ({"type": "structural_tag", "structures": [{"begin": "<a"}], "triggers": ["<a"]}, "/structures/0"),
        (
            {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]},
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


def test_limits() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(40):
        deep = {"type": "optional", "content": deep}
    many = {"type": "or", "elements": [{"type": "const_string", "value": str(index)} for index in range(50)]}
    repeated = {"type": "repeat", "min": 0, "max": 500, "content": TEXT}
    schema = {"type": "json_schema", "json_schema": {"anyOf": [{"const": index} for index in range(50)]}}
    tags = [{"begin": f"<{index}>", "content": TEXT, "end": "</>"} for index in range(20)]
    triggered = {"type": "triggered_tags", "triggers": [tag["begin"] for tag in tags], "tags": tags}
    small = Limits(max_nesting=30, max_alternatives=40, max_repetition=100)
    for form in (deep, many, repeated, schema, triggered):
        constraint = of(form)
        with pytest.raises(ConstraintTooLarge):
            of(form, limits=small)
        with pytest.raises(ConstraintTooLarge):
            constraint.check(small)
    with pytest.raises(ConstraintTooLarge):
        Constraint.structural_tag(json.dumps({"type": "structural_tag", "format": many}), limits=Limits(max_values=20))
    with pytest.raises(ConstraintTooLarge):
        of(many, limits=Limits(max_constraint_bytes=100))
