"""JSON-Schema-Test-Suite: a schema is refused, or each of its instances is accepted as the suite says.

The data are not part of the project: `shared/data`, next to the checkout. The required tests of both drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from byte_vocabulary import BYTES, tokens
from json_orders import reordered

from guided.backends import Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.compilation import compile_constraint
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, TokenRejected

SUITE = Path(__file__).parents[3] / "shared" / "data" / "json-schema-test-suite" / "tests"
DIALECTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
LEAST_COMPILED = {"draft7": 234, "draft2020-12": 347}
"""Of 257 and 383 groups. The others refer to other documents, or no value satisfies them."""

INTEGER = "an integer is written without a fraction: `1.0` gains a model nothing"
ORDER = "properties are generated in the order of the schema"
FORMAT = "`format` is enforced, where the specification makes it an annotation by default"
VOCABULARY = "a meta-schema without the vocabulary of validation is none that is known: 2020-12 applies"
ALTERNATIVES = "`unevaluatedProperties` next to `anyOf` closes each alternative, so values of two of them are excluded"
REJECTED = {
    ("allOf", "allOf", "allOf"): ORDER,
    ("allOf", "allOf with base schema", "valid"): ORDER,
    ("const", "const with object", "same object with different property order is valid"): ORDER,
    ("const", "const with 0 does not match other zero-like types", "float zero is valid"): INTEGER,
    ("const", "const with 1 does not match true", "float one is valid"): INTEGER,
    ("const", "const with -2.0 matches integer and float types", "float -2.0 is valid"): INTEGER,
    ("const", "float and integers are equal up to 64-bit representation limits", "float is valid"): INTEGER,
    ("dependencies", "dependencies", "with dependency"): ORDER,
    ("dependencies", "multiple dependencies", "with dependencies"): ORDER,
    ("dependentRequired", "single dependency", "with dependency"): ORDER,
    ("dependentRequired", "multiple dependents required", "with dependencies"): ORDER,
    ("dependentRequired", "dependencies with escaped characters", "quoted quotes"): ORDER,
    ("enum", "enum with 0 does not match false", "float zero is valid"): INTEGER,
    ("enum", "enum with [0] does not match [false]", "[0.0] is valid"): INTEGER,
    ("enum", "enum with 1 does not match true", "float one is valid"): INTEGER,
    ("enum", "enum with [1] does not match [true]", "[1.0] is valid"): INTEGER,
    ("type", "integer type matches integers", "a float with zero fractional part is an integer"): INTEGER,
    (
        "unevaluatedProperties",
        "unevaluatedProperties with anyOf",
        "when two match and has no unevaluated properties",
    ): ALTERNATIVES,
    ("unevaluatedProperties", "unevaluatedProperties with $ref", "with no unevaluated properties"): ORDER,
    (
        "vocabulary",
        "schema that uses custom metaschema with with no validation vocabulary",
        "no validation: invalid number, but it still validates",
    ): VOCABULARY,
}
"""(file, group, test) -> why a valid instance may be rejected. (In `format`, invalid values of a format: `FORMAT`.)"""


class Group(NamedTuple):
    """One schema with instances."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def groups(draft: str) -> Iterator[Group]:
    for path in sorted((SUITE / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DIALECTS[draft], **schema}
            yield Group(path.stem, group["description"], schema, group["tests"])


def accepts(grammar: CompiledGrammar, document: Any) -> bool:
    matcher = grammar.matcher()
    try:
        matcher.accept_tokens(tokens(json.dumps(document, ensure_ascii=False)))
    except TokenRejected:
        return False
    return matcher.is_accepting()


def reason(grammar: CompiledGrammar, group: Group, test: dict[str, Any]) -> str | None:
    """Return why the grammar may reject a valid instance; None if it may not."""
    if group.file == "format" and "is only an annotation by default" in test["description"]:
        return FORMAT
    known = REJECTED.get((group.file, group.description, test["description"]))
    if known == ORDER and not any(accepts(grammar, document) for document in reordered(test["data"])):
        return None
    return known


@pytest.mark.skipif(not SUITE.exists(), reason="JSON-Schema-Test-Suite (shared/data) is not here")
@pytest.mark.parametrize("backend", ["auto", "xgrammar", "lm-format-enforcer"])  # outlines compiles for minutes
@pytest.mark.parametrize("draft", list(DIALECTS))
def test_json_schema_test_suite(draft: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    backends = Backends(BYTES)
    names = candidates("json_schema", backend)
    number = compiled = 0
    accepted, rejected = [], []
    for group in groups(draft):
        number += 1
        try:
            grammar = compile_constraint(backends, Constraint.json_schema(group.schema), names).grammar
        except InvalidConstraint:
            continue
        compiled += 1
        for test in group.tests:
            if accepts(grammar, test["data"]) == test["valid"]:
                continue
            if not test["valid"]:
                accepted.append((group.file, group.description, test["description"]))
            elif backend == "auto" and reason(grammar, group, test) is None:
                rejected.append((group.file, group.description, test["description"]))
    with capsys.disabled():
        print(f"\n{backend}, {draft}: {compiled} of {number} groups compiled")
    assert accepted == []
    assert rejected == []
    assert compiled >= LEAST_COMPILED[draft]
