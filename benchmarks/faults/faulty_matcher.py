"""Inject one fault into one request's masks, the same in every engine that uses llguidance.

Both engines call `llguidance.LLMatcher`. `install` replaces it with a factory that makes the library's own matchers,
and wraps the matchers of a grammar that has `MARK` in its text. A wrapped matcher behaves like the library's until it
has accepted `FAULT_AT` tokens. From then on each mask has the fault that the environment names. It counts accepted
tokens, not masks, so that a matcher that is opened again from its history (a replay) fails at the same position.

Imports only the standard library, because it also runs in vLLM's environment.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

FAULT_VARIABLE = "BENCHMARK_FAULT"
MARK = "injected_fault"
FAULT_AT = 24
SLOW_SECONDS = 0.2


def _raise() -> None:
    raise RuntimeError("a fault, injected into a mask")


def _segfault() -> None:
    ctypes.string_at(0)


def _slow() -> None:
    time.sleep(SLOW_SECONDS)


def _endless() -> None:
    # A loop in C that holds the GIL: no other Python thread of the process runs.
    collections.deque(itertools.repeat(None), maxlen=0)


FAULTS: dict[str, Callable[[], None]] = {"raise": _raise, "segfault": _segfault, "slow": _slow, "endless": _endless}


def install(llguidance: ModuleType) -> None:
    """Replace `llguidance.LLMatcher` if the environment names one of `FAULTS`."""
    fault = FAULTS.get(os.environ.get(FAULT_VARIABLE, ""))
    if fault is not None:
        vars(llguidance)["LLMatcher"] = _MatcherFactory(llguidance.LLMatcher, fault)


class _MatcherFactory:
    """Replacement for the class `LLMatcher`. The static methods are the library's."""

    def __init__(self, original: Any, fault: Callable[[], None]) -> None:
        self._original, self._fault = original, fault

    def __call__(self, tokenizer: Any, grammar: str, *arguments: Any, **named: Any) -> Any:
        matcher = self._original(tokenizer, grammar, *arguments, **named)
        return _FaultyMatcher(matcher, self._fault, 0) if MARK in grammar else matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _FaultyMatcher:
    def __init__(self, inner: Any, fault: Callable[[], None], accepted: int) -> None:
        self._inner, self._fault, self._accepted = inner, fault, accepted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def deep_copy(self) -> _FaultyMatcher:
        return _FaultyMatcher(self._inner.deep_copy(), self._fault, self._accepted)

    def consume_token(self, token: int) -> Any:
        self._accepted += 1
        return self._inner.consume_token(token)

    def consume_tokens(self, tokens: list[int]) -> Any:
        self._accepted += len(tokens)
        return self._inner.consume_tokens(tokens)

    def try_consume_tokens(self, tokens: list[int]) -> Any:
        self._accepted += len(tokens)
        return self._inner.try_consume_tokens(tokens)

    def rollback(self, count: int) -> Any:
        self._accepted -= count
        return self._inner.rollback(count)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> Any:
        if self._accepted >= FAULT_AT:
            self._fault()
        return self._inner.unsafe_compute_mask_ptr(address, size)
