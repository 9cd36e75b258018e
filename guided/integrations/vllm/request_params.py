"""Guided parameters of a vLLM request, read from `SamplingParams.extra_args` (HTTP: `vllm_xargs`).

`vllm_xargs` takes strings, numbers and flat lists of them, so a JSON schema is passed as a JSON string there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import InvalidConstraint, InvalidRequest
from guided.integrations.vllm.error_reports import REQUEST_ID
from guided.request import GivenConstraint, GivenWhitespace, build, refuse_stops, take_one, take_whitespace

_FORMER_NAMES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_TRUE, _FALSE = (True, 1, "true"), (False, 0, "false")
"""`vllm_xargs` has no booleans: pydantic converts them to numbers."""


class VLLMParams(Protocol):
    """The fields of vLLM's `SamplingParams` that are read here."""

    extra_args: dict[str, Any] | None
    stop: Any
    stop_token_ids: Any
    ignore_eos: bool
    structured_outputs: Any
    thinking_token_budget: int | None
    trace_decode_token_ids: list[int] | None


@dataclass(frozen=True)
class GuidedParams:
    """The guided parameters of one request."""

    constraint: Constraint
    backend: str = AUTO
    request_id: str | None = None
    """The id that errors are reported under. None: errors are not reported."""


def guided_params(params: VLLMParams) -> GuidedParams | None:
    """Read and check the guided parameters, except stop conditions. None: the request has no constraint.

    Raises:
        InvalidRequest, InvalidConstraint, ConstraintTooLarge, UnsupportedConstraint: as from `guided serve`.
    """
    extra = params.extra_args or {}
    for name, current in _FORMER_NAMES.items():
        if extra.get(name) is not None:
            raise InvalidRequest(f"{name} is called {current} here", param=name)
    given = take_one(_given(extra))
    pattern = extra.get("whitespace_pattern")
    whitespace = take_whitespace(given, [] if pattern is None else [GivenWhitespace("whitespace_pattern", pattern)])
    backend = resolve(_backend(extra))
    if given is None:
        return None
    constraint = build(given, whitespace, strict_formats=extra.get("strict_formats") in _TRUE)
    candidates(given.kind, backend)
    _reject_conflicts(params, constraint.kind)
    return GuidedParams(constraint, backend, request_id(params))


def reject_stops(guided: GuidedParams, params: VLLMParams) -> None:
    """Reject stop strings and stop token ids, which would cut the output short, with `InvalidRequest`.

    Call it in the process that admits requests: later, vLLM adds the model's own end tokens to `stop_token_ids`.
    """
    refuse_stops(guided.constraint, stop=params.stop, stop_token_ids=params.stop_token_ids)


def request_id(params: VLLMParams) -> str | None:
    """Return the id that errors are reported under, even if other parameters are invalid."""
    value = (params.extra_args or {}).get(REQUEST_ID)
    return None if value is None else str(value)


def _given(extra: Mapping[str, Any]) -> list[GivenConstraint]:
    given = [GivenConstraint(kind, kind, extra[kind]) for kind in KINDS if extra.get(kind) is not None]
    json_object = extra.get("json_object")
    if json_object is None or json_object in _TRUE:
        return given
    if json_object in _FALSE:
        return [one for one in given if one.kind != "json_object"]
    raise InvalidConstraint("json_object takes true or false (or 1 or 0)", param="json_object")


def _backend(extra: Mapping[str, Any]) -> str:
    value = extra.get("backend")
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"backend is a string, not {type(value).__name__}", param="backend")
    return value or AUTO


def _reject_conflicts(params: VLLMParams, kind: ConstraintKind) -> None:
    """Reject parameters that overwrite masks or change where an output ends."""
    if params.structured_outputs is not None:
        raise InvalidConstraint(
            f"structured_outputs and {kind} are given: a request takes one constraint", param="structured_outputs"
        )
    if params.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos can't be kept: the output ends where the {kind} constraint does", param="ignore_eos"
        )
    overwriting = {
        "thinking_token_budget": params.thinking_token_budget is not None,
        "trace_decode_token_ids": bool(params.trace_decode_token_ids),
    }
    for name, given in overwriting.items():
        if given:
            raise InvalidRequest(f"{name} would write over what the {kind} constraint allows", param=name)
