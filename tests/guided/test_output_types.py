"""Python types as constraints, and answers parsed back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import pytest
from byte_vocabulary import BYTES, accepts
from outlines import grammars, types
from outlines.types import JsonSchema, dsl
from pydantic import BaseModel, field_validator

from guided.backends import Backends, candidates
from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.fields.output_types import constraint_for, parse_as
from guided.masks.compilation import compile_constraint


class Color(Enum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


class Person(BaseModel):
    name: str
    color: Color
    price: Decimal = Decimal(0)

    @field_validator("name")
    @classmethod
    def _capital(cls, name: str) -> str:
        if not name[:1].isupper():
            raise ValueError("a name begins with a capital")
        return name


@dataclass
class Point:
    x: int
    tags: list[str]


@pytest.mark.parametrize(
    ("output_type", "text", "value"),
    [
        (
            Person,
            '{"name": "Ada", "color": "red", "price": 1.5}',
            Person(name="Ada", color=Color.RED, price=Decimal("1.5")),
        ),
        (Point, '{"x": 3, "tags": ["a"]}', Point(3, ["a"])),
        (Level, "2", Level.HIGH),
        (Literal[1, "a"], '"a"', "a"),
        (list[Point], '[{"x": 1, "tags": []}]', [Point(1, [])]),
        (int | None, "null", None),
    ],
)
def test_a_type_is_a_schema_and_parses_its_answers(
    output_type: Any, text: str, value: Any
) -> None:
    constraint = constraint_for(output_type, whitespace="")
    assert (constraint.kind, constraint.whitespace) == ("json_schema", "")
    assert parse_as(output_type, text) == value


@pytest.mark.parametrize(
    ("output_type", "value"),
    [(Color, Color.DARK_BLUE), (Literal["red", "dark blue"], "dark blue")],
)
def test_strings_are_a_choice_of_plain_texts(output_type: Any, value: Any) -> None:
    assert constraint_for(output_type) == Constraint.choice(["red", "dark blue"])
    assert parse_as(output_type, "dark blue") == value


def test_a_decimal_needs_no_lookaround() -> None:
    assert "?!" not in constraint_for(Person).source


@pytest.mark.parametrize(
    "output_type", [object(), Any.__class__.__call__, type("Plain", (), {})]
)
def test_what_is_no_type_is_refused(output_type: Any) -> None:
    with pytest.raises(InvalidConstraint) as refusal:
        constraint_for(output_type)
    assert refusal.value.param == "output_type"


BACKENDS = Backends(BYTES)


def allows(constraint: Constraint, text: str) -> bool:
    """Whether a backend of "auto" allows `text` as a whole."""
    return accepts(
        compile_constraint(BACKENDS, constraint, candidates(constraint.kind)).grammar,
        text,
    )


@pytest.mark.parametrize(
    ("term", "valid", "invalid"),
    [
        (dsl.String("a.b (c)"), ["a.b (c)"], ["axb (c)"]),
        (types.regex("(?i)yes"), ["YES", "yes"], ["no"]),
        (types.regex("a|b") + "." + types.regex("c|d"), ["a.c", "b.d"], ["a", "axc"]),
        ("none" | types.digit, ["1", "none"], ["1none"]),
        (types.either("a+", types.integer), ["a+", "-12"], ["aa"]),
        ("x" + types.at_most(2, types.digit), ["x", "x12"], ["x123"]),
        (
            types.uuid4,
            ["123e4567-e89b-42d3-a456-426614174000"],
            ["123e4567-e89b-12d3-a456-426614174000"],
        ),
    ],
    ids=repr,
)
def test_a_term_is_a_regex(term: Any, valid: list[str], invalid: list[str]) -> None:
    constraint = constraint_for(term)
    assert constraint.kind == "regex"
    for text in valid:
        assert allows(constraint, text), text
        assert parse_as(term, text) == text
    assert not any(allows(constraint, text) for text in invalid)


@pytest.mark.parametrize(
    "schema",
    [Person.model_json_schema(), json.dumps(Person.model_json_schema()), Person],
    ids=["dict", "str", "model"],
)
def test_a_term_is_a_schema(schema: Any) -> None:
    assert constraint_for(JsonSchema(schema)) == Constraint.json_schema(
        Person.model_json_schema()
    )
    text = '{"name": "Ada", "color": "dark blue"}'
    assert parse_as(JsonSchema(schema), text) == {"name": "Ada", "color": "dark blue"}


def test_the_whitespace_of_a_schema() -> None:
    term = JsonSchema({"type": "integer"}, whitespace_pattern=" ?")
    assert constraint_for(term) == Constraint.json_schema(
        {"type": "integer"}, whitespace=" ?"
    )
    assert constraint_for(term, whitespace="").whitespace == ""
    with pytest.raises(InvalidConstraint, match="whitespace_pattern"):
        constraint_for(types.digit, whitespace="")


def test_a_term_is_a_grammar() -> None:
    constraint = constraint_for(types.cfg(grammars.arithmetic))
    assert constraint == Constraint.grammar(grammars.arithmetic)
    assert allows(constraint, "(1 + 2.5) * -3")
    assert not allows(constraint, "1 +* 2")


@pytest.mark.parametrize(
    ("term", "says"),
    [
        (types.digit + types.cfg('start: "a"'), "no regex"),
        (types.regex("(?i)a") + "b", "flags"),
        (
            JsonSchema({"type": "array", "uniqueItems": True}) | "none",
            "within another term",
        ),
        (JsonSchema({"$ref": "https://example.org/schema"}), "ref"),
    ],
)
def test_a_term_that_is_refused(term: Any, says: str) -> None:
    with pytest.raises(InvalidConstraint, match=says):
        BACKENDS["llguidance"].compile(constraint_for(term))


def test_terms_as_fields_of_a_model() -> None:
    class Event(BaseModel):
        year: types.regex("[0-9]{4}")
        place: dsl.String("at ") + types.either("a.b", "c-d") + types.optional(" now")

    constraint = constraint_for(Event)
    text = '{"year": "2026", "place": "at c-d now"}'
    assert allows(constraint, text)
    assert parse_as(Event, text).year == "2026"
    assert not allows(constraint, text.replace("2026", "20267"))
    assert not allows(constraint, text.replace("at", "as"))
