"""Processes that die or freeze: who is hit, who isn't, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens

from actors import RayPool
from guided.constraint import Constraint
from guided.errors import WorkerDied
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


class Host:
    """A pool with one grammar open several times: `[0-9]*x`, so that sequences can go on for ever."""

    def __init__(self, pool: RayPool) -> None:
        self.pool = pool
        self.grammar = pool.compile(Constraint.regex("[0-9]*x"), ("llguidance",)).result(WAIT)
        self.bitmask = np.zeros((16, WORDS), np.int32)
        self.texts: dict[int, str] = {}

    def open(self, number: int) -> list[int]:
        sequences = [next(_ids) for _ in range(number)]
        for sequence in sequences:
            self.pool.open(sequence, self.grammar)
            self.texts[sequence] = ""
        return sequences

    def step(self, sequences: list[int], timeout: float = WAIT) -> dict[int, Row]:
        """One row a sequence, with its whole text; those that are ready go on by a digit."""
        self.pool.submit([Fill(sequence, 0, tokens(self.texts[sequence])) for sequence in sequences])
        rows = dict(zip(sequences, self.pool.collect(self.bitmask, timeout), strict=True))
        for index, (sequence, row) in enumerate(rows.items()):
            if row.state == "ready":
                assert allowed(self.bitmask[index]) == "0123456789x"
                self.texts[sequence] += str(index % 10)
        return rows

    def placed_on(self) -> dict[int, set[int]]:
        """Sequences by the process that they are on."""
        links = self.pool._rotation._links
        return {link.place.pid: set(link.sequences) for link in links}

    def all_up(self, but: tuple[int, ...] = ()) -> bool:
        workers = self.pool.status().workers
        return all(worker.state == "up" and worker.pid not in but for worker in workers)

    def close(self) -> None:
        self.pool.free(list(self.texts))
        self.texts.clear()


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(BYTES, num_actors=2, mask_limit=2.0)
    yield pool
    pool.shutdown()


@pytest.fixture
def host(pool: RayPool) -> Iterator[Host]:
    host = Host(pool)
    until(host.all_up)
    yield host
    host.close()
    until(host.all_up)
    pool.failures()


def test_a_killed_actor_ends_its_sequences_and_no_others_and_is_replaced(host: Host) -> None:
    sequences = host.open(8)
    assert {row.state for row in host.step(sequences).values()} == {"ready"}
    (victim, lost), (_, kept) = host.placed_on().items()
    assert len(lost) == len(kept) == 4
    before = {worker.pid: worker for worker in host.pool.status().workers}

    os.kill(victim, signal.SIGKILL)
    # Far less than the wait: the death is noticed, nothing is timed out.
    rows = host.step(sequences)
    while any(row.state == "ready" for sequence, row in rows.items() if sequence in lost):
        rows = host.step(sequences)

    assert {sequence for sequence, row in rows.items() if row.state == "failed"} == lost
    assert all(isinstance(rows[sequence].error, WorkerDied) for sequence in lost)
    assert {rows[sequence].state for sequence in kept} == {"ready"}
    failures = host.pool.failures()
    assert set(failures) == lost
    assert all(isinstance(error, WorkerDied) for error in failures.values())
    assert host.pool.failures() == {}

    host.pool.free(lost)
    for _ in range(3):
        assert {row.state for row in host.step(sorted(kept)).values()} == {"ready"}
    until(lambda: host.all_up(but=(victim,)))
    (restarted,) = [worker for worker in host.pool.status().workers if worker.pid not in before]
    assert restarted.incarnation > before[victim].incarnation
    assert restarted.restarts == before[victim].restarts + 1

    new = host.open(4)  # the replacement is empty: they all go there, and it has the grammar
    assert {row.state for row in host.step(new).values()} == {"ready"}
    assert host.placed_on()[restarted.pid or 0] == set(new)


def test_a_grammar_that_died_with_all_actors_is_there_again_before_it_is_used(host: Host) -> None:
    constraint, backends = Constraint.regex("[a-c]+"), ("xgrammar",)
    host.pool.release(host.pool.compile(constraint, backends).result(WAIT))
    victims = tuple(worker.pid for worker in host.pool.status().workers if worker.pid is not None)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: not any(worker.state == "up" for worker in host.pool.status().workers))
    again = host.pool.compile(constraint, backends)
    assert not again.done()
    assert host.pool.compile(constraint, backends) is again
    assert host.pool.status().compiling == 1
    grammar = again.result(WAIT)
    sequence = next(_ids)
    host.pool.open(sequence, grammar)
    host.pool.submit([Fill(sequence, 0, tokens("a"))])
    assert [row.state for row in host.pool.collect(host.bitmask, WAIT)] == ["ready"]
    assert allowed(host.bitmask[0]) == ".abc"
    assert host.pool.status().compiling == 0
    host.pool.free([sequence])
    host.pool.release(grammar)
    host.pool.release(grammar)
    host.pool.compile(constraint, backends).result(0)  # now there is nothing to wait for


def test_an_idle_actors_death_is_reported_between_steps(host: Host) -> None:
    sequences = host.open(2)
    host.step(sequences)
    victim, lost = next(iter(host.placed_on().items()))
    os.kill(victim, signal.SIGKILL)
    failures: dict[int, Exception] = {}

    def reported() -> bool:
        failures.update(host.pool.failures())
        return bool(failures)

    until(reported)
    assert set(failures) == lost


def test_a_sequence_that_was_not_yet_opened_there_is_placed_again(host: Host) -> None:
    sequences = host.open(4)
    victim, unsent = next(iter(host.placed_on().items()))
    os.kill(victim, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(victim) or (host.pool.failures() == {} and victim not in host.placed_on()))
    rows = host.step(sequences)
    while any(row.state == "late" for row in rows.values()):
        rows = host.step(sequences)
    assert {row.state for row in rows.values()} == {"ready"}
    assert unsent


def test_a_frozen_actor_writes_into_no_row_that_is_somebody_elses(host: Host) -> None:
    sequences = host.open(4)
    host.step(sequences)
    frozen, stuck = next(iter(host.placed_on().items()))
    freeze(frozen)
    try:
        rows = host.step(sequences, timeout=0.2)
        assert {sequence for sequence, row in rows.items() if row.state == "late"} == stuck
        host.bitmask[:] = 7
        kept = sorted(set(sequences) - stuck)
        host.step(kept, timeout=0.2)
    finally:
        os.kill(frozen, signal.SIGCONT)
    seen = host.bitmask.copy()
    rows = host.step(sorted(stuck))  # what was late is there, or comes: nothing is computed twice
    assert {row.state for row in rows.values()} == {"ready"}
    assert (seen[len(kept) :] == 7).all()
    assert {row.state for row in host.step(sequences).values()} == {"ready"}
    assert frozen in host.placed_on()


def test_an_actor_that_never_answers_is_ended_and_its_sequences_go_on_elsewhere(host: Host) -> None:
    """It was stopped outside of any mask: that is no sequence's fault."""
    sequences = host.open(6)
    host.step(sequences)
    hung, there = next(iter(host.placed_on().items()))
    freeze(hung)
    rows = host.step(sequences)
    assert {sequence for sequence, row in rows.items() if row.state == "unplaced"} == there
    assert {row.state for row in host.step(sequences).values()} == {"ready"}
    assert host.pool.failures() == {}
    until(lambda: not psutil.pid_exists(hung))


