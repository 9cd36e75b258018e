"""Mask actors on threads, with real channels, slot tables and step servers, and a
dispatcher for them, without Ray.

The death of such an actor is a lost connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from byte_vocabulary import BYTES, WORDS, allowed, tokens
from msgspec.msgpack import encode
from scripted_grammar import ScriptedGrammar, SlowGrammar

from actors.connection import WorkerConnection
from actors.dispatcher import Dispatcher
from actors.packages import CompileResult, Package, buffer, receive_package
from actors.protocol import Channel, connect, hang_up
from actors.server import StepServer
from guided.backends.base import CompiledGrammar
from guided.constraint import Constraint
from guided.errors import GuidedError, MaskTimeout, WorkerDied
from guided.masks.worker import MaskWorker
from guided.pools.protocol import Grammar, StepMasks
from guided.sequence import GuidedSequence

WAIT = 30.0
ABC = [tokens("abc"), tokens("abd"), tokens("xyz")]
Outcome = str | GuidedError
"""A row's mask as the allowed characters, "late", or the error that it failed with."""
_living: list[ThreadActor] = []


class ConnectedPair:
    """Both ends of a channel, and the slot table between them."""

    def __init__(
        self, *, slots: int = 8, index: int = 0, max_cache_bytes: int = 1 << 20
    ) -> None:
        self.channel = Channel()
        self.end, self.grammars, self.workers_table = connect(
            self.channel.name, slots, WORDS
        )
        self.table = self.channel.accept(10, slots, WORDS)
        weakref.finalize(self, self.grammars.close)
        weakref.finalize(self, self.end.close)
        name = f"mask worker {index}"
        self.connection = WorkerConnection(
            name, os.getpid(), self.channel, self.table, max_cache_bytes
        )

    def receive_grammar(self) -> Any:
        """Wait for the next grammar."""
        return partial(buffer, receive_package(self.grammars))


class ScriptedBackend:
    """Loads grammars by the names that their `dumped` has."""

    def __init__(self, grammars: Mapping[str, CompiledGrammar]) -> None:
        self._grammars = grammars
        self.loaded: list[str] = []

    def load(self, constraint: Constraint, dumped: memoryview) -> CompiledGrammar:
        self.loaded.append(str(dumped, "utf-8").rstrip("\0"))
        return self._grammars[self.loaded[-1]]


class ThreadActor:
    """A worker with grammars, served by a `StepServer` for as long as the test runs."""

    def __init__(
        self,
        grammars: Mapping[str, CompiledGrammar],
        *,
        slots: int = 8,
        index: int = 0,
        max_cache_bytes: int = 1 << 20,
    ) -> None:
        self.pair = ConnectedPair(
            slots=slots, index=index, max_cache_bytes=max_cache_bytes
        )
        self.connection = self.pair.connection
        self.worker = MaskWorker(BYTES)
        self.backend = ScriptedBackend(grammars)
        self.table = self.pair.workers_table
        self.ended = threading.Event()
        """The server has given up: the process of a real actor ends here."""
        backends, pair = {"scripted": self.backend}, self.pair
        StepServer(
            self.worker,
            backends,
            pair.end,
            pair.receive_grammar,
            self.table,
            False,
            self._give_up,
        ).start()
        _living.append(self)

    def _give_up(self) -> None:
        hang_up(self.pair.end)
        self.ended.set()


def close_all() -> None:
    """End the actors that a test left. They must not be in a mask."""
    while _living:
        hang_up(_living.pop().pair.end)


class Cluster:
    """A dispatcher with actors that know the grammars `fast` and `slow`. Opens
    sequences by number and runs steps."""

    def __init__(
        self,
        number: int = 2,
        slots: int = 8,
        max_cache_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        self.dispatcher = Dispatcher(**{"pool_wait": 30.0, "max_replays": 0, **options})
        self.slow = SlowGrammar(ABC, slow_at=1)
        self.actors: list[ThreadActor] = []
        self.sequences: dict[int, GuidedSequence] = {}
        self._num_rows = 0
        self._max_cache_bytes = max_cache_bytes
        for _ in range(number):
            self.join(slots)

    def open(
        self, *numbers: int, grammar: str | Grammar = "fast", text: str = ""
    ) -> None:
        for number in numbers:
            sequence = GuidedSequence(f"request-{number}", number, tokens(text))
            self.sequences[number] = sequence
            self.dispatcher.open(
                sequence,
                grammar_named(grammar) if isinstance(grammar, str) else grammar,
            )

    def submit(self, *outputs: tuple[int, str]) -> None:
        """Begin a step of sequences, each with its whole output."""
        for number, text in outputs:
            self.sequences[number].output_token_ids = tokens(text)
        self._num_rows = len(outputs)
        self.dispatcher.submit([self.sequences[number] for number, _ in outputs])

    def collect(self, deadline: float | None = None) -> list[Outcome]:
        return outcomes(self.dispatcher.collect(deadline), self._num_rows)

    def step(
        self, *outputs: tuple[int, str], deadline: float | None = None
    ) -> list[Outcome]:
        self.submit(*outputs)
        return self.collect(deadline)

    def join(self, slots: int = 8) -> ThreadActor:
        grammars = {"fast": ScriptedGrammar(ABC), "slow": self.slow}
        size = self._max_cache_bytes
        actor = ThreadActor(
            grammars, slots=slots, index=len(self.actors), max_cache_bytes=size
        )
        self.actors.append(actor)
        self.dispatcher.announce(partial(self.dispatcher.add, actor.connection))
        return actor

    def on(self, index: int) -> set[int]:
        """The sequences that are open on an actor."""
        return {
            state.sequence.sequence_id
            for state in self.actors[index].connection.sequences.values()
        }

    def where(self, number: int) -> int:
        (index,) = [
            index for index in range(len(self.actors)) if number in self.on(index)
        ]
        return index

    def end(self, index: int, hung: bool = False) -> None:
        connection = self.actors[index].connection
        end = partial(
            self.dispatcher.end, connection, WorkerDied(f"worker {index} died")
        )
        if hung:
            works = connection.work()[:1]
            end = partial(
                self.dispatcher.end,
                connection,
                MaskTimeout(f"worker {index} hung"),
                "fill",
                works,
            )
        self.dispatcher.announce(end)

    def close(self) -> None:
        self.slow.release.set()
        self.dispatcher.close()


def grammar_named(key: str) -> Grammar:
    return Grammar(key, "scripted", Constraint.regex(key), dumped=package_of(key))


def package_of(name: str, size: int = 0) -> Package:
    """A grammar for `ScriptedBackend`, as it is sent, with `size` more bytes."""
    dumped = memoryview(name.encode() + bytes(size))
    return encode(CompileResult("scripted", Constraint.json_object(), dumped=dumped))


def outcomes(found: StepMasks, count: int) -> list[Outcome]:
    """What became of each row of a step."""
    rows: dict[int, Outcome] = dict.fromkeys(found.late, "late")
    rows.update(found.failed)
    for part in found.ready:
        for row, slot in zip(part.rows.tolist(), part.slots.tolist(), strict=True):
            assert row not in rows, "a row has one outcome"
            rows[row] = allowed(part.masks[slot])
    return [rows[row] for row in range(count)]


def all_ready(found: Iterable[Outcome]) -> bool:
    return all(isinstance(each, str) and each != "late" for each in found)
