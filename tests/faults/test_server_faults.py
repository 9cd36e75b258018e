"""What clients get after each failure, and what happens to a request after its client
fails. Real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from driven_pool import assert_all_end, family_of
from faulty_backend import ADAPTER, NAME, environment
from hosting import WAIT, Hosted, events_in, hosted, read_to_the_end
from serving import ServerProcess, serving, sse, wait_until

from engine.model.loader import LoadedModel
from guided.backends import BACKENDS
from guided.errors import GuidedError, InvalidRequest, errors_by_code

STATUSES = {
    400: """invalid_request context_length_exceeded invalid_constraint constraint_too_large unsupported_constraint
        constraint_quarantined constraint_compile_timeout body_too_complex invalid_json""",
    401: "invalid_api_key",
    404: "model_not_found",
    408: "request_timeout",
    429: "compile_queue_full",
    431: "header_too_large",
    500: """internal_error backend_error dead_end token_rejected constraint_not_met mask_timeout worker_died
        grammar_load_timeout post_processor_failed logits_processor_failed""",
    503: "pool_unavailable too_many_connections queue_full shutting_down",
}
ERRORS = {code: status for status, codes in STATUSES.items() for code in codes.split()}
"""The statuses that docs/http-reference.md lists."""
RETRYABLE = {
    "constraint_not_met",
    "worker_died",
    *(code for code, status in ERRORS.items() if status in (408, 429, 503)),
}
WITHOUT_CLASS = {
    "body_too_complex",
    "invalid_json",
    "invalid_api_key",
    "model_not_found",
    "header_too_large",
}
"""Codes that are an argument of an `InvalidRequest`."""
ROW_FAULTS = {"raise@fill:3": "backend_error", "empty@fill:3": "dead_end"}
LONG = "[a-z]{300}"
SECONDS = 30.0
"""Generous for a loaded machine. docs/failure-model.md has the time on a quiet one."""


@pytest.fixture(scope="module")
def shared(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model) as server:
        yield server


@pytest.fixture
def server(shared: Hosted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    """A server without faults. At the end of the test none of its requests may
    remain."""
    monkeypatch.setitem(BACKENDS, NAME, ADAPTER)
    yield shared
    pool = shared.pool
    pool.fails, pool.delay, pool.hold_compiles = (
        lambda sequence, position: False,
        lambda sequence, position: 0,
        False,
    )
    pool.finish_compiles()
    shared.wait_empty()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "pointer"}
    return error


class TestEveryError:
    def test_every_class_is_in_the_table(self) -> None:
        # the root, and that of Ray Serve's proxies
        others = {"guided_error", "replica_died"}
        assert (
            errors_by_code(GuidedError).keys() - others == ERRORS.keys() - WITHOUT_CLASS
        )

    @pytest.mark.parametrize("code", ERRORS)
    def test_before_the_first_token_it_is_a_status(
        self, server: Hosted, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed: Future[Any] = Future()
        status = ERRORS[code]
        given = InvalidRequest("told to", code=code, status=status)
        failed.set_exception(
            given
            if code in WITHOUT_CLASS
            else errors_by_code(GuidedError)[code]("told to")
        )
        monkeypatch.setattr(server.pool, "compile", lambda constraint, backends: failed)
        fault = (
            "load" if "queue_full" in code else "request" if status < 500 else "server"
        )
        counters: list[tuple[str, dict[str, str]]] = [
            ("guided_request_failures_total", {"code": code, "fault": fault}),
            ("guided_grammar_failures_total", {"code": code, "kind": "regex"}),
        ]
        before = [server.metric(name, **labels) for name, labels in counters]
        for answer in (server.post(regex="a"), server.post(regex="a", stream=True)):
            assert (answer.status_code, error_of(answer)["code"]) == (status, code)
            types = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
            assert error_of(answer)["type"] == types.get(
                status, "invalid_request_error"
            )
            assert answer.headers["x-should-retry"] == (
                "true" if code in RETRYABLE else "false"
            )
            assert ("retry-after" in answer.headers) == (status in (429, 503))
            assert answer.headers["x-request-id"]
        assert [server.metric(name, **labels) for name, labels in counters] == [
            count + 2 for count in before
        ]

    @pytest.mark.parametrize("code", ["dead_end", "worker_died"])
    def test_after_it_an_event_and_the_end(self, server: Hosted, code: str) -> None:
        def fails(sequence: int, position: int) -> bool:
            if position == 5:
                server.pool.lose(sequence, errors_by_code(GuidedError)[code]("told to"))
            return False

        server.pool.fails = fails
        answer = server.post(regex=LONG, max_tokens=None, stream=True)
        assert answer.status_code == 200
        *_, last = sse(answer.text)
        assert (last["error"]["code"], last["error"]["message"]) == (code, "told to")
        server.wait_empty()


def test_health_says_why_no_actor_is_up(
    server: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = dataclasses.replace(
        server.pool.status(), workers=[], trouble="Ray is gone"
    )
    monkeypatch.setattr(server.pool, "status", lambda: status)
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.json()["reason"]) == (
        503,
        "no mask actor is up: Ray is gone",
    )
    assert answer.json()["pool"]["trouble"] == "Ray is gone"
    assert httpx.get(f"{server.url}/health/live").status_code == 200


class TestRows:
    """A grammar library raises or returns a wrong result for one row. Only that request
    fails."""

    @pytest.mark.parametrize(("fault", "code"), ROW_FAULTS.items())
    def test_fails_alone(
        self, server: Hosted, fault: str, code: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        others = [
            {"max_tokens": 40, "ignore_eos": True},
            {"regex": "[0-9]{40}", "max_tokens": None},
        ]
        bodies: list[dict[str, Any]] = [{**body, "temperature": 0} for body in others]
        calm = [server.post(**body).json()["choices"] for body in bodies]
        with (
            caplog.at_level(logging.WARNING, "guided.server"),
            ThreadPoolExecutor(4) as threads,
        ):
            running = [threads.submit(server.post, **body) for body in bodies]
            whole = threads.submit(server.post, regex=fault, backend=NAME, n=2)
            streamed = threads.submit(
                server.post, regex=fault, backend=NAME, stream=True
            )
            assert [each.result().json()["choices"] for each in running] == calm
        answer = whole.result()
        assert answer.status_code == 500
        assert (error_of(answer)["code"], error_of(answer)["type"]) == (
            code,
            "server_error",
        )
        assert answer.headers["x-should-retry"] == "false"
        assert streamed.result().status_code == 200
        *_, last = sse(streamed.result().text)
        assert last["error"]["code"] == code
        server.wait_empty()
        said = [
            record.getMessage()
            for record in caplog.records
            if code in record.getMessage()
        ]
        for request in (answer, streamed.result()):
            [line] = [line for line in said if request.headers["x-request-id"] in line]
            assert f"backend {NAME}" in line
            assert "constraint regex" in line

    @pytest.mark.parametrize(
        "body",
        [
            {"n": 3},
            {"prompt": ["a", "b", "c"]},
            {"prompt": ["a", "b", "c"], "stream": True},
        ],
    )
    def test_one_of_several_outputs_ends_all(
        self, server: Hosted, body: dict[str, Any]
    ) -> None:
        server.pool.opened.clear()
        server.pool.fails = lambda sequence, position: (
            position == 5 and sequence == server.pool.opened[1]
        )
        answer = server.post(regex=LONG, max_tokens=None, **body)
        error = (
            sse(answer.text)[-1]["error"] if body.get("stream") else error_of(answer)
        )
        assert error["code"] == "backend_error"
        server.wait_empty()


class TestClientsThatGo:
    """Whenever a client disconnects, nothing of its request remains and other requests
    are not affected."""

    @pytest.fixture(autouse=True)
    def counted(self, server: Hosted) -> Iterator[None]:
        gone = server.metric("guided_request_aborts_total", reason="disconnected")
        yield
        wait_until(
            lambda: (
                server.metric("guided_request_aborts_total", reason="disconnected")
                > gone
            )
        )
        assert server.post(max_tokens=3).status_code == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_its_grammar_is_compiled(self, server: Hosted, stream: bool) -> None:
        server.pool.opened.clear()
        server.pool.hold_compiles = True
        client = server.connect(regex="[a-f]{30}", stream=stream)
        wait_until(lambda: server.engine.health().num_waiting_for_grammar == 1)
        client.close()
        server.wait_empty()
        server.pool.finish_compiles()
        server.pool.hold_compiles = False
        assert not server.pool.opened, (
            "the request of the disconnected client was never opened"
        )

    def test_while_it_waits_in_the_queue(self, server: Hosted) -> None:
        # No mask is ever ready: the sequences are late and keep their slots.
        server.pool.delay = lambda sequence, position: 10**9
        first = server.connect(regex=LONG, n=8)
        wait_until(lambda: server.engine.health().stats.late == 8)
        waiting = server.connect(max_tokens=5)
        wait_until(lambda: server.engine.health().num_waiting == 1)
        waiting.close()
        wait_until(lambda: server.engine.health().num_waiting == 0)
        first.close()
        server.wait_empty()

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("position", [0, 4])
    def test_before_and_after_its_first_token(
        self, server: Hosted, position: int, stream: bool
    ) -> None:
        server.pool.delay = lambda sequence, at: 10**9 if at == position else 0
        client = server.connect(regex=LONG, n=2, stream=stream)
        wait_until(lambda: server.engine.health().stats.late == 2)
        if stream:  # the connection is reset, not closed
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        server.wait_empty()


class TestClientsThatDontRead:
    """The output is larger than all buffers, and the client reads none of it."""

    MUCH = {  # noqa: RUF012
        "regex": "[a-z]{400}",
        "max_tokens": None,
        "logprobs": 20,
        "stream": True,
        "temperature": 0,
    }

    @pytest.mark.parametrize(
        "several", [{"n": 4}, {"n": 2, "prompt": ["a", "b"]}], ids=["n", "prompts"]
    )
    def test_delay_no_other_request_and_get_all_tokens(
        self, server: Hosted, several: dict[str, Any]
    ) -> None:
        body = {**self.MUCH, **several}
        whole = server.post(**{**body, "stream": False}).json()
        client = server.connect(receive_buffer=4096, **body)
        # The engine runs it to its end, and all other requests too.
        wait_until(
            lambda: server.context.in_flight == 4 and not server.engine.engine.groups,
            WAIT,
        )
        assert server.post(regex="[0-9]{20}", max_tokens=None).status_code == 200
        *events, done = events_in(read_to_the_end(client))
        client.close()
        assert done == "[DONE]"
        texts = [""] * 4
        for event in events:
            [choice] = json.loads(event)["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert len(events) < 4 * 400, "the missed output arrived in one chunk"

    def test_are_given_up_after_a_while(self, tiny_model: LoadedModel) -> None:
        """The kernel ends the connection, with unread data."""
        with (
            hosted(tiny_model, unread_seconds=2.0) as server,
            contextlib.closing(
                server.connect(receive_buffer=4096, n=4, **self.MUCH)
            ) as client,
        ):
            here = client.getsockname()
            wait_until(lambda: bool(server.pool.opened), WAIT)
            wait_until(
                lambda: all(
                    each.raddr != here
                    for each in psutil.Process().net_connections("tcp")
                ),
                WAIT,
            )
            server.wait_empty()
            assert "[DONE]" not in read_to_the_end(client)


@pytest.fixture(scope="module")
def real() -> Iterator[ServerProcess]:
    directory = tempfile.mkdtemp(prefix="g", dir="/tmp")  # paths of sockets are limited
    with serving("--num-actors", "2", **environment(), TMPDIR=directory) as server:
        yield server
    shutil.rmtree(directory, ignore_errors=True)


def wait_up(server: ServerProcess) -> None:
    wait_until(
        lambda: all(
            actor["state"] == "up" for actor in server.health()["pool"]["actors"]
        ),
        120,
    )


class TestActors:
    """The effect of an actor's end on clients of a real `guided serve`."""

    def post(self, server: ServerProcess, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "a", "temperature": 0, **body},
            timeout=120,
        )

    def test_a_segfault_is_an_error_that_would_come_again(
        self, real: ServerProcess
    ) -> None:
        plain = {"max_tokens": 200, "ignore_eos": True}
        calm = self.post(real, **plain).json()["choices"]
        with ThreadPoolExecutor(2) as threads:
            running = threads.submit(self.post, real, **plain)
            answer = self.post(real, regex="segfault@fill:3", backend=NAME)
        assert running.result().json()["choices"] == calm
        assert (answer.status_code, error_of(answer)["code"]) == (500, "worker_died")
        assert answer.headers["x-should-retry"] == "false"
        pid = error_of(answer)["message"].partition("pid ")[2].partition(",")[0]
        number = answer.headers["x-request-id"]
        wait_until(
            lambda: any(f"pid {pid}" in line.partition(number)[2] for line in real.log)
        )
        wait_up(real)
        assert real.metric("guided_mask_actor_restarts_total") >= 1
        assert self.post(real, regex="[0-9]{4}").status_code == 200


def test_a_server_killed_in_mid_stream(real: ServerProcess) -> None:
    """The last one with this server."""
    wait_up(real)
    family = family_of(real.process.pid)
    directory = psutil.Process(real.process.pid).environ()["TMPDIR"]
    assert [process.name() for process in family].count("ray::MaskActor") == 2
    assert os.listdir(directory)
    body = {"prompt": "a", "max_tokens": 1900, "stream": True, "regex": "[a-z ]{1800,}"}
    with httpx.stream(
        "POST", f"{real.url}/v1/completions", json=body, timeout=SECONDS
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        real.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    real.process.wait(SECONDS)
    assert_all_end(family, SECONDS)
    wait_until(lambda: not os.listdir(directory), SECONDS)
