"""Test backends of `benchmarks.stragglers` and `benchmarks.replicas`: llguidance with a fixed delay per mask.

They are registered in every process that has `benchmarks/startup` on its PYTHONPATH. Actors and compile processes
inherit this variable from the benchmark.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.delay import delay
from guided.backends.base import CompiledGrammar, Matcher
from guided.backends.llguidance import LLGuidanceBackend
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary

SECONDS_VARIABLE = "BENCHMARK_SLOW_SECONDS"
Kind = Literal["sleep", "hold"]


def slow_name(kind: str) -> str:
    """Return the name of the backend with this kind of delay."""
    return f"benchmark-{kind}"


class _SlowMatcher(Matcher):
    def __init__(self, inner: Matcher, kind: Kind) -> None:
        self._inner, self._kind = inner, kind

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self._inner.accept_tokens(token_ids)

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        delay(self._kind, float(os.environ.get(SECONDS_VARIABLE, "0.2")))
        return self._inner.fill_bitmask(row)

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)

    def fork(self) -> Matcher:
        return _SlowMatcher(self._inner.fork(), self._kind)

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens()


class _SlowGrammar(CompiledGrammar):
    def __init__(self, inner: CompiledGrammar, kind: Kind) -> None:
        self._inner, self._kind = inner, kind

    def matcher(self) -> Matcher:
        return _SlowMatcher(self._inner.matcher(), self._kind)

    def dump(self) -> bytes:
        return self._inner.dump()


class SleepingBackend:
    """A backend that sleeps before each mask."""

    name: ClassVar[str] = slow_name("sleep")
    _kind: ClassVar[Kind] = "sleep"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._inner = LLGuidanceBackend(vocabulary)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        return _SlowGrammar(self._inner.compile(constraint), self._kind)

    def load(self, constraint: Constraint, dumped: bytes) -> CompiledGrammar:
        return _SlowGrammar(self._inner.load(constraint, dumped), self._kind)


class HoldingBackend(SleepingBackend):
    """A backend that computes before each mask, and holds the GIL while it does."""

    name: ClassVar[str] = slow_name("hold")
    _kind: ClassVar[Kind] = "hold"
