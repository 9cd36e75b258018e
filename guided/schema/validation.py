"""Validation of a whole output against its schema, before it may end: `jsonschema-rs`, a library in Rust."""

from __future__ import annotations

import math
import re
from typing import Any

import jsonschema_rs

from guided.errors import ConstraintNotMet, bounded
from guided.schema.drafts import Draft
from guided.schema.keywords import Schema
from guided.schema.pointer import pointer

PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=1_000_000, size_limit=10 << 20)
"""Limits of the engine for patterns."""
_NONZERO = re.compile(r"[-0.]*[1-9]")


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
        document = {name: value for name, value in sent.items() if name != "$schema"}
        make = Draft.of(sent).validator
        self._native = make(document, validate_formats=True, pattern_options=PATTERNS, offline=True)

    def violation(self, document: Any) -> ConstraintNotMet | None:
        """Return why a document violates the schema; None if it satisfies it."""
        try:
            error = next(self._native.iter_errors(document), None)
        except (ValueError, RecursionError) as failure:
            return not_validated(failure)
        if error is None:
            return None
        where, keyword = pointer(error.instance_path) or "the root", pointer(error.schema_path)
        return ConstraintNotMet(
            f"the output is complete and violates the schema at {bounded(where)}: {bounded(error.message)}",
            param="json_schema",
            pointer=keyword,
        )
