"""A pool that is driven as an engine drives it: every sequence goes on by a token that its mask allows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import numpy as np
import psutil
from byte_vocabulary import WORDS
from faulty_backend import NAME, faulty

from actors import RayPool
from actors.link import Link
from guided.bitmask import allowed_ids
from guided.errors import GuidedError
from guided.pool import Fill, Row

WAIT = 60.0
_ids = count(1)


def until(true: Callable[[], bool], seconds: float = WAIT) -> None:
    """Wait for something to become true; fail where it doesn't."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it didn't happen in time"
        time.sleep(0.02)


def freeze(pid: int) -> None:
    """Stop a process, and see that all its threads are."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()))


def gone(pid: int) -> None:
    """Wait for a process's end."""
    until(lambda: not psutil.pid_exists(pid))


class DrivenPool:
    """Opens sequences of the faulty backend's grammars and takes steps, each row with its whole history."""

    def __init__(self, pool: RayPool) -> None:
        self.pool = pool
        self.tokens: dict[int, list[int]] = {}
        self.errors: dict[int, GuidedError] = {}
        self._bitmask = np.zeros((32, WORDS), np.int32)

    def open(self, *words: str, number: int = 1) -> list[int]:
        """Sequences of the grammar `faulty(*words)`; no actor has heard of them before their first step."""
        grammar = self.pool.compile(faulty(*words), (NAME,)).result(WAIT)
        sequences = [next(_ids) for _ in range(number)]
        for sequence in sequences:
            self.pool.open(sequence, grammar)
            self.tokens[sequence] = []
        return sequences

    def step(self, sequences: Iterable[int], timeout: float = WAIT) -> dict[int, Row]:
        """One row each for those that have not failed."""
        asked = [sequence for sequence in sequences if sequence not in self.errors]
        self.pool.submit([Fill(sequence, 0, self.tokens[sequence]) for sequence in asked])
        rows = dict(zip(asked, self.pool.collect(self._bitmask, timeout), strict=True))
        for index, (sequence, row) in enumerate(rows.items()):
            if row.state == "ready":
                self.tokens[sequence].append(int(allowed_ids(self._bitmask[index])[0]))
            elif row.state == "failed":
                assert row.error is not None
                self.errors[sequence] = row.error
        return rows

    def go_on(self, sequences: Iterable[int], steps: int = 1) -> None:
        """Until each of them has so many tokens more, or has failed."""
        aims = {sequence: len(self.tokens[sequence]) + steps for sequence in sequences}
        deadline = time.monotonic() + WAIT
        while short := [each for each, aim in aims.items() if each not in self.errors and len(self.tokens[each]) < aim]:
            assert time.monotonic() < deadline, "no masks come"
            self.step(short, timeout=5.0)

    @property
    def links(self) -> list[Link]:
        """The actors that take sequences."""
        return list(self.pool._rotation._links)

    def home(self, sequence: int) -> Link:
        """Where a sequence is."""
        (link,) = [link for link in self.links if sequence in link.sequences]
        return link

    def with_neighbours(self, sequence: int, others: Iterable[int]) -> set[int]:
        """Those of `others` that are on the same actor."""
        return self.home(sequence).sequences & set(others)

    @property
    def pids(self) -> set[int]:
        """Of the actors that are up."""
        return {worker.pid for worker in self.pool.status().workers if worker.pid is not None}

    def all_up(self) -> bool:
        return all(worker.state == "up" for worker in self.pool.status().workers)

    def close(self) -> None:
        """Free everything, and wait until all actors are there for whoever comes next."""
        self.pool.free(list(self.tokens))
        self.tokens.clear()
        self.errors.clear()
        until(self.all_up)
        self.pool.failures()
