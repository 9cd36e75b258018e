"""With a budget, every output ends with a stop token, satisfies its constraint and
fits."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import count
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

from guided.backends import Backends
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidRequest
from guided.masks.compilation import compile_constraint
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"items": {"type": "string"}},
    },
    "required": ["name", "age"],
}
HUGE = {
    "type": "object",
    "properties": {f"property{index}": {"type": "string"} for index in range(30)},
    "required": [f"property{index}" for index in range(30)],
}
TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["v", "kids"],
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"additionalProperties": False, **schema},
    }


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def structural_tag(form: dict[str, Any]) -> Constraint:
    return Constraint.structural_tag({"type": "structural_tag", "format": form})


THINKING = tag("", {"type": "any_text"}, "</think>")
PERSON_TAG = tag("<person>", json_schema(PERSON), "</person>")
TOOLS = {"big": HUGE, "get": CITY}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        tag(
            f'<tool_call>{{"name": "{name}", "arguments": ',
            json_schema(schema),
            "}</tool_call>",
        )
        for name, schema in TOOLS.items()
    ],
    "at_least_one": True,
}
CONSTRAINTS = {
    "person": Constraint.json_schema(PERSON),
    "huge": Constraint.json_schema(
        {"anyOf": [{"type": "string", "maxLength": 5}, HUGE]}
    ),
    "tree": Constraint.json_schema(TREE),
    "date": Constraint.json_schema(
        {"type": "array", "minItems": 2, "items": {"type": "string", "format": "date"}}
    ),
    "object": Constraint.json_object(),
    "regex": Constraint.regex("(a.{60}|[b-z]+)!"),
    "letters": Constraint.regex("(a[0-9]{12}|[b-z]+)!"),
    "choice": Constraint.choice(
        ["no", "yes", "a long explanation of why neither of them is right"]
    ),
    "grammar": Constraint.grammar('start: "(" start ")" | "x" | "a long word"'),
    "lookahead": Constraint.regex(r"(?=.*[0-9])[a-z0-9 ]+\.(com|org/.{40})"),
    "text": Constraint.grammar('start: TEXT "END" "[" /[0-9]{9}/ "]"\nTEXT: /[^E]*/'),
    "tag": structural_tag(PERSON_TAG),
    "thinking": structural_tag(sequence(THINKING, json_schema(CITY))),
    "tools": structural_tag(sequence(THINKING, CALLS)),
}
_slots = count()


class Generator:
    """Generates with random tokens."""

    def __init__(
        self, vocabulary: Vocabulary, constraint: Constraint, backend: str
    ) -> None:
        self.vocabulary = vocabulary
        self.constraint = constraint
        self.worker = MaskWorker(vocabulary)
        self.grammar = compile_constraint(
            Backends(vocabulary), constraint, [backend]
        ).grammar
        self.row = np.empty(words(vocabulary.padded_vocab_size), np.int32)

    def mask(self, slot: int, new: list[int]) -> list[int] | GuidedError:
        error = self.worker.fill(slot, new, self.row)
        return error or allowed_ids(self.row).tolist()

    def generate(self, budget: int, seed: int) -> tuple[str, bool] | GuidedError:
        """The text and whether a mask was restricted."""
        slot, chance = next(_slots), random.Random(seed)
        self.worker.open(slot, self.grammar, budget=budget)
        output: list[int] = []
        while len(output) < budget:
            mask = self.mask(slot, output[-1:])
            if isinstance(mask, GuidedError):
                return mask
            stops = [token for token in mask if token in self.vocabulary.stop_token_ids]
            texts = [token for token in mask if token not in stops]
            output.append(
                chance.choice(
                    stops if stops and (not texts or chance.random() < 0.2) else texts
                )
            )
            if output[-1] in stops:
                self.worker.free([slot])
                return self.vocabulary.decode(
                    output[:-1]
                ).decode(), slot in self.worker.steered
        raise AssertionError(f"cut off: {self.vocabulary.decode(output)!r}")

    def least(self) -> int:
        """The least budget, as the refusal of a smaller one names it."""
        found = self.generate(1, 0)
        assert isinstance(found, InvalidRequest)
        assert found.param == "max_tokens"
        return int(str(found).rpartition(" ")[2])


@cache
def generator(vocabulary: Vocabulary, name: str, backend: str) -> Generator:
    return Generator(vocabulary, CONSTRAINTS[name], backend)


@pytest.mark.parametrize("name", CONSTRAINTS)
@given(spare=st.integers(0, 40), seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None)
def test_outputs_fit_and_satisfy_the_constraint(
    vocabulary: Vocabulary, name: str, spare: int, seed: int
) -> None:
    one = generator(vocabulary, name, "llguidance")
    found = one.generate(one.least() + spare, seed)
    assert not isinstance(found, GuidedError), found
    text, _ = found
    if one.constraint.kind not in ("json_schema", "json_object"):
        assert compile_accepts(one, text)
    elif name != "object":
        jsonschema.validate(json.loads(text), json.loads(one.constraint.source))


def compile_accepts(one: Generator, text: str) -> bool:
    slot = next(_slots)
    one.worker.open(slot, one.grammar, tokens=one.vocabulary.encode(text))
    mask = one.mask(slot, [])
    return (
        not isinstance(mask, GuidedError) and one.vocabulary.stop_token_ids[0] in mask
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("huge", 3),
        ("choice", 3),
        ("object", 3),
        ("tree", 18),
        ("regex", 3),
        ("grammar", 12),
        ("person", 20),
        ("date", 28),
        ("lookahead", 8),
        ("text", 16),
        ("tag", 40),
        ("thinking", 24),
        ("tools", 76),
    ],
)
def test_the_least_budget_is_that_of_a_short_answer(name: str, least: int) -> None:
    assert generator(BYTES, name, "llguidance").least() <= least


@pytest.mark.parametrize("backend", ["xgrammar", "outlines"])
def test_other_backends(backend: str) -> None:
    one = generator(BYTES, "letters", backend)
    found = one.generate(one.least() + 6, 3)
    assert not isinstance(found, GuidedError), found
    assert len(found[0]) <= one.least() + 5


THOUGHTS = 'They ask: "where?" <b>Lisbon</b>, {sure}.\n\nSo [Lisbon]; (10 > 9) was it. '
OUTPUTS = {
    "person": '{"name": "Anna \\"A\\" Weber", "age": 47, "tags": ["a", "b, c"]}',
    "huge": '"abc"',
    "tree": '{"v": 1, "kids": [{"v": 22, "kids": []}, {"v": 3, "kids": [{"v": 4, "kids": []}]}]}',
    "object": '{"a": {"b": [1, 2.5e10, null, "x] y}"]}, "c": "d"}',
    "regex": "a" + "." * 60 + "!",
    "choice": "a long explanation of why neither of them is right",
    "grammar": "((((a long word))))",
    "lookahead": "lisbon 24 is great.com",
    "text": "something like text, [with] {brackets}. END[012345678]",
    "tag": '<person>{"name": "Anna Weber", "age": 47, "tags": ["a"]}</person>',
    "thinking": THOUGHTS + '</think>{"city": "Lisbon"}',
    "tools": THOUGHTS
    + '</think><tool_call>{"name": "get", "arguments": {"city": "Lisbon"}}</tool_call>',
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_with_room_is_not_changed(vocabulary: Vocabulary, name: str) -> None:
    one, slot = generator(vocabulary, name, "llguidance"), next(_slots)
    output = [*vocabulary.encode(OUTPUTS[name]), vocabulary.stop_token_ids[0]]
    one.worker.open(slot, one.grammar, budget=len(output) + 40)
    for position, token in enumerate(output):
        mask = one.mask(slot, output[position - 1 : position] if position else [])
        assert not isinstance(mask, GuidedError), mask
        assert token in mask, vocabulary.decode(output[: position + 1])
