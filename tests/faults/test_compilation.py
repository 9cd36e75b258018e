"""Compilations that crash, hang, take too much memory or come in large numbers: each
fails alone. No Ray."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from byte_vocabulary import BYTES
from driven_pool import compile_pids, until
from faulty_backend import ADAPTER, NAME, PATHS, faulty

from actors.compile_process import CompileProcess
from actors.compiler import Compiler
from actors.processes import RETRY_SECONDS
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileQueueFull,
    CompileTimeout,
    ConstraintTooLarge,
    GuidedError,
)
from guided.limits import CompileLimits
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import Grammar

WAIT = 120.0
_numbers = count()


def new(*words: str) -> Constraint:
    """A constraint for the faulty backend that was not compiled before."""
    return faulty(*words, f"name={next(_numbers)}")


def quick(compiler: Compiler) -> Grammar:
    """Compile what no fault concerns, and was not compiled before."""
    return compiler.compile(
        Constraint.regex(f"ab{next(_numbers)}"), ["llguidance"]
    ).result(WAIT)


def error_of(compiler: Compiler, constraint: Constraint, *backends: str) -> GuidedError:
    error = compiler.compile(constraint, backends or [NAME]).exception(WAIT)
    assert isinstance(error, GuidedError)
    return error


def counts(compiler: Compiler) -> tuple[int, int]:
    """Crashes and timeouts of all backends, so far."""
    return sum(each.crashes for each in compiler.backends()), sum(
        each.timeouts for each in compiler.backends()
    )


@contextmanager
def _compiler(
    seconds: float, wait_seconds: float | None = None, **options: Any
) -> Iterator[Compiler]:
    limits = CompileLimits(
        processes=2,
        seconds=seconds,
        memory_bytes=256 << 20,
        grammar_bytes=200 << 10,
        wait_seconds=wait_seconds or 2 * seconds,
        waiting=20,
    )
    with pytest.MonkeyPatch.context() as patch:
        for path in PATHS:
            patch.syspath_prepend(path)
        # like the compile processes, this process knows the faulty backend
        patch.setitem(BACKENDS, NAME, ADAPTER)
        compiler = Compiler(BYTES, RayPoolOptions(compile_limits=limits, **options))
        until(
            lambda: (
                compiler.compile(Constraint.regex("warm"), ["llguidance"]).exception(
                    WAIT
                )
                is None
            )
        )
        yield compiler
        compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with _compiler(seconds=2.0) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def patient_compiler() -> Iterator[Compiler]:
    """For what must end before its time is up, also on a busy machine."""
    with _compiler(seconds=60.0) as compiler:
        yield compiler


@pytest.mark.parametrize("fault", ["segfault@compile", "exit@fill:0"])
def test_a_crash_is_one_constraints_error(
    patient_compiler: Compiler, fault: str
) -> None:
    compiler, (crashes, _) = patient_compiler, counts(patient_compiler)
    bad = compiler.compile(new(fault), [NAME])
    quick(compiler)
    error = bad.exception(WAIT)
    assert type(error) is BackendError
    assert "ended its process" in str(error)
    assert counts(compiler)[0] == crashes + 1
    quick(compiler)


@pytest.mark.parametrize("fault", ["hold@compile", "hold@fill:0"])
def test_what_never_ends_is_killed(compiler: Compiler, fault: str) -> None:
    before = counts(compiler)
    error = error_of(compiler, new(fault))
    assert type(error) is CompileTimeout
    assert "took more than 2" in str(error)
    assert counts(compiler) == (before[0], before[1] + 1)


def test_what_eats_memory_is_killed_before_the_machine_swaps(
    patient_compiler: Compiler,
) -> None:
    error = error_of(patient_compiler, new("eat@compile"))
    assert type(error) is ConstraintTooLarge
    assert "256 MiB" in str(error)


def test_a_library_that_raises_costs_no_process(compiler: Compiler) -> None:
    before = compile_pids()
    for action in ("raise", "panic"):
        assert type(error_of(compiler, new(f"{action}@compile"))) is BackendError
    assert set(before) <= set(compile_pids()), "on a busy machine there may be one more"


@pytest.mark.parametrize("fault", ["segfault@compile", "eat@compile", "raise@compile"])
def test_the_next_backend_is_tried_after_a_failure(
    patient_compiler: Compiler, fault: str
) -> None:
    assert (
        patient_compiler.compile(new(fault), [NAME, "llguidance"]).result(WAIT).backend
        == "llguidance"
    )


def test_the_next_backend_is_tried_with_the_time_that_is_left() -> None:
    # one second of it is left: enough on a busy machine
    with _compiler(seconds=10.0) as compiler:
        assert (
            compiler.compile(new("hold@compile"), [NAME, "llguidance"])
            .result(WAIT)
            .backend
            == "llguidance"
        )
        assert counts(compiler) == (0, 1)


def test_where_no_backend_could_the_error_names_each(compiler: Compiler) -> None:
    # No backend reports a syntax error for this text. outlines rejects it because it
    # can't enforce it.
    error = error_of(
        compiler, faulty("hold@compile", r"a(?=b)"), NAME, "llguidance", "xgrammar"
    )
    assert type(error) is CompileTimeout
    for name in (NAME, "llguidance", "xgrammar"):
        assert name in str(error)


def test_a_grammar_that_weighs_too_much_reaches_no_worker() -> None:
    words = Constraint.choice([f"{number}{'word' * 30}" for number in range(100)])
    # no time-out comes first on a busy machine
    with _compiler(seconds=20.0) as compiler:
        error = error_of(compiler, words, "llguidance")
    assert type(error) is ConstraintTooLarge
    assert "the compiled constraint takes" in str(error)


def test_what_waits_too_long_for_others_gets_an_error(compiler: Compiler) -> None:
    flood = [compiler.compile(new("hold@compile"), [NAME]) for _ in range(20)]
    errors = [future.exception(WAIT) for future in flood]
    assert {type(error) for error in errors} == {CompileTimeout, CompileQueueFull}
    assert {
        (error.status, error.retryable)
        for error in errors
        if type(error) is CompileQueueFull
    } == {(429, True)}
    quick(compiler)


def test_constraints_that_wait_are_bounded(
    patient_compiler: Compiler, tmp_path: Path
) -> None:
    compiler, go_on = patient_compiler, tmp_path / "go_on"
    flood = [
        compiler.compile(
            new(f"wait@compile={go_on}", f"once={tmp_path / str(n)}"), [NAME]
        )
        for n in range(40)
    ]
    refused = [future.exception(0) for future in flood if future.done()]
    assert {type(error) for error in refused} == {CompileQueueFull}
    assert len(refused) in (18, 19, 20), "two are being compiled, and 20 wait"
    go_on.touch()
    for future in flood:
        future.exception(WAIT)
    quick(compiler)


def test_a_process_killed_or_frozen_from_outside_ends_its_constraint(
    compiler: Compiler, tmp_path: Path
) -> None:
    ways = [
        (signal.SIGKILL, BackendError, 0),
        (signal.SIGSTOP, CompileTimeout, 0),
        (signal.SIGKILL, BackendError, 1),
    ]
    for number, (sent, error, to_fork_server) in enumerate(ways):
        reached = tmp_path / f"reached{number}"
        future = compiler.compile(
            new(f"hold@compile={number}", f"touch={reached}"), [NAME]
        )
        until(reached.exists)
        process = psutil.Process(int(reached.read_text()))
        os.kill(process.ppid() if to_fork_server else process.pid, sent)
        assert type(future.exception(WAIT)) is error
        quick(compiler)


def test_a_process_that_died_while_idle_gets_no_job(compiler: Compiler) -> None:
    crashes, _ = counts(compiler)
    for process in map(psutil.Process, compile_pids()):
        process.kill()
        psutil.wait_procs([process], timeout=WAIT)
    quick(compiler)
    assert counts(compiler)[0] == crashes


def fork_servers() -> list[psutil.Process]:
    """The fork servers of all compilers of this process."""
    return [
        each
        for each in psutil.Process().children()
        if "actors.compile_process" in each.cmdline()
    ]


def test_a_lost_fork_server_is_replaced_by_a_warm_one(
    patient_compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, ends = patient_compiler, patient_compiler.counts()["fork_server_ends"]
    quick(compiler)
    until(lambda: len(fork_servers()) % 2 == 0)  # each compiler has two
    used = {psutil.Process(pid).ppid() for pid in compile_pids()}
    others = {server.pid for server in fork_servers()} - used
    forks = [fork for pid in used for fork in psutil.Process(pid).children()]
    for pid in used:
        os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(forks, timeout=WAIT)  # what one of them compiled would fail
    quick(compiler)
    assert {psutil.Process(pid).ppid() for pid in compile_pids()} <= others
    until(lambda: compiler.counts()["fork_server_ends"] == ends + 1)
    assert "a fork server of the compile processes was lost" in caplog.text


def test_a_fork_server_that_is_slow_is_not_killed(
    patient_compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler, ends = patient_compiler, patient_compiler.counts()["fork_server_ends"]
    for process in map(psutil.Process, compile_pids()):
        process.kill()
        psutil.wait_procs([process], timeout=WAIT)
    with monkeypatch.context() as patch:
        # no answer comes in time
        patch.setattr("actors.compile_process.wait", lambda *_: [])
        patch.setattr(CompileProcess, "alive", False)
        future = compiler.compile(new(), [NAME])
        until(lambda: "does not answer" in caplog.text)
    future.result(WAIT)
    assert compiler.counts()["fork_server_ends"] == ends


@pytest.mark.parametrize(
    "script",
    ["exec sleep 1000", "exit 1", None],
    ids=["hangs", "ends", "does not start"],
)
def test_a_fork_server_that_gets_not_warm_is_replaced(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("actors.compile_process.START_SECONDS", 0.5)
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
    began = time.monotonic()
    compiler = Compiler(
        BYTES,
        RayPoolOptions(compile_limits=CompileLimits(processes=2, wait_seconds=1.0)),
    )
    futures = [compiler.compile(new(), ["llguidance"]) for _ in range(3)]
    assert {type(future.exception(WAIT)) for future in futures} == {CompileQueueFull}, (
        "also if it has a thread's turn"
    )
    if script is not None:
        until(lambda: compiler.counts()["fork_server_ends"] == 2)
        assert time.monotonic() - began >= RETRY_SECONDS
    monkeypatch.undo()
    until(lambda: compiler.compile(new(), ["llguidance"]).exception(WAIT) is None)
    compiler.close()


def test_equal_constraints_share_a_compilation(patient_compiler: Compiler) -> None:
    before, constraint = patient_compiler.counts(), new()
    futures = [patient_compiler.compile(constraint, [NAME]) for _ in range(50)]
    assert len({id(future.result(WAIT)) for future in futures}) == 1
    patient_compiler.compile(constraint, [NAME])
    after = patient_compiler.counts()
    assert (
        after["shared_compilations"] + after["cache_hits"]
        == before["shared_compilations"] + before["cache_hits"] + 50
    )
    assert after["cache_hits"] > before["cache_hits"]


def test_a_constraint_is_refused_while_all_processes_are_busy(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with _compiler(seconds=60.0, wait_seconds=1.0) as compiler:
        busy = [
            compiler.compile(new(f"wait@compile={go_on}"), [NAME]) for _ in range(2)
        ]
        refused = compiler.compile(new(), [NAME])
        assert type(refused.exception(30)) is CompileQueueFull
        assert not any(future.done() for future in busy)
        go_on.touch()
        for future in busy:
            future.result(WAIT)


def test_a_constraint_without_a_thread_waits_for_one(
    patient_compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "threading.Thread.start",
            Mock(side_effect=RuntimeError("can't start new thread")),
        )
        future = patient_compiler.compile(new(), [NAME])
    future.result(WAIT)


def test_its_processes_give_precedence_to_all_others(compiler: Compiler) -> None:
    quick(compiler)
    for pid in compile_pids():
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getsid(pid) == pid
