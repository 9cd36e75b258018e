"""Requests and connections that once killed or stopped the server, or would do so
without a limit. On real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hosting import Hosted, events_in, hosted, read_to_the_end
from serving import wait_until

from engine.model.loader import LoadedModel
from engine.server.connections import ConnectionLimits
from engine.server.request.fields import MAX_IGNORED

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
LIMITS = ConnectionLimits(
    max_connections=6, max_header_bytes=8192, header_seconds=0.5, idle_seconds=0.6
)
BODY_SECONDS = 0.8
GET = b"GET /version HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n"
CHUNKED = POST.replace(b"content-length: 30", b"transfer-encoding: chunked")


@pytest.fixture(scope="module")
def server(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model, limits=LIMITS, body_seconds=BODY_SECONDS) as server:
        yield server


def refusal(
    server: Hosted, path: str, body: bytes | dict[str, Any]
) -> tuple[str, str | None, str]:
    """Code, param and message of a 400. The server goes on."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(server.url + path, content=content, headers=JSON, timeout=60)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert len(error["message"]) < 1000
    return error["code"], error["param"], error["message"]


class TestBodies:
    @pytest.mark.parametrize("path", [CHAT, "/detokenize"])
    @pytest.mark.parametrize(
        ("body", "code", "says"),
        [
            (
                b'{"prompt": "a", "prompt": "b"}',
                "invalid_json",
                "'prompt' occurs twice",
            ),
            (
                b'{"json_schema": ' + b"[" * 100_000,
                "body_too_complex",
                "nested deeper than 256",
            ),
            (
                b'{"messages": [' + b"0," * 300_000 + b"0]}",
                "body_too_complex",
                "more than 200000 values",
            ),
            (
                b'{"prompt": [' + b"[]," * 30_000 + b"[]]}",
                "body_too_complex",
                "25000 keys, objects and arrays",
            ),
            (
                b'{"n": ' + b"1" * 4000 + b"}",
                "body_too_complex",
                "a number has more than 100 characters",
            ),
            (b'{"prompt": "\xff"}', "invalid_json", "not UTF-8"),
        ],
        ids=["twice", "deep", "values", "members", "number", "UTF-8"],
    )
    def test_size_and_shape_come_first(
        self, server: Hosted, path: str, body: bytes, code: str, says: str
    ) -> None:
        found, param, message = refusal(server, path, body)
        assert (found, param) == (code, None)
        assert says in message

    def test_other_types_are_refused(self, server: Hosted) -> None:
        """A page of another site can send plain text without asking."""
        answer = httpx.post(
            server.url + TEXT,
            content=b'{"prompt": "a"}',
            headers={"content-type": "text/plain"},
        )
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (TEXT, {"prompt": [0] * 150_000 + [None]}, "prompt"),
            (
                CHAT,
                {"messages": [{"role": "user", "content": [0] * 150_000}]},
                "messages[0].content",
            ),
            (TEXT, {"prompt": "a", "choice": [0] * 150_000}, "choice"),
        ],
        ids=["prompt", "content", "choice"],
    )
    def test_many_errors_are_reported_as_one(
        self, server: Hosted, path: str, body: dict[str, Any], param: str
    ) -> None:
        _, found, _ = refusal(server, path, body)
        assert found is not None
        assert found.startswith(param)

    def test_many_unknown_fields_are_named_up_to_a_limit(self, server: Hosted) -> None:
        body = {
            "prompt": "a",
            **{f"unknown-{number}": 1 for number in range(20_000)},
            "max_tokens": 1,
        }
        answer = httpx.post(server.url + TEXT, json=body, timeout=60)
        assert answer.json()["guided"]["ignored"] == [
            f"unknown-{number}" for number in range(MAX_IGNORED)
        ]

    @pytest.mark.parametrize(
        ("fields", "param", "says"),
        [
            ({"prompt": ["a"] * 257}, "prompt", "the limit of 256 outputs"),
            (
                {"prompt": [[1]] * 100, "best_of": 3},
                "prompt",
                "the limit of 256 outputs",
            ),
            ({"n": 300}, "n", "the limit of 256 outputs"),
            (
                {"prompt": ["a"] * 64, "n": 4, "logprobs": 20, "max_tokens": 100},
                "logprobs",
                "200000",
            ),
        ],
    )
    def test_a_limit_is_named(
        self, server: Hosted, fields: dict[str, Any], param: str, says: str
    ) -> None:
        code, found, message = refusal(
            server, TEXT, {"prompt": "a", "max_tokens": 1, **fields}
        )
        assert (code, found) == ("invalid_request", param)
        assert says in message

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (TEXT, {"prompt": ["a", " " * 4_000_000]}, "prompt[1]"),
            (
                CHAT,
                {"messages": [{"role": "user", "content": "<|end|>" * 500_000}]},
                "messages",
            ),
            ("/tokenize", {"prompt": "word " * 800_000}, "prompt"),
        ],
        ids=["blanks", "special", "tokenize"],
    )
    def test_a_text_that_is_far_too_long_is_not_tokenized(
        self,
        server: Hosted,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        body: dict[str, Any],
        param: str,
    ) -> None:
        encode, lengths = server.engine.tokenizer.encode, []

        def counted(text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(server.engine.tokenizer, "encode", counted)
        assert refusal(server, path, body)[1] == param
        assert sum(lengths) < 100_000


@pytest.fixture
def dial(server: Hosted) -> Iterator[Callable[[], socket.socket]]:
    clients: list[socket.socket] = []

    def connect() -> socket.socket:
        host, port = server.url.removeprefix("http://").split(":")
        clients.append(socket.create_connection((host, int(port)), timeout=20))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


Dial = Callable[[], socket.socket]


def rest(client: socket.socket) -> bytes:
    """Read until the server ends the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
    return bytes(received)


def is_ended(client: socket.socket, piece: bytes, pause: float = 0.0) -> bool:
    """Send the piece again and again. Returns whether the server ends the
    connection."""
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


class TestConnections:
    def test_a_silent_one_ends(self, server: Hosted, dial: Dial) -> None:
        before = server.metric("guided_connections_ended_total", reason="idle")
        assert rest(dial()) == b""
        assert (
            server.metric("guided_connections_ended_total", reason="idle") == before + 1
        )

    @pytest.mark.parametrize(
        "sent",
        [b"G", GET, POST, POST + b'{"prompt"'],
        ids=["byte", "header", "none", "body"],
    )
    def test_half_a_request_is_a_408(
        self, server: Hosted, dial: Dial, sent: bytes
    ) -> None:
        client = dial()
        client.sendall(sent)
        assert status(rest(client)) == 408
        server.wait_empty()

    def test_an_idle_one_ends_and_line_breaks_do_not_keep_it(self, dial: Dial) -> None:
        client = dial()
        client.sendall(GET + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert is_ended(client, b"\r\n", pause=0.05)

    @pytest.mark.parametrize(
        "begin",
        [b"GET /", b"GET /version HTTP/1.1\r\na: ", b"\r\n\r\n"],
        ids=["url", "header", "line breaks"],
    )
    def test_a_huge_header_is_a_431(
        self, server: Hosted, dial: Dial, begin: bytes
    ) -> None:
        before = server.metric(
            "guided_connections_ended_total", reason="header_too_large"
        )
        client = dial()
        client.sendall(begin)
        assert is_ended(client, b"\r\n" * 2048 if begin.isspace() else b"a" * 4096)
        assert (
            server.metric("guided_connections_ended_total", reason="header_too_large")
            == before + 1
        )

    @pytest.mark.parametrize(
        "begin",
        [b"0\r\na: ", b"0\r\n", b"1;"],
        ids=["a trailer", "trailers", "an extension"],
    )
    def test_what_follows_a_body_is_limited_as_a_header_is(
        self, dial: Dial, begin: bytes
    ) -> None:
        client = dial()
        client.sendall(CHUNKED + b"1\r\n{\r\n" + begin)
        assert is_ended(client, b"a: b\r\n" * 600 if begin == b"0\r\n" else b"a" * 4096)

    def test_a_chunked_body_without_end_is_a_413(self, dial: Dial) -> None:
        client = dial()
        client.sendall(CHUNKED)
        assert is_ended(client, b"10000\r\n" + b" " * 0x10000 + b"\r\n")

    def test_what_is_not_http_is_a_400(self, dial: Dial) -> None:
        client = dial()
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert status(rest(client)) == 400

    def test_too_many_are_a_503(self, server: Hosted, dial: Dial) -> None:
        for _ in range(LIMITS.max_connections):
            dial()
        assert status(rest(dial())) == 503
        time.sleep(2 * LIMITS.header_seconds)
        assert httpx.get(f"{server.url}/version").status_code == 200, (
            "silent ones have ended"
        )

    def test_an_answer_may_take_longer_than_all_limits(self, server: Hosted) -> None:
        """While the server is the one to send, nothing is expected of the client."""
        server.pool.hold_compiles = True
        try:
            client = server.connect(choice=["a"], max_tokens=4, stream=True)
            wait_until(lambda: server.context.in_flight == 1)
            time.sleep(
                1.2 * max(LIMITS.header_seconds, BODY_SECONDS, LIMITS.idle_seconds)
            )
        finally:
            server.pool.hold_compiles = False
            server.pool.finish_compiles()
        assert events_in(read_to_the_end(client))[-1] == "[DONE]"
        client.close()
