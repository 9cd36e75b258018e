from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message

from engine.server import turns as turns_module
from engine.server.disconnect import ClientGone, unless_gone
from engine.server.errors import QueueFull
from engine.server.turns import ClientTurns

LONG_AGO = 0.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


def turns(limit: int = 2, max_waiting: int = 8) -> ClientTurns:
    return ClientTurns(lambda clients: limit, max_waiting)


async def begin(it: ClientTurns, client: str, count: int) -> list[asyncio.Task[None]]:
    """Start requests. Their tasks are done once they are let in."""

    async def enter() -> None:
        if not it.enter(client):
            await it.wait(client)

    tasks = [asyncio.create_task(enter()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def inside(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


async def end(it: ClientTurns, client: str) -> None:
    it.leave(client, LONG_AGO)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@on_a_loop
async def test_a_client_alone_is_not_limited() -> None:
    assert inside(await begin(turns(), "a", 5)) == [True] * 5


@on_a_loop
async def test_beside_another_client_requests_wait_in_order() -> None:
    it = turns()
    await begin(it, "other", 1)
    tasks = await begin(it, "a", 4)
    assert inside(tasks) == [True, True, False, False]
    await end(it, "a")
    assert inside(tasks) == [True, True, True, False]
    assert inside(await begin(it, "other", 1)) == [True]
    await end(it, "a")
    assert inside(tasks) == [True] * 4


@on_a_loop
async def test_a_request_that_does_not_count_delays_no_other() -> None:
    it = turns()
    assert it.enter("scraper", counts=False)
    assert inside(await begin(it, "a", 5)) == [True] * 5


@on_a_loop
async def test_a_request_keeps_its_place_for_a_moment() -> None:
    it = turns(limit=1)
    await begin(it, "other", 1)
    tasks = await begin(it, "a", 2)
    it.leave("a", asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert inside(tasks) == [True, False]
    await asyncio.wait_for(tasks[1], 10)


def test_requests_are_let_in_when_the_other_clients_become_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_ACTIVE_SECONDS", 0.2)

    async def run() -> None:
        it = turns(limit=1)
        await begin(it, "other", 1)
        tasks = await begin(it, "a", 3)
        assert inside(tasks) == [True, False, False]
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(run())


@on_a_loop
async def test_waiting_requests_that_are_given_up_leave_the_queue() -> None:
    it = turns(limit=1, max_waiting=1)
    await begin(it, "other", 1)
    first, second = await begin(it, "a", 2)
    second.cancel()
    await asyncio.sleep(0)
    (third,) = await begin(it, "a", 1)
    assert first.done()
    assert not third.done()
    await end(it, "a")
    assert third.done()


@on_a_loop
async def test_a_request_that_is_given_up_while_its_place_becomes_free_takes_none() -> None:
    it = turns(limit=1)
    await begin(it, "other", 1)
    _, second, third = await begin(it, "a", 3)
    second.cancel()
    it.leave("a", LONG_AGO)  # before the cancelled task has run
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert second.cancelled()
    assert third.done()
    assert not third.cancelled()


@on_a_loop
async def test_too_many_waiting_requests_are_refused() -> None:
    it = turns(limit=1, max_waiting=1)
    await begin(it, "other", 1)
    tasks = await begin(it, "a", 3)
    with pytest.raises(QueueFull, match="1 requests of this client wait"):
        tasks[2].result()
    assert inside(tasks) == [True, False, True]
    tasks[1].cancel()


@on_a_loop
async def test_all_are_let_in_at_shutdown() -> None:
    it = turns(limit=1)
    await begin(it, "other", 1)
    tasks = await begin(it, "a", 4)
    it.open()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert inside(tasks) == [True] * 4


@on_a_loop
async def test_a_body_that_arrives_meanwhile_is_kept() -> None:
    messages = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.request", "body": b"b"}]

    async def receive() -> Message:
        return messages.pop(0)

    async def work() -> str:
        while len(messages) > 1:
            await asyncio.sleep(0)
        return "done"

    result, again = await unless_gone(receive, work())
    assert (result, [(await again())["body"], (await again())["body"]]) == ("done", [b"a", b"b"])


@pytest.mark.parametrize("begun", [[], [{"type": "http.request", "body": b"a", "more_body": True}]])
@on_a_loop
async def test_work_ends_when_the_client_goes_away(begun: list[Message]) -> None:
    messages = [*begun]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    it = turns(limit=1, max_waiting=1)
    await begin(it, "other", 1)
    await begin(it, "a", 1)
    for _ in range(3):  # each gives its place in the queue back
        with pytest.raises(ClientGone):
            await unless_gone(receive, it.wait("a"))


@on_a_loop
async def test_a_client_with_a_request_in_progress_counts_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    it = turns()
    it.enter("a")
    assert not it.has_others("a")
    it.enter("b")
    monkeypatch.setattr(turns_module, "_ACTIVE_SECONDS", -1.0)  # its last request is long ago, and goes on
    assert it.has_others("a")
    it.leave("b", LONG_AGO)
    assert not it.has_others("a")
    it.enter("b")
    it.open()
    assert not it.has_others("a"), "no request waits for others at a shutdown"
