"""The chaos command's own judgement: what it calls valid, a declared error, or what must not be."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from byte_vocabulary import BYTES

from benchmarks.chaos.checks import Judge, undeclared
from benchmarks.chaos.client import Answer, Choice
from benchmarks.chaos.decisions import Case, decided, problem
from benchmarks.chaos.examples import EXAMPLES, fresh
from benchmarks.chaos.faults import Event
from benchmarks.chaos.hostile_inputs import Entry, backends_of, requests
from benchmarks.chaos.traffic import ABLE, CHAT, Request, Traffic, constrained, plain
from benchmarks.chaos.watch import Replacement, Seen, replacements
from benchmarks.soak import Growth, growths
from guided.backends import AUTO, BACKENDS
from guided.constraint import KINDS


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(BYTES)


def answered(text: str, finish_reason: str = "stop", *, used: str | None = None) -> Answer:
    return Answer(0.0, 1.0, 0.5, 200, {}, {0: Choice(text, finish_reason)}, complete=True, used=used)


def refused(status: int, code: str, **headers: str) -> Answer:
    error = {"message": "no", "type": "server_error", "param": None, "code": code, "pointer": None}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(0.0, 1.0, 0.5, status, named, error=error)


DATE = constrained(1, EXAMPLES["regex"][0], "llguidance", CHAT)
CHOICE = constrained(2, EXAMPLES["choice"][1], AUTO, CHAT)
GRAMMAR = constrained(3, EXAMPLES["grammar"][1], AUTO, CHAT)
OBJECT = constrained(4, EXAMPLES["json_schema"][0], "xgrammar", CHAT)


class TestOutputs:
    @pytest.mark.parametrize(
        ("request_", "used", "right", "wrong"),
        [
            (DATE, "llguidance", "2031-12-01", "2031-13-01"),
            (CHOICE, "outlines", "Lisbon, Portugal", "Lisbon, "),
            (GRAMMAR, "llguidance", "12+3-456", "12+"),
            (OBJECT, "xgrammar", '{"name": "A", "age": 1, "city": ""}', '{"name": "A", "age": 1}'),
        ],
    )
    def test_what_ends_stop_satisfies_the_constraint(
        self, judge: Judge, request_: Request, used: str, right: str, wrong: str
    ) -> None:
        assert judge.verdict(request_, answered(right, used=used)).outcome == "valid"
        assert judge.verdict(request_, answered(wrong, used=used)).outcome == "invalid"

    @pytest.mark.parametrize(
        ("request_", "used", "right", "wrong"),
        [
            (DATE, "llguidance", "2031-1", "2031-2"),
            (CHOICE, "outlines", "Lisbon, P", "Lisbon. "),
            (GRAMMAR, "llguidance", "12+", "1234"),
            (OBJECT, "xgrammar", '{"name": "A', '{"name": 1'),
        ],
    )
    def test_what_is_cut_is_a_legal_beginning(
        self, judge: Judge, request_: Request, used: str, right: str, wrong: str
    ) -> None:
        assert judge.verdict(request_, answered(right, "length", used=used)).outcome == "valid"
        assert judge.verdict(request_, answered(wrong, "length", used=used)).outcome == "invalid"

    def test_blanks_and_the_order_of_properties_are_free(self, judge: Judge) -> None:
        example = EXAMPLES["json_schema"][2]
        request = constrained(5, example, "lm-format-enforcer", CHAT)
        right = answered('{"city":  \n\n "Oslo" , "who": {"age": 1, "na', "length", used="lm-format-enforcer")
        assert judge.verdict(request, right).outcome == "valid"
        wrong = answered('{"city": "Oslo", "who": {"age": 1, "na": ', "length", used="lm-format-enforcer")
        assert judge.verdict(request, wrong).outcome == "invalid"

    def test_the_backend_is_the_one_that_was_asked_for(self, judge: Judge) -> None:
        assert judge.verdict(DATE, answered("2031-12-01", used="xgrammar")).outcome == "invalid"

    def test_all_choices_count(self, judge: Judge) -> None:
        two = Request(1, CHAT, {**DATE.body, "n": 2}, DATE.example, AUTO)
        answer = answered("2031-12-01")
        assert judge.verdict(two, answer).outcome == "invalid"
        answer.choices[1] = Choice("2031-99-99", "stop")
        assert judge.verdict(two, answer).outcome == "invalid"
        answer.choices[1] = Choice("2031-09-09", "stop")
        assert judge.verdict(two, answer).outcome == "valid"

    def test_a_greedy_one_is_what_it_was_undisturbed(self) -> None:
        request = plain(1, 0)
        assert request.key is not None
        judge = Judge(BYTES, {request.key: Choice("It is Maria", "length")})
        streamed = Request(9, CHAT, {**request.body, "stream": True})
        assert judge.verdict(streamed, answered("It is Maria", "length")).outcome == "valid"
        assert judge.verdict(streamed, answered("It is maria", "length")).outcome == "different"
        assert judge.verdict(streamed, answered("It is Maria", "stop")).outcome == "different"


class TestEnds:
    def test_a_stream_has_an_end(self, judge: Judge) -> None:
        answer = answered("2031-12-01", used="llguidance")
        answer.complete = False
        assert judge.verdict(DATE, answer).outcome == "undeclared"
        answer.left = True
        assert judge.verdict(DATE, answer).outcome == "left"

    def test_hung_and_broken(self, judge: Judge) -> None:
        assert judge.verdict(DATE, Answer(0.0, 120.0, hung=True)).outcome == "hung"
        assert judge.verdict(DATE, Answer(0.0, 1.0, problem="ReadError: ")).outcome == "undeclared"

    def test_errors(self, judge: Judge) -> None:
        assert judge.verdict(DATE, refused(500, "worker_died")).outcome == "failed"
        assert judge.verdict(DATE, refused(200, "worker_died")).outcome == "failed", "a stream's error event"
        assert judge.verdict(DATE, refused(503, "pool_unavailable", retry_after="1")).outcome == "failed"
        assert judge.verdict(DATE, refused(400, "invalid_constraint", x_should_retry="false")).outcome == "refused"

    @pytest.mark.parametrize(
        "answer",
        [
            refused(500, "internal_error", x_should_retry="false"),
            refused(500, "something_else", x_should_retry="false"),
            refused(503, "pool_unavailable"),
            refused(500, "worker_died", x_should_retry="false"),
            refused(500, "dead_end"),
            refused(500, "dead_end", x_should_retry="perhaps"),
        ],
    )
    def test_errors_that_do_not_tell(self, judge: Judge, answer: Answer) -> None:
        assert judge.verdict(DATE, answer).outcome == "undeclared"

    def test_an_error_has_all_its_fields(self) -> None:
        assert undeclared(500, {"x-should-retry": "false"}, {"code": "dead_end", "type": "", "param": None}) is not None


class TestTraffic:
    def test_it_is_the_same_every_time_and_of_every_sort(self) -> None:
        made = [Traffic(3).request(number) for number in range(2000)]
        assert made == [Traffic(3).request(number) for number in range(2000)]
        assert made != [Traffic(4).request(number) for number in range(2000)]
        constrained_ones = [request for request in made if request.example is not None]
        assert {(request.example.kind, request.backend) for request in constrained_ones if request.example} == set(ABLE)
        assert {kind for kind, _ in ABLE} == set(KINDS)
        assert {backend for _, backend in ABLE} == {AUTO, *BACKENDS}
        assert {request.behavior for request in made} == {"reads", "leaves", "stalls"}
        assert {request.stream for request in made} == {True, False}
        assert {request.body.get("n", 1) for request in made} == {1, 2, 3}
        assert len({json.dumps(request.body) for request in made}) > 500

    def test_every_greedy_request_that_others_repeat_has_a_reference(self) -> None:
        keys = {request.key for request in Traffic.repeated()}
        shared = [example for examples in EXAMPLES.values() for example in examples]
        for number in range(500):
            request = Traffic(0).request(number)
            if request.body["temperature"] == 0 and (request.example is None or request.example in shared):
                assert request.key in keys

    @pytest.mark.parametrize("kind", KINDS)
    def test_fresh_constraints_are_constraints(self, kind: Any) -> None:
        made = [fresh(kind, random.Random(seed)) for seed in range(50)]
        assert len({example.constraint.key for example in made}) == (1 if kind == "json_object" else 50)


def look(at: float, *actors: tuple[int, str, int]) -> Seen:
    listed = [{"index": index, "state": state, "incarnation": incarnation} for index, state, incarnation in actors]
    return Seen(at, listed, 0.01)


def test_how_long_it_took_to_replace_an_actor() -> None:
    seen = [
        look(1.0, (0, "up", 1), (1, "up", 2)),
        look(2.0, (0, "up", 1), (1, "up", 2)),
        look(3.0, (0, "restarting", 1), (1, "up", 2)),
        look(4.0, (0, "starting", 3), (1, "up", 2)),
        look(6.0, (0, "up", 3), (1, "up", 2)),
    ]
    events = [
        Event(1.5, "kill", "77", 0, 1),
        Event(1.6, "slow", "78", 1, 2),
        Event(1.7, "freeze", "78", 1, 2),
        Event(1.8, "hostile", "an-input"),
    ]
    assert replacements(events, seen) == [Replacement(1.5, 4.5), Replacement(None, None)]


ACCEPTED = answered('"ab"', "length")
REFUSED = refused(400, "invalid_constraint", x_should_retry="false")
UNABLE = refused(400, "unsupported_constraint", x_should_retry="false")
TIMEOUT = refused(400, "constraint_compile_timeout", x_should_retry="false")
FAILED = refused(500, "backend_error", x_should_retry="false")
HUNG = Answer(0.0, 120.0, hung=True)


class TestDecisions:
    def case(self, listed: Any, *answers: Answer, scope: Any = "spec", payload: Any = None, **fields: bool) -> Case:
        flags = {"bounded": False, "if_enforced": False, **fields}
        entry = Entry("an-input", "json_schema", listed, scope=scope, payload=payload or {"type": "string"}, **flags)
        return Case(0, entry, AUTO, requests(entry, AUTO, 10), answers)

    @pytest.mark.parametrize(
        ("listed", "answer", "well"),
        [
            ("accept", ACCEPTED, True),
            ("accept", UNABLE, True),
            ("accept", REFUSED, False),
            ("accept", TIMEOUT, False),
            ("accept", FAILED, False),
            ("reject", REFUSED, True),
            ("reject", UNABLE, True),
            ("reject", ACCEPTED, False),
            ("reject", TIMEOUT, False),
            ("reject", HUNG, False),
        ],
    )
    def test_as_listed_or_refused_because_the_backend_cannot(self, listed: Any, answer: Answer, well: bool) -> None:
        assert (problem(self.case(listed, answer), 13) is None) == well

    @pytest.mark.parametrize("answer", [ACCEPTED, REFUSED, UNABLE, TIMEOUT])
    def test_where_both_are_fine_it_is_decided_in_time(self, answer: Answer) -> None:
        assert problem(self.case("accept", answer, bounded=True), 13) is None
        assert "0.5 s" in str(problem(self.case("accept", answer, bounded=True), 0.4))

    def test_a_failure_is_no_decision(self) -> None:
        assert problem(self.case("accept", FAILED, bounded=True), 13) == "failed: backend_error"

    def test_what_is_accepted_is_enforced(self) -> None:
        payload = {"type": "string", "maxLength": 3}
        right, wrong = answered('"abc"'), answered('"abcd"')
        for listed, flags in (("accept", {}), ("reject", {"if_enforced": True})):
            assert problem(self.case(listed, right, payload=payload, **flags), 13) is None
            assert problem(self.case(listed, wrong, payload=payload, **flags), 13) is not None

    def test_of_a_sequence_the_last_one_is_to_be_refused(self) -> None:
        payload = [{"json": {"type": "object"}}, {"grammar": "not a grammar"}]
        well = self.case("reject", ACCEPTED, REFUSED, scope="stream", payload=payload)
        assert [request.body["structured_outputs"] for request in well.requests] == payload
        assert (decided(well), problem(well, 13)) == ("rejected", None)
        latched = self.case("reject", REFUSED, ACCEPTED, scope="stream", payload=payload)
        assert problem(latched, 13) is not None

    def test_of_a_flood_all_are_to_be_accepted(self) -> None:
        assert decided(self.case("accept", ACCEPTED, TIMEOUT, ACCEPTED)) == "timeout"

    def test_it_is_sent_with_every_backend_that_has_the_kind(self) -> None:
        assert backends_of(self.case("accept").entry) == [AUTO, *BACKENDS]
        assert backends_of(self.case("accept", scope="request").entry) == [AUTO]


def test_memory_is_flat_when_its_last_fifth_is_like_its_first() -> None:
    def rows(server: float, actor: float) -> list[dict[str, Any]]:
        sizes = {"server": [server], "actor": [actor, actor + 2]}
        return [{"process": name, "pss_mib": mib, "rss_mib": 2 * mib} for name, all_ in sizes.items() for mib in all_]

    samples = [(float(at), rows(100 + 10 * min(at, 5), 50 + at)) for at in range(25)]
    server, actor = growths(samples, 5)
    assert (server.process, server.count, server.pss) == ("server", 1, (150, 150))
    assert server.is_flat(5)
    assert (actor.count, actor.pss, actor.rss) == (2, (57.5, 73.5), (115, 147))
    assert not actor.is_flat(5)
    assert actor.is_flat(30)
    assert Growth("small", 1, (1, 2), (1, 2)).is_flat(5)
