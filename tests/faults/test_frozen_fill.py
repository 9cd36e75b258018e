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

from actors.channel import Transport
from actors.processes import ProcessLocation, ProcessReading
from actors.steps import Dispatcher
from actors.steps.connection import WorkerConnection
from actors.steps.placement import WorkerDown, WorkerUp
from actors.steps.protocol import Segment
from guided.errors import MaskTimeout, WorkerDied

STEPS = 20
SLOTS = 6
MASKS = {"": "ax", "a": "b", "ab": "cd"}
OUTPUTS = tuple(MASKS)


class Frozen(StepDriver):
    """Two workers: a process that can be frozen in mid-fill, and a thread."""

    def __init__(self, directory: Path) -> None:
        self.transport = Transport(str(directory / "s"), "127.0.0.1")
        self.reached, self.go_on = directory / "reached", directory / "go_on"
        self.segment = Segment(SLOTS, WORDS)
        channel = self.transport.ipc()
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(channel.address, self.segment.name, str(self.reached), str(self.go_on)), daemon=True
        )
        self.process.start()
        assert channel.wait_connected(WAIT)
        assert self.process.pid is not None
        self.pid = self.process.pid
        reading = ProcessReading.of(self.pid)
        assert reading is not None
        location = ProcessLocation(self.pid, "node", started=reading.started)
        self.connection = WorkerConnection(0, 1_000_000, location, channel, self.segment, True, {"fast", "stuck"})
        self.dispatcher = Dispatcher(mask_limit=60.0, pool_wait=60.0, max_replays=0)
        self.dispatcher.announce(WorkerUp(self.connection))
        super().__init__(self.dispatcher)

    def add_other(self) -> None:
        """Add a second worker. Earlier sequences are on the first."""
        other = ThreadActor(self.transport, {"fast": ScriptedGrammar([tokens(text) for text in TEXTS])}, index=1)
        self.dispatcher.announce(WorkerUp(other.connection))

    def freeze_in_mid_fill(self) -> int:
        """Ask for masks of sequences 1 and 2, and stop the process while it writes that of 1. Return 1's slot."""
        self.segment.table.seconds[:] = 0.0  # otherwise 1 is filled last if its last mask was slow
        self.submit((1, "a"), (2, "a"))
        until(self.reached.exists)
        freeze(self.pid)
        assert self.collect(0.05) == ["late", "late"]
        (slot,) = [slot for slot, state in self.connection.sequences.items() if state.sequence_id == 1]
        assert self.segment.table.mark["busy"][0] == slot
        return slot

    def wake(self) -> None:
        """Let the process finish its write."""
        self.go_on.touch()
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT)
        self.dispatcher.close()
        close_all()
        self.transport.close()


@pytest.fixture
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    directory = tmp_path_factory.mktemp("f")
    (directory / "s").mkdir()
    case = Frozen(directory)
    yield case
    case.close()


def test_woken_many_steps_later_it_has_changed_no_other_mask(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    frozen.freeze_in_mid_fill()
    frozen.dispatcher.free([1])
    time.sleep(0.05)
    assert frozen.dispatcher.settled(WAIT) == [2], "the sequence that waited behind it is moved"
    frozen.open(3, 4)
    before = frozen.segment.table.mask.copy()
    for number in range(STEPS):
        text = OUTPUTS[number % 3]
        assert frozen.step((2, text), (3, text), (4, text)) == [MASKS[text]] * 3
    assert (frozen.segment.table.mask == before).all(), "no sequence got a slot of the frozen process"
    frozen.wake()
    until(lambda: frozen.connection.is_idle)
    for number in range(STEPS):
        text = OUTPUTS[number % 3]
        assert frozen.step((2, text), (3, text), (4, text)) == [MASKS[text]] * 3
    frozen.open(5)  # the process can be used again
    assert frozen.step((5, "ab"), (3, "a")) == ["cd", "b"]
    assert {state.sequence_id for state in frozen.connection.sequences.values()} == {5}


@pytest.mark.parametrize("answered", [True, False], ids=["in a later mask", "in the first mask"])
def test_its_slot_is_used_again_only_after_the_free_was_handled(frozen: Frozen, answered: bool) -> None:
    """There is no other worker, so that every slot is needed."""
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((2, ""))
    if answered:
        frozen.step((1, ""))
    slot = frozen.freeze_in_mid_fill()
    frozen.dispatcher.free([1])
    numbers = range(3, 3 + SLOTS)
    frozen.open(*numbers)
    for _ in range(3):
        assert set(frozen.step((2, "a"), *((number, "ab") for number in numbers), timeout=0.05)) == {"late"}
    assert not frozen.connection.has_slot()
    assert sorted(frozen.connection.sequences) == sorted(set(range(SLOTS)) - {slot}), "the others are used"
    frozen.wake()
    waiting = {2, *numbers}
    until(lambda: not waiting.difference_update(frozen.dispatcher.settled(0.01)) and len(waiting) <= 1)
    assert slot in frozen.connection.sequences, "the Free has been handled"
    assert waiting, "one sequence waits for a slot"
    frozen.dispatcher.free(waiting)
    rows = [(number, "ab") for number in numbers if number not in waiting]
    assert frozen.step(*rows) == ["cd"] * len(rows)


def test_sequences_of_a_killed_process_stay_until_its_end_is_announced(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    frozen.freeze_in_mid_fill()
    os.kill(frozen.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert frozen.dispatcher.settled(0.1) == []
    frozen.dispatcher.announce(WorkerDown(frozen.connection, WorkerDied("killed")))
    assert set(frozen.dispatcher.failures()) == {1, 2}, "without replays, a death ends what was there"


def test_woken_after_its_replacement_it_writes_where_nothing_reads(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    frozen.freeze_in_mid_fill()
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
