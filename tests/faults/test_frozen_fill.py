"""A worker freezes while it writes a row, and is woken many steps later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from actors.link import Link, Wired
from actors.rotation import Rotation
from actors.segment import Segment
from byte_vocabulary import WORDS, allowed, tokens
from scripted_grammar import ScriptedGrammar
from stuck_worker import TEXTS, serve
from thread_actor import ThreadActor, close_all

from actors.channel import Transport
from actors.processes import ActorLocation
from actors.supervision.supervisor import WorkerDown, WorkerUp
from guided.constraint import Constraint
from guided.errors import MaskTimeout
from guided.pool import Fill, Grammar, Row

WAIT = 60.0
STEPS = 20
ROWS = 6
_incarnations = count(1_000_000)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.01)


class Frozen:
    """Two workers: a process that can be frozen in mid-fill, and a thread."""

    def __init__(self, directory: Path) -> None:
        self.transport = Transport(str(directory / "s"), "127.0.0.1")
        self.reached, self.go_on = directory / "reached", directory / "go_on"
        self.segment = Segment(ROWS, WORDS)
        channel = self.transport.ipc()
        incarnation = next(_incarnations)
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve,
            args=(incarnation, channel.address, self.segment.name, str(self.reached), str(self.go_on)),
            daemon=True,
        )
        self.process.start()
        assert channel.wait_connected(WAIT)
        pid = self.process.pid
        assert pid is not None
        self.pid = pid
        place = ActorLocation(pid, "node", "host")
        installed = {"fast", "stuck"}
        self.link = Link(Wired(0, incarnation, place, channel, self.segment, True, installed))
        self.rotation = Rotation()
        self.rotation.announce(WorkerUp(self.link))
        self.bitmask = np.zeros((16, WORDS), np.int32)

    def add_other(self) -> None:
        """Add a second actor. Earlier sequences are on the first."""
        other = ThreadActor(
            self.transport, {"fast": ScriptedGrammar([tokens(text) for text in TEXTS])}, rows=8, index=1
        )
        self.rotation.announce(WorkerUp(other.link))

    def open(self, *sequences: int, grammar: str = "fast") -> None:
        for sequence in sequences:
            self.rotation.open(sequence, Grammar(grammar, "scripted", Constraint.json_object(), (grammar,)), None)

    def step(self, *fills: tuple[int, str], patience: float | None = None) -> list[Row]:
        self.rotation.submit([Fill(sequence, 0, tokens(text)) for sequence, text in fills])
        return list(self.rotation.collect(self.bitmask, WAIT, patience))

    def freeze_in_mid_fill(self) -> int:
        """Request masks for sequences 1 and 2 and stop the process while it writes 1's row. Returns that row."""
        self.rotation.submit([Fill(1, 0, tokens("a")), Fill(2, 0, tokens("a"))])
        until(self.reached.exists)
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()))
        assert [row.state for row in self.rotation.collect(self.bitmask, 0.05)] == ["late", "late"]
        assert self.link.busy_with() == 1
        return int(self.segment.rows.mark["busy"][0])

    def wake(self) -> None:
        """Let the process finish its write."""
        self.go_on.touch()
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT)
        self.rotation.close()
        close_all()
        self.transport.close()


@pytest.fixture
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    directory = tmp_path_factory.mktemp("f")
    (directory / "s").mkdir()
    case = Frozen(directory)
    yield case
    case.close()


def test_woken_many_steps_later_it_has_changed_no_other_row(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    row = frozen.freeze_in_mid_fill()
    frozen.rotation.free([1])  # the sequence of this row is gone
    time.sleep(0.05)
    assert frozen.rotation.settled([2], 0.0) == [2], "the sequence that waited behind it is moved"
    frozen.open(3, 4)
    before = frozen.segment.rows.masks.copy()
    seen: list[list[str]] = []
    for number in range(STEPS):
        text = ("", "a", "ab")[number % 3]
        rows = frozen.step((2, text), (3, text), (4, text))
        assert [each.state for each in rows] == ["ready"] * 3
        seen.append([allowed(mask) for mask in frozen.bitmask[:3]])
        assert row not in frozen.link.leases._free, "not lent again while the process can still write there"
    kept = frozen.bitmask.copy()
    assert (frozen.segment.rows.masks == before).all(), "no sequence got a row of the frozen process"
    frozen.wake()

    def answered() -> bool:
        frozen.step()
        return frozen.link.leases.num_free == ROWS

    until(answered)
    assert (frozen.bitmask == kept).all()
    wants = {"": "ax", "a": "b", "ab": "cd"}
    assert seen == [[wants[("", "a", "ab")[number % 3]]] * 3 for number in range(STEPS)]
    frozen.open(5)  # its rows can be used again now
    assert [each.state for each in frozen.step((5, "ab"), (3, "a"))] == ["ready", "ready"]
    assert [allowed(mask) for mask in frozen.bitmask[:2]] == ["cd", "b"]


def test_woken_after_its_replacement_it_writes_where_nothing_reads(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    frozen.freeze_in_mid_fill()
    frozen.rotation.announce(WorkerDown(frozen.link, MaskTimeout("given up"), "hung"))
    assert set(frozen.rotation.failures()) == {1}
    replacement = Segment(ROWS, WORDS)  # takes the place, maybe the very descriptor, of the one that was dropped
    replacement.rows.masks[:] = 7
    for _ in range(STEPS):
        assert [each.state for each in frozen.step((2, "a"))] == ["ready"]
    frozen.wake()
    time.sleep(0.2)
    assert [each.state for each in frozen.step((2, "ab"))] == ["ready"]
    assert allowed(frozen.bitmask[0]) == "cd"
    assert (replacement.rows.masks == 7).all()
    replacement.close()
