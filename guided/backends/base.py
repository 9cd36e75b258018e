"""The contract between the worker and a grammar library. One test suite checks it for
every adapter.

A `Backend` compiles a `Constraint` for one `Vocabulary` into a `CompiledGrammar`
(immutable, shared by sequences), which creates `Matcher`s (the mutable state of one
sequence). Adapters derive from these classes. Where they expect a library to fail, they
raise an error of `guided.errors`; `guard` around their calls turns everything else into
one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from types import TracebackType
from typing import Protocol, Self

from guided.backends.rules import LineBreaks
from guided.bitmask import Bitmask
from guided.constraint import Constraint
from guided.errors import (
    BackendError,
    ConstraintNotMet,
    GuidedError,
    TokenRejected,
    bounded,
)
from guided.vocabulary import TokenIds, Vocabulary


class Matcher(Protocol):
    """One sequence's state within a grammar."""

    def accept_tokens(self, token_ids: TokenIds) -> None:
        """Advance by all of `token_ids`. A stop token is accepted where the constraint
        is satisfied, and terminates.

        Raises:
            TokenRejected: a token is not allowed here. The state is undefined then; the
                sequence is over.
            BackendError: the library failed.
        """

    def fill_bitmask(self, row: Bitmask) -> bool:
        """Write which tokens are allowed next. `row`: int32 `[ceil(padded_vocab_size /
        32)]`, bit 1 = allowed.

        Every word is written. Bits of stop, special and padding tokens may have any
        value: the worker sets those of stop tokens from the result and clears the
        others.

        Returns:
            Whether a stop token is allowed, as `is_accepting` does.

        Raises:
            BackendError: the library failed, or reports an error state as a mask.
        """

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens. A terminating stop token counts
        as one."""

    def fork(self) -> Matcher:
        """Return an independent copy of this state."""

    def is_accepting(self) -> bool:
        """Whether the output so far satisfies the constraint: a stop token is allowed
        now."""

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""

    def accepts(self, token_ids: TokenIds) -> int:
        """Return how many of `token_ids`, from the first on, are allowed here. The
        state does not change."""
        trial = self.fork()
        for count, token in enumerate(token_ids):
            try:
                trial.accept_tokens([token])
            except TokenRejected:
                return count
        return len(token_ids)

    def violation(self) -> ConstraintNotMet | None:
        """Return why the output may not end although it is complete: it violates a
        keyword that is checked."""
        return None

    def forced_tokens(self) -> list[int]:
        """Return the only possible continuation, as token ids; empty if there are
        several, or none is known.

        A hint for searches and drafts. A library that doesn't know it returns nothing.
        """
        return []


class TextMatcher(Matcher):
    """A matcher that handles stop tokens itself, for libraries that get text tokens
    only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        self._tokens: list[int] = []
        """The text tokens that it has accepted."""
        self._terminated = False

    @abstractmethod
    def accept_text(self, token_ids: list[int]) -> None:
        """Advance by tokens that are no stop tokens. Raises as `accept_tokens` does."""

    @abstractmethod
    def rollback_text(self, count: int) -> None:
        """Take back the last `count` text tokens, at least one. `_tokens` has those
        that are left."""

    @abstractmethod
    def copy_state(self) -> None:
        """Replace what `fork` must not share by a copy, other than `_tokens`."""

    def fork(self) -> Self:
        forked = copy(self)
        forked._tokens = list(self._tokens)
        forked.copy_state()
        return forked

    def accept_tokens(self, token_ids: TokenIds) -> None:
        if self._terminated and token_ids:
            raise TokenRejected("the sequence is over: a stop token was accepted")
        text = list(token_ids)
        is_end = bool(text) and text[-1] in self._stop_token_ids
        if is_end:
            text.pop()
        if not self._stop_token_ids.isdisjoint(text):
            raise TokenRejected("a stop token before the end of the sequence")
        if text:
            self.accept_text(text)
            self._tokens += text
        if is_end and not self.is_accepting():
            raise TokenRejected(
                "a stop token is not allowed here: the constraint is not satisfied"
            )
        self._terminated = self._terminated or is_end

    def rollback(self, count: int) -> None:
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count:
            del self._tokens[-count:]
            self.rollback_text(count)

    def is_terminated(self) -> bool:
        return self._terminated


class OutputRule(Protocol):
    """A condition on the next token that depends on the output so far, and that no
    library has in its grammars."""

    def restrict(self, output: TokenIds, row: Bitmask, accepting: bool) -> None:
        """Forbid tokens after `output`. `row`: int32 `[words]`, changed in place.
        `accepting`: the output may end."""


class CompiledGrammar(Protocol):
    """A constraint compiled for one vocabulary. Immutable; shared by all its
    matchers."""

    special_token_ids: frozenset[int] = frozenset()
    """Special tokens that the grammar may allow, because a structural tag names
    them."""
    checked: tuple[str, ...] = ()
    """JSON pointers of the keywords of a schema that the mask does not enforce: the
    whole output is validated before it may end."""
    literals: Sequence[str] = ()
    """Texts that may end a free text, or are a whole output: for searches of a
    completion."""
    rules: Sequence[OutputRule] = ()
    """The worker applies them to each mask."""
    line_breaks: LineBreaks | None = None
    """The worker's restriction of line breaks in JSON text, where the library allows
    them between any two tokens."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the start."""

    def dump(self) -> bytes:
        """Serialise the grammar for `Backend.load` in another process; empty where
        compiling again is cheaper."""
        return b""


class Backend(Protocol):
    """Adapter for one library and one vocabulary. It builds the data that depends on
    the vocabulary only once."""

    breaks_lines_anywhere: bool = False
    """Whether the library allows a line break between any two tokens of JSON text, see
    `LineBreaks`."""

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile. This may take arbitrarily long: call it in a process that may be
        killed.

        Of a schema that the library does not enforce completely, a superset is
        compiled: `CompiledGrammar.checked` names what is left out. A constraint that is
        `strict` is refused instead.

        Raises:
            InvalidConstraint: the constraint is malformed; says what and where.
            UnsupportedConstraint: the library can't enforce all of the constraint; says
                which keyword and where.
            BackendError: the library failed.
        """

    def load(self, constraint: Constraint, dumped: memoryview) -> CompiledGrammar:
        """Load a grammar that `CompiledGrammar.dump` serialised. Never much slower than
        `compile`. Keeps no reference to the buffer."""
        return self.compile(constraint)


class guard:  # noqa: N801 -- used like a function, in `with`
    """Context manager that turns every exception of a grammar library into a
    `BackendError`.

    A Rust panic is included: it arrives as a BaseException that is no Exception. Errors
    of `guided.errors`, KeyboardInterrupt and SystemExit pass unchanged. One instance
    may be used any number of times, also nested.

    Args:
        library: name for the message.
    """

    # A class: a generator-based context manager would take as long as a small mask.
    def __init__(self, library: str) -> None:
        self._library = library

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if error is None or isinstance(
            error, GuidedError | KeyboardInterrupt | SystemExit
        ):
            return
        raise BackendError(
            f"{self._library} failed: {type(error).__name__}: {bounded(error)}"
        ) from error
