"""The scores of the benchmark of a real model's answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from benchmarks.answers.scoring import Score, score
from benchmarks.answers.tasks import TASKS, Task

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "price": {"type": "number"}},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "stock": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "$defs": {"Item": ITEM},
}
TASK = Task(
    "nested lists",
    "…",
    {
        "customer": ("Eva", "Mrs. Eva"),
        "note": None,
        "items": [{"name": "pen", "price": 2}],
        "stock": {"pen": 7},
    },
    SCHEMA,
)
RIGHT = '{"customer":"Eva","note":null,"items":[{"name":"pen","price":2}],"stock":{"pen":7}}'


@pytest.mark.parametrize(
    ("text", "right", "exact", "invented"),
    [
        (RIGHT, 5, True, 0),
        (
            RIGHT.replace('"Eva"', '"mrs. EVA"')
            .replace(":2", ":2.0")
            .replace('"note":null,', ""),
            5,
            True,
            0,
        ),
        (f"Here you are:\n```json\n{RIGHT}\n```", 5, True, 0),
        (RIGHT.replace("null", '"urgent"'), 4, False, 0),
        (RIGHT.replace("7", "true"), 4, False, 0),
        (RIGHT.replace("}]", '},{"name":"ink","price":1}]'), 5, False, 0),
        (RIGHT.replace("}]", ',"size":{"cm":9}}],"paid":true'), 5, False, 2),
        (RIGHT[:-1], 0, False, 0),
        (RIGHT[:-1] + ',"paid": tru', 0, False, 0),
        (RIGHT[:-1] + ',"paid": "ye', 0, False, 1),
        ("I cannot say.", 0, False, 0),
    ],
)
def test_json_answers(text: str, right: int, exact: bool, invented: int) -> None:
    outcome = score(TASK, text)
    assert (outcome.right, outcome.expected, outcome.exact, outcome.invented) == (
        right,
        5,
        exact,
        invented,
    )


def test_blanks_in_strings_do_not_count() -> None:
    assert score(TASK, '{ "a b":\n"c \\" d" }').blanks == 3 / 19


def test_text_answers() -> None:
    task = Task("regex and choice", "…", "Paris", choice=("Paris", "Rome"))
    assert score(task, "Paris") == Score(1, 1, True)
    assert score(task, "Rome") == Score(0, 1, False)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.prompt[:40])
def test_expected_answers_meet_the_constraints(task: Task) -> None:
    value = first_spelling(task.expected)
    text = value if task.schema is None else json.dumps(value)
    if task.schema is not None:
        jsonschema.validate(value, task.schema)
    outcome = score(task, text)
    assert (outcome.right, outcome.exact, outcome.invented) == (
        outcome.expected,
        True,
        0,
    )


def first_spelling(expected: Any) -> Any:
    """Return an expected value with the first of the ways in which a part may be
    written."""
    if isinstance(expected, tuple):
        return expected[0]
    if isinstance(expected, list):
        return [first_spelling(item) for item in expected]
    if isinstance(expected, dict):
        return {key: first_spelling(value) for key, value in expected.items()}
    return expected
