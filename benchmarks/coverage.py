"""Write docs/coverage.md: what becomes of each keyword of JSON Schema, as the code says.

    python -m benchmarks.coverage [--check]

Each keyword has a small schema, a valid and an invalid instance. The command compiles the schema with each backend, and
has it decide the instances. With --check it compares the page instead of writing it: exit status 1 if it differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.default_model import checkpoint_path
from guided.backends import Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.check import check, vocabulary_of
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import GuidedError

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
_HEAD = """# Keywords of JSON Schema

What becomes of each keyword. This page is generated: `python -m benchmarks.coverage` compiles the sample of each row
and checks that a valid instance is accepted and an invalid one is not. Another schema with the same keyword may be
refused: `guided check FILE` says what becomes of yours.

*enforced*: the mask is exact while the output is written. *checked*: the library enforces a superset, and the whole
output is validated before it may end. *refused*: 400, with the keyword's pointer. *narrower*: some valid values are
never generated. The backends are llguidance and xgrammar, of which `auto` takes the first that does not refuse; each is
named where they differ. outlines and lm-format-enforcer, which `auto` does not use, enforce fewer keywords
(`guided/backends/few_keywords.py`) and check the others.

| keyword | sample | what becomes of it |
|---|---|---|
"""
_COLUMNS = candidates("json_schema")
"""The backends of `auto`."""
_OBJECT, _ARRAY = {"type": "object"}, {"type": "array"}
_NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}


class Sample(NamedTuple):
    """A schema that depends on one keyword, and instances of which the second violates it."""

    keyword: str
    schema: dict[str, Any]
    valid: Any
    invalid: Any


SAMPLES = [
    Sample("type", {"type": "integer"}, 1, "a"),
    Sample("type (several)", {"type": ["integer", "null"]}, None, "a"),
    Sample("enum", {"enum": ["a", 1, None]}, 1, 2),
    Sample("const", {"const": {"b": 1, "a": 2}}, {"b": 1, "a": 2}, {"b": 1}),
    Sample("properties", {**_OBJECT, "properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": "x"}),
    Sample("required", {**_OBJECT, "properties": _NUMBERS, "required": ["b"]}, {"b": 1}, {"a": 1}),
    Sample("additionalProperties", {**_OBJECT, "additionalProperties": {"type": "integer"}}, {"x": 1}, {"x": "a"}),
    Sample(
        "additionalProperties: false",
        {**_OBJECT, "properties": _NUMBERS, "additionalProperties": False},
        {"a": 1},
        {"x": 1},
    ),
    Sample(
        "patternProperties",
        {**_OBJECT, "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        {"x1": 1},
        {"x1": "a"},
    ),
    Sample(
        "patternProperties (overlapping)",
        {**_OBJECT, "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 3}}},
        {"xy": 4},
        {"xy": 2},
    ),
    Sample("propertyNames", {**_OBJECT, "propertyNames": {"pattern": "^[a-z]+$"}}, {"ab": 1}, {"A": 1}),
    Sample("minProperties", {**_OBJECT, "minProperties": 2}, {"a": 1, "b": 2}, {"a": 1}),
    Sample("maxProperties", {**_OBJECT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    Sample(
        "dependentRequired",
        {**_OBJECT, "properties": _NUMBERS, "dependentRequired": {"a": ["b"]}, "additionalProperties": False},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    Sample("dependentRequired (open)", {**_OBJECT, "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    Sample(
        "dependentSchemas",
        {
            **_OBJECT,
            "properties": _NUMBERS,
            "dependentSchemas": {"a": {"properties": {"b": {"minimum": 3}}}},
            "additionalProperties": False,
        },
        {"a": 1, "b": 3},
        {"a": 1, "b": 2},
    ),
    Sample(
        "unevaluatedProperties",
        {"allOf": [{"properties": _NUMBERS}], "type": "object", "unevaluatedProperties": False},
        {"a": 1},
        {"x": 1},
    ),
    Sample("items", {**_ARRAY, "items": {"type": "integer"}}, [1], ["a"]),
    Sample("prefixItems", {**_ARRAY, "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["a"]),
    Sample("minItems", {**_ARRAY, "minItems": 2}, [1, 2], [1]),
    Sample("maxItems", {**_ARRAY, "maxItems": 1}, [1], [1, 2]),
    Sample("uniqueItems", {**_ARRAY, "items": {"type": "integer"}, "uniqueItems": True}, [1, 2], [1, 1]),
    Sample(
        "uniqueItems (enum)", {**_ARRAY, "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ["a", "b"], ["a", "a"]
    ),
    Sample("contains", {**_ARRAY, "contains": {"type": "integer"}}, ["a", 1], ["a"]),
    Sample("minContains", {**_ARRAY, "contains": {"type": "integer"}, "minContains": 2}, [1, 1], [1]),
    Sample("maxContains", {**_ARRAY, "contains": {"type": "integer"}, "maxContains": 1}, [1], [1, 1]),
    Sample(
        "unevaluatedItems", {**_ARRAY, "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, [1], [1, 2]
    ),
    Sample("minLength", {"type": "string", "minLength": 2}, "ab", "a"),
    Sample("maxLength", {"type": "string", "maxLength": 2}, "ab", "abc"),
    Sample("pattern", {"type": "string", "pattern": "^[a-z]+$"}, "ab", "A"),
    Sample("pattern with \\p{…}", {"type": "string", "pattern": r"^\p{Lu}$"}, "A", "a"),
    Sample("pattern with lookaheads", {"type": "string", "pattern": r"^(?!-)(?=.*\d)[a-z\d-]+$"}, "a1", "-1"),
    Sample("pattern with other lookaround", {"type": "string", "pattern": "a(?=b)"}, "ab", "a"),
    *(
        Sample(f"format: {name}", {"type": "string", "format": name}, valid, "x x")
        for name, valid in {
            "date": "2024-02-29",
            "time": "10:00:00Z",
            "date-time": "2024-02-29T10:00:00Z",
            "duration": "P1D",
            "email": "a@b.cd",
            "hostname": "a.b",
            "ipv4": "1.2.3.4",
            "ipv6": "::1",
            "uri": "a:b",
            "uuid": "00000000-0000-4000-8000-000000000000",
        }.items()
    ),
    Sample("minimum, maximum (integer)", {"type": "integer", "minimum": 3, "maximum": 12}, 11, 13),
    Sample("minimum, maximum (number)", {"type": "number", "minimum": 0.5, "maximum": 12}, 11.5, 12.5),
    Sample("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, 4, 3),
    Sample("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, 2, 3),
    Sample("multipleOf", {"type": "integer", "multipleOf": 3}, 6, 7),
    Sample("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    Sample("anyOf", {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, True, "a"),
    Sample("oneOf (disjoint)", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "a", None),
    Sample(
        "oneOf (overlapping)", {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, 1, 3
    ),
    Sample("not (a type)", {"not": {"type": "string"}}, 1, "a"),
    Sample("not (a value)", {"type": "string", "not": {"const": "no"}}, "yes", "no"),
    Sample("not (an object)", {**_OBJECT, "not": {"required": ["a"]}}, {"b": 1}, {"a": 1}),
    Sample(
        "if, then, else",
        {
            **_OBJECT,
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
            "additionalProperties": False,
        },
        {"kind": "a", "n": 1},
        {"kind": "a"},
    ),
    Sample("$ref", {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, 1, "a"),
    Sample("$ref (recursive)", {**_ARRAY, "items": {"$ref": "#"}}, [[], [[]]], [1]),
    Sample("$anchor", {"$defs": {"n": {"$anchor": "x", "type": "integer"}}, "$ref": "#x"}, 1, "a"),
    Sample("$dynamicRef", {"$dynamicAnchor": "node", "type": "array", "items": {"$dynamicRef": "#node"}}, [[]], [1]),
]


class Row(NamedTuple):
    """What becomes of a sample."""

    keyword: str
    schema: dict[str, Any]
    verdicts: dict[str, str]
    """By the backend's name, in the order of `auto`."""

    def text(self) -> str:
        """Return the verdict, or those of the backends if they differ."""
        if len(set(self.verdicts.values())) == 1:
            return next(iter(self.verdicts.values()))
        return ", ".join(f"{backend}: {verdict}" for backend, verdict in self.verdicts.items())


