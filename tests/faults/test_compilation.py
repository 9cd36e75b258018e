"""Compilations that crash, hang, take too much memory or come in large numbers: each fails alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
from byte_vocabulary import BYTES
from faulty_backend import NAME, PATHS, faulty

from actors import RayPool
from actors.compile.compiler import Compiler
from actors.compile.process import CompileResult
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileQueueFull,
    CompileTimeout,
    ConstraintTooLarge,
    GuidedError,
    InvalidConstraint,
    from_wire,
)
from guided.limits import CompileLimits

WAIT = 120.0
QUICK = (Constraint.regex("ab+c"), ["llguidance"])
_numbers = count()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.01)


def new(*words: str) -> Constraint:
    """A constraint for the faulty backend that was not compiled before."""
    return faulty(*words, f"name={next(_numbers)}")


def error_of(outcome: CompileResult) -> GuidedError:
    assert outcome.error is not None
    return from_wire(outcome.error)


@contextmanager
def _compiler(seconds: float) -> Iterator[Compiler]:
    limits = CompileLimits(
        processes=2, seconds=seconds, memory_bytes=256 << 20, grammar_bytes=200 << 10, wait_seconds=2 * seconds
    )
    with pytest.MonkeyPatch.context() as patch:
        for path in PATHS:
            patch.syspath_prepend(path)  # like the compile processes, this process knows the faulty backend
        compiler = Compiler(BYTES, limits)
        assert compiler.submit(*QUICK).result(WAIT).error is None
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


@pytest.mark.parametrize("place", ["compile", "fill:0"])
@pytest.mark.parametrize("action", ["segfault", "abort", "exit"])
def test_a_crash_is_one_constraints_error(patient_compiler: Compiler, action: str, place: str) -> None:
    compiler = patient_compiler
    bad = compiler.submit(new(f"{action}@{place}"), [NAME])
    good = compiler.submit(*QUICK)
    error = error_of(bad.result(WAIT))
    assert type(error) is BackendError
    assert "ended its process" in str(error)
    assert bad.result().crashed == [NAME]
    assert good.result(WAIT).error is None
    assert compiler.submit(*QUICK).result(WAIT).error is None


@pytest.mark.parametrize("place", ["compile", "fill:0"])
@pytest.mark.parametrize("action", ["hold", "spin"])
def test_what_never_ends_is_killed(compiler: Compiler, action: str, place: str) -> None:
    outcome = compiler.submit(new(f"{action}@{place}"), [NAME]).result(WAIT)
    error = error_of(outcome)
    assert type(error) is CompileTimeout
    assert "took more than 2" in str(error)
    assert outcome.timed_out == [NAME]
    assert outcome.crashed == []


def test_what_eats_memory_is_killed_before_the_machine_swaps(patient_compiler: Compiler) -> None:
    assert psutil.virtual_memory().available > 2 << 30
    error = error_of(patient_compiler.submit(new("eat@compile"), [NAME]).result(WAIT))
    assert type(error) is ConstraintTooLarge
    assert "256 MiB" in str(error)


def test_a_library_that_raises_costs_no_process(compiler: Compiler) -> None:
    compiler.submit(*QUICK).result(WAIT)
    before = compiler.pids
    for action in ("raise", "panic"):
        error = error_of(compiler.submit(new(f"{action}@compile"), [NAME]).result(WAIT))
        assert type(error) is BackendError
        assert compiler.submit(*QUICK).result(WAIT).error is None
    assert set(before) <= set(compiler.pids), "on a busy machine there may be one more"


@pytest.mark.parametrize("fault", ["segfault@compile", "eat@compile", "raise@compile", "exit@fill:0"])
def test_the_next_backend_is_tried_after_a_failure(patient_compiler: Compiler, fault: str) -> None:
    outcome = patient_compiler.submit(new(fault), [NAME, "llguidance"]).result(WAIT)
    assert outcome.error is None
    assert outcome.backend == "llguidance"
    assert outcome.timed_out == []
    assert outcome.crashed == ([NAME] if fault.startswith(("segfault", "exit")) else [])


def test_the_next_backend_is_tried_with_the_time_that_is_left() -> None:
    with _compiler(seconds=20.0) as compiler:  # two seconds of it are left: enough on a busy machine
        outcome = compiler.submit(new("hold@compile"), [NAME, "llguidance"]).result(WAIT)
    assert outcome.error is None
    assert outcome.backend == "llguidance"
    assert (outcome.timed_out, outcome.crashed) == ([NAME], [])


def test_where_none_could_the_error_names_each_and_is_not_the_users(compiler: Compiler) -> None:
    # No backend reports a syntax error for this text. outlines rejects it because it can't enforce it.
    refused = faulty("hold@compile", r"a(?=b)")
    error = error_of(compiler.submit(refused, [NAME, "llguidance", "xgrammar"]).result(WAIT))
    assert type(error) is CompileTimeout
    for name in (NAME, "llguidance", "xgrammar"):
        assert name in str(error)


def test_a_grammar_that_weighs_too_much_reaches_no_worker(compiler: Compiler) -> None:
    words = Constraint.choice([f"{number}{'word' * 30}" for number in range(100)])
    error = error_of(compiler.submit(words, ["llguidance"]).result(WAIT))
    assert type(error) is ConstraintTooLarge
    assert "the compiled constraint takes" in str(error)


def test_what_waits_too_long_for_others_gets_an_error(compiler: Compiler) -> None:
    flood = [compiler.submit(new("spin@compile"), [NAME]) for _ in range(20)]
    kinds = {type(error_of(future.result(WAIT))) for future in flood}
    assert kinds == {CompileTimeout, CompileQueueFull}
    assert compiler.submit(*QUICK).result(WAIT).error is None


def test_the_template_is_replaced(compiler: Compiler, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    template = psutil.Process(compiler.pids[0]).parent()
    assert template is not None
    future = compiler.submit(new("hold@compile", f"touch={reached}"), [NAME])
    until(reached.exists)
    template.kill()
    assert type(error_of(future.result(WAIT))) is BackendError
    assert compiler.submit(*QUICK).result(WAIT).error is None


def test_a_process_killed_or_frozen_from_outside_ends_its_constraint(compiler: Compiler, tmp_path: Path) -> None:
    for number, (sent, error) in enumerate([(signal.SIGKILL, BackendError), (signal.SIGSTOP, CompileTimeout)]):
        reached = tmp_path / f"reached{number}"
        future = compiler.submit(new(f"hold@compile={number}", f"touch={reached}"), [NAME])
        until(reached.exists)
        os.kill(int(reached.read_text()), sent)
        assert type(error_of(future.result(WAIT))) is error
        assert compiler.submit(*QUICK).result(WAIT).error is None


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    limits = CompileLimits(processes=2, seconds=5.0, memory_bytes=256 << 20)
    pool = RayPool(BYTES, num_actors=1, compile_limits=limits, max_compiling=3)
    pool.compile(*QUICK).result(WAIT)
    yield pool
    pool.shutdown()


def test_invalid_is_remembered_and_a_timeout_is_not(pool: RayPool, tmp_path: Path) -> None:
    invalid = Constraint.regex("a(b")
    first = pool.compile(invalid, ["llguidance"])
    assert isinstance(first.exception(WAIT), InvalidConstraint)
    assert pool.compile(invalid, ["llguidance"]) is first
    once = new("hold@compile", f"once={tmp_path / 'once'}")
    assert type(pool.compile(once, [NAME]).exception(WAIT)) is CompileTimeout
    assert pool.compile(once, [NAME]).result(WAIT).backend == NAME


def test_constraints_that_wait_are_bounded(pool: RayPool, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    waiting = [new(f"wait@compile={go_on}", f"once={tmp_path / str(number)}") for number in range(3)]
    futures = [pool.compile(constraint, [NAME]) for constraint in waiting]
    assert pool.status().compiling == 3
    one_more = new()
    error = pool.compile(one_more, [NAME]).exception(0)
    assert type(error) is CompileQueueFull
    assert error.status == 429
    assert error.retryable
    assert pool.compile(waiting[0], [NAME]) is futures[0], "equal constraints share one compilation"
    go_on.touch()
    for future in futures:
        future.exception(WAIT)
    assert pool.compile(one_more, [NAME]).result(WAIT).backend == NAME
