"""From a constraint to a compiled grammar that is known to start: the first backend that can, and its first mask.

Runs wherever compilation runs: in a process that may be killed (`actors`), or in the caller (`InlinePool`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    CompileTimeout,
    ConstraintTooLarge,
    DeadEnd,
    GuidedError,
    InternalError,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
)
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

__all__ = ["Compiled", "compile_constraint", "compile_with", "conclusion", "grammar_key", "is_about_backend"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar whose first mask was computed, and what made it."""

    backend: str
    grammar: CompiledGrammar
    seconds: float


def grammar_key(backend: str, constraint: Constraint) -> str:
    """Under which workers know a compiled grammar."""
    return f"{backend}:{constraint.key}"


def compile_constraint(backends: Backends, constraint: Constraint, names: Sequence[str]) -> Compiled:
    """Compile by the first of `names` that can enforce all of `constraint`, and compute the first mask.

    Raises:
        InvalidConstraint: malformed, or nothing satisfies it.
        UnsupportedConstraint: none of `names` can; says why each can't.
        BackendError: a library failed, and none after it can.
    """
    failed: list[tuple[str, GuidedError]] = []
    for name in names:
        try:
            return compile_with(backends, constraint, name)
        except GuidedError as error:
            if not is_about_backend(error):
                raise
            failed.append((name, error))
    raise conclusion(failed)


def compile_with(backends: Backends, constraint: Constraint, name: str) -> Compiled:
    """Compile by one backend, and compute the first mask.

    Raises:
        InvalidConstraint: malformed, or nothing satisfies it.
        UnsupportedConstraint: this backend can't enforce all of it.
        BackendError: the library failed.
    """
    started = time.perf_counter()
    try:
        grammar = backends[name].compile(constraint)
    except (GuidedError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # a Rust panic is no `Exception`
        raise BackendError(bounded(f"{name} failed: {type(failure).__name__}: {failure}")) from failure
    _check_first_mask(backends.vocabulary, grammar)
    return Compiled(name, grammar, time.perf_counter() - started)


def is_about_backend(error: GuidedError) -> bool:
    """It says something about the backend that was tried: another one may do. Else: about the constraint."""
    return isinstance(error, UnsupportedConstraint | ConstraintTooLarge | CompileTimeout | InternalError)


def conclusion(failed: Sequence[tuple[str, GuidedError]]) -> GuidedError:
    """What to say where every backend that was tried came to nothing: `(its name, its error)`, at least one.

    The error is of the kind that is ours before those that are the constraint's: a failure, then a timeout (it may go
    better another time, so neither is remembered), then what is too large, then what none can enforce.
    """
    if len(failed) == 1:
        return failed[0][1]
    reasons = "; ".join(f"{name}: {bounded(error.message, 200)}" for name, error in failed)
    for kind in (InternalError, CompileTimeout):
        for _, error in failed:
            if isinstance(error, kind):
                return type(error)(f"no backend could compile this constraint ({reasons})")
    first = next((error for _, error in failed if isinstance(error, ConstraintTooLarge)), failed[0][1])
    return type(first)(
        f"no backend can enforce all of this constraint ({reasons})", param=first.param, pointer=first.pointer
    )


def _check_first_mask(vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
    worker = MaskWorker(vocabulary)
    worker.install("first", grammar)
    worker.open(0, "first")
    error = worker.fill(0, (), np.empty(words(vocabulary.padded_vocab_size), np.int32))
    if isinstance(error, DeadEnd):
        raise InvalidConstraint("no output satisfies this constraint with the model's vocabulary")
    if error is not None:
        raise error
