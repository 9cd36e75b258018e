"""Compilation of a constraint by the first backend that supports it, with a check of
the first masks."""

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
    """Growth of the process's memory during the compilation, including what other
    threads allocated meanwhile."""


def compile_constraint(
    backends: Backends,
    constraint: Constraint,
    names: Sequence[str],
    when_refused: Callable[[str, GuidedError], None] = lambda name, refusal: None,
) -> Compiled:
    """Compile with the first of `names` that can enforce all of `constraint`, and
    compute the first mask.

    Args:
        when_refused: called with the name of each backend that can't, and the reason.

    Raises:
        InvalidConstraint: the constraint is malformed, or no output satisfies it.
        UnsupportedConstraint: none of `names` can enforce it; gives the reason for
            each.
        BackendError: a library failed, and no other can enforce it.
    """
    return first_able(names, partial(compile_with, backends, constraint), when_refused)


def first_able(
    names: Sequence[str],
    attempt: Callable[[str], _T],
    when_refused: Callable[[str, GuidedError], None] = lambda name, refusal: None,
) -> _T:
    """Return what `attempt` returns for the first backend of which it raises no error.
    See `compile_constraint`."""
    failed: list[tuple[str, GuidedError]] = []
    for name in names:
        try:
            return attempt(name)
        except GuidedError as error:
            # Another backend may succeed, unless the error is about the constraint.
            if not isinstance(
                error,
                UnsupportedConstraint
                | ConstraintTooLarge
                | CompileTimeout
                | InternalError,
            ):
                raise
            failed.append((name, error))
            when_refused(name, error)
    raise _conclusion(failed)


def compile_with(backends: Backends, constraint: Constraint, name: str) -> Compiled:
    """Compile with one backend, and compute the first mask; of a large grammar also
    others.

    Raises as `compile_constraint` does, and `ConstraintTooLarge` for what is nested too
    deep for Python's stack.
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
            raise ConstraintTooLarge(
                f"{name} failed: the {constraint.kind} is nested too deep, or too long"
            ) from None
        raise
    masks = 1
    if time.thread_time() - cpu_before > _QUICK_SECONDS:
        masks = _TRIAL_MASKS
    _check_masks(backends.vocabulary, grammar, masks)
    return Compiled(
        name, grammar, time.perf_counter() - started, max(0, held_bytes() - before)
    )


def _conclusion(failed: Sequence[tuple[str, GuidedError]]) -> GuidedError:
    """Return one error for the failures of all backends that were tried: `(name,
    error)`, at least one.

    Internal errors come first, then timeouts (both may not happen again, so neither is
    cached), then a size over a limit, then a lack of support.
    """
    if len(failed) == 1:
        return failed[0][1]
    said: dict[str, list[str]] = {}
    for name, error in failed:
        said.setdefault(
            bounded(
                error.message.removeprefix(f"{name} ").removeprefix(f"{name}: "), 200
            ),
            [],
        ).append(name)
    reasons = "; ".join(
        f"{', '.join(names)}: {message}" for message, names in said.items()
    )
    first = max((error for _, error in failed), key=_weight)
    if isinstance(first, InternalError | CompileTimeout):
        return type(first)(f"no backend could compile this constraint ({reasons})")
    keyword = "all of this constraint"
    if first.pointer:
        keyword = repr(bounded(first.pointer.rpartition("/")[2], 60))
    return type(first)(
        f"no backend can enforce {keyword}: {reasons}",
        param=first.param,
        pointer=first.pointer,
    )


def _weight(error: GuidedError) -> tuple[bool, ...]:
    """Return the sort key of errors of which the greatest is reported."""
    kinds = (InternalError, CompileTimeout, ConstraintTooLarge)
    return (*(isinstance(error, kind) for kind in kinds), bool(error.pointer))


def _check_masks(vocabulary: Vocabulary, grammar: CompiledGrammar, count: int) -> None:
    """Compute `count` masks of random outputs: later ones may exceed limits of the
    library."""
    worker = MaskWorker(vocabulary)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    chance = random.Random(0)
    tokens: list[int] = []
    for number in range(count):
        if not tokens:
            worker.open(0, grammar)
        error = worker.fill(0, tokens, row)
        if number == 0 and isinstance(error, DeadEnd):
            raise InvalidConstraint(
                "no output satisfies this constraint with the model's vocabulary"
            )
        if error is not None and not isinstance(error, ConstraintNotMet | DeadEnd):
            raise error
        tokens = []
        if error is None:
            tokens = chance.choices(allowed_ids(row).tolist())
        if not set(tokens).isdisjoint(vocabulary.stop_token_ids):
            tokens = []
