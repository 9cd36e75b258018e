"""A worker that is frozen in the middle of writing a row, and woken when everybody has long gone on."""

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
from byte_vocabulary import WORDS, allowed, tokens
from scripted import ScriptedGrammar
from stuck_worker import TEXTS, serve
from thread_actor import ThreadActor, close_all

from actors.channel import Transport
from actors.link import Link, Wired
from actors.rotation import Rotation
from actors.segment import Segment
from actors.supervision.process import ActorLocation
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
        assert time.monotonic() < deadline, "it didn't happen in time"
        time.sleep(0.01)


class Frozen:
    """A rotation of two: a process that can be frozen in mid-fill, and a thread."""

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
        """A second actor: whoever came before is on the first."""
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
        """Sequence 1 and then 2 are asked for, and the process stops while it writes 1's row: returns that row."""
        self.rotation.submit([Fill(1, 0, tokens("a")), Fill(2, 0, tokens("a"))])
        until(self.reached.exists)
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()))
        assert [row.state for row in self.rotation.collect(self.bitmask, 0.05)] == ["late", "late"]
        assert self.link.busy_with() == 1
        return int(self.segment.rows.mark["busy"][0])

    def wake(self) -> None:
        """Let it write to its end."""
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


def test_woken_many_steps_later_it_has_changed_no_row_of_anybody_else(frozen: Frozen) -> None:
    frozen.open(1, grammar="stuck")
    frozen.open(2)
    frozen.step((1, ""), (2, ""))
    frozen.add_other()
    row = frozen.freeze_in_mid_fill()
    frozen.rotation.free([1])  # whoever it was for is gone, and its row with it
    time.sleep(0.05)
    assert frozen.rotation.settled([2], 0.0) == [2], "who waited behind it is moved"
    frozen.open(3, 4)
    before = frozen.segment.rows.masks.copy()
    seen: list[list[str]] = []
    for number in range(STEPS):
        text = ("", "a", "ab")[number % 3]
        rows = frozen.step((2, text), (3, text), (4, text))
        assert [each.state for each in rows] == ["ready"] * 3
        seen.append([allowed(mask) for mask in frozen.bitmask[:3]])
        assert row not in frozen.link.leases._free, "lent to nobody while the process could still write there"
    kept = frozen.bitmask.copy()
    assert (frozen.segment.rows.masks == before).all(), "nobody was given a row of the frozen one's"
    frozen.wake()

    def answered() -> bool:
        frozen.step()
        return frozen.link.leases.num_free == ROWS

    until(answered)
    assert (frozen.bitmask == kept).all()
    wants = {"": "ax", "a": "b", "ab": "cd"}
    assert seen == [[wants[("", "a", "ab")[number % 3]]] * 3 for number in range(STEPS)]
    frozen.open(5)  # and now its rows are anybody's again
    assert [each.state for each in frozen.step((5, "ab"), (3, "a"))] == ["ready", "ready"]
    assert [allowed(mask) for mask in frozen.bitmask[:2]] == ["cd", "b"]


def test_woken_after_it_was_given_up_it_writes_where_nobody_reads(frozen: Frozen) -> None:
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
