"""JSON-Schema-Test-Suite: a schema is refused, or each of its instances is accepted as
the suite says.

The data are not part of the project: `shared/data`, next to the checkout. The required
tests of both drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from byte_vocabulary import BYTES, accepts
from json_orders import reordered

from guided.backends import Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.masks.compilation import compile_constraint

SUITE = (
    Path(__file__).parents[3] / "shared" / "data" / "json-schema-test-suite" / "tests"
)
DIALECTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
LEAST_COMPILED = {"draft7": 234, "draft2020-12": 349}
"""Of 257 and 383 groups. The others refer to other documents, have NUL in a value, or
no value satisfies them."""

FORMAT = (
    "`format` is enforced, where the specification makes it an annotation by default"
)
REJECTED = {
    (
        "unevaluatedProperties with anyOf",
        "when two match and has no unevaluated properties",
    ): "`unevaluatedProperties` next to `anyOf` closes each alternative, so values of two of them are excluded",
    (
        "schema that uses custom metaschema with with no validation vocabulary",
        "no validation: invalid number, but it still validates",
    ): "a meta-schema without the vocabulary of validation is none that is known: 2020-12 applies",
}
"""(group, test) -> why a valid instance may be rejected, beside the order of
properties, and `1.0` for an integer."""


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


def accepts_document(grammar: CompiledGrammar, document: Any) -> bool:
    return accepts(grammar, json.dumps(document, ensure_ascii=False))


def reason(grammar: CompiledGrammar, group: Group, test: dict[str, Any]) -> str | None:
    """Return why the grammar may reject a valid instance; None if it may not."""
    if (
        group.file == "format"
        and "is only an annotation by default" in test["description"]
    ):
        return FORMAT
    written = json.loads(json.dumps(test["data"]), parse_float=shortest)
    if any(accepts_document(grammar, document) for document in reordered(written)):
        return "properties are generated in the order of the schema, and integers without a fraction"
    return REJECTED.get((group.description, test["description"]))


def shortest(text: str) -> float:
    return int(float(text)) if float(text).is_integer() else float(text)


@pytest.mark.skipif(
    not SUITE.exists(), reason="JSON-Schema-Test-Suite (shared/data) is not here"
)
# outlines compiles for minutes
@pytest.mark.parametrize("backend", ["auto", "xgrammar", "lm-format-enforcer"])
@pytest.mark.parametrize("draft", list(DIALECTS))
def test_json_schema_test_suite(
    draft: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = Backends(BYTES)
    names = candidates("json_schema", backend)
    number = compiled = 0
    accepted, rejected = [], []
    for group in groups(draft):
        number += 1
        try:
            grammar = compile_constraint(
                backends, Constraint.json_schema(group.schema), names
            ).grammar
        except InvalidConstraint:
            continue
        compiled += 1
        for test in group.tests:
            if accepts_document(grammar, test["data"]) == test["valid"]:
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
