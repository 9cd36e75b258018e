"""A case: an attack, the server that it runs against, and what it found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
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
        received, end, writer = b"", "closed without an answer", None
        try:
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
        except TimeoutError:
            end = "hung"
        except OSError:
            pass
        finally:
            if writer is not None:
                writer.transport.abort()
        self.answers[received[9:12].decode() if received.startswith(b"HTTP/1.") else end] += 1
        return received

    async def recovered(self, limit: float, *, whole: bool = True) -> None:
        """Wait until all mask actors are up and a constrained request is answered, and note the times.

        Args:
            whole: nothing may be wrong with Ray either.
        """
        started, unhealthy = time.monotonic(), None
        while self.server.alive and (now := time.monotonic() - started) < limit:
            await asyncio.sleep(0.25)
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                answer = await self.http.get("/health", timeout=5.0)
                if answer.status_code != 200 and unhealthy is None:
                    unhealthy = now
                    self.notes.append(f"/health {answer.status_code} after {now:.1f} s")
                pool = answer.json()["pool"]
                if (
                    not (whole and pool["trouble"])
                    and all(actor["state"] == "up" for actor in pool["actors"])
                    and now > 3
                ):
                    pattern = f"[a-z]{{3}}{time.monotonic_ns()}"
                    body = {"prompt": "a", "regex": pattern, "max_tokens": 40}
                    if (await self.http.post(COMPLETIONS, json=body, timeout=10.0)).status_code == 200:
                        self.notes.append(f"recovered after {time.monotonic() - started:.1f} s")
                        return
        self.expect(not self.server.alive, f"has not recovered after {limit:g} s")


@dataclass(frozen=True)
class Setup:
    """How `guided serve` is started."""

    arguments: tuple[str, ...] = ()
    key: str | None = None
    """GUIDED_API_KEY."""
    prefix: tuple[str, ...] = ()
    """See `running_server`."""


Attack = Callable[[Target], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Case:
    """One attack."""

    name: str
    what: str
    attack: Attack
    row: str
    """A number for its kind, or "held": an attack that earlier versions withstood."""
    seconds: float = 30.0
    """After this time the attack is hung."""
    setup: Setup = Setup()
    ends_server: bool = False
    """Whether the server has to end."""
    restarts: bool = False
    """Whether processes are restarted: good requests may then be slower, and fail with a retryable error."""
    slow: bool = False
    """Whether it takes more than 20 s on a server that withstands it."""
    unable: Callable[[], str | None] = lambda: None
    """Returns why the case can't run on this machine, or None."""


ALL: list[Case] = []
"""Every case, in the order of definition."""


def case(row: str, **options: Any) -> Callable[[Attack], Attack]:
    """Register a function as a case. Its name and the first line of its docstring become the case's."""

    def register(attack: Attack) -> Attack:
        name, what = getattr(attack, "__name__", ""), (attack.__doc__ or "").partition("\n")[0]
        ALL.append(Case(name.replace("_", "-"), what, attack, row, **options))
        return attack

    return register
