"""Compilation of a constraint by the first backend that supports it, with a check of the first masks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from guided.backends import Backends
from guided.backends.base import CompiledGrammar, guard
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileTimeout,
    ConstraintNotMet,
    ConstraintTooLarge,
    DeadEnd,
    GuidedError,
    InternalError,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
)
from guided.masks.resources import held_bytes
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

_QUICK_SECONDS = 0.03
"""A grammar that compiles in less CPU time is not large."""
_TRIAL_MASKS = 40
"""Masks of a large grammar that are computed for trial."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar with a valid first mask, and the backend that compiled it."""

    backend: str
    grammar: CompiledGrammar
    seconds: float
    """Includes the first mask."""
    nbytes: int
    """Growth of the process's memory during the compilation, including what other threads allocated meanwhile."""


def compile_constraint(
    backends: Backends,
    constraint: Constraint,
    names: Sequence[str],
    when_refused: Callable[[str, GuidedError], None] = lambda name, refusal: None,
) -> Compiled:
    """Compile with the first of `names` that can enforce all of `constraint`, and compute the first mask.

    Args:
        when_refused: called with the name of each backend that can't, and the reason.

    Raises:
        InvalidConstraint: the constraint is malformed, or no output satisfies it.
        UnsupportedConstraint: none of `names` can enforce it; gives the reason for each.
        BackendError: a library failed, and no other can enforce it.
    """
    return first_able(names, partial(compile_with, backends, constraint), when_refused)


def first_able(
    names: Sequence[str],
    attempt: Callable[[str], _T],
    when_refused: Callable[[str, GuidedError], None] = lambda name, refusal: None,
) -> _T:
    """Return what `attempt` returns for the first backend of which it raises no error. See `compile_constraint`."""
    failed: list[tuple[str, GuidedError]] = []
    for name in names:
        try:
            return attempt(name)
        except GuidedError as error:
            # Another backend may succeed, unless the error is about the constraint.
            if not isinstance(error, UnsupportedConstraint | ConstraintTooLarge | CompileTimeout | InternalError):
                raise
            failed.append((name, error))
            when_refused(name, error)
    raise _conclusion(failed)


def compile_with(backends: Backends, constraint: Constraint, name: str) -> Compiled:
    """Compile with one backend, and compute the first mask; of a large grammar also others.

    Raises as `compile_constraint` does, and `ConstraintTooLarge` for what is nested too deep for Python's stack.
    """
    try:
        with guard(name):
            backend = backends[name]
            started = time.perf_counter()
            before = held_bytes()
            cpu_before = time.thread_time()
            grammar = backend.compile(constraint)
    except BackendError as error:
        if isinstance(error.__cause__, RecursionError):
            raise ConstraintTooLarge(f"{name} failed: the {constraint.kind} is nested too deep, or too long") from None
        raise
    is_large = time.thread_time() - cpu_before > _QUICK_SECONDS
    _check_masks(backends.vocabulary, grammar, _TRIAL_MASKS if is_large else 1)
    return Compiled(name, grammar, time.perf_counter() - started, max(0, held_bytes() - before))


def _conclusion(failed: Sequence[tuple[str, GuidedError]]) -> GuidedError:
    """Return one error for the failures of all backends that were tried: `(name, error)`, at least one.

    Internal errors come first, then timeouts (both may not happen again, so neither is cached), then a size over a
    limit, then a lack of support.
    """
    if len(failed) == 1:
        return failed[0][1]
    said: dict[str, list[str]] = {}
    for name, error in failed:
        said.setdefault(bounded(error.message.removeprefix(f"{name} ").removeprefix(f"{name}: "), 200), []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {message}" for message, names in said.items())
    for kind in (InternalError, CompileTimeout):
        for _, error in failed:
            if isinstance(error, kind):
                return type(error)(f"no backend could compile this constraint ({reasons})")
    errors = [error for _, error in failed]
    located = next((error for error in errors if error.pointer), errors[0])
    first = next((error for error in errors if isinstance(error, ConstraintTooLarge)), located)
    if first.pointer:
        keyword = repr(bounded(first.pointer.rpartition("/")[2], 60))
    else:
        keyword = "all of this constraint"
    return type(first)(f"no backend can enforce {keyword}: {reasons}", param=first.param, pointer=first.pointer)


def _check_masks(vocabulary: Vocabulary, grammar: CompiledGrammar, count: int) -> None:
    """Compute `count` masks of random outputs: later ones may exceed limits of the library."""
    worker = MaskWorker(vocabulary)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    chance = random.Random(0)
    token = stop = vocabulary.stop_token_ids[0]
    for number in range(count):
        if token == stop:
            worker.open(0, grammar)
        error = worker.fill(0, () if token == stop else [token], row)
        if number == 0 and isinstance(error, DeadEnd):
            raise InvalidConstraint("no output satisfies this constraint with the model's vocabulary")
        if error is not None and not isinstance(error, ConstraintNotMet | DeadEnd):
            raise error
        if error is None:
            token = chance.choice(allowed_ids(row).tolist())
        else:
            token = stop
