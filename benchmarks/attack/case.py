"""A case: an attack, the server that it runs against, and what it found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos.server import Server
from benchmarks.chaos.traffic import COMPLETIONS

ANSWER_SECONDS = 15.0
"""A request without an answer after this time is hung, unless its case says otherwise."""
JSON_HEADERS = {"content-type": "application/json"}


@dataclass
class Target:
    """The server under attack, and what the attack found."""

    server: Server
    http: httpx.AsyncClient
    """The attacker's client, without the API key."""
    answers: Counter[str] = field(default_factory=Counter)
    """Status and error code, or what happened instead -> number."""
    problems: list[str] = field(default_factory=list)
    """Findings that are violations."""
    notes: list[str] = field(default_factory=list)
    """Other findings: times and counts."""

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.server.url)
        return url.host, url.port or 80

    def expect(self, truth: object, problem: str) -> None:
        """Note a violation if something isn't so."""
        if not truth:
            self.problems.append(problem)

    async def post(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = COMPLETIONS,
        limit: float = ANSWER_SECONDS,
        allowed: tuple[str, ...] = (),
    ) -> int | None:
        """Send a body, count the answer, and return its status, or None if there was no answer.

        Args:
            limit: seconds after which the request is hung.
            allowed: error codes that may come with a 500 although the same request would fail again.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            async with asyncio.timeout(limit):
                response = await self.http.post(path, content=content, headers=JSON_HEADERS)
        except TimeoutError:
            self.answers["hung"] += 1
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1
        else:
            self._take(response, allowed)
            return response.status_code
        return None

    def _take(self, response: httpx.Response, allowed: tuple[str, ...]) -> None:
        code = ""
        if response.status_code != 200:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                code = response.json()["error"]["code"]
        answer = f"{response.status_code} {code}".strip()
        self.answers[answer] += 1
        again = response.headers.get("x-should-retry") == "true"
        self.expect(response.status_code < 500 or again or code in allowed, f"{answer}: {response.text[:120]}")

    async def posts(self, *bodies: Mapping[str, Any] | bytes, **options: Any) -> list[int | None]:
        """Send bodies at the same time; see `post`."""
        return await asyncio.gather(*(self.post(body, **options) for body in bodies))

    async def raw(self, *parts: bytes, limit: float = ANSWER_SECONDS) -> bytes:
        """Send bytes on a connection of their own. Returns the beginning of what the server sends until it closes the
        connection or pauses for a second."""
        received = b""
        writer = None
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(limit):
                reader, writer = await asyncio.open_connection(*self.address)
                with contextlib.suppress(ConnectionError):
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                while len(received) < 1 << 16 and (
                    chunk := await asyncio.wait_for(reader.read(1 << 14), 1.0 if received else limit)
                ):
                    received += chunk
        if writer is not None:
            writer.transport.abort()
        self.answers[_status_line(received)] += 1
        return received

    async def recovered(self, limit: float) -> None:
        """Wait until all mask actors are up and a constrained request is answered, and note the times."""
        started, unhealthy = time.monotonic(), None
        while self.server.alive and (now := time.monotonic() - started) < limit:
            await asyncio.sleep(0.25)
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                answer = await self.http.get("/health", timeout=5.0)
                if answer.status_code != 200 and unhealthy is None:
                    unhealthy = now
                    self.notes.append(f"/health {answer.status_code} after {now:.1f} s")
                pool = answer.json()["pool"]
                if pool["trouble"] is None and all(actor["state"] == "up" for actor in pool["actors"]) and now > 3:
                    pattern = f"[a-z]{{3}}{time.monotonic_ns()}"
                    body = {"prompt": "a", "regex": pattern, "max_tokens": 40}
                    if (await self.http.post(COMPLETIONS, json=body, timeout=10.0)).status_code == 200:
                        self.notes.append(f"recovered after {time.monotonic() - started:.1f} s")
                        return
        self.expect(not self.server.alive, f"has not recovered after {limit:g} s")


def _status_line(received: bytes) -> str:
    if received.startswith(b"HTTP/1."):
        return received[9:12].decode(errors="replace")
    return "closed without an answer" if not received else "not HTTP"


Attack = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class Setup:
    """How `guided serve` is started."""

    arguments: tuple[str, ...] = ()
    key: str | None = None
    """GUIDED_API_KEY."""
    prefix: tuple[str, ...] = ()
    """See `running_server`."""


@dataclass(frozen=True)
class Case:
    """One attack."""

    name: str
    row: str
    """Row of the table in issue 11, or "held"."""
    what: str
    attack: Attack
    seconds: float
    """The attack ends after this time at the latest. It is then hung."""
    setup: Setup
    ends_server: bool
    """Whether the server has to end."""
    restarts: bool
    """Whether processes are restarted: requests may then be slower, and fail with `EXCUSED` codes."""
    slow: bool
    """Whether it takes more than 20 s on a server that withstands it."""
    unable: Callable[[], str | None]
    """Returns why the case can't run here, or None."""


ALL: list[Case] = []
"""Every case, in the order of definition."""


def case(
    row: str,
    seconds: float = 30.0,
    setup: Setup | None = None,
    ends_server: bool = False,
    restarts: bool = False,
    slow: bool = False,
    unable: Callable[[], str | None] = lambda: None,
) -> Callable[[Attack], Attack]:
    """Register a function as a case. Its name and the first line of its docstring become the case's."""

    def register(attack: Attack) -> Attack:
        name = getattr(attack, "__name__").replace("_", "-")  # noqa: B009
        what = (attack.__doc__ or "").partition("\n")[0]
        ALL.append(
            Case(name, row, what, attack, seconds, setup or Setup(), ends_server, restarts, slow, unable),
        )
        return attack

    return register
