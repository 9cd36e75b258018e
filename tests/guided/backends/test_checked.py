"""Keywords that the mask does not enforce: the output may end only if the whole document satisfies the schema."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import ConstraintNotMet, InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.schema.validation import Validator
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

NUMBERS = {"type": "array", "items": {"type": "integer"}}
CASES: list[tuple[dict[str, Any], Any, Any, str]] = [
    ({**NUMBERS, "uniqueItems": True}, [1, 2], [1, 1], "/uniqueItems"),
    ({**NUMBERS, "contains": {"const": 7}, "maxContains": 1}, [7], [7, 7], "/contains"),
    ({"type": "object", "minProperties": 2}, {"a": 1, "b": 2}, {"a": 1}, "/minProperties"),
    (
        {
            "type": "object",
            "properties": {"t": {"$ref": "#/$defs/u"}},
            "$defs": {"u": {**NUMBERS, "uniqueItems": True}},
        },
        {"t": [1]},
        {"t": [1, 1]},
        "/$defs/u/uniqueItems",
    ),
]


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Backends:
    return Backends(vocabulary)


class Row:
    """A sequence in a worker."""

    def __init__(self, vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
        self.vocabulary, self.worker = vocabulary, MaskWorker(vocabulary)
        self.mask = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        self.worker.install("g", grammar)
        self.worker.open(0, "g")

    def write(self, document: Any) -> Any:
        """Write a whole document. Returns the error of the mask after it."""
        return self.worker.fill(0, self.vocabulary.encode(json.dumps(document)), self.mask)

    @property
    def may_end(self) -> bool:
        stop = self.vocabulary.stop_token_ids[0]
        return bool(int(self.mask[stop >> 5]) >> (stop & 31) & 1)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("schema", "valid", "invalid", "keyword"), CASES)
def test_an_output_ends_only_if_it_is_valid(
    backends: Backends, vocabulary: Vocabulary, backend: str, schema: Any, valid: Any, invalid: Any, keyword: str
) -> None:
    constraint = Constraint.json_schema(schema)
    compiled = backends[backend].compile(constraint)
    assert keyword in compiled.checked
    for grammar in (compiled, backends[backend].load(constraint, compiled.dump())):
        assert grammar.checked == compiled.checked
        row = Row(vocabulary, grammar)
        assert row.write(valid) is None
        assert row.may_end
        error = Row(vocabulary, grammar).write(invalid)
        assert isinstance(error, ConstraintNotMet)
        assert error.param == "json_schema"
        assert error.pointer in grammar.checked
    with pytest.raises(UnsupportedConstraint) as refused:
        backends[backend].compile(Constraint.json_schema(schema, strict_schema=True))
    assert refused.value.pointer is not None


def test_what_the_library_enforces_is_not_checked(backends: Backends) -> None:
    grammar = backends["llguidance"].compile(Constraint.json_schema({"type": "object", "required": ["a"]}))
    assert grammar.checked == ()


def test_forks_and_rollbacks_keep_what_was_written(backends: Backends, vocabulary: Vocabulary) -> None:
    matcher = backends["llguidance"].compile(Constraint.json_schema({**NUMBERS, "uniqueItems": True})).matcher()
    matcher.accept_tokens(vocabulary.encode("[1,"))
    ends = {text: vocabulary.encode(text) for text in ("1]", "2]")}
    other = matcher.fork()
    matcher.accept_tokens(ends["1]"])
    assert not matcher.is_accepting()
    assert matcher.violation() is not None
    with pytest.raises(TokenRejected):
        matcher.accept_tokens([vocabulary.stop_token_ids[0]])
    other.accept_tokens(ends["2]"])
    assert other.is_accepting()
    matcher.rollback(len(ends["1]"]))
    matcher.accept_tokens([*ends["2]"], vocabulary.stop_token_ids[0]])
    assert matcher.is_terminated()


def test_a_schema_without_a_value_is_refused(backends: Backends) -> None:
    schema = {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 3}], "uniqueItems": True}
    with pytest.raises(InvalidConstraint):
        backends["lm-format-enforcer"].compile(Constraint.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "maximum": 5}, "1e400"),
        ({"type": "number"}, "NaN"),
        ({"format": "date"}, '"2026-02-30"'),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, "3"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}, '{"a": 1}'),
        ({"type": "string"}, "["),
    ],
)
def test_the_validator_sees_what_is_wrong(schema: dict[str, Any], text: str) -> None:
    assert isinstance(Validator(schema).violation(text.encode()), ConstraintNotMet)


@pytest.mark.parametrize("schema", [{"$ref": "http://example.org/x"}, {"$ref": "file:///etc/passwd"}])
def test_the_validator_fetches_nothing(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Validator(schema)
