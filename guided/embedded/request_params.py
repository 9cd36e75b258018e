"""A request's constraint out of the extra arguments that vLLM carries: `SamplingParams.extra_args`, HTTP `vllm_xargs`.

`vllm_xargs` takes strings, numbers and flat lists of them: a JSON schema travels as a JSON string there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint
from guided.embedded.statuses import REQUEST_ID
from guided.errors import InvalidConstraint, InvalidRequest
from guided.request import GivenConstraint, GivenWhitespace, build, refuse_stops, take_one, take_whitespace

__all__ = ["Asked", "HostParams", "asked", "refuse_host_stops", "request_id"]

_OLDER = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_TRUE, _FALSE = (True, 1, "true"), (False, 0, "false")
"""`vllm_xargs` has no booleans: pydantic makes a number of one."""


class HostParams(Protocol):
    """What is read of vLLM's `SamplingParams`."""

    extra_args: dict[str, Any] | None
    stop: Any
    stop_token_ids: Any
    ignore_eos: bool
    structured_outputs: Any
    thinking_token_budget: int | None
    trace_decode_token_ids: list[int] | None


@dataclass(frozen=True)
class Asked:
    """What a guided request asked for."""

    constraint: Constraint
    backend: str = AUTO
    request_id: str | None = None
    """To report by, where the request has one."""


def asked(params: HostParams) -> Asked | None:
    """What `params` ask for; None where they ask for nothing of ours.

    Raises:
        InvalidRequest, InvalidConstraint, ConstraintTooLarge, UnsupportedConstraint: as our HTTP server has it.

    What is read here stays as the user gave it. vLLM adds the model's further ends to `stop_token_ids` once the request
    is admitted: those are looked at by `refuse_host_stops`, before.
    """
    extra = params.extra_args or {}
    for name, ours in _OLDER.items():
        if extra.get(name) is not None:
            raise InvalidRequest(f"{name} is called {ours} here", param=name)
    one = take_one(_given(extra))
    pattern = extra.get("whitespace_pattern")
    whitespace = take_whitespace(one, [] if pattern is None else [GivenWhitespace("whitespace_pattern", pattern)])
    backend = resolve(_text(extra, "backend") or AUTO)
    if one is None:
        return None
    constraint = build(one, whitespace)
    candidates(one.kind, backend)
    _refuse_other_masters(params, constraint)
    return Asked(constraint, backend, request_id(params))


def refuse_host_stops(what: Asked, params: HostParams) -> None:
    """In the process that admits requests, where `params` are as the user gave them.

    Raises:
        InvalidRequest: something else than the constraint would end the output.
    """
    refuse_stops(what.constraint, stop=params.stop, stop_token_ids=params.stop_token_ids)


def _given(extra: Mapping[str, Any]) -> list[GivenConstraint]:
    given = [GivenConstraint(kind, kind, extra[kind]) for kind in KINDS if extra.get(kind) is not None]
    wanted = extra.get("json_object")
    if wanted is None or wanted in _TRUE:
        return given
    if wanted in _FALSE:
        return [one for one in given if one.kind != "json_object"]
    raise InvalidConstraint("json_object takes true or false (or 1 or 0)", param="json_object")


def _refuse_other_masters(params: HostParams, constraint: Constraint) -> None:
    """What vLLM would write over the masks, or would have to end otherwise than they end."""
    kind = constraint.kind
    if params.structured_outputs is not None:
        raise InvalidConstraint(
            f"structured_outputs and {kind} are given: a request takes one constraint", param="structured_outputs"
        )
    if params.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos can't be kept: the output ends where the {kind} constraint does", param="ignore_eos"
        )
    if params.thinking_token_budget is not None:
        raise InvalidRequest(
            f"thinking_token_budget would write over what the {kind} constraint allows", param="thinking_token_budget"
        )
    if params.trace_decode_token_ids:
        raise InvalidRequest(
            f"trace_decode_token_ids would write over what the {kind} constraint allows", param="trace_decode_token_ids"
        )


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} is a string, not {type(value).__name__}", param=name)
    return value


def request_id(params: HostParams) -> str | None:
    """What a request is reported by, where it has something; whatever else is wrong with it."""
    value = (params.extra_args or {}).get(REQUEST_ID)
    return None if value is None else str(value)
