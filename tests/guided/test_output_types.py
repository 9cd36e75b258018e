"""Python types as constraints, and answers parsed back."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import BaseModel, field_validator
from typing_extensions import TypedDict

from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.output_types import constraint_for, parse_as


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


class Movie(TypedDict):
    title: str
    year: int


@pytest.mark.parametrize(
    ("output_type", "text", "value"),
    [
        (
            Person,
            '{"name": "Ada", "color": "red", "price": 1.5}',
            Person(name="Ada", color=Color.RED, price=Decimal("1.5")),
        ),
        (Point, '{"x": 3, "tags": ["a"]}', Point(3, ["a"])),
        (Movie, '{"title": "M", "year": 1931}', {"title": "M", "year": 1931}),
        (Level, "2", Level.HIGH),
        (Literal[1, "a"], '"a"', "a"),
        (list[Point], '[{"x": 1, "tags": []}]', [Point(1, [])]),
        (int | None, "null", None),
    ],
)
def test_a_type_is_a_schema_and_parses_its_answers(output_type: Any, text: str, value: Any) -> None:
    constraint = constraint_for(output_type, whitespace="")
    assert (constraint.kind, constraint.whitespace) == ("json_schema", "")
    assert parse_as(output_type, text) == value


@pytest.mark.parametrize(
    ("output_type", "value"), [(Color, Color.DARK_BLUE), (Literal["red", "dark blue"], "dark blue")]
)
def test_strings_are_a_choice_of_plain_texts(output_type: Any, value: Any) -> None:
    assert constraint_for(output_type) == Constraint.choice(["red", "dark blue"])
    assert parse_as(output_type, "dark blue") == value


def test_a_decimal_needs_no_lookaround() -> None:
    assert "?!" not in constraint_for(Person).source


def test_a_validator_may_reject_what_the_schema_allows() -> None:
    with pytest.raises(ValueError, match="capital"):
        parse_as(Person, '{"name": "ada", "color": "red"}')


@pytest.mark.parametrize("output_type", [object(), Any.__class__.__call__, type("Plain", (), {})])
def test_what_is_no_type_is_refused(output_type: Any) -> None:
    with pytest.raises(InvalidConstraint) as refusal:
        constraint_for(output_type)
    assert refusal.value.param == "output_type"


def test_without_pydantic_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(InvalidConstraint, match="pip install pydantic"):
        constraint_for(type("Unseen", (), {"__annotations__": {"x": int}}))


class TestTermsOfOutlines:
    """Against the package if it is installed, else against the part of its interface that is used (outlines 1.3)."""

    @pytest.fixture
    def dsl(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        try:
            return pytest.importorskip("outlines.types.dsl")
        except pytest.skip.Exception:
            module = _recorded_interface()
            monkeypatch.setitem(sys.modules, "outlines", ModuleType("outlines"))
            monkeypatch.setitem(sys.modules, "outlines.types", ModuleType("outlines.types"))
            monkeypatch.setitem(sys.modules, "outlines.types.dsl", module)
            return module

    def test_a_schema(self, dsl: Any) -> None:
        term = dsl.JsonSchema(json.dumps({"type": "integer"}), whitespace_pattern="")
        assert constraint_for(term) == Constraint.json_schema({"type": "integer"}, whitespace="")
        assert parse_as(term, "3") == 3

    def test_a_grammar(self, dsl: Any) -> None:
        assert constraint_for(dsl.CFG('start: "a"')) == Constraint.grammar('start: "a"')

    def test_a_regex(self, dsl: Any) -> None:
        term = dsl.Regex("[0-9]+") + dsl.String(" €")
        constraint = constraint_for(term)
        assert constraint.kind == "regex"
        assert constraint.source.startswith("([0-9]+)")
        assert parse_as(term, "12 €") == "12 €"

    def test_a_term_without_a_regex(self, dsl: Any) -> None:
        with pytest.raises(InvalidConstraint, match="no regex"):
            constraint_for(dsl.Regex("a") + dsl.CFG('start: "a"'))


def _recorded_interface() -> ModuleType:
    """The classes of `outlines.types.dsl` 1.3 that are used here, with its attributes and its `to_regex`."""
    module: Any = ModuleType("outlines.types.dsl")
    source = """
import re

class Term:
    def __add__(self, other): return Sequence([self, other])

class String(Term):
    def __init__(self, value): self.value = value

class Regex(Term):
    def __init__(self, pattern): self.pattern = pattern

class CFG(Term):
    def __init__(self, definition): self.definition = definition

class JsonSchema(Term):
    def __init__(self, schema, whitespace_pattern=None): self.schema, self.whitespace_pattern = schema, whitespace_pattern

class Sequence(Term):
    def __init__(self, terms): self.terms = terms

def to_regex(term):
    if isinstance(term, String): return re.escape(term.value)
    if isinstance(term, Regex): return f"({term.pattern})"
    if isinstance(term, Sequence): return "".join(map(to_regex, term.terms))
    raise TypeError(f"Cannot convert object {term!r} to a regular expression.")
"""
    exec(source, module.__dict__)
    return module  # type: ignore[no-any-return]
