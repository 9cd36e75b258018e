"""Faults in the masks of one sequence, the same in every engine that uses llguidance.

The mask actors and vLLM call `llguidance.LLMatcher`. `install` replaces it with a
factory that makes the library's own matchers, and wraps those with the name of one of
`FAULTS` in their grammar, for example as a property of a JSON Schema. A wrapped matcher
behaves like the library's until it has accepted `FAULT_AT` tokens. From then on each
mask has the fault. Accepted tokens are counted, not masks, so that a matcher that is
opened again from its history (a replay) fails at the same position.

The module runs in vLLM's environment too, so it imports only packages of both.
`benchmarks/startup` installs the faults in a process.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance

from benchmarks.report import ROOT

FAULT_AT = 4
SLOW_SECONDS = float(os.environ.get("GUIDED_SLOW_SECONDS", "0.2"))


def _raise() -> None:
    raise RuntimeError("a fault, injected into a mask")


def _hold() -> None:
    # PyDLL keeps the interpreter lock during the call
    ctypes.PyDLL(None).usleep(int(SLOW_SECONDS * 1e6))


def _endless() -> None:
    while True:
        ctypes.PyDLL(None).sleep(3600)


FAULTS: dict[str, Callable[[], Any]] = {
    "injected_sleep": lambda: time.sleep(SLOW_SECONDS),
    "injected_hold": _hold,
    "injected_raise": _raise,
    "injected_segfault": lambda: ctypes.string_at(0),
    "injected_endless": _endless,
}
"""Mark in the grammar -> what happens before each mask. "hold" and "endless" keep the
interpreter lock."""


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return the environment variables of a process with these faults, for modules of
    `root`."""
    return {
        "PYTHONPATH": os.pathsep.join([str(root / "benchmarks" / "startup"), str(root)])
    }


def install() -> None:
    """Replace `llguidance.LLMatcher` in this process."""
    vars(llguidance)["LLMatcher"] = _MatcherFactory(llguidance.LLMatcher)


class _MatcherFactory:
    """Replacement for the class `LLMatcher`. The static methods are the library's."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self, tokenizer: Any, grammar: str, *arguments: Any, **named: Any
    ) -> Any:
        matcher = self._original(tokenizer, grammar, *arguments, **named)
        fault = next((fault for mark, fault in FAULTS.items() if mark in grammar), None)
        return matcher if fault is None else _FaultyMatcher(matcher, fault, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _FaultyMatcher:
    def __init__(self, inner: Any, fault: Callable[[], None], accepted: int) -> None:
        self._inner, self._fault, self._accepted = inner, fault, accepted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("consume_token", "consume_tokens", "try_consume_tokens"):
            return found

        def consume(tokens: Any) -> Any:
            self._accepted += 1 if name == "consume_token" else len(tokens)
            return found(tokens)

        return consume

    def deep_copy(self) -> _FaultyMatcher:
        return _FaultyMatcher(self._inner.deep_copy(), self._fault, self._accepted)

    def rollback(self, count: int) -> Any:
        self._accepted -= count
        return self._inner.rollback(count)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> Any:
        if self._accepted >= FAULT_AT:
            self._fault()
        return self._inner.unsafe_compute_mask_ptr(address, size)
