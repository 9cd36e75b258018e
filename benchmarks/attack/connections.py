"""Attacks by connections: their number, what they do not send, and what their headers say."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time

from benchmarks.attack.case import Setup, Target, case
from benchmarks.chaos.client import ask
from benchmarks.chaos.examples import EXAMPLES
from benchmarks.chaos.traffic import CHAT, Request, constrained

CLOSED_SECONDS = 60.0
"""The server closes a connection without a complete request within this time."""
KEY = "the-key-of-this-server"
WITH_KEY = Setup(key=KEY)
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
UNFINISHED = (b"", LINE, LINE + b'content-length: 100\r\n\r\n{"prompt": ')
"""Nothing, half a header, half a body."""
MB = 1_000_000


async def _open(target: Target, count: int, begin: bytes = b"") -> list[asyncio.StreamWriter]:
    """Open connections and send the beginning of a request on each."""
    writers = []
    for _ in range(count):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                _, writer = await asyncio.open_connection(*target.address)
                writer.write(begin)
                writers.append(writer)
    return writers


def _close(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()


@case("5", seconds=90, slow=True)
async def unfinished_requests(target: Target) -> None:
    """60 connections that send nothing, half a header, or half a body."""

    async def seconds_open(begin: bytes) -> float | None:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(*target.address)
        writer.write(begin)
        try:
            async with asyncio.timeout(CLOSED_SECONDS):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1 << 14):
                        pass
        except TimeoutError:
            return None
        finally:
            writer.transport.abort()
        return time.monotonic() - began

    lives = await asyncio.gather(*(seconds_open(begin) for begin in UNFINISHED * 20))
    closed = [life for life in lives if life is not None]
    target.notes.append(f"{len(closed)} of {len(lives)} closed" + (f" after {max(closed):.0f} s" if closed else ""))
    target.expect(len(closed) == len(lives), f"{len(lives) - len(closed)} connections open after {CLOSED_SECONDS:g} s")


@case("5")
async def huge_header(target: Target) -> None:
    """A header of 200 MB."""
    await target.raw(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", *[b"a" * MB] * 200, b"\r\n\r\n", limit=25)


@case("5")
async def huge_url(target: Target) -> None:
    """A URL of 100 MB."""
    await target.raw(b"GET /", *[b"a" * MB] * 100, b" HTTP/1.1\r\nhost: a\r\n\r\n", limit=25)


@case("5", seconds=40, setup=Setup(prefix=("prlimit", "--nofile=256")))
async def few_descriptors(target: Target) -> None:
    """400 silent connections to a server that may have 256 file descriptors."""
    writers = await _open(target, 400)
    try:
        await asyncio.sleep(5)
    finally:
        _close(writers)
        await asyncio.sleep(1)


@case("held")
async def idle_connections(target: Target) -> None:
    """2,000 idle connections for ten seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = await _open(target, 2_000)
    try:
        target.notes.append(f"{len(writers)} opened")
        await asyncio.sleep(10)
    finally:
        _close(writers)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@case("held", seconds=90)
async def cancelled_streams(target: Target) -> None:
    """1,500 streams, 300 at a time, whose clients leave at once or after some chunks."""
    slots = asyncio.Semaphore(300)

    async def stream(number: int) -> None:
        request = constrained(number, EXAMPLES["regex"][3], "auto", CHAT)
        body = {**request.body, "stream": True, "max_tokens": 300}
        async with slots:
            answer = await ask(target.http, Request(number, CHAT, body, behavior="leaves"), 30)
        target.answers["left" if answer.left else str(answer.status or answer.problem)] += 1

    await asyncio.gather(*(stream(number) for number in range(1_500)))


PATHS: tuple[str, ...] = ("//v1/models", "/health/../v1/models", "/health%2f..%2fv1/models", "/v1%2fmodels", "*")
PATHS += ("/health/%2e%2e/v1/models", "/v1/models/", "/V1/models", "/health;/v1/models", "/./v1/models")
PATHS += ("/health\\..\\v1\\models", "/docs/../v1/models", "http://x/v1/models", "http://x/health/../v1/models")
PATHS += ("/health?/../v1/models", "/health#/../v1/models", "/metrics/../../v1/models", "/healthv1/models")


