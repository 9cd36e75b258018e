"""Read a request's constraint and its backend: our names, OpenAI's `response_format` (also with llama.cpp's `schema`),
vLLM's `structured_outputs` and its older `guided_*` names. Errors name the field as the request spells it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.server.options import ServerSettings
from engine.server.protocol import GenerationRequest, ResponseFormat
from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest
from guided.request import GivenConstraint, GivenWhitespace, build, take_one, take_whitespace

_STRUCTURED = {"json_" if kind == "json_schema" else kind: kind for kind in KINDS}
"""Kinds of the fields of `structured_outputs`."""
_OLDER: dict[str, ConstraintKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Kinds of vLLM's older fields."""
_FORMAT_FIELDS: dict[str, tuple[str, ...]] = {
    "json_schema": ("json_schema", "schema_"),
    "json_object": ("schema_",),
    "structural_tag": ("format", "structures", "triggers"),
}
"""Fields of `response_format` by its type."""


@dataclass(frozen=True)
class RequestedConstraint:
    """The constraint and the backend that a request asks for."""

    constraint: Constraint | None = None
    backend: str = AUTO
    param: str | None = None
    """The field that holds the constraint, as the request spells it."""


def opens_objects(request: GenerationRequest, settings: ServerSettings) -> bool:
    """Return whether objects that name their properties may have others where the schema does not say."""
    return settings.open_objects if request.open_objects is None else request.open_objects


def requested_constraint(request: GenerationRequest, settings: ServerSettings) -> RequestedConstraint:
    """Read the request's constraint, and its backend. `param` of an error is the field."""
    older, given = request.guided_decoding_backend, request.backend
    backend_field = "backend" if older is None else "guided_decoding_backend"
    if None not in (older, given):
        raise InvalidRequest(f"backend and {backend_field} are given: choose one", param=backend_field)
    backend = resolve(older or given or settings.backend, param=backend_field)
    one = take_one(
        [
            *_fields(request, {kind: kind for kind in KINDS}),
            *_response_format(request.response_format),
            *_structured_outputs(request),
            *_fields(request, _OLDER),
        ]
    )
    spaces = take_whitespace(one, list(_whitespace(request)))
    if one is None:
        return RequestedConstraint(backend=backend)
    closed = request.structured_outputs is not None and request.structured_outputs.disable_additional_properties
    if closed and one.kind != "json_schema":
        field = "structured_outputs.disable_additional_properties"
        raise InvalidRequest(f"{field} requires a JSON schema, not {one.field}", param=field)
    is_open = opens_objects(request, settings) and not closed
    constraint = build(one, spaces, open_objects=is_open, strict_schema=request.strict_schema is True)
    candidates(one.kind, backend, param=backend_field)  # rejects a backend that lacks the kind, before anything runs
    return RequestedConstraint(constraint, backend, one.field)


def _fields(owner: object, kinds: Mapping[str, ConstraintKind], prefix: str = "") -> Iterator[GivenConstraint]:
    """Return the fields of `owner` that are set. `json_object: false` counts as not set."""
    for name, kind in kinds.items():
        value = getattr(owner, name)
        if value is not None and not (kind == "json_object" and value is False):
            yield GivenConstraint(kind, prefix + name.rstrip("_"), value)


def _response_format(chosen: ResponseFormat | None) -> Iterator[GivenConstraint]:
    if chosen is None:
        return
    given = {name for name in ResponseFormat.model_fields.keys() - {"type"} if getattr(chosen, name) is not None}
    for name in sorted(given.difference(_FORMAT_FIELDS.get(chosen.type, ()))):
        field = f"{chosen.path}.{name.rstrip('_')}"
        requires = next(kind for kind, names in _FORMAT_FIELDS.items() if name in names)
        raise InvalidConstraint(f"{field} requires type {requires}, not {chosen.type}", param=field)
    if chosen.type == "structural_tag":
        parts = {"format": chosen.format, "structures": chosen.structures, "triggers": chosen.triggers}
        tag = {"type": "structural_tag", **{name: value for name, value in parts.items() if value is not None}}
        yield GivenConstraint("structural_tag", chosen.path, tag)
    elif given or chosen.type == "json_schema":
        schema = chosen.json_schema.schema_ if chosen.json_schema is not None else chosen.schema_
        if schema is None:
            message = f"Missing required parameter: '{chosen.schema_path}'"
            raise InvalidConstraint(message, param=chosen.schema_path)
        # Errors about the schema name `response_format` itself, as OpenAI's do.
        yield GivenConstraint("json_schema", chosen.path, schema)
    elif chosen.type == "json_object":
        yield GivenConstraint("json_object", chosen.path, True)


def _structured_outputs(request: GenerationRequest) -> Iterator[GivenConstraint]:
    outputs = request.structured_outputs
    if outputs is None:
        return
    given = list(_fields(outputs, _STRUCTURED, "structured_outputs."))
    if not given:
        names = ", ".join(name.rstrip("_") for name in _STRUCTURED)
        message = f"structured_outputs has no constraint: give one of {names}"
        raise InvalidConstraint(message, param="structured_outputs")
    yield from given


def _whitespace(request: GenerationRequest) -> Iterator[GivenWhitespace]:
    for field in ("whitespace_pattern", "guided_whitespace_pattern"):
        if (pattern := getattr(request, field)) is not None:
            yield GivenWhitespace(field, pattern)
    if (outputs := request.structured_outputs) is not None:
        if outputs.whitespace_pattern is not None:
            yield GivenWhitespace("structured_outputs.whitespace_pattern", outputs.whitespace_pattern)
        if outputs.disable_any_whitespace:
            yield GivenWhitespace("structured_outputs.disable_any_whitespace", "")
