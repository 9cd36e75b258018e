"""Check an answer: valid, a declared error, or a violation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema

from benchmarks.chaos.traffic import Example, Request
from benchmarks.client import Answer, Choice
from engine.server.errors import QueueFull, ShuttingDown
from guided.errors import GuidedError, InternalError

Outcome = Literal["valid", "failed", "refused", "left", "invalid", "different", "undeclared", "hung"]
MUST_NOT: tuple[Outcome, ...] = ("invalid", "different", "undeclared", "hung")
"""Outcomes that are violations under any fault."""


def _codes(root: type[GuidedError]) -> set[str]:
    return {root.code}.union(*(_codes(child) for child in root.__subclasses__()))


_SHAPE = {"invalid_request", "invalid_json", "invalid_type", "missing_required_parameter", "unknown_parameter"}
_SHAPE |= {"unsupported_parameter", "misplaced_parameter", QueueFull.code, ShuttingDown.code}
DECLARED = (_codes(GuidedError) | _SHAPE) - {GuidedError.code, InternalError.code}
"""Error codes with a specific cause. `internal_error` has none."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    cause: str = ""
    """The error's code, or the problem with the output."""


def verdict_of(request: Request, answer: Answer, references: Mapping[str, Choice]) -> Verdict:
    """Return the verdict on an answer. The output of a hostile request is not checked, nor one that was cut.

    Args:
        references: `Request.key` -> output of the same request without faults.
    """
    if answer.hung:
        return Verdict("hung", f"no end after {answer.ended - answer.began:.0f} s")
    if answer.problem is not None:
        return Verdict("undeclared", answer.problem)
    if answer.error is not None:
        return _of_error(answer.error, answer)
    if answer.left:
        return Verdict("left")
    if not answer.complete:
        return Verdict("undeclared", "a stream without an end")
    if request.hostile is not None:
        return Verdict("valid")
    if len(answer.choices) != request.body.get("n", 1):
        return Verdict("invalid", f"{len(answer.choices)} choices")
    if request.backend not in (None, "auto", answer.backend):
        return Verdict("invalid", f"{answer.backend} was used, not {request.backend}")
    reference = references.get(request.key or "")
    for choice in answer.choices.values():
        if choice.finish_reason not in ("stop", "length"):
            return Verdict("invalid", f"finish_reason {choice.finish_reason}")
        if choice.finish_reason == "stop" and request.example and (wrong := _unsatisfied(request.example, choice.text)):
            return Verdict("invalid", wrong)
        if reference is not None and choice != reference:
            return Verdict("different", f"{choice.text[:200]!r}, without faults {reference.text[:200]!r}")
    return Verdict("valid")


def _unsatisfied(example: Example, text: str) -> str | None:
    """Return why a whole output doesn't satisfy the constraint, or None."""
    if example.kind in ("json_schema", "json_object"):
        schema = example.value if example.kind == "json_schema" else {"type": "object"}
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"not valid: {text[:200]!r} ({str(error)[:200]})"
        return None
    fine = text in example.value if example.kind == "choice" else re.fullmatch(example.pattern, text)
    return None if fine else f"no {example.kind} {example.value!r}: {text[:200]!r}"


def _of_error(error: Mapping[str, Any], answer: Answer) -> Verdict:
    """Return the verdict on an error: it needs its fields, a specific code, and a time to retry where that helps."""
    if missing := {"message", "type", "param", "code"} - error.keys():
        return Verdict("undeclared", f"an error without {', '.join(sorted(missing))}")
    code, status = str(error["code"]), answer.status or 500
    if code not in DECLARED:
        return Verdict("undeclared", f"{status} {code}: {str(error['message'])[:200]}")
    if status in (429, 503) and "retry-after" not in answer.headers:
        return Verdict("undeclared", f"{status} {code} without retry-after")
    return Verdict("refused" if 400 <= status < 500 else "failed", code)
