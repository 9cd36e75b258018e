"""A worker process is frozen while it writes a mask, and is woken many steps later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_vocabulary import WORDS, tokens
from driven_pool import freeze, until
from scripted_grammar import ScriptedGrammar
from step_driver import WAIT, StepDriver
from stuck_worker import TEXTS, serve
from thread_actor import ThreadActor, close_all

from actors.channel import Channel
from actors.steps.connection import WorkerConnection
from actors.steps.dispatcher import Dispatcher, WorkerDown, WorkerUp
from actors.steps.protocol import Segment
from guided.errors import MaskTimeout

STEPS = 20
SLOTS = 6
MASKS = {"": "ax", "a": "b", "ab": "cd"}
OUTPUTS = tuple(MASKS)


class Frozen(StepDriver):
    """A process that is frozen while it fills sequence 1, and a thread with sequence 2."""

    def __init__(self, directory: Path) -> None:
        self.reached, self.go_on = directory / "reached", directory / "go_on"
        self.segment = Segment(SLOTS, WORDS)
        channel = Channel()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(channel.path, self.segment.name, str(self.reached), str(self.go_on)), daemon=True
        )
        self.process.start()
        assert channel.accept(WAIT)
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.connection = WorkerConnection("frozen", self.pid, channel, self.segment)
        other = ThreadActor({"fast": ScriptedGrammar([tokens(text) for text in TEXTS])})
        self.dispatcher = Dispatcher(pool_wait=60.0, max_replays=0)
        for connection in (self.connection, other.connection):
            connection.loaded |= {"fast", "stuck"}
            self.dispatcher.announce(WorkerUp(connection))
        super().__init__(self.dispatcher)
        self.open(1, grammar="stuck")
        self.open(2)
        self.step((1, ""), (2, ""))
        self.submit((1, "a"), (2, "a"))
        until(self.reached.exists)
        freeze(self.pid)
        assert self.collect(0.05) == ["late", "b"]
        (self.slot,) = self.connection.sequences
        assert self.segment.table.mark["busy"][0, 0] == self.slot

    def wake(self) -> None:
        """Let the process finish its write."""
        self.go_on.touch()
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT)
        self.dispatcher.close()
        close_all()


@pytest.fixture
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    case = Frozen(tmp_path_factory.mktemp("f"))
    yield case
    case.close()


def test_its_slot_is_used_again_only_after_the_free_was_handled(frozen: Frozen) -> None:
    frozen.dispatcher.free([1])
    numbers = range(3, 3 + 2 * SLOTS)
    frozen.open(*numbers)
    rows = [(2, "a"), *((number, "ab") for number in numbers)]
    for _ in range(3):
        frozen.step(*rows, deadline=0.05)
        assert frozen.slot not in frozen.connection.sequences
    frozen.wake()
    there = sorted(state.sequence.sequence_id for state in frozen.connection.sequences.values())
    assert there, "its other slots are used"
    assert frozen.step(*((number, "ab") for number in there)) == ["cd"] * len(there)
    until(lambda: frozen.connection.table.ready[frozen.slot] < 0)


def test_woken_after_its_replacement_it_writes_where_nothing_reads(frozen: Frozen) -> None:
    frozen.dispatcher.announce(WorkerDown(frozen.connection, MaskTimeout("given up"), "hung"))
    assert set(frozen.dispatcher.failures()) == {1}
    replacement = Segment(SLOTS, WORDS)  # takes the place, maybe the very descriptor, of the one that was dropped
    replacement.table.mask[:] = 7
    for _ in range(STEPS):
        assert frozen.step((2, "a")) == ["b"]
    frozen.wake()
    time.sleep(0.2)
    assert frozen.step((2, "ab")) == ["cd"]
    assert (replacement.table.mask == 7).all()
    replacement.close()
