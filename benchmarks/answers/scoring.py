"""Compare an answer with the expected one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json

from benchmarks.answers.tasks import Task

Path: TypeAlias = tuple[str | int, ...]
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


@dataclass(frozen=True)
class Score:
    """The score of an answer."""

    right: int
    """Number of expected fields that have the expected value."""
    expected: int
    """Number of expected fields."""
    exact: bool
    """Whether the answer has exactly the expected fields and values."""
    invented: int = 0
    """Number of keys that the schema does not name."""
    blanks: float | None = None
    """Whitespace outside of strings, as a share of the characters. None if the answer
    is not JSON by its task."""


def score(task: Task, text: str) -> Score:
    """Compare the text of an answer with the expected one. A text that is not JSON has
    no right field."""
    if task.schema is None:
        exact = same(text, task.expected)
        return Score(int(exact), 1, exact)
    expected = dict(leaves(task.expected))
    fence = _FENCE.search(text)
    body = fence[1] if fence else text
    try:
        found = dict(leaves(json.loads(body)))
    except (ValueError, RecursionError):
        found = {}
    # An optional field without a value may be left out.
    right = (
        sum(same(found.get(path), value) for path, value in expected.items())
        if found
        else 0
    )
    others = [
        path
        for path, value in found.items()
        if path not in expected and value is not None
    ]
    outside = _STRING.sub("", text)
    blanks = sum(map(str.isspace, outside)) / max(1, len(text))
    return Score(
        right,
        len(expected),
        right == len(expected) and not others,
        invented_keys(task, body),
        blanks,
    )


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each field. Empty objects and lists are
    values."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from leaves(part, (*path, index))
    else:
        yield path, value


def same(found: Any, expected: Any) -> bool:
    """Return whether a value is the expected one, regardless of case, outer blanks and
    a final full stop."""
    if isinstance(expected, tuple):
        return any(same(found, value) for value in expected)
    if isinstance(found, str) and isinstance(expected, str):
        return _plain(found) == _plain(expected)
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    return bool(found == expected)


def _plain(text: str) -> str:
    return text.strip().rstrip(".").casefold()


def invented_keys(task: Task, text: str) -> int:
    """Return the number of keys in a text, which may be cut, that the task's schema
    does not name."""
    assert task.schema is not None
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return 0
    return _invented(value, [task.schema], task.schema)


def _invented(value: Any, schemas: list[Any], root: dict[str, Any]) -> int:
    parts = [part for schema in schemas for part in _parts(schema, root)]
    if isinstance(value, list):
        items = [part["items"] for part in parts if "items" in part]
        return sum(_invented(item, items, root) for item in value)
    if not isinstance(value, dict):
        return 0
    count = 0
    for key, member in value.items():
        named = [
            part["properties"][key]
            for part in parts
            if key in part.get("properties", {})
        ]
        named += [
            part["additionalProperties"]
            for part in parts
            if "additionalProperties" in part
        ]
        count += _invented(member, named, root) if named else 1
    return count


def _parts(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas."""
    yield schema
    if "$ref" in schema:
        yield from _parts(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for branch in schema.get("anyOf", ()):
        yield from _parts(branch, root)
