"""What a server decided about a hostile input, beside what a robust one does."""

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

__all__ = ["Case", "Decision", "decided", "decision", "describe", "problem"]

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
    """An input with one backend, and how its requests were answered."""

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
        """Seconds until its status came, of the request that took longest."""
        return max((answer.decided or answer.ended) - answer.began for answer in self.answers)


def decision(answer: Answer) -> Decision:
    """What one request met."""
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
    """The worst that its requests met; of a sequence that is to end with a refusal, what the last one met."""
    met = [decision(answer) for answer in case.answers]
    for bad in ("hung", "failed"):
        if bad in met:
            return bad
    if case.entry.expected == "reject":
        return met[-1]
    return next((each for each in met if each != "accepted"), "accepted")


def describe(case: Case) -> str:
    """For a table."""
    return f"{SHORT[decided(case)]} {case.slowest:.2f}"


def problem(case: Case, limit: float) -> str | None:
    """What is wrong with how it was decided; None where it was decided as listed, or refused because a backend can't.

    Args:
        limit: seconds within which it is to be decided.
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
    return None if made == listed else f"{made}, listed as {listed}"


def _outputs(case: Case) -> str | None:
    """What is wrong with the outputs of an input that was accepted."""
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
    """`unsatisfied`, unless Python's own `re` doesn't know the pattern, or takes for ever."""

    def give_up(number: int, frame: object) -> None:
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
