"""Compare the server's decision on a hostile input with the expected one."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.chaos.checks import undeclared, unsatisfied
from benchmarks.chaos.client import Answer
from benchmarks.chaos.examples import Example
from benchmarks.chaos.hostile_inputs import Entry
from benchmarks.chaos.traffic import Request
from guided.errors import CompileTimeout, UnsupportedConstraint

Decision = Literal["accepted", "rejected", "can't", "timeout", "failed", "hung"]
CHECK_SECONDS = 2
SHORT: dict[Decision, str] = {
    "accepted": "yes",
    "rejected": "no",
    "can't": "can't",
    "timeout": "timeout",
    "failed": "FAILED",
    "hung": "HUNG",
}


@dataclass(frozen=True)
class Case:
    """A hostile input with one backend, its requests and their answers."""

    order: int
    entry: Entry
    backend: str
    requests: Sequence[Request]
    answers: Sequence[Answer] = ()

    def answered(self, answers: Sequence[Answer]) -> Case:
        return replace(self, answers=answers)

    @property
    def name(self) -> str:
        return f"{self.entry.id} ({self.backend})"

    @property
    def slowest(self) -> float:
        """Seconds until the HTTP status of the slowest request."""
        return max((answer.decided or answer.ended) - answer.began for answer in self.answers)


def decision(answer: Answer) -> Decision:
    """Return the decision on one request."""
    if answer.hung:
        return "hung"
    if answer.error is None:
        return "accepted" if answer.complete and answer.problem is None else "failed"
    code, status = answer.error["code"], answer.status or 500
    if code == UnsupportedConstraint.code:
        return "can't"
    if code == CompileTimeout.code:
        return "timeout"
    return "rejected" if 400 <= status < 500 else "failed"


def decided(case: Case) -> Decision:
    """Return the worst decision on its requests, or the last one if the sequence must end with a rejection."""
    met = [decision(answer) for answer in case.answers]
    for bad in ("hung", "failed"):
        if bad in met:
            return bad
    if case.entry.expected == "reject":
        return met[-1]
    return next((each for each in met if each != "accepted"), "accepted")


def describe(case: Case) -> str:
    """Return the cell of the table."""
    return f"{SHORT[decided(case)]} {case.slowest:.2f}"


def problem(case: Case, limit: float) -> str | None:
    """Return the problem with a decision, or None: it is the expected one, or the backend can't enforce the input.

    Args:
        limit: maximum seconds until the decision.
    """
    made = decided(case)
    for answer in case.answers:
        if answer.problem is not None:
            return answer.problem
        if answer.error is not None and (wrong := undeclared(answer.status, answer.headers, answer.error)):
            return wrong
    if made in ("hung", "failed"):
        causes = {str(answer.error["code"]) for answer in case.answers if answer.error is not None}
        return f"{made}: {', '.join(sorted(causes))}"
    if case.slowest > limit:
        return f"decided after {case.slowest:.1f} s"
    if made == "accepted" and (wrong := _outputs(case)):
        return wrong
    if made == "can't" or case.entry.bounded or (made == "accepted" and case.entry.if_enforced):
        return None
    listed = {"accept": "accepted", "reject": "rejected"}[case.entry.expected]
    return None if made == listed else f"{made}, expected {listed}"


def _outputs(case: Case) -> str | None:
    """Return the problem with the outputs of an accepted input, or None."""
    if case.entry.scope != "spec" or case.entry.kind == "grammar":
        return None
    value: Any = case.entry.payload
    if case.entry.kind == "json_schema" and isinstance(value, str):
        return None
    example = Example(case.entry.kind, value, "")
    for answer in case.answers:
        for choice in answer.choices.values():
            if choice.finish_reason == "stop" and (wrong := _in_time(example, choice.text)):
                return wrong
    return None


def _in_time(example: Example, text: str) -> str | None:
    """Call `unsatisfied`. Returns None where Python's `re` doesn't support the pattern or takes too long."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(CHECK_SECONDS)
    try:
        return unsatisfied(example, text)
    except (TimeoutError, re.error, RecursionError):
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