@case("held", setup=WITH_KEY)
async def paths_around_the_key(target: Target) -> None:
    """Spellings of /v1/models that may pass the check of the API key."""
    for path in PATHS:
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            request = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            received = await target.raw(request.encode(), limit=5)
            target.expect(b'"guided-default"' not in received, f"{method} {path} without the key lists the models")
            target.expect(b"HTTP/1.1 5" not in received, f"{method} {path}: {received[:40]!r}")
    for header in ("", "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
        request = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: {header}\r\nconnection: close\r\n\r\n"
        received = await target.raw(request.encode(), limit=5)
        target.expect(b" 401 " in received[:20], f"authorization {header!r}: {received[:40]!r}")


@case("14")
async def foreign_host(target: Target) -> None:
    """A web page's request by DNS rebinding: another Host header."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: rebinding.example:8000\r\nconnection: close\r\n\r\n"
    received = await target.raw(request)
    target.expect(b"guided-default" not in received, "Host: rebinding.example is accepted")


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = LINE.replace(b"host: a", b"host: localhost") + b"transfer-encoding: chunked\r\n\r\n"


@case("new", seconds=60)
async def pipelined_requests(target: Target) -> None:
    """20 connections with 30,000 requests each that do not wait for an answer."""
    await asyncio.gather(*(target.raw(*[(GET + b"\r\n") * 3_000] * 10, limit=50) for _ in range(20)))


@case("new", seconds=60)
async def header_lines(target: Target) -> None:
    """Requests with thousands of header lines, a long query, or thousands of cookies, on 20 connections."""
    lines = [b"a:b\r\n" * 12_000, b"cookie: " + b"a=b;" * 15_000 + b"\r\n"]
    heads = [GET + line + b"connection: close\r\n\r\n" for line in lines]
    heads.append(b"GET /health?" + b"a=b&" * 15_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    for _ in range(5):
        await asyncio.gather(*(target.raw(head, limit=20) for head in heads * 7))


@case("new", seconds=60)
async def endless_trailers(target: Target) -> None:
    """Chunked bodies with endless trailers, one endless trailer, endless chunk extensions, and chunks of one byte."""
    begun = CHUNKED + b"1\r\n{\r\n"
    await target.raw(begun + b"0\r\n", *[b"x: y\r\n" * 100_000] * 100, limit=50)
    await target.raw(begun + b"0\r\nx: ", *[b"y" * MB] * 100, limit=50)
    await target.raw(begun + b"1;", *[b"y" * MB] * 100, limit=50)
    await asyncio.gather(*(target.raw(begun, *[b"1\r\na\r\n" * 100_000] * 45, limit=50) for _ in range(8)))


@case("new")
async def odd_requests(target: Target) -> None:
    """Requests that are legal HTTP, and that few clients send: upgrades, CONNECT, HTTP/1.0, odd hosts and lengths."""
    end = b"connection: close\r\n\r\n"
    for request in (
        GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        GET + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n",
        b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nhost: [\r\n" + end,
        b"GET /nothing HTTP/1.1\r\nhost: localhost:99999999\r\n" + end,
        GET + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n" + end + b"0\r\n\r\n",
        GET + b"content-length: 99999999999999999999999999\r\n" + end,
        GET + b"content-length: -1\r\n" + end,
        LINE.replace(b"host: a", b"host: localhost") + b"expect: 100-continue\r\ncontent-length: 2\r\n" + end + b"{}",
        LINE.replace(b"host: a", b"host: localhost") + b"content-encoding: gzip\r\ncontent-length: 2\r\n" + end + b"{}",
    ):
        received = await target.raw(request, limit=12)
        target.expect(b"HTTP/1.1 5" not in received, f"{request[:60]!r}: {received[:60]!r}")
