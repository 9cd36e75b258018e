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
    DeadEnd,
    GuidedError,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
    from_wire,
)
from guided.messages import FillRow, OpenSequence, RowStatus, StepRequest
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

__all__ = ["Compiled", "compile_constraint", "grammar_key"]


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
        BackendError: the library failed.
    """
    started = time.perf_counter()
    refusals: list[tuple[str, UnsupportedConstraint]] = []
    for name in names:
        try:
            grammar = backends[name].compile(constraint)
        except UnsupportedConstraint as refusal:
            refusals.append((name, refusal))
            continue
        except GuidedError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # a Rust panic is no `Exception`
            raise BackendError(bounded(f"{name} failed: {type(failure).__name__}: {failure}")) from failure
        _check_first_mask(backends.vocabulary, grammar)
        return Compiled(name, grammar, time.perf_counter() - started)
    raise _refusal(refusals)


def _check_first_mask(vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
    worker = MaskWorker(vocabulary)
    worker.install("first", grammar)
    row = np.empty((1, words(vocabulary.padded_vocab_size)), dtype=np.int32)
    request = StepRequest(0, 0, [FillRow(0, 0, 0, [])], [OpenSequence(0, "first")])
    (result,) = worker.handle(request, row)
    if result.status is not RowStatus.READY and result.error is not None:
        error = from_wire(result.error)
        if isinstance(error, DeadEnd):
            raise InvalidConstraint("no output satisfies this constraint with the model's vocabulary")
        raise error


def _refusal(refusals: Sequence[tuple[str, UnsupportedConstraint]]) -> UnsupportedConstraint:
    if len(refusals) == 1:
        return refusals[0][1]
    reasons = "; ".join(f"{name}: {bounded(refusal.message, 200)}" for name, refusal in refusals)
    first = refusals[0][1]
    return UnsupportedConstraint(
        f"no backend can enforce all of this constraint ({reasons})", param=first.param, pointer=first.pointer
    )
