"""A token that violates a keyword that is only checked is taken back, and forbidden at
its place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import BYTES, STOP, WORDS, allowed, tokens

from guided.backends import Backends
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import ConstraintNotMet, GuidedError
from guided.masks.compilation import compile_constraint
from guided.masks.vetoes import MAX_VETOES
from guided.masks.worker import MaskWorker
from guided.schema.beginnings import Part

NUMBERS = {"type": "array", "items": {"type": "integer"}}
UNIQUE = {**NUMBERS, "uniqueItems": True}
OPEN = {"type": "object", "additionalProperties": {"type": "integer"}}
CONDITION = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "k": {"type": "integer"}},
    "if": {"required": ["k"], "properties": {"k": {"const": 1}}},
    "else": {"properties": {"a": {"const": 2}}},
}


@pytest.fixture(scope="module")
def backends() -> Backends:
    return Backends(BYTES)


class Writer:
    """Writes what it wants, as far as the masks allow it. Where they do not, it takes
    the first of `others`."""

    def __init__(
        self, backends: Backends, constraint: Constraint, backend: str = "llguidance"
    ) -> None:
        self.worker, self.row = MaskWorker(BYTES), np.zeros(WORDS, np.int32)
        self.grammar = compile_constraint(backends, constraint, (backend,)).grammar
        self.worker.open(0, self.grammar, final=0)
        self.output: list[int] = []
        self.vetoes: list[tuple[str, str, int]] = []
        """(keyword, the token, number of tokens that were taken back)."""
        self.final = 0

    @property
    def text(self) -> str:
        return bytes(token - 1 for token in self.output).decode("utf-8", "replace")

    def fill(self, new: list[int]) -> GuidedError | None:
        error = self.worker.fill(0, new, self.row)
        if error is None and 0 in self.worker.vetoed:
            report = self.worker.vetoed[0].report()
            assert self.final <= report.final <= report.length, "what is final stays"
            self.final = report.final
            if report.length < len(self.output):
                self.vetoes.append(
                    (report.keyword, self.text[-1], len(self.output) - report.length)
                )
                del self.output[report.length :]
        return error

    @property
    def may_end(self) -> bool:
        return STOP in allowed_ids(self.row)

    def write(
        self, text: str, others: str = '"]},0123456789:[{ ', most: int = 80
    ) -> GuidedError | None:
        """Write up to the first place after `text` at which the output may end. Returns
        an error."""
        wanted, error = tokens(text), self.fill([])
        while error is None and len(self.output) < most:
            done, choices = len(self.output), set(allowed_ids(self.row).tolist())
            if self.may_end and not wanted[done:]:
                return None
            first = wanted[done : done + 1] if wanted[:done] == self.output else []
            self.output.append(
                next(
                    (token for token in (*first, *tokens(others)) if token in choices),
                    max(choices),
                )
            )
            if self.output[-1] == STOP:
                self.output.pop()
                return None
            error = self.fill(self.output[-1:])
        return error


@pytest.mark.parametrize(
    ("schema", "wanted", "keyword", "taken"),
    [
        (UNIQUE, "[1, 1]", "uniqueItems", "]"),
        (UNIQUE, "[1, 1, 2]", "uniqueItems", ","),
        ({**NUMBERS, "contains": {"const": 7}}, "[1]", "contains", "]"),
        ({**OPEN, "minProperties": 2}, '{"a":1}', "minProperties", "}"),
        (
            {"type": "string", "maxLength": 3, "not": {"const": "no"}},
            '"no"',
            "not",
            '"',
        ),
        ({**OPEN, "maxProperties": 1}, '{"a":1,"b":2}', "maxProperties", '"'),
        ({**OPEN, "propertyNames": {"pattern": "^x"}}, '{"a":1}', "propertyNames", '"'),
        (
            {"type": "array", "items": {"type": "integer", "multipleOf": 7}},
            "[8]",
            "multipleOf",
            "]",
        ),
        ({"type": "string", "pattern": "^a(?=b)"}, '"x"', "pattern", "x"),
        ({"type": "string", "pattern": "^(?!foo$).*(?<=o)$"}, '"foo"', "pattern", '"'),
        (
            {"oneOf": [{**OPEN, "minProperties": 1}, {**OPEN, "maxProperties": 1}]},
            '{"a":1}',
            "oneOf",
            "}",
        ),
        ({**NUMBERS, "not": {"items": {"const": 7}}}, "[7]", "not", "]"),
        (
            {
                **OPEN,
                "if": {"minProperties": 2, "required": ["a"]},
                "then": {"minProperties": 3},
            },
            '{"a":1,"b":2}',
            "minProperties",
            "}",
        ),
    ],
)
def test_the_token_is_vetoed_and_the_output_is_valid(
    backends: Backends, schema: dict[str, Any], wanted: str, keyword: str, taken: str
) -> None:
    backend = (
        "xgrammar"
        if keyword in ("multipleOf", "maxProperties", "propertyNames")
        or "not" in schema
        else "llguidance"
    )
    writer = Writer(backends, Constraint.json_schema(schema), backend)
    error = writer.write(wanted)
    assert writer.vetoes[0][:2] == (keyword, taken)
    if error is None and writer.may_end:
        assert jsonschema.Draft202012Validator(schema).is_valid(
            json.loads(writer.text)
        ), writer.text
    assert error is None or isinstance(error, ConstraintNotMet)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "^(?=\\p{L})..+$"}, '"Öa"'),
        (
            {**UNIQUE, "items": {"type": "object", "properties": {"items": CONDITION}}},
            '[{"items":{"a":1,"k":1}}]',
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 3}},
                "required": ["a"],
            },
            '{"a":1}',
        ),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2}, '["z"]'),
        (UNIQUE, "[1, 2, 12, 21]"),
        ({**NUMBERS, "contains": {"const": 7}}, "[1, 7, 2]"),
        ({**UNIQUE, "items": CONDITION}, '[{"a":1,"k":1}]'),
        (
            {"type": "object", "additionalProperties": NUMBERS, "minProperties": 2},
            '{"200":[1],"+07":[2]}',
        ),
    ],
)
def test_nothing_else_needs_a_veto(
    backends: Backends, schema: dict[str, Any], text: str
) -> None:
    writer = Writer(backends, Constraint.json_schema(schema))
    assert writer.write(text) is None
    assert writer.vetoes == []


def test_a_vetoed_end_leaves_the_comma(backends: Backends) -> None:
    """A number before it does not go on."""
    writer = Writer(
        backends, Constraint.json_schema({**NUMBERS, "contains": {"const": 7}})
    )
    assert writer.write("[1]", others="]7,2") is None
    assert writer.text == "[1,7]"
    assert writer.vetoes == [("contains", "]", 1)]


def test_a_string_goes_on_with_what_its_pattern_allows(backends: Backends) -> None:
    writer = Writer(
        backends,
        Constraint.json_schema({"type": "string", "pattern": "^a[0-9a-c]{2}7(?<=7)$"}),
    )
    assert writer.write('"xyz"', others='z"cb7a') is None
    assert writer.vetoes == [("pattern", "x", 1)]
    assert writer.text == '"acc7"'


@pytest.mark.parametrize("wrong", ["1", "-", '"', "{", "n", "t"])
def test_no_value_of_a_wrong_type_begins(backends: Backends, wrong: str) -> None:
    arrays = {"items": {"type": "array"}}
    schema = {
        "type": "array",
        "oneOf": [arrays, {**arrays, "uniqueItems": True, "minItems": 3}],
    }
    writer = Writer(backends, Constraint.json_schema(schema))
    writer.output = tokens(f"[{wrong}")
    assert writer.fill(writer.output) is None
    assert writer.vetoes == [("oneOf", wrong, 1)]
    assert set(allowed(writer.row)) <= set("[] \n\r\t")


def test_a_vetoed_token_stays_forbidden_near_a_budgets_end(backends: Backends) -> None:
    writer = Writer(backends, Constraint.json_schema(UNIQUE))
    writer.worker.open(0, writer.grammar, tokens("[1,1"), budget=7, final=0)
    writer.output = tokens("[1,1]")
    assert writer.fill(tokens("]")) is None
    assert writer.vetoes == [("uniqueItems", "]", 1)]
    digits = allowed(writer.row)
    assert digits
    assert set(digits) <= set("0123456789")
    assert writer.worker.fill(0, tokens(digits[0]), writer.row) is None
    assert allowed(writer.row) == "]"


def test_a_number_may_be_all_of_a_content(backends: Backends) -> None:
    """And the token that was sampled is forbidden, whatever it is."""
    content = {
        "type": "json_schema",
        "json_schema": {"type": "integer", "multipleOf": 7},
    }
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    writer = Writer(
        backends,
        Constraint.structural_tag({"type": "structural_tag", "format": form}),
        "xgrammar",
    )
    assert writer.write("<f>12</f>", others="</f>6") is None
    assert writer.text == "<f>126</f>"
    assert writer.vetoes == [("multipleOf", "<", 1)]


def test_several_vetoes_lead_back_to_the_beginning_of_a_value(
    backends: Backends,
) -> None:
    schema = {
        "type": "array",
        "items": {"enum": [11, 12, 3]},
        "uniqueItems": True,
        "minItems": 3,
    }
    writer = Writer(backends, Constraint.json_schema(schema))
    assert writer.write("[11,11", others="1,]23") is None
    assert sorted(json.loads(writer.text)) == [3, 11, 12]


def test_an_output_without_a_way_out_ends(backends: Backends) -> None:
    writer = Writer(
        backends, Constraint.json_schema({**NUMBERS, "contains": {"const": 7}})
    )
    error = writer.write("[1]", others="],1 ", most=400)
    assert isinstance(error, ConstraintNotMet)
    assert error.pointer == "/contains"
    assert len(writer.vetoes) <= MAX_VETOES


def test_only_the_innermost_checked_value_is_held(backends: Backends) -> None:
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "tags": UNIQUE,
            "end": {"type": "string"},
        },
        "required": ["title", "tags", "end"],
    }
    writer, text, held = (
        Writer(backends, Constraint.json_schema(schema)),
        '{"title":"ab","tags":[1,2],"end":"x"}',
        [],
    )
    for char in text:
        writer.output.append(ord(char) + 1)
        assert writer.fill(tokens(char)) is None
        held.append(len(writer.output) - writer.final)
    assert held == [0] * text.index("[") + [1, 2, 3, 4] + [0] * len(
        text[text.index("]") :]
    )


def test_contents_of_tags_are_followed(backends: Backends) -> None:
    tag = {
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": UNIQUE},
        "end": "</f>",
    }
    form = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    writer = Writer(
        backends, Constraint.structural_tag({"type": "structural_tag", "format": form})
    )
    assert writer.write("é [1, 1] <f>[5, 5, 6]</f> <f>[5]</f>", most=60) is None
    assert [veto[0] for veto in writer.vetoes] == ["uniqueItems"]
    first, _, rest = writer.text.partition("<f>")
    assert first == "é [1, 1] "
    assert len(set(json.loads(rest.partition("</f>")[0]))) == len(
        json.loads(rest.partition("</f>")[0])
    )


def test_a_replay_takes_back_nothing_that_was_final(backends: Backends) -> None:
    writer = Writer(backends, Constraint.json_schema(UNIQUE))
    writer.output = tokens("[1,1")
    writer.worker.open(0, writer.grammar, writer.output, final=4)
    writer.final = 4
    assert writer.fill([]) is None
    writer.output += tokens("]")
    assert writer.fill(tokens("]")) is None
    assert writer.vetoes == [("uniqueItems", "]", 1)]
    assert "]" not in allowed(writer.row)
    assert STOP not in writer.output


def test_what_a_library_allows_and_is_not_json_is_for_the_final_check(
    backends: Backends,
) -> None:
    writer = Writer(
        backends,
        Constraint.json_schema(
            {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
        ),
        "lm-format-enforcer",
    )
    assert writer.fill(tokens("[7.e-9")) is None
    writer.output += tokens("[7.e-9")
    assert writer.fill(tokens("]")) is None
    assert not writer.may_end


def test_after_a_veto_patterns_are_not_matched_again(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "pattern": "^(?!foo$).*$"},
        "uniqueItems": True,
    }
    writer = Writer(backends, Constraint.json_schema(schema))
    matched: list[object] = []
    original = Part.may_match
    monkeypatch.setattr(
        Part,
        "may_match",
        lambda part, string: matched.append(string) or original(part, string),
    )
    assert writer.fill([]) is None
    for character in '["abcd","abcd"':
        before = len(matched)
        writer.output += tokens(character)
        assert writer.fill(tokens(character)) is None
    assert [veto[0] for veto in writer.vetoes] == ["uniqueItems"]
    assert "ab" in matched[:before]
    assert "ab" not in matched[before:]
