"""Rules for the constraint fields of a request: one constraint, in one field or
several, and its whitespace.

Each API (HTTP body, `SamplingParams`, vLLM's extra arguments) collects its fields and
checks them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import guided.schema.document  # noqa: F401 -- imported at the start of a server, and not at its first request
from guided.constraint import Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest


@dataclass(frozen=True)
class GivenConstraint:
    """A constraint field that is set."""

    kind: ConstraintKind
    field: str
    """The path of the field in the request, for errors."""
    value: Any
    """The value of the field, or a constraint that was already built with the default
    options of `build`."""


@dataclass(frozen=True)
class GivenWhitespace:
    """A field for the whitespace between JSON tokens that is set."""

    field: str
    pattern: str


def take_one(given: Sequence[GivenConstraint]) -> GivenConstraint | None:
    """Return the constraint field, or None if there is none. Several fields with equal
    constraints count as the first.

    Raises:
        InvalidConstraint: two fields have different constraints.
    """
    if len(given) > 1 and len({build(field) for field in given}) > 1:
        names = " and ".join(field.field for field in given)
        raise InvalidConstraint(
            f"{names} are given: a request takes one constraint", param=given[1].field
        )
    if given:
        return given[0]
    return None


def take_whitespace(
    constraint: GivenConstraint | None, given: Sequence[GivenWhitespace]
) -> GivenWhitespace | None:
    """Return the whitespace field, or None if there is none. `constraint` is the
    request's constraint field.

    Raises:
        InvalidRequest: several fields differ, or the constraint is not a JSON
            constraint.
    """
    if not given:
        return None
    if constraint is None:
        field = given[0].field
        raise InvalidRequest(f"{field} requires a JSON constraint", param=field)
    if len({space.pattern for space in given}) > 1:
        names = " and ".join(space.field for space in given)
        raise InvalidRequest(f"{names} are given: choose one", param=given[1].field)
    if constraint.kind not in ("json_schema", "json_object", "structural_tag"):
        raise InvalidRequest(
            f"{given[0].field} requires a JSON constraint, not {constraint.field}",
            param=given[0].field,
        )
    return given[0]


def build(
    given: GivenConstraint,
    whitespace: GivenWhitespace | None = None,
    *,
    open_objects: bool = False,
    strict_schema: bool = False,
) -> Constraint:
    """Build the constraint of a field. `param` of an `InvalidConstraint` is the field
    at fault."""
    if isinstance(given.value, Constraint):
        return given.value
    pattern = None
    if whitespace is not None:
        pattern = whitespace.pattern
    try:
        return Constraint.of_kind(
            given.kind,
            given.value,
            whitespace=pattern,
            open_objects=open_objects,
            strict_schema=strict_schema,
            param=given.field,
        )
    except InvalidConstraint as error:
        if (
            whitespace is not None
            and "whitespace" in error.message
            and error.param == given.field
        ):
            error.param = whitespace.field  # the pattern is at fault, not the schema
        raise
