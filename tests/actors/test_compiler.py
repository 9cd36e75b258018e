"""Compile processes: warm, watched, killed where they take too much, replaced. No Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from byte_vocabulary import BYTES

from actors.compile.compiler import Compiler
from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import (
    CompileTimeout,
    ConstraintTooLarge,
    GuidedError,
    InvalidConstraint,
    UnsupportedConstraint,
    from_wire,
)
from guided.limits import CompileLimits

WAIT = 120.0
QUICK = (Constraint.regex("ab+c"), ["llguidance"])
ENDLESS = (Constraint.regex("(a|b)*a(a|b){20}"), ["outlines"])
"""A deterministic automaton of two million states: minutes, and gigabytes."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(BYTES, CompileLimits(memory_bytes=1 << 30, processes=1, seconds=5.0))
    yield compiler
    compiler.close()


def error_of(compiler: Compiler, job: tuple[Constraint, list[str]]) -> GuidedError:
    outcome = compiler.submit(*job).result(WAIT)
    assert outcome.error is not None
    return from_wire(outcome.error)


def test_a_grammar_comes_back_as_another_process_can_load_it(compiler: Compiler) -> None:
    outcome = compiler.submit(*QUICK).result(WAIT)
    assert outcome.error is None
    assert outcome.backend == "llguidance"
    assert outcome.seconds > 0
    assert outcome.nbytes > 0
    Backends(BYTES)["llguidance"].load(QUICK[0], outcome.dumped).matcher()


def test_what_takes_too_long_is_killed_and_the_next_one_served(compiler: Compiler) -> None:
    compiler.submit(*QUICK).result(WAIT)
    (before,) = compiler.pids
    started = time.monotonic()
    assert isinstance(error_of(compiler, ENDLESS), CompileTimeout)
    assert time.monotonic() - started < 30
    assert compiler.submit(*QUICK).result(WAIT).error is None
    assert not psutil.pid_exists(before)


def test_its_processes_give_precedence_to_all_others(compiler: Compiler) -> None:
    (pid,) = compiler.pids
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getsid(pid) == pid
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists() and (found := autogroup.read_text()):  # "/autogroup-7 nice 10"
        assert int(found.rpartition(" ")[2]) > 0


def test_a_process_that_died_while_idle_is_noticed_before_it_gets_a_job(compiler: Compiler) -> None:
    compiler.submit(*QUICK).result(WAIT)
    (pid,) = compiler.pids
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):
        time.sleep(0.01)
    assert compiler.submit(*QUICK).result(WAIT).error is None


def test_the_users_mistakes_cost_no_process(compiler: Compiler) -> None:
    compiler.submit(*QUICK).result(WAIT)
    before = compiler.pids
    assert type(error_of(compiler, (Constraint.regex("a(b"), ["llguidance"]))) is InvalidConstraint
    schema = Constraint.json_schema({"contains": {"pattern": "a"}, "maxContains": 2}, strict_schema=True)
    assert type(error_of(compiler, (schema, ["llguidance", "outlines"]))) is UnsupportedConstraint
    assert compiler.submit(*QUICK).result(WAIT).error is None
    assert compiler.pids == before


def test_what_takes_too_much_memory_is_killed() -> None:
    compiler = Compiler(BYTES, CompileLimits(processes=1, seconds=60.0, memory_bytes=64 << 20))
    error = error_of(compiler, ENDLESS)
    assert type(error) is ConstraintTooLarge
    assert "64 MiB" in str(error)
    compiler.close()


def test_children_die_with_the_process_that_started_them() -> None:
    code = (
        "import time\n"
        "from byte_vocabulary import BYTES\n"
        "from actors.compile.compiler import Compiler\n"
        "from guided.limits import CompileLimits\n"
        "from guided.constraint import Constraint\n"
        "compiler = Compiler(BYTES, CompileLimits(processes=1))\n"
        "compiler.submit(Constraint.regex('a'), ['llguidance']).result()\n"
        "compiler.submit(Constraint.regex('(a|b)*a(a|b){20}'), ['outlines'])\n"
        "print(compiler.pids[0], flush=True)\n"
        "time.sleep(600)\n"
    )
    here = Path(__file__).parents
    environment = {**os.environ, "PYTHONPATH": f"{here[2]}{os.pathsep}{here[1] / 'support'}"}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone
