"""Processes that die or freeze: which sequences end, which go on, and what remains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest
from byte_vocabulary import BYTES
from driven_pool import WAIT, freeze, until
from step_driver import Outcome, StepDriver

from actors import RayPool
from guided.constraint import Constraint
from guided.errors import WorkerDied

MASK = "0123456789x"
_ids = count(1)


class Host(StepDriver):
    """A pool with several sequences of the grammar `[0-9]*x`, which has no longest output."""

    def __init__(self, pool: RayPool) -> None:
        super().__init__(pool)
        self.pool = pool
        self.grammar = pool.compile(Constraint.regex("[0-9]*x"), ("llguidance",)).result(WAIT)
        self.texts: dict[int, str] = {}

    def add(self, number: int) -> list[int]:
        """Open sequences."""
        sequences = [next(_ids) for _ in range(number)]
        self.open(*sequences, grammar=self.grammar)
        self.texts |= dict.fromkeys(sequences, "")
        return sequences

    def begin(self, sequences: list[int]) -> None:
        self.submit(*((sequence, self.texts[sequence]) for sequence in sequences))

    def finish(self, sequences: list[int], deadline: float | None = None) -> dict[int, Outcome]:
        """Return the outcomes of a step that `begin` began. Each ready sequence gets another digit."""
        found = dict(zip(sequences, self.collect(deadline), strict=True))
        for index, (sequence, outcome) in enumerate(found.items()):
            if outcome != "late" and isinstance(outcome, str):
                assert outcome == MASK
                self.texts[sequence] += str(index % 10)
        return found

    def run(self, sequences: list[int], deadline: float | None = None) -> dict[int, Outcome]:
        """Run a step with one row per sequence, with its whole text."""
        self.begin(sequences)
        return self.finish(sequences, deadline)

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
    sequences = host.add(8)
    assert set(host.run(sequences).values()) == {MASK}
    (victim, lost), (_, kept) = host.pool.placement().items()
    assert len(lost) == len(kept) == 4
    before = {worker.pid: worker for worker in host.pool.status().workers}

    os.kill(victim, signal.SIGKILL)
    # Far less than the timeout: the death is detected.
    rows = host.run(sequences)
    while any(rows[sequence] == MASK for sequence in lost):
        rows = host.run(sequences)

    assert {type(rows[sequence]) for sequence in lost} == {WorkerDied}
    assert {rows[sequence] for sequence in kept} == {MASK}
    failures = host.pool.failures()
    assert set(failures) == lost
    assert all(isinstance(error, WorkerDied) for error in failures.values())
    assert host.pool.failures() == {}

    host.pool.free(lost)
    for _ in range(3):
        assert set(host.run(sorted(kept)).values()) == {MASK}
    until(lambda: host.all_up(but=(victim,)))
    (restarted,) = [worker for worker in host.pool.status().workers if worker.pid not in before]
    assert restarted.incarnation > before[victim].incarnation
    assert restarted.restarts == before[victim].restarts + 1

    new = host.add(4)  # the replacement is empty, so all go there; it has the grammar
    assert set(host.run(new).values()) == {MASK}
    assert host.pool.placement()[restarted.pid or 0] == set(new)


def test_an_idle_actors_death_is_reported_between_steps(host: Host) -> None:
    sequences = host.add(2)
    host.run(sequences)
    victim, lost = next(iter(host.pool.placement().items()))
    os.kill(victim, signal.SIGKILL)
    failures: dict[int, Exception] = {}

    def reported() -> bool:
        failures.update(host.pool.failures())
        return bool(failures)

    until(reported)
    assert set(failures) == lost


def test_a_sequence_that_was_not_yet_opened_there_is_placed_again(host: Host) -> None:
    sequences = host.add(4)
    victim = next(iter(host.pool.placement()))
    freeze(victim)  # it does not handle the message that opens its sequences
    host.begin(sequences)
    unopened = host.pool.placement()[victim]
    os.kill(victim, signal.SIGKILL)
    assert set(host.finish(sequences).values()) == {MASK}
    assert unopened
    assert victim not in host.pool.placement()
    assert host.pool.failures() == {}


def test_a_frozen_actor_changes_no_mask_of_another_sequence(host: Host) -> None:
    sequences = host.add(4)
    host.run(sequences)
    frozen, stuck = next(iter(host.pool.placement().items()))
    kept = sorted(set(sequences) - stuck)
    freeze(frozen)
    try:
        rows = host.run(sequences, deadline=0.5)
        assert {sequence for sequence, row in rows.items() if row == "late"} == stuck
        assert set(host.run(kept).values()) == {MASK}
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert set(host.run(kept).values()) == {MASK}
    assert set(host.run(sorted(stuck)).values()) == {MASK}  # late masks are ready now or later
    assert set(host.run(sequences).values()) == {MASK}
    assert frozen in host.pool.placement()


def test_an_actor_that_never_answers_is_ended_and_its_sequences_go_on_elsewhere(host: Host) -> None:
    """It stopped outside of a mask, so no sequence is the cause."""
    sequences = host.add(6)
    host.run(sequences)
    hung, there = next(iter(host.pool.placement().items()))
    freeze(hung)
    assert set(host.run(sequences).values()) == {MASK}, "they were opened again within the step"
    assert there
    assert host.pool.failures() == {}
    until(lambda: not psutil.pid_exists(hung))


ENGINE = """
import sys, time
from byte_vocabulary import BYTES
from actors import RayPool
from guided.constraint import Constraint
from guided.sequence import GuidedSequence

pool = RayPool(BYTES, num_actors=2)
grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(60)
sequence = GuidedSequence("request", 1, [])
pool.open(sequence, grammar)
pool.submit([sequence])
assert len(pool.collect(60).ready) == 1
print(*[worker.pid for worker in pool.status().workers], *pool.compile_pids(), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
elif sys.argv[1] == "raise":
    raise SystemExit(3)
"""


def has_ended_or_cleans_up(process: psutil.Process) -> bool:
    try:
        return "guided-cleanup" in process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return True


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGKILL of all that descends from it", "raise"])
def test_nothing_is_left_when_the_engines_process_is_gone(ending: str, short_directory: str) -> None:
    """Actors, compile processes, Ray's own processes and files."""
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
        assert len(pids) >= 3, "two actors, and the compile processes"
        family = psutil.Process(engine.pid).children(recursive=True) if ending != "raise" else []
        family.extend(psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid)))
        family = [process for process in family if not has_ended_or_cleans_up(process)]
        if ending != "raise":
            scratch = list(Path(short_directory).glob("guided-*"))
            assert len(scratch) == 1, "of the local Ray"
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
        if "descends" not in ending:  # then nothing is left that could remove it
            until(lambda: not list(Path(short_directory).glob("guided-*")), 15)
    finally:
        engine.kill()
        engine.communicate()
        for process in family:
            if process.is_running():
                process.kill()
