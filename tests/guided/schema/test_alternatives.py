"""`oneOf` that the library keeps is enforced: what a library gets has no value of two
alternatives."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from guided.backends.llguidance.schema import LLGuidanceLowering
from guided.constraint import Constraint

INTEGER = {"type": "integer"}
SELF = {"$ref": "#/$defs/self"}


def with_fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def recursive(*parts: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {**SELF, "$defs": {"self": {"oneOf": [*parts], **beside}}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            recursive(
                with_fields(["car"], car=SELF),
                with_fields(["cdr"], cdr=SELF),
                {"type": "null"},
            ),
            [None, {"car": {"cdr": None}}, {"car": None, "more": 1}],
            [{"car": None, "cdr": None}, {}, {"car": {}}],
        ),
        (
            recursive(
                with_fields(
                    ["args"], op={"const": "and"}, args={"type": "array", "items": SELF}
                ),
                with_fields(["value"], op={"const": "is"}, value=INTEGER),
                **with_fields(["op"], op={"type": "string"}),
            ),
            [
                {"op": "and", "args": [{"op": "is", "value": 1}]},
                {"op": "is", "value": 1, "args": 2},
            ],
            [
                {"op": "or", "args": []},
                {"op": "is", "args": []},
                {"args": []},
                {"op": "and", "args": [{}]},
            ],
        ),
        (
            {
                "oneOf": [
                    {
                        **with_fields([], host={"type": "string"}),
                        "additionalProperties": False,
                    },
                    {
                        **with_fields([], path={"type": "string"}),
                        "additionalProperties": False,
                    },
                ]
            },
            [{"host": "a"}, {"path": "a"}],
            [{}, {"host": "a", "path": "a"}],
        ),
        (
            recursive(
                with_fields(["n"], n=INTEGER, next=SELF),
                with_fields(["n", "m"], n={"type": "string"}, m=SELF),
            ),
            [
                {"n": 1},
                {"n": 1, "next": {"n": 2}},
                {"n": "a", "m": {"n": 1}},
                {"n": 1, "m": 0},
            ],
            [{"n": "a"}, {"n": 1.5, "m": {"n": 1}}, {"m": {"n": 1}}],
        ),
        (
            {
                "$defs": {"a": with_fields([], a=INTEGER)},
                "oneOf": [{"$ref": "#/$defs/a"}, with_fields([], b=INTEGER)],
            },
            [{"a": "x"}, {"a": 1, "b": "x"}],
            [{}, {"a": 1}, {"a": "x", "b": "x"}],
        ),
        (
            recursive(
                with_fields(["kind"], kind={"type": "string"}, next=SELF),
                with_fields(
                    ["size"], kind={"enum": ["a", "b"]}, size=INTEGER, next=SELF
                ),
            ),
            [
                {"kind": "c", "size": 1},
                {"size": 1},
                {"kind": "a", "next": {"kind": "b"}},
            ],
            [{"kind": "a", "size": 1}, {"kind": 1}],
        ),
        (
            {
                "allOf": [
                    {"type": "integer", "minimum": 5, "maximum": 12},
                    *({"not": {"multipleOf": n}} for n in (2, 3)),
                ]
            },
            [5, 7, 11],
            [6, 9, 10, 13],
        ),
        (
            {"oneOf": [{"enum": [[1], [2, 3], [4]]}, {"enum": [[1], [5]]}]},
            [[2, 3], [4], [5]],
            [[1], [2]],
        ),
        (
            {
                "allOf": [
                    {"enum": [[1], [True], {"a": 1}]},
                    {"not": {"enum": [[True], {"a": True}]}},
                ]
            },
            [[1]],
            [[True], [2]],
        ),
    ],
    ids=str,
)
def test_one_of_is_enforced(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    lowering = LLGuidanceLowering(Constraint.json_schema(schema))
    lowered = Draft202012Validator(lowering.document())
    sent = Draft202012Validator(schema)
    assert not lowering.checked
    assert [sent.is_valid(value) for value in (*valid, *invalid)] == [True] * len(
        valid
    ) + [False] * len(invalid)
    assert [value for value in valid if not lowered.is_valid(value)] == []
    assert [value for value in invalid if lowered.is_valid(value)] == []


@pytest.mark.parametrize(
    "parts",
    [
        [with_fields([], a=SELF), with_fields([], b=SELF)],
        [
            with_fields([], a=SELF),
            {**with_fields([], a=SELF), "additionalProperties": False},
        ],
        [{"type": "array", "items": SELF}, {"type": "array", "items": INTEGER}],
        [
            with_fields([], a=SELF),
            {**with_fields([], b=INTEGER), "additionalProperties": False},
        ],
    ],
    ids=["no required property", "properties without a name", "items", "closed"],
)
def test_what_cannot_be_told_apart_stays_checked(parts: list[Any]) -> None:
    lowering = LLGuidanceLowering(Constraint.json_schema(recursive(*parts)))
    lowering.document()
    assert list(lowering.checked) == ["/$defs/self/oneOf"]


@pytest.mark.parametrize(
    ("counts", "open_objects", "numbers"),
    [
        ({"maxProperties": 1}, False, [0, 1]),
        ({"minProperties": 2}, False, [2, 3, 4]),
        ({"minProperties": 3, "maxProperties": 3}, False, [3]),
        ({"minProperties": 1, "maxProperties": 2}, True, [1, 2]),
    ],
    ids=str,
)
def test_numbers_of_properties_are_enforced(
    counts: dict[str, int], open_objects: bool, numbers: list[int]
) -> None:
    schema = {
        **with_fields([], a=INTEGER, b=INTEGER, c=INTEGER, d=INTEGER),
        "additionalProperties": open_objects,
    }
    lowering = LLGuidanceLowering(Constraint.json_schema({**schema, **counts}))
    lowered = Draft202012Validator(lowering.document())
    assert not lowering.checked
    for names in ("abcd", "dcba", "bdac"):
        assert [
            size
            for size in range(5)
            if lowered.is_valid(dict.fromkeys(names[:size], 1))
        ] == numbers


def test_properties_of_any_value_keep_an_object_closed() -> None:
    closed = {
        "patternProperties": {"^x-": {}, "^n": INTEGER},
        "additionalProperties": False,
    }
    lowering = LLGuidanceLowering(
        Constraint.json_schema({**with_fields([], a=INTEGER), **closed})
    )
    lowered = Draft202012Validator(lowering.document())
    assert not lowering.checked
    instances = [{"a": 1}, {"x-1": "b"}, {"n": 2}, {"n": "b"}, {"b": 1}]
    assert [lowered.is_valid(instance) for instance in instances] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_fractions_stay_where_a_schema_excludes_integers() -> None:
    """Beside other types, they are left out only where `oneOf` alone would add them."""
    lowering = LLGuidanceLowering(Constraint.json_schema({"not": INTEGER}))
    assert Draft202012Validator(lowering.document()).is_valid(1.5)
    assert lowering.checked
    either = {
        "oneOf": [with_fields(["a"], a=INTEGER), with_fields(["b"], a={}, b=INTEGER)]
    }
    lowering = LLGuidanceLowering(Constraint.json_schema(either))
    lowered = Draft202012Validator(lowering.document())
    assert not lowering.checked
    assert [lowered.is_valid({"a": a, "b": 1}) for a in (1, "c")] == [False, True]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            recursive(
                with_fields(["kind", "next"], kind={"const": "leaf"}, next=SELF),
                {
                    "oneOf": [
                        with_fields([], kind={"type": "string"}, next=SELF),
                        with_fields(["kind"], kind={}, size=INTEGER),
                    ]
                },
            ),
            [{"kind": "leaf", "next": {}}],
            [{"kind": "leaf", "next": {}, "size": "s"}],
        ),
        (
            recursive(
                with_fields(["kind"], kind={"const": "leaf"}),
                with_fields(["next"], next=SELF),
                **with_fields(["id", "next"]),
            ),
            [{"kind": "leaf", "id": 1, "next": {}}],
            [{"kind": "leaf", "id": 1}],
        ),
        (
            {
                **with_fields(["n"], n={"type": "string"}),
                "oneOf": [
                    {"type": "array"},
                    {"type": "array", "prefixItems": [INTEGER]},
                    {"type": "object"},
                ],
            },
            [{"n": "x"}],
            [{"n": 1}, []],
        ),
        (
            recursive(
                {"type": "number"},
                INTEGER,
                {"enum": [1.5, "a"]},
                with_fields(["a"], a=SELF),
            ),
            [2.5, "a", {"a": 2.5}],
            [2, 1.5, {"a": 2}],
        ),
        (
            {"oneOf": [{"type": ["number", "null"]}, {"allOf": [INTEGER]}]},
            [2.5, None],
            [2],
        ),
        (
            recursive(
                *(
                    with_fields(["kind"], kind={"const": f"k{n}"}, next=SELF)
                    for n in range(60)
                )
            ),
            [{"kind": "k7"}, {"kind": "k8", "next": {"kind": "k59"}}],
            [{"kind": "k60"}, {"kind": "k1", "next": {}}],
        ),
        (
            {
                **SELF,
                "$defs": {
                    "self": {
                        "anyOf": [
                            {
                                **with_fields([], z={}),
                                "propertyNames": {"pattern": "^[xy]"},
                            },
                            {
                                **with_fields(["x"]),
                                "anyOf": [
                                    {
                                        "properties": {"x": {}},
                                        "additionalProperties": {"type": "string"},
                                    }
                                ],
                                "patternProperties": {"^x": INTEGER},
                            },
                        ]
                    }
                },
            },
            [{"x": 1}],
            [{"z": 1}],
        ),
    ],
    ids=["inner", "part", "siblings", "numbers", "fractions", "many", "names"],
)
def test_alternatives_keep_valid_values_only(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    """What is not enforced is checked, and no valid value is lost."""
    lowering = LLGuidanceLowering(Constraint.json_schema(schema))
    lowered = Draft202012Validator(lowering.document())
    sent = Draft202012Validator(schema)
    assert [sent.is_valid(value) for value in (*valid, *invalid)] == [True] * len(
        valid
    ) + [False] * len(invalid)
    assert [value for value in valid if not lowered.is_valid(value)] == []
    assert (
        lowering.checked
        or [value for value in invalid if lowered.is_valid(value)] == []
    )


def test_sixty_listed_kinds_are_enforced() -> None:
    kinds = [
        with_fields(["kind"], kind={"const": f"k{n}"}, next=SELF) for n in range(60)
    ]
    lowering = LLGuidanceLowering(Constraint.json_schema(recursive(*kinds)))
    lowering.document()
    assert not lowering.checked
