"""Check answers: valid, a declared error, or a violation."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jsonschema

from benchmarks.chaos.client import Answer, Choice
from benchmarks.chaos.examples import Example
from benchmarks.chaos.traffic import Request
from engine.server import errors as server_errors
from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError
from guided.vocabulary import Vocabulary

Outcome = Literal["valid", "failed", "refused", "left", "invalid", "different", "undeclared", "hung"]
MUST_NOT: tuple[Outcome, ...] = ("invalid", "different", "undeclared", "hung")
"""Outcomes that are violations under any fault."""
BLANKS = "[ \\t\\r\\n]*"


def _codes(root: type[GuidedError]) -> set[str]:
    return {root.code}.union(*(_codes(child) for child in root.__subclasses__()))


_SHAPE = {"invalid_request", "invalid_json", "invalid_type", "missing_required_parameter", "unknown_parameter"}
_SHAPE |= {"unsupported_parameter", "misplaced_parameter"}
DECLARED = (_codes(GuidedError) | _SHAPE) - {GuidedError.code, InternalError.code}
"""Error codes with a specific cause. `internal_error` has none."""
_RETRYABLE = {"worker_died", "pool_unavailable", server_errors.QueueFull.code, server_errors.ShuttingDown.code}


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    cause: str = ""
    """The error's code, or the problem with the output."""


class Judge:
    """Returns verdicts on answers.

    Args:
        vocabulary: the served model's, for checks of outputs that were cut.
        references: `Request.key` -> output of the same request without faults.
    """

    def __init__(self, vocabulary: Vocabulary, references: dict[str, Choice] | None = None) -> None:
        self._backends = Backends(vocabulary)
        self._compiled = lru_cache(256)(lambda backend, constraint: self._backends[backend].compile(constraint))
        self.references = references or {}

    def verdict(self, request: Request, answer: Answer) -> Verdict:
        """Return the verdict on an answer. The output of a hostile request is not checked here."""
        if answer.hung:
            return Verdict("hung", f"no end after {answer.ended - answer.began:.0f} s")
        if answer.problem is not None:
            return Verdict("undeclared", answer.problem)
        if answer.error is not None:
            return _of_error(answer)
        if answer.left:
            return Verdict("left")
        if not answer.complete:
            return Verdict("undeclared", "a stream without an end")
        if request.hostile is not None:
            return Verdict("valid")
        if len(answer.choices) != request.body.get("n", 1):
            return Verdict("invalid", f"{len(answer.choices)} choices")
        for choice in answer.choices.values():
            if wrong := self._wrong(request, answer, choice):
                return Verdict("invalid", wrong)
        return self._compared(request, answer)

    def _wrong(self, request: Request, answer: Answer, choice: Choice) -> str | None:
        if choice.finish_reason not in ("stop", "length"):
            return f"finish_reason {choice.finish_reason}"
        if request.example is None:
            return None
        if request.backend not in (answer.used, "auto"):
            return f"{answer.used} was used, not {request.backend}"
        if choice.finish_reason == "stop":
            return unsatisfied(request.example, choice.text)
        return self.illegal(request.example, choice.text, answer.used)

    def illegal(self, example: Example, text: str, used: str | None) -> str | None:
        """Return why an output is no legal beginning, or None. Another backend than the one that made it decides."""
        checker = "xgrammar" if used == "llguidance" else "llguidance"
        reason = ""
        for constraint in [example.constraint] if used == "llguidance" else readings(example):
            matcher = self._compiled(checker, constraint).matcher()
            try:
                matcher.accept_tokens(self._backends.vocabulary.encode(text))
            except GuidedError as error:
                reason = reason or str(error)
            else:
                return None
        return f"cut, and no legal beginning: {text[:200]!r} ({checker}: {reason[:200]})"

    def _compared(self, request: Request, answer: Answer) -> Verdict:
        reference = self.references.get(request.key or "")
        if reference is not None:
            for choice in answer.choices.values():
                if (choice.text, choice.finish_reason) != (reference.text, reference.finish_reason):
                    return Verdict("different", f"{choice.text[:200]!r}, without faults {reference.text[:200]!r}")
        return Verdict("valid")


def readings(example: Example) -> Iterator[Constraint]:
    """Yield constraints that together allow every output of `example`: any white space, and properties in any order.
    Each backend allows a part of these."""
    if example.kind == "json_object":
        yield Constraint.json_object(whitespace=BLANKS)
    elif example.kind == "json_schema":
        for schema in _orders(example.value):
            yield Constraint.json_schema(schema, whitespace=BLANKS)
    else:
        yield example.constraint


def _orders(value: Any) -> Iterator[Any]:
    """Yield a schema with the properties of its objects in every order."""
    if isinstance(value, dict):
        for parts in itertools.product(*(_orders(each) for each in value.values())):
            fields = dict(zip(value, parts, strict=True))
            if isinstance(named := fields.get("properties"), dict):
                for order in itertools.permutations(named):
                    yield {**fields, "properties": {name: named[name] for name in order}}
            else:
                yield fields
    else:
        yield value


def unsatisfied(example: Example, text: str) -> str | None:
    """Return why a whole output doesn't satisfy the constraint, or None."""
    match example.kind:
        case "json_schema" | "json_object":
            schema = example.value if example.kind == "json_schema" else {"type": "object"}
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                return f"not valid: {text[:200]!r} ({str(error)[:200]})"
            return None
        case "choice":
            return None if text in example.value else f"not one of the choices: {text[:200]!r}"
        case _:
            pattern = example.pattern or example.value
            return None if re.fullmatch(pattern, text) else f"no match of {pattern!r}: {text[:200]!r}"


def _of_error(answer: Answer) -> Verdict:
    assert answer.error is not None
    if wrong := undeclared(answer.status, answer.headers, answer.error):
        return Verdict("undeclared", wrong)
    code = str(answer.error["code"])
    ours = answer.status == 200 or (answer.status or 500) >= 500
    return Verdict("failed" if ours else "refused", code)


def undeclared(status: int | None, headers: Any, error: dict[str, Any]) -> str | None:
    """Return why an error is not a declared one, or None. It needs its fields, a specific code and correct retry
    headers.

    Args:
        status: 200 if the error is an event of a stream.
    """
    if missing := {"message", "type", "param", "code"} - error.keys():
        return f"an error without {', '.join(sorted(missing))}"
    code = error["code"]
    if code not in DECLARED:
        return f"{status} {code}: {str(error['message'])[:200]}"
    if status == 200:
        return None
    if status in (429, 503) and "retry-after" not in headers:
        return f"{status} {code} without retry-after"
    again = headers.get("x-should-retry")
    if again not in (None, "true", "false"):
        return f"x-should-retry: {again}"
    if code in _RETRYABLE and again == "false":
        return f"{status} {code}, and x-should-retry is false"
    if status is not None and status >= 500 and code not in _RETRYABLE and again is None:
        return f"{status} {code} without x-should-retry"
    return None
