"""Guided parameters of a vLLM request, read from `SamplingParams.extra_args` (HTTP: `vllm_xargs`).

`vllm_xargs` takes strings, numbers and flat lists of them, so a JSON schema is passed as a JSON string there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from guided.backends import AUTO, candidates, resolve
from guided.constraint import KINDS, Constraint
from guided.errors import InternalError, InvalidConstraint, InvalidRequest, bounded
from guided.integrations.vllm.error_reports import REQUEST_ID
from guided.request import GivenConstraint, GivenWhitespace, build, refuse_stops, take_one, take_whitespace

if TYPE_CHECKING:
    from vllm import SamplingParams

_OPTIONS = ("whitespace_pattern", "backend")
_MEANT = {
    "json_schema": ("json", "schema", "guided_json", "guided_schema", "response_format", "structured_outputs"),
    "json_object": ("json_mode", "guided_json_object"),
    "regex": ("pattern", "re", "guided_regex"),
    "choice": ("choices", "enum", "guided_choice"),
    "grammar": ("ebnf", "gbnf", "lark", "cfg", "guided_grammar"),
    "backend": ("guided_decoding_backend",),
    "whitespace_pattern": ("guided_whitespace_pattern",),
}
"""Our names -> other names for the same fields elsewhere."""
_OURS = {other: name for name, others in _MEANT.items() for other in others}
VALIDATED = "guided_constraint"
"""The parameter with the validated constraint, as text. Written in the process that admits requests."""
FROM_EXTRA_ARGS = "_guided_from_extra_args"
"""Attribute of `structured_outputs` that were made from guided parameters."""
_PREFIX = "guided:"
_CLOSE = 0.8
"""Similarity (`difflib`) from which a name counts as a misspelt one."""
_TRUE, _FALSE = (True, 1, "true"), (False, 0, "false")
"""`vllm_xargs` has no booleans: pydantic converts them to numbers."""


@dataclass(frozen=True)
class GuidedParams:
    """The validated guided parameters of one request."""

    constraint: Constraint
    backend: str = AUTO

    def to_text(self) -> str:
        """Return these parameters as text, for the engine's process."""
        constraint = self.constraint
        return _PREFIX + json.dumps([constraint.kind, constraint.source, constraint.whitespace, self.backend])

    @classmethod
    def from_text(cls, text: str | None) -> GuidedParams | InternalError:
        """Read what `to_text` wrote. The constraint is not validated again.

        Returns:
            An error if it is something else: the request was admitted by a process without this integration.
        """
        if not isinstance(text, str) or not text.startswith(_PREFIX):
            return InternalError("this request was admitted by a process without guided's structured outputs")
        kind, source, whitespace, backend = json.loads(text.removeprefix(_PREFIX))
        return cls(Constraint(kind, source, whitespace), backend)


def guided_params(params: SamplingParams) -> GuidedParams | None:
    """Read and check the guided parameters, in the process that admits requests. None: the request has no constraint.

    Raises:
        InvalidRequest, InvalidConstraint, ConstraintTooLarge, UnsupportedConstraint: as from `guided serve`.
    """
    extra = params.extra_args or {}
    _reject_near_misses(extra)
    given = take_one(_given(extra))
    pattern = extra.get("whitespace_pattern")
    whitespace = take_whitespace(given, [] if pattern is None else [GivenWhitespace("whitespace_pattern", pattern)])
    backend = resolve(_backend(extra))
    if given is None:
        if extra.get("backend") is not None:
            raise InvalidRequest(f"backend needs a constraint beside it: {', '.join(KINDS)}", param="backend")
        return None
    constraint = build(given, whitespace, strict_schema=extra.get("strict_schema") in _TRUE)
    candidates(given.kind, backend)
    if params.structured_outputs is not None and not is_ours(params.structured_outputs):
        raise InvalidConstraint(
            f"structured_outputs and {given.kind} are given: a request takes one constraint", param="structured_outputs"
        )
    reject_overwriting(params, given.kind)
    refuse_stops(constraint, stop=params.stop, stop_token_ids=params.stop_token_ids)
    return GuidedParams(constraint, backend)


def is_ours(structured_outputs: Any) -> bool:
    """Whether `structured_outputs` were made from `vllm_xargs`, for an earlier request with the same parameters."""
    return bool(getattr(structured_outputs, FROM_EXTRA_ARGS, False))


def reject_overwriting(params: SamplingParams, constraint: str) -> None:
    """Reject parameters that overwrite masks, or change where an output ends.

    Args:
        constraint: what has the constraint: a kind, or a field.
    """
    if params.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos can't be kept: the output ends where the {constraint} constraint does", param="ignore_eos"
        )
    overwriting = {
        "thinking_token_budget": params.thinking_token_budget is not None,
        "trace_decode_token_ids": bool(params.trace_decode_token_ids),
    }
    for name, given in overwriting.items():
        if given:
            raise InvalidRequest(f"{name} would write over what the {constraint} constraint allows", param=name)


def request_id(params: SamplingParams) -> str | None:
    """Return the id that errors are reported under, even if other parameters are invalid."""
    value = (params.extra_args or {}).get(REQUEST_ID)
    return None if value is None else str(value)


def _reject_near_misses(extra: Mapping[str, Any]) -> None:
    """Reject names that are probably meant as ours. Others belong to vLLM, or to other plugins."""
    known = (*KINDS, *_OPTIONS)
    for name in extra:
        if name in known or name in (REQUEST_ID, VALIDATED):
            continue
        plain = name.lower().replace("-", "_")
        meant = [_OURS[plain]] if plain in _OURS else get_close_matches(plain, known, 1, _CLOSE)
        if meant or plain.startswith("guided_"):
            hint = f"did you mean {meant[0]}? " if meant else ""
            raise InvalidRequest(
                f"there is no {bounded(name, 60)} here: {hint}there are {', '.join(known)}", param=name
            )


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
