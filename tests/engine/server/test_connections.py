"""Clients that send too little, too much, or too many connections, on real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hosting import Hosted, events_in, hosted, read_to_the_end
from serving import wait_until

from engine.model_loader import LoadedModel, load_model
from engine.server.options import ConnectionLimits, ServeOptions

QUICK = ConnectionLimits(
    max_connections=6, max_header_bytes=8192, header_seconds=0.5, body_seconds=0.8, idle_seconds=0.6
)
GET = b"GET /version HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n"


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def quick(model: LoadedModel) -> Iterator[Hosted]:
    with hosted(model, options=ServeOptions(connections=QUICK)) as server:
        yield server


@pytest.fixture
def dial(quick: Hosted) -> Iterator[Callable[[], socket.socket]]:
    clients: list[socket.socket] = []

    def connect() -> socket.socket:
        host, port = quick.url.removeprefix("http://").split(":")
        clients.append(socket.create_connection((host, int(port)), timeout=20))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


Dial = Callable[[], socket.socket]


def rest(client: socket.socket) -> bytes:
    """Read until the server ends the connection."""
    received = bytearray()
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def is_ended(client: socket.socket, piece: bytes, pause: float = 0.0) -> bool:
    """Send the piece again and again. Returns whether the server ends the connection."""
    for _ in range(400):
        try:
            client.sendall(piece)
        except OSError:
            return True
        time.sleep(pause)
    return False


def status(answer: bytes) -> int:
    assert b'"code"' in answer, answer
    return int(answer.split()[1])


def test_a_silent_connection_ends(quick: Hosted, dial: Dial) -> None:
    before = quick.metric("guided_connections_ended_total", reason="header_timeout")
    assert rest(dial()) == b""
    assert quick.metric("guided_connections_ended_total", reason="header_timeout") == before + 1


@pytest.mark.parametrize("sent", [b"G", GET], ids=["one byte", "half a header"])
def test_half_a_header_is_a_408(dial: Dial, sent: bytes) -> None:
    client = dial()
    client.sendall(sent)
    assert status(rest(client)) == 408


def test_a_header_that_drips_is_a_408(dial: Dial) -> None:
    client = dial()
    client.sendall(GET)
    assert is_ended(client, b"a: b\r\n", pause=0.05)


@pytest.mark.parametrize("body", [b"", b'{"prompt"'], ids=["no body", "half a body"])
def test_a_body_that_does_not_come_is_a_408(quick: Hosted, dial: Dial, body: bytes) -> None:
    client = dial()
    client.sendall(POST + body)
    assert status(rest(client)) == 408
    quick.wait_empty()


def test_an_idle_connection_ends_and_stray_line_breaks_do_not_keep_it(dial: Dial) -> None:
    client = dial()
    client.sendall(GET + b"\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert is_ended(client, b"\r\n", pause=0.05)


def test_the_next_request_of_a_connection_has_its_own_time(dial: Dial) -> None:
    client = dial()
    for _ in range(3):
        time.sleep(0.3)
        client.sendall(GET + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    client.sendall(GET)
    assert status(rest(client)) == 408


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET /version HTTP/1.1\r\na: ", b"\r\n\r\n"], ids=["url", "header", "line breaks"]
)
def test_a_huge_header_is_a_431(quick: Hosted, dial: Dial, begin: bytes) -> None:
    before = quick.metric("guided_connections_ended_total", reason="header_too_large")
    client = dial()
    client.sendall(begin)
    piece = b"\r\n" * 2048 if begin.isspace() else b"a" * 4096
    assert is_ended(client, piece)
    assert quick.metric("guided_connections_ended_total", reason="header_too_large") == before + 1


@pytest.mark.parametrize("size", [7000, 9000])
def test_the_header_s_limit_holds_for_one_that_comes_at_once(dial: Dial, size: int) -> None:
    client = dial()
    client.sendall(GET + b"connection: close\r\na: " + b"a" * size + b"\r\n\r\n")
    answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 200" if size < 8192 else b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "begin", [b"0\r\na: ", b"0\r\n", b"1;"], ids=["a trailer", "trailers", "an extension of a chunk"]
)
def test_what_follows_a_body_is_limited_as_a_header_is(dial: Dial, begin: bytes) -> None:
    client = dial()
    client.sendall(POST.replace(b"content-length: 30", b"transfer-encoding: chunked") + b"1\r\n{\r\n" + begin)
    assert is_ended(client, b"a: b\r\n" * 600 if begin == b"0\r\n" else b"a" * 4096)


def test_a_body_of_many_chunks_is_refused(dial: Dial) -> None:
    client = dial()
    client.sendall(POST.replace(b"content-length: 30", b"transfer-encoding: chunked"))
    assert is_ended(client, b"1\r\n \r\n" * 100)


def test_many_header_lines_are_a_431(dial: Dial) -> None:
    client = dial()
    client.sendall(GET + b"a:\r\n" * 300 + b"\r\n")
    assert status(rest(client)) == 431


def test_requests_that_wait_for_no_answer_are_limited(quick: Hosted, dial: Dial) -> None:
    before = quick.metric("guided_connections_ended_total", reason="malformed_request")
    few, many = dial(), dial()
    few.sendall((GET + b"\r\n") * 9 + GET + b"connection: close\r\n\r\n")
    assert rest(few).count(b"HTTP/1.1 200") == 10
    many.sendall((GET + b"\r\n") * 2000)
    assert rest(many).count(b"HTTP/1.1 200") < 30
    assert quick.metric("guided_connections_ended_total", reason="malformed_request") == before + 1


def test_what_is_not_http_is_a_400(dial: Dial) -> None:
    client = dial()
    client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    assert status(rest(client)) == 400


def test_silent_connections_do_not_keep_others_out(quick: Hosted, dial: Dial) -> None:
    """Many more connections than the limit: a client that sends its request is served."""
    before = quick.metric("guided_connections_ended_total", reason="evicted")
    for _ in range(5 * QUICK.max_connections):
        dial()
    assert httpx.get(f"{quick.url}/version").status_code == 200
    assert quick.metric("guided_connections_ended_total", reason="evicted") >= before + QUICK.max_connections


def test_connections_with_a_request_are_not_ended_for_others(quick: Hosted, dial: Dial) -> None:
    quick.pool.hold_compiles = True
    try:
        busy = [quick.connect(choice=["a"], max_tokens=4) for _ in range(QUICK.max_connections)]
        wait_until(lambda: quick.context.in_flight == len(busy))
        assert status(rest(dial())) == 503
    finally:
        quick.pool.hold_compiles = False
        quick.pool.finish_compiles()
    for client in busy:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.close()
    quick.wait_empty()


def test_an_answer_may_take_longer_than_all_limits(quick: Hosted) -> None:
    """While the server is the one to send, nothing is expected of the client."""
    quick.pool.hold_compiles = True
    try:
        client = quick.connect(choice=["a"], max_tokens=4, stream=True)
        wait_until(lambda: quick.context.in_flight == 1)
        time.sleep(1.2 * max(QUICK.header_seconds, QUICK.body_seconds, QUICK.idle_seconds))
    finally:
        quick.pool.hold_compiles = False
        quick.pool.finish_compiles()
    assert events_in(read_to_the_end(client))[-1] == "[DONE]"
    client.close()


@pytest.mark.parametrize(("proxies", "status"), [(None, 200), ("192.0.2.9", 200), ("127.0.0.1", 429)])
def test_forwarded_addresses_are_believed_from_named_proxies_only(
    model: LoadedModel, proxies: str | None, status: int
) -> None:
    with hosted(model, options=ServeOptions(forwarded_allow_ips=proxies), max_requests=2) as server:
        body = {"prompt": "a", "max_tokens": 1}
        with server.context.admit(2, "203.0.113.5"):
            headers = {"x-forwarded-for": "203.0.113.5"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == status


def test_a_low_limit_on_open_files_is_a_limit_on_connections(model: LoadedModel) -> None:
    """Without it the server could accept no connection once its file descriptors are used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, hard))
    try:
        with hosted(model) as server, contextlib.ExitStack() as clients:
            host, port = server.url.removeprefix("http://").split(":")
            for _ in range(60):
                clients.enter_context(socket.create_connection((host, int(port))))
            assert httpx.get(f"{server.url}/version").status_code == 200
            assert server.metric("guided_connections_ended_total", reason="evicted") > 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