ENGINE = """
import os, sys, time
import numpy as np
from byte_vocabulary import BYTES, WORDS
from actors import RayPool
from guided.constraint import Constraint
from guided.pool import Fill

pool = RayPool(BYTES, num_actors=2)
grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(60)
pool.open(1, grammar)
pool.submit([Fill(1, 0, [])])
assert pool.collect(np.zeros((1, WORDS), np.int32), 60)[0].state == "ready"
print(*[worker.pid for worker in pool.status().workers], *pool.compile_pids(), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
elif sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGKILL of all that descends from it", "raise"])
def test_nothing_is_left_when_the_engines_process_is_gone(ending: str, short_directory: str) -> None:
    """Actors, compile processes, Ray's own processes, sockets and files."""
    here = Path(__file__)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, "raise" if ending == "raise" else "wait"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parents[1] / "support")]),
            "TMPDIR": short_directory,
        },
    )
    assert engine.stdout is not None
    family: list[psutil.Process] = []
    try:
        pids = engine.stdout.readline().split()
        assert len(pids) >= 3, "two actors, and what compiles"
        family = psutil.Process(engine.pid).children(recursive=True) if ending != "raise" else []
        family.extend(psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid)))
        family = [process for process in family if "guided-janitor" not in process.cmdline()]
        if ending != "raise":
            scratch = list(Path(short_directory).glob("guided-*"))
            assert len(scratch) == 2, "of the pool's sockets, and of Ray"
            assert all(path.stat().st_mode & 0o077 == 0 for path in scratch), "private"
            if ending != "SIGKILL":  # as vLLM ends its engine's process
                for process in psutil.Process(engine.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            engine.kill()
        engine.wait(WAIT)
        gone, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, [process.cmdline() for process in alive if process.is_running()]
        assert len(gone) >= (len(pids) if ending != "raise" else 0)
        until(lambda: not list(Path(short_directory).glob("guided-*")), 15)
    finally:
        engine.kill()
        engine.communicate()
        for process in family:
            if process.is_running():
                process.kill()
