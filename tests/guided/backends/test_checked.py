"""Keywords that the mask does not enforce: the output may end only if the whole
document satisfies the schema."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.backends.content_reader import ContentReader
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import ConstraintNotMet, TokenRejected, UnsupportedConstraint
from guided.masks.worker import MaskWorker
from guided.schema.beginnings import Beginnings
from guided.schema.validation import Validator
from guided.tags.structural_tag import Content
from guided.vocabulary import Vocabulary

NUMBERS = {"type": "array", "items": {"type": "integer"}}
CASES: list[tuple[dict[str, Any], Any, Any, str]] = [
    ({**NUMBERS, "uniqueItems": True}, [1, 2], [1, 1], "/uniqueItems"),
    ({**NUMBERS, "contains": {"const": 7}, "maxContains": 1}, [7], [7, 7], "/contains"),
    (
        {"type": "object", "minProperties": 2},
        {"a": 1, "b": 2},
        {"a": 1},
        "/minProperties",
    ),
    (
        {"type": "array", "items": {"type": "number", "multipleOf": 123457}},
        [123457, 0],
        [3],
        "/items/multipleOf",
    ),
]


class Row:
    """A sequence in a worker."""

    def __init__(self, vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
        self.vocabulary, self.worker = vocabulary, MaskWorker(vocabulary)
        self.mask = np.empty(words(vocabulary.padded_vocab_size), np.int32)
        self.worker.open(0, grammar)

    def write(self, document: Any) -> Any:
        """Write a whole document. Returns the error of the mask after it."""
        return self.worker.fill(
            0, self.vocabulary.encode(json.dumps(document)), self.mask
        )

    def write_text(self, text: str) -> tuple[Any, str]:
        """Write token by token. Returns the first error of a mask, and what was written
        before it."""
        written = b""
        for token in self.vocabulary.encode(text):
            if (error := self.worker.fill(0, [token], self.mask)) is not None:
                return error, written.decode()
            written += self.vocabulary.token_bytes[token]
        return None, written.decode()

    @property
    def may_end(self) -> bool:
        return self.vocabulary.stop_token_ids[0] in allowed_ids(self.mask)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("schema", "valid", "invalid", "keyword"), CASES)
def test_an_output_ends_only_if_it_is_valid(
    backends: Backends,
    vocabulary: Vocabulary,
    backend: str,
    schema: Any,
    valid: Any,
    invalid: Any,
    keyword: str,
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


def test_forks_and_rollbacks_keep_what_was_written(
    backends: Backends, vocabulary: Vocabulary
) -> None:
    matcher = (
        backends["llguidance"]
        .compile(Constraint.json_schema({**NUMBERS, "uniqueItems": True}))
        .matcher()
    )
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


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "maximum": 5}, "1e400"),
        ({"type": "number"}, "NaN"),
        ({"type": "number", "multipleOf": 0.5}, "-0.3e-400"),
        ({"format": "date"}, '"2026-02-30"'),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "maximum": 3,
                "exclusiveMaximum": True,
            },
            "3",
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "dependencies": {"a": ["b"]},
            },
            '{"a": 1}',
        ),
        ({"type": "string"}, "["),
    ],
)
def test_the_reader_sees_what_is_wrong(
    vocabulary: Vocabulary, schema: dict[str, Any], text: str
) -> None:
    reader = ContentReader(
        Content("json_schema", schema, ""), {"": Beginnings(schema, [])}, vocabulary
    )
    reading = reader.read(reader.start, text.encode(), 1)
    assert not reading.complete
    assert isinstance(reading.violation, ConstraintNotMet) is (text != "[")


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://example.org/x"}, {"$ref": "file:///etc/passwd"}]
)
def test_the_validator_fetches_nothing(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Validator(schema)


def tag(*elements: Any) -> Constraint:
    return Constraint.structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "sequence", "elements": list(elements)},
        }
    )


def part(schema: Any, begin: str = "<", end: str = ">") -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


SCHEMA = {**NUMBERS, "uniqueItems": True}
TEXT = {"type": "any_text"}
TAGS: list[tuple[Constraint, list[str], tuple[str, str]]] = [
    (tag(part(SCHEMA)), ["<[1, 2]>"], ("<[1, 1]>", "<[1, 1]")),
    # Which schema the content has is known only at its end.
    (
        tag(
            {
                "type": "or",
                "elements": [part(SCHEMA, "<", ">1"), part(NUMBERS, "<", ">2")],
            }
        ),
        ["<[1, 2]>1", "<[1, 1]>2"],
        ("<[1, 1]>1", "<[1, 1]>"),
    ),
    # A trigger within a string of another content is no trigger.
    (
        tag(
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [part(SCHEMA), part({"type": "string"}, "<s")],
            }
        ),
        ["", "a [1, 1] b", "a <[1]> b <[2]>", '<s"<[1, 1]>">'],
        ("a <[1]> <[2, 2]> b", "a <[1]> <[2, 2]"),
    ),
    (
        tag(
            {"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</t>", "</>"]},
            part(SCHEMA, ""),
        ),
        ["<t> <[1, 1]></t>[1]>", "<t></>[]>"],
        ("<t></t>[1, 1]>", "<t></t>[1, 1]"),
    ),
    (
        tag(
            {"type": "repeat", "min": 1, "max": 3, "content": part(SCHEMA)},
            {"type": "json_object"},
        ),
        ['<[1]><[1]>{"a": [1, 1]}'],
        ("<[1]><[1]><[1, 1]>{}", "<[1]><[1]><[1, 1]"),
    ),
    (
        tag({"type": "tags_with_separator", "tags": [part(SCHEMA)], "separator": ", "}),
        ["", "<[1]>, <[1, 2]>"],
        ("<[1]>, <[3, 3]>", "<[1]>, <[3, 3]"),
    ),
    (
        tag(
            {"type": "choice", "choice": ["a", "ab"]},
            part({"type": "array", "contains": {"const": 7}}, "=", ""),
        ),
        ["a=[7]", "ab=[1, 7]"],
        ("ab=[1]", "ab=[1]"),
    ),
]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("constraint", "valid", "invalid"), TAGS)
def test_a_content_of_a_structural_tag_is_checked_where_it_ends(
    backends: Backends,
    vocabulary: Vocabulary,
    backend: str,
    constraint: Constraint,
    valid: list[str],
    invalid: tuple[str, str],
) -> None:
    compiled = backends[backend].compile(constraint)
    assert compiled.checked
    for grammar in (compiled, backends[backend].load(constraint, compiled.dump())):
        for text in valid:
            row = Row(vocabulary, grammar)
            assert row.write_text(text) == (None, text)
            assert row.worker.fill(0, (), row.mask) is None
            assert row.may_end, text
        text, least = invalid
        error, written = Row(vocabulary, grammar).write_text(text)
        assert isinstance(error, ConstraintNotMet)
        assert error.param == "structural_tag"
        assert error.pointer in grammar.checked
        assert least.startswith(written)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_number_is_checked_only_where_it_ends(
    backends: Backends, vocabulary: Vocabulary, backend: str
) -> None:
    schema = {"type": "integer", "not": {"multipleOf": 3}}
    for constraint, begin, end in (
        (Constraint.json_schema(schema), "", ""),
        (tag(part(schema)), "<", ">"),
    ):
        grammar = backends[backend].compile(constraint)
        assert len(grammar.checked) == 1
        row = Row(vocabulary, grammar)
        for text in (f"{begin}3", "3", f"1{end}"):
            assert row.write_text(text) == (None, text)
            assert row.may_end is ("1" in text)
        row = Row(vocabulary, grammar)
        error, _ = row.write_text(f"{begin}33{end}")
        assert isinstance(error, ConstraintNotMet) is bool(end)
        assert not row.may_end
