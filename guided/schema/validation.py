"""`jsonschema-rs`: the drafts of JSON Schema, what a meta-schema refuses, and the
validation of a whole output."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from guided.errors import ConstraintNotMet, bounded
from guided.json_text import JsonObject
from guided.schema.keywords import Schema, as_object, pointer

PATTERNS = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=1_000_000, size_limit=10 << 20
)
"""Limits of the engine for patterns."""
_MAX_REASON = 200
"""Number of characters that are kept of a message of the library. Its end says the
reason."""
_NONZERO = re.compile(r"[-0.]*[1-9]")
_DRAFTS = {
    "draft-04": "http://json-schema.org/draft-04/schema#",
    "draft-06": "http://json-schema.org/draft-06/schema#",
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
TUPLES = _DRAFTS["2019-09"]
"""The last draft where `items` may be a list. It reads everything else as 2020-12
does."""
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def draft_of(document: JsonObject) -> str:
    """Return the identifier of the draft that `$schema` names; that of 2020-12 if it
    names no known one."""
    named = str(document.get("$schema", ""))
    return next(
        (uri for version, uri in _DRAFTS.items() if version in named),
        _DRAFTS["2020-12"],
    )


def fault(document: JsonObject, draft: str) -> tuple[str, list[str | int]] | None:
    """Return what the draft's meta-schema refuses in a schema, and the path to it; None
    if it is valid."""
    try:
        jsonschema_rs.meta.validate({**document, "$schema": draft})
    except jsonschema_rs.ValidationError as failure:
        error = _innermost(failure)
        path = list(error.instance_path)
        keyword = next((part for part in reversed(path) if isinstance(part, str)), "")
        if keyword == "type":
            return _type_fault(error.instance, is_member=path[-1] != "type"), path
        if keyword == "items" and isinstance(error.instance, list):
            return (
                "'items' is no list since 2020-12: a tuple is 'prefixItems', or '$schema' names an older draft",
                path,
            )
        return (
            f"{keyword!r} is not valid: {bounded(error.message[-_MAX_REASON:])}",
            path,
        )
    return None


def _innermost(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Return the error in the alternative that goes deepest: `items` is a schema or a
    list of them before 2020-12."""
    parts = [part for branch in getattr(error.kind, "context", ()) for part in branch]
    inner = max(parts, key=lambda part: len(part.instance_path), default=error)
    if len(inner.instance_path) > len(error.instance_path):
        return _innermost(inner)
    return error


def _type_fault(named: Any, is_member: bool) -> str:
    """Return what is wrong with a `type`, or with a member of a list of types."""
    if isinstance(named, list) and not is_member:
        return "'type' is an empty list, or names a type twice"
    known = f"it is one of {', '.join(_TYPES)}"
    for near in difflib.get_close_matches(str(named)[:60], _TYPES, n=1):
        known = f"did you mean {near!r}?"
    return f"{bounded(named, 60)!r} is not valid as 'type': {known}"


def finite(text: str) -> float:
    """Read a number. Raises ValueError for one that is read as infinite or as zero: a
    reader may be more exact."""
    number = float(text)
    if math.isinf(number) or (number == 0 and _NONZERO.match(text)):
        raise ValueError(
            f"the number {bounded(text, 40)} is out of the range of doubles"
        )
    return number


def not_validated(failure: Exception) -> ConstraintNotMet:
    """Return the error for an output that can't be read, or not be validated."""
    return ConstraintNotMet(
        f"the output could not be validated: {bounded(failure)}", param="json_schema"
    )


class Validator:
    """Validates JSON values. It fetches nothing: references out of the document are
    refused.

    Raises:
        ValueError: the library does not take the schema.
    """

    def __init__(self, schema: Schema) -> None:
        document = as_object(schema)
        document["$schema"] = draft_of(document)
        self._native = jsonschema_rs.validator_for(
            document, validate_formats=True, pattern_options=PATTERNS, offline=True
        )

    def errors(self, document: Any) -> Iterator[jsonschema_rs.ValidationError]:
        """Iterate over all errors. Raises ValueError or RecursionError for what cannot
        be validated."""
        return iter(self._native.iter_errors(document))

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
    violation = ConstraintNotMet(
        f"the output is complete and violates the schema at {bounded(where)}: {bounded(error.message)}",
        param="json_schema",
        pointer=keyword,
    )
    violation.keyword = keyword_of(error)
    return violation
