"""`jsonschema-rs`: the drafts of JSON Schema, what a meta-schema refuses, and the validation of a whole output."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from guided.errors import ConstraintNotMet, bounded
from guided.schema.keywords import Schema, pointer

PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=1_000_000, size_limit=10 << 20)
"""Limits of the engine for patterns."""
_MAX_REASON = 200
"""Number of characters that are kept of a message of the library. Its end says the reason."""
_NONZERO = re.compile(r"[-0.]*[1-9]")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def draft_of(document: dict[str, Any]) -> str:
    """Return the identifier of the draft that `$schema` names; that of 2020-12 if it names no known one."""
    named = str(document.get("$schema", ""))
    return next((uri for version, uri in _DRAFTS.items() if version in named), _DRAFTS["2020-12"])


def fault(document: dict[str, Any], draft: str) -> tuple[str, list[str | int]] | None:
    """Return what the draft's meta-schema refuses in a schema, and the path to it; None if it is valid."""
    try:
        jsonschema_rs.meta.validate({**document, "$schema": draft})
    except jsonschema_rs.ValidationError as failure:
        error = _innermost(failure)
        path = list(error.instance_path)
        if path and path[-1] == "type":
            return _type_fault(error.instance, path)
        keyword = next((part for part in reversed(path) if isinstance(part, str)), "")
        if keyword == "items" and isinstance(error.instance, list):
            return "'items' is no list since 2020-12: a tuple is 'prefixItems', or '$schema' names an older draft", path
        return f"{keyword!r} is not valid: {bounded(error.message[-_MAX_REASON:])}", path
    return None


def _innermost(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Return the error in the alternative that goes deepest: `items` is a schema or a list of them before 2020-12."""
    parts = [part for branch in getattr(error.kind, "context", ()) for part in branch]
    inner = max(parts, key=lambda part: len(part.instance_path), default=error)
    if len(inner.instance_path) > len(error.instance_path):
        return _innermost(inner)
    return error


def _type_fault(named: Any, path: list[str | int]) -> tuple[str, list[str | int]]:
    """Return what is wrong with a `type`, and the path to it."""
    if isinstance(named, list):
        wrong = next((place for place, one in enumerate(named) if one not in _TYPES), None)
        if wrong is None:
            return "'type' is an empty list, or names a type twice", path
        named = named[wrong]
        path = [*path, wrong]
    near = difflib.get_close_matches(str(named)[:60], _TYPES, n=1)
    if near:
        known = f"did you mean {near[0]!r}?"
    else:
        known = f"it is one of {', '.join(_TYPES)}"
    return f"{bounded(named, 60)!r} is not valid as 'type': {known}", path


_DRAFTS = {
    **{name: f"http://json-schema.org/{name}/schema#" for name in ("draft-04", "draft-06", "draft-07")},
    **{name: f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")},
}

TUPLES = _DRAFTS["2019-09"]
"""The last draft where `items` may be a list. It reads everything else as 2020-12 does."""


def finite(text: str) -> float:
    """Read a number. Raises ValueError for one that is read as infinite or as zero: a reader may be more exact."""
    number = float(text)
    if math.isinf(number) or (number == 0 and _NONZERO.match(text)):
        raise ValueError(f"the number {bounded(text, 40)} is out of the range of doubles")
    return number


def not_validated(failure: Exception) -> ConstraintNotMet:
    """Return the error for an output that can't be read, or not be validated."""
    return ConstraintNotMet(f"the output could not be validated: {bounded(failure)}", param="json_schema")


class Validator:
    """Validates JSON values. It fetches nothing: references out of the document are refused.

    Raises:
        ValueError: the library does not take the schema.
    """

    def __init__(self, schema: Schema) -> None:
        sent = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        document = {**sent, "$schema": draft_of(sent)}
        self._native = jsonschema_rs.validator_for(
            document, validate_formats=True, pattern_options=PATTERNS, offline=True
        )

    def errors(self, document: Any) -> Iterator[jsonschema_rs.ValidationError]:
        """Yield all errors. Raises ValueError or RecursionError for what cannot be validated."""
        yield from self._native.iter_errors(document)

    def violation(self, document: Any) -> ConstraintNotMet | None:
        """Return why a document violates the schema; None if it satisfies it."""
        try:
            error = next(self._native.iter_errors(document), None)
        except (ValueError, RecursionError) as failure:
            return not_validated(failure)
        if error is None:
            return None
        return described(error)


def keyword_of(error: jsonschema_rs.ValidationError) -> str:
    """Return the keyword that is violated."""
    name = error.kind.name
    if name == "falseSchema" and error.evaluation_path:
        return str(error.evaluation_path[-1])
    return name


def described(error: jsonschema_rs.ValidationError) -> ConstraintNotMet:
    """Return the error for an output that violates a schema."""
    where = pointer(error.instance_path) or "the root"
    keyword = pointer(error.schema_path)
    found = ConstraintNotMet(
        f"the output is complete and violates the schema at {bounded(where)}: {bounded(error.message)}",
        param="json_schema",
        pointer=keyword,
    )
    found.keyword = keyword_of(error)
    return found
