"""The checks of the chaos command: valid answers, declared errors, violations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.chaos.answers import Answer, Choice, verdict_of
from benchmarks.chaos.faults import Event
from benchmarks.chaos.result import Seen, seconds_to_replace
from benchmarks.chaos.traffic import ABLE, Example, Request, constrained, repeated, request
from guided.backends import AUTO, BACKENDS
from guided.constraint import KINDS

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
DATE = constrained(1, Example("regex", "20[0-9]{2}-(0[1-9]|1[0-2])", "20[0-9]{2}-(0[1-9]|1[0-2])"), "llguidance")
CHOICE = constrained(2, Example("choice", ["Lisbon", "Lisbon, Portugal"]), AUTO)
OBJECT = constrained(4, Example("json_schema", SCHEMA), "xgrammar")


def outcome(request: Request, answer: Answer, references: dict[str, Choice] | None = None) -> str:
    return verdict_of(request, answer, references or {}).outcome


def answered(text: str, finish_reason: str = "stop", *, used: str | None = None) -> Answer:
    return Answer(0.0, 1.0, 200, {}, {0: Choice(text, finish_reason)}, complete=True, used=used)


def refused(status: int, code: str, **headers: str) -> Answer:
    error = {"message": "no", "type": "server_error", "param": None, "code": code, "pointer": None}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(0.0, 1.0, status, named, error=error)


@pytest.mark.parametrize(
    ("request_", "used", "right", "wrong"),
    [
        (DATE, "llguidance", "2031-12", "2031-13"),
        (CHOICE, "outlines", "Lisbon, Portugal", "Lisbon, "),
        (OBJECT, "xgrammar", '{"age": 1}', '{"age": "1"}'),
    ],
)
def test_what_ends_stop_satisfies_the_constraint(request_: Request, used: str, right: str, wrong: str) -> None:
    assert outcome(request_, answered(right, used=used)) == "valid"
    assert outcome(request_, answered(wrong, used=used)) == "invalid"


def test_the_backend_is_the_one_that_was_asked_for() -> None:
    assert outcome(DATE, answered("2031-12", used="xgrammar")) == "invalid"


def test_all_choices_count() -> None:
    two = Request(1, {**DATE.body, "n": 2}, DATE.example, AUTO)
    answer = answered("2031-12")
    assert outcome(two, answer) == "invalid"
    answer.choices[1] = Choice("2031-99", "stop")
    assert outcome(two, answer) == "invalid"
    answer.choices[1] = Choice("2031-09", "stop")
    assert outcome(two, answer) == "valid"


def test_a_greedy_output_equals_the_reference() -> None:
    references = {DATE.key or "": Choice("2031-12", "stop")}
    streamed = Request(9, {**DATE.body, "stream": True}, DATE.example, DATE.backend)
    assert outcome(streamed, answered("2031-12", used="llguidance"), references) == "valid"
    assert outcome(streamed, answered("2031-11", used="llguidance"), references) == "different"
    assert outcome(streamed, answered("2031-12", "length", used="llguidance"), references) == "different"


def test_a_stream_has_an_end() -> None:
    answer = answered("2031-12", used="llguidance")
    answer.complete = False
    assert outcome(DATE, answer) == "undeclared"
    answer.left = True
    assert outcome(DATE, answer) == "left"


def test_hung_and_broken() -> None:
    assert outcome(DATE, Answer(0.0, 120.0, hung=True)) == "hung"
    assert outcome(DATE, Answer(0.0, 1.0, problem="ReadError: ")) == "undeclared"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refused(500, "worker_died"), "failed"),
        (refused(200, "worker_died"), "failed"),  # a stream's error event
        (refused(503, "pool_unavailable", retry_after="1"), "failed"),
        (refused(400, "invalid_constraint"), "refused"),
        (refused(500, "internal_error"), "undeclared"),
        (refused(500, "something_else"), "undeclared"),
        (refused(503, "pool_unavailable"), "undeclared"),
        (Answer(0.0, 1.0, 500, error={"code": "dead_end", "type": "", "param": None}), "undeclared"),
    ],
)
def test_errors_are_declared(answer: Answer, expected: str) -> None:
    assert outcome(DATE, answer) == expected


def test_the_traffic_is_repeatable_and_of_every_sort() -> None:
    made = [request(3, number) for number in range(2000)]
    assert made == [request(3, number) for number in range(2000)]
    assert made != [request(4, number) for number in range(2000)]
    assert {(each.example.kind, each.backend) for each in made if each.example} == set(ABLE)
    assert {kind for kind, _ in ABLE} == set(KINDS)
    assert {backend for _, backend in ABLE} == {AUTO, *BACKENDS}
    assert {each.behavior for each in made} == {"reads", "leaves"}
    assert {each.body.get("n", 1) for each in made} == {1, 2, 3}
    assert len({json.dumps(each.body) for each in made}) > 500
    keys = {each.key for each in repeated()}
    assert sum(each.key in keys for each in made) > 500


def look(at: float, *actors: tuple[int, str, int]) -> Seen:
    listed: list[dict[str, Any]] = [
        {"index": index, "state": state, "incarnation": incarnation} for index, state, incarnation in actors
    ]
    return Seen(at, listed, 0.01)


def test_how_long_it_took_to_replace_an_actor() -> None:
    seen = [
        look(2.0, (0, "up", 1), (1, "up", 2)),
        look(3.0, (0, "restarting", 1), (1, "up", 2)),
        look(4.0, (0, "starting", 3), (1, "up", 2)),
        look(6.0, (0, "up", 3), (1, "up", 2)),
    ]
    events = [Event(1.5, "kill", 0, 1), Event(1.6, "slow", 1, 2), Event(1.7, "freeze", 1, 2), Event(1.8, "hostile")]
    assert seconds_to_replace(events, seen) == [4.5, None]