def row(sample: Sample, backends: Backends) -> Row:
    """Compile a sample with each backend.

    Raises:
        AssertionError: a backend accepts the invalid instance.
    """
    verdicts = {name: _verdict(sample, name, backends) for name in _COLUMNS}
    return Row(sample.keyword, sample.schema, verdicts)


def _verdict(sample: Sample, name: str, backends: Backends) -> str:
    text = json.dumps(sample.schema)
    report = check(sample.keyword, text, backends, backend=name)
    if not report.accepted:
        return "refused"
    grammar = compile_with(backends, Constraint.json_schema(text), name).grammar
    assert not _accepts(grammar, backends, sample.invalid), f"{name} accepts what violates {sample.keyword}"
    how = "checked" if report.checked else "enforced"
    return how if _accepts(grammar, backends, sample.valid) else f"{how}, narrower"


def _accepts(grammar: CompiledGrammar, backends: Backends, value: Any) -> bool:
    """Whether `value` is an output, with or without spaces between its JSON tokens."""
    for separators in ((",", ":"), (", ", ": ")):
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(backends.vocabulary.encode(json.dumps(value, separators=separators)))
        except GuidedError:
            continue
        if matcher.is_accepting():
            return True
    return False


def page() -> str:
    """Return the page."""
    backends = Backends(vocabulary_of(checkpoint_path()))
    lines = []
    for each in (row(sample, backends) for sample in SAMPLES):
        sample = json.dumps(each.schema, ensure_ascii=False, separators=(",", ":")).replace("|", "\\|")
        lines.append(f"| {each.keyword} | `{sample}` | {each.text()} |")
    return _HEAD + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page, and write nothing")
    options = parser.parse_args(argv)
    text = page()
    if not options.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.name} is not what the code says: run python -m benchmarks.coverage")


if __name__ == "__main__":
    main()
