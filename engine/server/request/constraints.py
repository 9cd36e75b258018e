"""Read the constraint and the backend of a request, following the table in `fields.py`.

Errors name a field as the request spells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.server.options import ServerSettings
from engine.server.request.bodies import GenerationRequest
from engine.server.request.fields import (
    Body,
    ConstraintFields,
    ResponseFormat,
    StructuredOutputs,
    rows,
)
from guided.backends import AUTO, resolve
from guided.constraint import Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest
from guided.fields.request import (
    GivenConstraint,
    GivenWhitespace,
    build,
    take_one,
    take_whitespace,
)

_FORMAT_KINDS: dict[str, ConstraintKind] = {
    "json_schema": "json_schema",
    "json_object": "json_schema",
    "json": "json_schema",
    "structural_tag": "structural_tag",
}
"""Type of a `response_format` -> the kind of the constraint that its fields hold."""
_NO_WHITESPACE = "disable-any-whitespace"
_CLOSED = "no-additional-properties"
_BACKEND_OPTIONS = ("no-fallback", _NO_WHITESPACE, _CLOSED)
"""vLLM's options after the name of a backend (`xgrammar:no-fallback,...`). A named
backend is never replaced."""


@dataclass(frozen=True)
class RequestedConstraint:
    """The constraint and the backend that a request asks for."""

    constraint: Constraint | None = None
    backend: str = AUTO
    open_objects: bool = False
    """Whether objects may have properties that their schema neither names nor
    excludes."""


def requested_constraint(
    request: GenerationRequest, settings: ServerSettings
) -> RequestedConstraint:
    """Read the constraint and the backend of a request. `param` of an error is the
    field at fault."""
    backend, options = _backend(request, settings)
    given: list[GivenConstraint] = []
    spaces: list[GivenWhitespace] = []
    closing = []
    if _CLOSED in options:
        closing.append("backend")
    for place in filter(None, (request, request.nvext, request.sampling_params)):
        given += _constraints(place, place.prefix)
        spaces += _whitespace(place, place.prefix)
        if (outputs := place.structured_outputs) is not None:
            prefix = place.prefix + outputs.prefix
            spaces += _whitespace(outputs, prefix)
            if outputs.disable_any_whitespace:
                spaces.append(GivenWhitespace(f"{prefix}disable_any_whitespace", ""))
            if outputs.disable_additional_properties:
                closing.append(f"{prefix}disable_additional_properties")
    if _NO_WHITESPACE in options:
        spaces.append(GivenWhitespace("backend", ""))
    chosen = take_one(given)
    whitespace = take_whitespace(chosen, spaces)
    is_open = request.open_objects
    if is_open is None:
        is_open = settings.open_objects
    if chosen is None:
        return RequestedConstraint(backend=backend, open_objects=is_open)
    if closing and chosen.kind != "json_schema":
        raise InvalidRequest(
            f"{closing[0]} requires a JSON schema, not {chosen.field}", param=closing[0]
        )
    is_open = is_open and not closing
    constraint = build(
        chosen,
        whitespace,
        open_objects=is_open,
        strict_schema=request.strict_schema is True,
    )
    return RequestedConstraint(constraint, backend, is_open)


def _backend(
    request: GenerationRequest, settings: ServerSettings
) -> tuple[str, Sequence[str]]:
    """Return the backend, and the options after its name."""
    older = request.guided_decoding_backend
    if older is not None and request.backend is not None:
        field = "guided_decoding_backend"
        raise InvalidRequest(f"backend and {field} are given: choose one", param=field)
    name, *options = (
        (older or request.backend or settings.backend).replace(",", ":").split(":")
    )
    if not set(options).issubset(_BACKEND_OPTIONS):
        raise InvalidRequest(
            f"the options of a backend are {', '.join(_BACKEND_OPTIONS)}",
            param="backend",
        )
    return resolve(name), options


def _constraints(place: ConstraintFields, prefix: str) -> Iterator[GivenConstraint]:
    yield from _fields(place, prefix)
    if place.response_format is not None:
        yield from _response_format(place.response_format, f"{prefix}response_format")
    if place.structured_outputs is not None:
        prefix += place.structured_outputs.prefix
        given = list(_fields(place.structured_outputs, prefix))
        if not given:
            names = ", ".join(row.name for row in rows(StructuredOutputs))
            message = f"structured_outputs has no constraint: give one of {names}"
            raise InvalidConstraint(message, param=prefix[:-1])
        yield from given


def _fields(owner: Body, prefix: str) -> Iterator[GivenConstraint]:
    """Return the fields of `owner` that are set. `json_object: false` counts as not
    set."""
    for row in rows(type(owner)):
        value = getattr(owner, row.attribute)
        if (
            row.kind is not None
            and value is not None
            and not (row.kind == "json_object" and value is False)
        ):
            yield GivenConstraint(row.kind, prefix + row.name, value)


def _response_format(chosen: ResponseFormat, path: str) -> Iterator[GivenConstraint]:
    given = [
        row
        for row in rows(ResponseFormat)
        if getattr(chosen, row.attribute) is not None
    ]
    kind = _FORMAT_KINDS.get(chosen.type)
    for row in given:
        if row.kind != kind:
            field = f"{path}.{row.name}"
            raise InvalidConstraint(
                f"{field} requires type {row.kind}, not {chosen.type}", param=field
            )
    if kind == "structural_tag":
        parts = {row.name: getattr(chosen, row.attribute) for row in given}
        yield GivenConstraint(
            "structural_tag", path, {"type": "structural_tag", **parts}
        )
        return
    if not given and chosen.type in ("json_object", "json"):
        yield GivenConstraint("json_object", path, True)
    missing = chosen.type == "json_schema" and not given
    for row in given:
        value = getattr(chosen, row.attribute)
        # the field `json_schema` is an object with the schema
        schema = getattr(value, "schema_", value)
        missing = missing or schema is None
        field = path  # as in OpenAI's errors about the schema
        if len(given) > 1:
            field = f"{path}.{row.name}"
        yield GivenConstraint("json_schema", field, schema)
    if missing:
        field = f"{path}.json_schema.schema"
        raise InvalidConstraint(f"Missing required parameter: '{field}'", param=field)


def _whitespace(place: Body, prefix: str) -> Iterator[GivenWhitespace]:
    for name in ("whitespace_pattern", "guided_whitespace_pattern"):
        if (pattern := getattr(place, name, None)) is not None:
            yield GivenWhitespace(prefix + name, pattern)
