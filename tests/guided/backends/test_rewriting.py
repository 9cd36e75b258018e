"""What the canonical form rewrites is enforced by llguidance: a schema and an instance are drawn together."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from byte_vocabulary import BYTES, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import UUID4, AnyUrl, Base64Str, BaseModel, Field, IPvAnyAddress, IPvAnyNetwork, SecretStr

from guided.backends.llguidance import LLGuidanceBackend
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected, UnsupportedConstraint

BACKEND = LLGuidanceBackend(BYTES)


def accepts(schema: Any, value: Any) -> bool:
    matcher = BACKEND.compile(Constraint.json_schema(schema, strict_schema=True)).matcher()
    try:
        matcher.accept_tokens(tokens(json.dumps(value, ensure_ascii=False)))
    except TokenRejected:
        return False
    return matcher.is_accepting()


def decided(schema: Any, value: Any) -> bool | None:
    """Return whether `value` is accepted; None if the schema is refused as one that the library can't enforce."""
    try:
        return accepts(schema, value)
    except UnsupportedConstraint:
        return None
    except InvalidConstraint:
        return False


_VALUES = st.sampled_from([None, True, 0, 1, 2.5, "", "a", "b", "ab", [], [1], ["a", 1]])
_PARTS = st.sampled_from(
    [
        *({"type": kind} for kind in ("null", "boolean", "number", "integer", "string", "array")),
        *({"const": value} for value in (None, True, 1, "a", "ab", [1])),
        {"enum": ["a", "b", 1]},
        {"minimum": 1},
        {"type": "string", "minLength": 1},
        {"pattern": "a"},
        {"pattern": "^a+b?$"},
        {"minItems": 1},
        {"not": {"const": "b"}},
        {"items": {"type": "integer"}},
    ]
)
_NAMES = st.sampled_from("xyz")
_OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(_NAMES, _PARTS, max_size=2),
        "required": st.lists(_NAMES, max_size=2, unique=True),
        "additionalProperties": st.booleans(),
        "maxProperties": st.integers(1, 2),
    },
)
_CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "not": _OBJECTS,
        "if": _OBJECTS,
        "then": _OBJECTS,
        "else": _OBJECTS,
        "oneOf": st.lists(_OBJECTS, min_size=2, max_size=3),
        "dependentRequired": st.dictionaries(_NAMES, st.lists(_NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(_NAMES, _OBJECTS, max_size=1),
        "propertyNames": st.sampled_from(
            [
                {"enum": ["x", "y"]},
                {"pattern": "^[xz]$"},
                {"not": {"const": "x"}},
                {"type": "object"},
                {"anyOf": [{"type": "null"}, {"const": "y"}]},
            ]
        ),
        "minProperties": st.integers(1, 2),
    },
)


_WRITTEN = ("2020-01-01", "2020-01-01T00:00:00Z", "a@b.de", "https://a.de", "1.2.3.4", "::1", "/a", "", "x")


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"oneOf": [{"format": "date"}, {"format": "date-time"}]}, _WRITTEN[:2]),
        ({"oneOf": [{"format": "email"}, {"format": "uri"}]}, _WRITTEN[2:4]),
        ({"oneOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, _WRITTEN[4:6]),
        ({"oneOf": [{"format": "uri"}, {"pattern": "^/"}]}, ("https://a.de", "/a")),
        ({"not": {"format": "date"}}, _WRITTEN[1:]),
    ],
)
def test_formats_exclude_each_other(schema: Any, valid: Sequence[str]) -> None:
    accepted = [text for text in _WRITTEN if decided({"type": "string", **schema}, text)]
    assert accepted == list(valid)


@settings(max_examples=60, deadline=None)
@given(_OBJECTS, _CONDITIONS, st.lists(st.dictionaries(_NAMES, _VALUES, max_size=3), min_size=1, max_size=6))
def test_conditions_on_objects(base: Any, conditions: Any, values: list[Any]) -> None:
    names = {"x": True, "y": True, "z": True}
    schema = {"type": "object", **base, **conditions, "properties": {**names, **base.get("properties", {})}}
    validator = Draft202012Validator(schema)
    for value in values:
        accepted = decided(schema, dict(sorted(value.items())))
        if accepted:
            assert validator.is_valid(value), value
        elif accepted is False:
            assert not validator.is_valid(value), value


@settings(max_examples=50, deadline=None)
@given(_PARTS, _PARTS, _VALUES)
def test_conditions_on_any_value(one: Any, other: Any, value: Any) -> None:
    for schema in (
        {"not": one},
        {**one, "not": other},
        {"oneOf": [one, other]},
        {"if": one, "then": other, "else": False},
    ):
        validator = Draft202012Validator(schema)
        accepted = decided(schema, value)
        assert accepted in (None, validator.is_valid(value)) or value == 1.0


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "not": {"enum": ["a", "abc"]}}, ["", "ab", "abcd", "b", "aé"], ["a", "abc"]),
        ({"type": "string", "not": {"pattern": "^(ab)*$"}}, ["a", "aba", "\n"], ["", "ab", "abab"]),
        ({"minProperties": 1, "properties": {"a": {}, "b": {}}, "type": "object"}, [{"a": 1}, {"c": 1}], [{}]),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "maxLength": 3}},
            [{}, {"abc": 1}],
            [{"abca": 1}, {"d": 1}],
        ),
        ({"const": {"b": [1, {"z": 1, "a": 2}], "a": None}}, [{"b": [1, {"z": 1, "a": 2}], "a": None}], [{"b": 1}]),
        (
            {
                "properties": {"a": {"type": "array"}},
                "patternProperties": {".*": {"$ref": "#/$defs/t"}},
                "type": "object",
            }
            | {"$defs": {"t": {"type": ["array", "null"], "items": {"$ref": "#/$defs/t"}}}},
            [{"a": [None]}, {"b": None}],
            [{"a": None}, {"a": [1]}, {"b": 1}],
        ),
        (
            {"$defs": {"t": {"type": "object", "additionalProperties": {"$ref": "#/$defs/t", "minProperties": 1}}}}
            | {"$ref": "#/$defs/t"},
            [{}],
            [{"a": {}}],
        ),
    ],
)
def test_rewritten_for_llguidance(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [accepts(schema, value) for value in good] == [True] * len(good)
    assert [accepts(schema, value) for value in bad] == [False] * len(bad)


class Everyday(BaseModel):
    """The types that pydantic's users write, apart from `set` (its `uniqueItems` is checked at the end)."""

    path: Path
    secret: SecretStr
    blob: bytes
    id4: UUID4
    encoded: Base64Str
    color: Annotated[str, Field(json_schema_extra={"format": "color"})]
    address: IPvAnyAddress
    network: IPvAnyNetwork
    url: AnyUrl
    mail: Annotated[str, Field(json_schema_extra={"format": "name-email"})]
    when: datetime.datetime
    lasts: datetime.timedelta
    price: Decimal
    pair: tuple[int, str]
    maybe: int | None = None
    kind: Literal["a", "b"] = "a"
    counts: dict[str, int] = {}


def test_everyday_pydantic_types_compile() -> None:
    constraint = Constraint.json_schema(Everyday.model_json_schema())
    BACKEND.compile(constraint)
    ignored = {pointer.split("/")[2] for pointer in constraint.not_enforced}
    assert ignored == {"path", "secret", "blob", "encoded", "color", "address", "network", "mail", "id4"}
