"""Read a request's constraint, in any of its spellings, and its backend.

Ours (`json_schema`, `regex`, `choice`, `grammar`, `json_object`, `backend`, `whitespace_pattern`), OpenAI's
`response_format`, vLLM's `structured_outputs`, and vLLM's older `guided_*` names. Errors name the field as the request
spells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.server.protocol import GenerationRequest
from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest, bounded
from guided.limits import DEFAULT_LIMITS, Limits
from guided.request import GivenConstraint, GivenWhitespace, build, take_one, take_whitespace

_STRUCTURED: dict[str, ConstraintKind] = {
    "json_": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
_OLDER: dict[str, ConstraintKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Kinds of the fields of `structured_outputs`, and of vLLM's older fields."""


@dataclass(frozen=True)
class RequestedConstraint:
    """The constraint and the backend that a request asks for."""

    constraint: Constraint | None = None
    backend: str = AUTO
    param: str | None = None
    """The field that holds the constraint, as the request spells it."""


def requested_constraint(
    request: GenerationRequest,
    default_backend: str = AUTO,
    limits: Limits = DEFAULT_LIMITS,
    *,
    strict_formats: bool = False,
) -> RequestedConstraint:
    """Read the request's constraint, check it against `limits`, and read its backend.

    Args:
        strict_formats: for requests that do not say.

    Raises:
        InvalidRequest, InvalidConstraint, ConstraintTooLarge, UnsupportedConstraint: `param` is the field.
    """
    backend, backend_field, backend_whitespace = _backend(request, default_backend)
    found = [
        *_fields(request, {kind: kind for kind in KINDS}),
        *_response_format(request),
        *_structured_outputs(request),
        *_fields(request, _OLDER),
    ]
    whitespace = [*_whitespace(request), *backend_whitespace]
    one = take_one(found)
    spaces = take_whitespace(one, whitespace)
    if one is None:
        return RequestedConstraint(backend=backend)
    strict = strict_formats if request.strict_formats is None else request.strict_formats
    constraint = _build(one, spaces, request, limits, strict)
    candidates(one.kind, backend, param=backend_field)  # rejects a backend that lacks the kind, before anything runs
    return RequestedConstraint(constraint, backend, one.field)


def _fields(owner: object, kinds: Mapping[str, ConstraintKind], prefix: str = "") -> Iterator[GivenConstraint]:
    """Return the fields of `owner` that are set. `json_object: false` is not."""
    for name, kind in kinds.items():
        value = getattr(owner, name)
        if value is not None and not (kind == "json_object" and value is False):
            yield GivenConstraint(kind, prefix + name.rstrip("_"), value)


def _response_format(request: GenerationRequest) -> Iterator[GivenConstraint]:
    chosen = request.response_format
    if chosen is None:
        return
    if chosen.type == "structural_tag":
        raise InvalidConstraint("response_format of type structural_tag is not supported", param="response_format.type")
    if chosen.type == "json_object":
        yield GivenConstraint("json_object", "response_format", True)
    if chosen.type == "json_schema":
        if chosen.json_schema is None or chosen.json_schema.schema_ is None:
            missing = "response_format.json_schema" + ("" if chosen.json_schema is None else ".schema")
            raise InvalidConstraint(f"Missing required parameter: '{missing}'", param=missing)
        # OpenAI names this field, too, in errors about the schema.
        yield GivenConstraint("json_schema", "response_format", chosen.json_schema.schema_)
    elif chosen.json_schema is not None:
        raise InvalidConstraint(
            f"response_format.json_schema requires type json_schema, not {chosen.type}",
            param="response_format.json_schema",
        )


def _structured_outputs(request: GenerationRequest) -> Iterator[GivenConstraint]:
    outputs = request.structured_outputs
    if outputs is None:
        return
    if outputs.structural_tag is not None:
        raise InvalidConstraint("structural_tag is not supported", param="structured_outputs.structural_tag")
    given = list(_fields(outputs, _STRUCTURED, "structured_outputs."))
    if not given:
        raise InvalidConstraint(
            "structured_outputs has no constraint: give one of json, regex, choice, grammar, json_object",
            param="structured_outputs",
        )
    yield from given


def _whitespace(request: GenerationRequest) -> Iterator[GivenWhitespace]:
    outputs = request.structured_outputs
    for field, pattern in (
        ("whitespace_pattern", request.whitespace_pattern),
        ("guided_whitespace_pattern", request.guided_whitespace_pattern),
        ("structured_outputs.whitespace_pattern", None if outputs is None else outputs.whitespace_pattern),
    ):
        if pattern is not None:
            yield GivenWhitespace(field, pattern)
    if outputs is not None and outputs.disable_any_whitespace:
        yield GivenWhitespace("structured_outputs.disable_any_whitespace", "")


def _backend(request: GenerationRequest, default: str) -> tuple[str, str, list[GivenWhitespace]]:
    """Return the backend, the field that names it, and the whitespace of vLLM's backend options."""
    if request.backend is not None and request.guided_decoding_backend is not None:
        raise InvalidRequest(
            "backend and guided_decoding_backend are given: choose one", param="guided_decoding_backend"
        )
    if request.guided_decoding_backend is None:
        return resolve(request.backend or default), "backend", []
    field = "guided_decoding_backend"
    name, _, options = request.guided_decoding_backend.partition(":")
    whitespace = []
    for option in filter(None, options.split(",")):
        if option == "disable-any-whitespace":
            whitespace.append(GivenWhitespace(field, ""))
        elif option != "no-fallback":  # a named backend is never replaced here
            raise InvalidRequest(
                f"{field}: no option {bounded(option, 60)!r}; there are no-fallback and disable-any-whitespace",
                param=field,
            )
    return resolve(name, param=field), field, whitespace


def _build(
    one: GivenConstraint, whitespace: GivenWhitespace | None, request: GenerationRequest, limits: Limits, strict: bool
) -> Constraint:
    closed = request.structured_outputs is not None and request.structured_outputs.disable_additional_properties
    if closed and one.kind != "json_schema":
        field = "structured_outputs.disable_additional_properties"
        raise InvalidRequest(f"{field} requires a JSON schema, not {one.field}", param=field)
    return build(one, whitespace, additional_properties=not closed, strict_formats=strict, limits=limits)
