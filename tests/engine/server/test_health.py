"""Liveness and readiness."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hosting import Hosted, hosted
from serving import wait_until

from engine.model_loader import LoadedModel


@pytest.fixture(scope="module")
def shared(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model) as server:
        yield server


@pytest.fixture
def server(shared: Hosted) -> Iterator[Hosted]:
    """After each test, a server that is ready."""
    yield shared
    shared.pool.hold_compiles, shared.pool.delay = False, lambda sequence, position: 0
    shared.pool.finish_compiles()
    wait_until(lambda: get(shared, "ready").status_code == 200)
    shared.wait_empty()


def get(server: Hosted, name: str) -> httpx.Response:
    return httpx.get(f"{server.url}/health/{name}", timeout=20)


def becomes_unready(server: Hosted) -> None:
    """Wait until the last good check is too old. The server is live all the time."""
    wait_until(lambda: get(server, "ready").status_code == 503)
    reason = "a request of one token did not end within 2 s"
    assert get(server, "ready").json() == {"status": "unavailable", "reason": reason}
    assert get(server, "live").status_code == 200


def test_many_probes_are_one_check(server: Hosted) -> None:
    wait_until(lambda: get(server, "ready").status_code == 200)
    before, started = len(server.pool.opened), time.monotonic()
    with ThreadPoolExecutor(8) as probes:
        answers = list(probes.map(lambda _: get(server, "ready").status_code, range(60)))
    assert set(answers) == {200}
    assert get(server, "ready").json() == get(server, "live").json() == {"status": "ok", "reason": None}
    assert len(server.pool.opened) - before <= 1 + (time.monotonic() - started) / 2


def test_compilation_that_hangs_is_not_ready_but_live(server: Hosted) -> None:
    server.pool.hold_compiles = True
    becomes_unready(server)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_admission_that_hangs_is_not_ready(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread that admits requests is busy."""
    release = threading.Event()
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda *_, **__: release.wait(60) and [1])
    with ThreadPoolExecutor(40) as clients:
        for _ in range(40):
            clients.submit(server.post, max_tokens=1)
        try:
            becomes_unready(server)
        finally:
            monkeypatch.undo()
            release.set()
