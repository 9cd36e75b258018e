"""Rules for the constraint fields of a request: one constraint, in one field or several, and what goes with it.

Each API (HTTP body, `SamplingParams`, vLLM's extra arguments) collects its fields and checks them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import guided.schema.document  # noqa: F401 -- at the start of a server, and not at its first request
from guided.constraint import Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest


@dataclass(frozen=True)
class GivenConstraint:
    """A constraint field that is set."""

    kind: ConstraintKind
    field: str
    """The field's path in the request. Errors name it."""
    value: Any
    """The field's value, or a constraint that is built already, with the default options of `build`."""


@dataclass(frozen=True)
class GivenWhitespace:
    """A field that is set and defines the whitespace between JSON tokens."""

    field: str
    pattern: str


def take_one(given: Sequence[GivenConstraint]) -> GivenConstraint | None:
    """Return the constraint field, or None if there is none. Several fields with equal constraints count as the first.

    Raises:
        InvalidConstraint: two fields have different constraints.
    """
    if len(given) > 1 and len({build(field) for field in given}) > 1:
        names = " and ".join(field.field for field in given)
        raise InvalidConstraint(f"{names} are given: a request takes one constraint", param=given[1].field)
    return given[0] if given else None


def take_whitespace(one: GivenConstraint | None, given: Sequence[GivenWhitespace]) -> GivenWhitespace | None:
    """Return the whitespace field, or None if there is none. `one` is the request's constraint field.

    Raises:
        InvalidRequest: several are given that differ, or the constraint is not one of JSON.
    """
    if not given:
        return None
    if one is None:
        field = given[0].field
        raise InvalidRequest(f"{field} requires a JSON constraint", param=field)
    if len({each.pattern for each in given}) > 1:
        names = " and ".join(each.field for each in given)
        raise InvalidRequest(f"{names} are given: choose one", param=given[1].field)
    if one.kind not in ("json_schema", "json_object", "structural_tag"):
        raise InvalidRequest(f"{given[0].field} requires a JSON constraint, not {one.field}", param=given[0].field)
    return given[0]


def build(
    one: GivenConstraint,
    whitespace: GivenWhitespace | None = None,
    *,
    open_objects: bool = False,
    strict_schema: bool = False,
) -> Constraint:
    """Build the constraint. `param` of an `InvalidConstraint` is the field at fault."""
    if isinstance(one.value, Constraint):
        return one.value
    try:
        return Constraint.of_kind(
            one.kind,
            one.value,
            whitespace=None if whitespace is None else whitespace.pattern,
            open_objects=open_objects,
            strict_schema=strict_schema,
            param=one.field,
        )
    except InvalidConstraint as error:
        if whitespace is not None and "whitespace" in error.message and error.param == one.field:
            error.param = whitespace.field  # the pattern is at fault, not the schema
        raise
