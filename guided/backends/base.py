"""The contract between the worker and a grammar library. Four adapters keep it; one test suite runs against all.

A `Backend` compiles a `Constraint` for one `Vocabulary` into a `CompiledGrammar` (immutable, shared by sequences),
which makes `Matcher`s (one sequence's mutable state). Adapters raise only errors of `guided.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from guided.constraint import Constraint, ConstraintKind
from guided.vocabulary import Vocabulary

__all__ = ["Backend", "CompiledGrammar", "Matcher"]


class Matcher(Protocol):
    """One sequence's state within a grammar."""

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Advance by all of `token_ids` (a stop token is accepted where the constraint is satisfied, and terminates).

        Raises:
            TokenRejected: one of them is not allowed here. The state is then undefined; the sequence is over.
            BackendError: the library failed.
        """

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Write which tokens are allowed next. `row`: int32 `[ceil(padded_vocab_size / 32)]`, bit 1 = allowed.

        Every word is written. Bits of stop, special and padding tokens are don't-care: the worker sets the first from
        `is_accepting()` and clears the others.

        Raises:
            BackendError: the library failed, or is in an error state that it reports as a mask.
        """

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens (a terminating stop token is one of them)."""

    def fork(self) -> Matcher:
        """An independent copy of this state."""

    def is_accepting(self) -> bool:
        """The output so far satisfies the constraint: a stop token is legal now."""

    def is_terminated(self) -> bool:
        """A stop token was accepted."""

    def forced_tokens(self) -> list[int]:
        """The only possible continuation, as token ids; empty where there is a choice or the library can't tell."""


class CompiledGrammar(Protocol):
    """A constraint compiled for one vocabulary. Immutable; shared by all its matchers."""

    @property
    def nbytes(self) -> int:
        """Memory it holds, estimated, in bytes: caches are bounded by it."""

    def matcher(self) -> Matcher:
        """A new matcher at the start."""

    def dump(self) -> bytes:
        """What another process needs to `Backend.load` it: serialised where that is cheaper than compiling again,
        empty otherwise."""


class Backend(Protocol):
    """Adapter to one library, for one vocabulary. What is per vocabulary (tokenizer data) is built once, here."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[ConstraintKind]]

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile. May take arbitrarily long: call it in a process that may be killed.

        Raises:
            InvalidConstraint: the library says that the constraint is malformed (what and where).
            UnsupportedConstraint: it is well formed, and this library can't enforce all of it (which keyword, where).
            BackendError: the library failed.
        """

    def load(self, constraint: Constraint, dumped: bytes) -> CompiledGrammar:
        """What `CompiledGrammar.dump` of another process described. Never much slower than `compile`."""
