"""A pool driven as an engine drives it: every sequence is continued by a token that its
mask allows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np
import psutil
from faulty_backend import NAME, faulty
from numpy.typing import NDArray
from serving import wait_until as until

from actors import RayPool
from guided.bitmask import allowed_ids, words
from guided.errors import GuidedError
from guided.pools.protocol import Grammar, StepMasks
from guided.sequence import GuidedSequence

WAIT = 120.0
_ids = count(1)


def copy_masks(found: StepMasks, bitmask: NDArray[np.int32]) -> None:
    """Copy the masks of a step: line i of `bitmask` for row i."""
    for part in found.ready:
        bitmask[part.rows] = part.masks[part.slots]


def freeze(pid: int) -> None:
    """Stop a process and wait until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(
        lambda: all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for task in tasks.iterdir()
        )
    )


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    until(lambda: not psutil.pid_exists(pid), WAIT)


def compile_pids() -> list[int]:
    """Return the pids of the compile processes of this process: the forks of all fork
    servers."""
    found = psutil.Process().children(recursive=True)
    program = {each.pid for each in found if "actors.compile_process" in each.cmdline()}
    return [
        each.pid for each in found if each.pid in program and each.ppid() in program
    ]


def family_of(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, except the cleanup processes, which must
    outlive it."""
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if "guided-cleanup" not in process.cmdline()]


def assert_all_end(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    left = [
        process
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert not left, [process.cmdline() for process in left]


def placement(pool: RayPool) -> dict[int, set[int]]:
    """Return the ids of the open sequences of each actor that is up, by its pid."""
    return {
        each.pid: {state.sequence.sequence_id for state in each.sequences.values()}
        for each in pool.workers
    }


class DrivenPool:
    """Opens sequences of the faulty backend's grammars and runs steps with them."""

    def __init__(self, pool: RayPool) -> None:
        self.pool = pool
        self.tokens: dict[int, list[int]] = {}
        """Output tokens by sequence."""
        self.errors: dict[int, GuidedError] = {}
        self._sequences: dict[int, GuidedSequence] = {}
        self._bitmask = np.zeros(
            (32, words(pool.vocabulary.padded_vocab_size)), np.int32
        )

    def open(self, *words: str, number: int = 1) -> list[int]:
        """Open sequences of the grammar `faulty(*words)`. Their first step opens them
        on an actor."""
        return self.open_with(
            self.pool.compile(faulty(*words), (NAME,)).result(WAIT), number
        )

    def open_with(self, grammar: Grammar, number: int) -> list[int]:
        """Open sequences of a grammar of any backend."""
        ids = [next(_ids) for _ in range(number)]
        for each in ids:
            self.tokens[each] = []
            self._sequences[each] = GuidedSequence("request", each, self.tokens[each])
            self.pool.open(self._sequences[each], grammar)
        return ids

    def step(self, sequences: Iterable[int], deadline: float | None = None) -> set[int]:
        """Run a step with the sequences that have not failed. Returns the sequences
        that got a mask."""
        asked = [each for each in sequences if each not in self.errors]
        self.pool.submit([self._sequences[each] for each in asked])
        found = self.pool.collect(deadline)
        copy_masks(found, self._bitmask)
        self.errors |= {asked[row]: error for row, error in found.failed.items()}
        ready = [row for part in found.ready for row in part.rows.tolist()]
        for row in ready:
            self.tokens[asked[row]].append(int(allowed_ids(self._bitmask[row])[0]))
        return {asked[row] for row in ready}

    def go_on(self, sequences: Iterable[int], steps: int = 1) -> None:
        """Run steps until each sequence has `steps` more tokens, or has failed."""
        aims = {sequence: len(self.tokens[sequence]) + steps for sequence in sequences}
        deadline = time.monotonic() + WAIT
        while short := [
            each
            for each, aim in aims.items()
            if each not in self.errors and len(self.tokens[each]) < aim
        ]:
            assert time.monotonic() < deadline, "no masks come"
            self.step(short, deadline=5.0)

    def pid_of(self, sequence: int) -> int:
        """Return the pid of the actor that a sequence is open on."""
        (pid,) = [
            pid for pid, there in placement(self.pool).items() if sequence in there
        ]
        return pid

    def neighbours(self, sequence: int, others: Iterable[int]) -> set[int]:
        """Return those of `others` that are on the same actor."""
        return placement(self.pool)[self.pid_of(sequence)] & set(others)

    @property
    def pids(self) -> set[int]:
        """The pids of the actors that are up."""
        return {
            worker.pid
            for worker in self.pool.status().workers
            if worker.pid is not None
        }

    def all_up(self) -> bool:
        return all(worker.state == "up" for worker in self.pool.status().workers)

    def close(self) -> None:
        """Free everything, and wait until all actors are up for the next test."""
        self.pool.free(list(self.tokens))
        self.tokens.clear()
        self._sequences.clear()
        self.errors.clear()
        until(self.all_up, WAIT)
