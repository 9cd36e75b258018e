"""Loading: which grammars are suspects when an actor dies, and how long a load may take."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from actors.compile import loading
from actors.compile.loading import ActorHandle, Loading, StoredGrammar
from actors.driver.client import ActorDied, ObjectLost, RemoteActor, RemoteObject


class Actor:
    """A mask actor that loads when it is told to."""

    def __init__(self) -> None:
        self.is_lost = False
        self.asked: dict[str, Future[None]] = {}

    def call(self, method: str, key: str, *arguments: Any) -> Future[None]:
        self.asked[key] = future = Future[None]()
        return future

    def end(self) -> None:
        for future in self.asked.values():
            if not future.done():
                future.set_exception(ActorDied())


class Desk:
    """Stands for the thread of `Grammars`."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lost: list[str] = []
        self.loading = Loading(self.when_done, lambda: None, self.lost.append)

    def when_done(self, future: Future[Any], task: Callable[[Future[Any]], None]) -> None:
        future.add_done_callback(lambda done: self.tasks.put(lambda: task(done)))

    def rejections(self, *keys: str) -> list[str]:
        return [key for key in keys if self.loading.rejection(key) is not None]

    def work(self) -> None:
        while not self.tasks.empty():
            self.tasks.get()()

    def add(self, *keys: str) -> None:
        for key in keys:
            self.loading.add(StoredGrammar(key, key.partition(":")[0], b"", RemoteObject(0)))

    def enter(self) -> tuple[ActorHandle, Actor]:
        actor = Actor()
        handle = ActorHandle(cast(RemoteActor, actor))
        self.loading.add_actor(handle, set(self.loading.stored))
        return handle, actor

    def finish(self, actor: Actor, *keys: str) -> None:
        for key in keys:
            actor.asked[key].set_result(None)
        self.work()

    def end(self, handle: ActorHandle, actor: Actor) -> None:
        actor.end()
        self.work()
        self.loading.remove_actor(handle)


def test_of_proven_grammars_only_the_one_that_was_being_loaded_is_suspect() -> None:
    desk = Desk()
    _, first = desk.enter()
    desk.add("a:1", "a:2", "a:3", "a:4")
    desk.finish(first, "a:1", "a:2", "a:3", "a:4")
    second = desk.enter()
    assert list(second[1].asked) == ["a:1", "a:2", "a:3", "a:4"]
    desk.finish(second[1], "a:1")
    desk.end(*second)
    third, actor = desk.enter()
    assert list(actor.asked) == ["a:1", "a:3", "a:4"]
    desk.finish(actor, "a:1", "a:3", "a:4")
    assert desk.loading.load_next_suspect(third) is not None
    desk.finish(actor, "a:2")
    assert desk.loading.load_next_suspect(third) is None
    assert third.installed == {"a:1", "a:2", "a:3", "a:4"}


def test_what_waited_and_was_never_loaded_is_suspect_too() -> None:
    desk = Desk()
    one, actor = desk.enter()
    desk.add("a:1", "a:2")
    desk.end(one, actor)
    two, actor = desk.enter()
    assert not actor.asked
    assert desk.loading.load_next_suspect(two) is not None
    desk.finish(actor, "a:1")
    assert desk.loading.load_next_suspect(two) is not None
    desk.end(two, actor)
    assert desk.rejections("a:1", "a:2") == [], "it may have been killed externally"
    three, actor = desk.enter()
    desk.finish(actor, "a:1")
    desk.loading.load_next_suspect(three)
    desk.end(three, actor)
    assert desk.rejections("a:1", "a:2") == ["a:2"]


def test_the_first_grammar_of_a_backend_brings_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(loading.time, "monotonic", lambda: now)
    desk = Desk()
    handle, actor = desk.enter()
    desk.add("a:1", "a:2", "b:1")
    now += 20
    assert not handle.is_overdue()
    desk.finish(actor, "a:1")
    now += 14
    assert not handle.is_overdue()
    now += 2
    assert handle.is_overdue()
    desk.finish(actor, "a:2")
    now += 50
    assert not handle.is_overdue()
    now += 20
    assert handle.is_overdue()
    assert isinstance(desk.loading.stored["b:1"], StoredGrammar)


def test_a_grammar_that_is_lost_with_its_node_is_reported_once_and_not_loaded_from_there_again() -> None:
    desk = Desk()
    _, first = desk.enter()
    desk.add("a:1", "a:2")
    desk.finish(first, "a:1", "a:2")
    actors = [desk.enter()[1] for _ in range(2)]
    for actor in actors:
        actor.asked.pop("a:1").set_exception(ObjectLost("its node is gone"))
    desk.work()
    assert desk.lost == ["a:1"]
    _, last = desk.enter()
    assert list(last.asked) == ["a:2"]
    del first.asked["a:1"]
    desk.add("a:1")
    assert sum("a:1" in actor.asked for actor in (first, *actors, last)) == 1, "compiled again, and loaded"


def test_the_loss_of_ray_makes_no_suspects_and_leaves_nothing() -> None:
    desk = Desk()
    desk.add("a:1")
    first = desk.enter()
    first[1].is_lost = True
    desk.loading.forget()
    assert desk.loading.stored == {}
    desk.end(*first)
    desk.add("a:1")
    second = desk.enter()
    assert list(second[1].asked) == ["a:1"]
