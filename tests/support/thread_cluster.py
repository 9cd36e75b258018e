"""A dispatcher with actors on threads: what the engine's thread does, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from byte_vocabulary import tokens
from scripted_grammar import ScriptedGrammar
from slow_grammar import SlowGrammar
from step_driver import WAIT, StepDriver
from thread_actor import ThreadActor

from actors.connection import WorkerConnection
from actors.dispatcher import Dispatcher
from actors.protocol import IDLE
from guided.errors import MaskTimeout, WorkerDied

ABC = [tokens("abc"), tokens("abd"), tokens("xyz")]


class Cluster(StepDriver):
    """A dispatcher with actors that know the grammars `fast` and `slow`."""

    def __init__(self, number: int = 2, slots: int = 8, **options: Any) -> None:
        self.dispatcher = Dispatcher(**{"pool_wait": 30.0, "max_replays": 0, **options})
        super().__init__(self.dispatcher)
        self.slow = SlowGrammar(ABC, slow_at=1)
        self.actors: list[ThreadActor] = []
        for _ in range(number):
            self.join(slots)

    def join(self, slots: int = 8) -> ThreadActor:
        grammars = {"fast": ScriptedGrammar(ABC), "slow": self.slow}
        actor = ThreadActor(grammars, slots=slots, index=len(self.actors))
        self.actors.append(actor)
        self.dispatcher.announce(partial(self.dispatcher.add, actor.connection))
        return actor

    def on(self, index: int) -> set[int]:
        """The sequences that are open on an actor."""
        return ids(self.actors[index].connection)

    def where(self, number: int) -> int:
        (index,) = [index for index in range(len(self.actors)) if number in self.on(index)]
        return index

    def end(self, index: int, hung: bool = False) -> None:
        connection = self.actors[index].connection
        if hung:
            slot = min((slot for slot, _ in connection.busy()), default=IDLE)
            end = partial(self.dispatcher.end, connection, MaskTimeout(f"worker {index} hung"), "hung", slot)
        else:
            end = partial(self.dispatcher.end, connection, WorkerDied(f"worker {index} died"))
        self.dispatcher.announce(end)

    def close(self) -> None:
        self.slow.release.set()
        self.dispatcher.close()


def ids(worker: WorkerConnection) -> set[int]:
    return {state.sequence.sequence_id for state in worker.sequences.values()}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)
