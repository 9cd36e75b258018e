"""Random constraints, valid and broken, through admission and every backend's compilation, in killable processes.

`--hypothesis-profile fuzz -rP` runs fifty times as many examples and prints the outcomes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from byte_vocabulary import BYTES
from constraint_strategies import FIELDS, WHITESPACE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.compiler import Compiler
from guided.backends import BACKENDS, candidates
from guided.constraint import KINDS, Constraint, ConstraintKind
from guided.errors import (
    BackendError,
    CompileTimeout,
    ConstraintTooLarge,
    GuidedError,
    InvalidConstraint,
    UnsupportedConstraint,
)
from guided.limits import CompileLimits
from guided.pools.options import RayPoolOptions

SECONDS = 5.0
WAIT = 120.0
REFUSALS = InvalidConstraint, ConstraintTooLarge, UnsupportedConstraint, CompileTimeout
DECLARED = (*REFUSALS, BackendError)
"""Possible outcomes of a constraint. `BackendError` is a 500 and means that a library raised or died."""
EXAMPLES = max(1, settings.default.max_examples // 5)
ABLE = [(kind, name) for kind in KINDS for name, adapter in BACKENDS.items() if kind in adapter.kinds]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    limits = CompileLimits(processes=1, seconds=SECONDS)
    compiler = Compiler(BYTES, RayPoolOptions(compile_limits=limits), lambda keys: None)
    yield compiler
    compiler.close()


def admitted(kind: ConstraintKind, value: Any, whitespace: str | None) -> Constraint | None:
    """Return the constraint, or None if it is rejected. Other errors are raised."""
    try:
        match kind:
            case "json_schema":
                return Constraint.json_schema(value, whitespace=whitespace)
            case "json_object":
                return Constraint.json_object(whitespace=whitespace)
            case _:
                constraint: Constraint = getattr(Constraint, kind)(value)
                return constraint
    except InvalidConstraint as refusal:
        if not 0 < len(str(refusal)) < 2000:
            raise
        return None


@pytest.mark.parametrize(("kind", "backend"), ABLE)
def test_every_constraint_is_decided(compiler: Compiler, kind: ConstraintKind, backend: str) -> None:
    decisions: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(FIELDS[kind], WHITESPACE)
    def decide(value: Any, whitespace: str | None) -> None:
        constraint = admitted(kind, value, whitespace)
        if constraint is None:
            decisions["refused at admission"] += 1
            return
        started = time.monotonic()
        compiled = compiler.compile(constraint, list(candidates(kind, backend)))
        error = compiled.exception(WAIT)
        if error is None:
            assert compiled.result().backend in candidates(kind, backend)
            compiler.release(compiled.result())
            decisions["compiled"] += 1
            return
        assert isinstance(error, GuidedError)
        decisions[f"{error.code}: {error} {value!r}" if isinstance(error, BackendError) else error.code] += 1
        assert isinstance(error, DECLARED), f"{error!r} of {constraint}"
        assert len(str(error)) < 2000
        if isinstance(error, CompileTimeout):
            assert time.monotonic() - started >= SECONDS * 0.9

    decide()
    print(*(f"{count:6} {decision}" for decision, count in decisions.most_common()), sep="\n")


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_the_same_constraint_has_one_key(data: st.DataObject) -> None:
    """The key doesn't depend on the form of the request. The caches of grammars and of invalid constraints use it."""
    kind = data.draw(st.sampled_from(KINDS))
    value, whitespace = data.draw(FIELDS[kind]), data.draw(WHITESPACE)
    one, other = admitted(kind, value, whitespace), admitted(kind, value, whitespace)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.key == other.key
        assert one == other
