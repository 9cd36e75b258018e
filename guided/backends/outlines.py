"""outlines-core: one automaton over tokens, built ahead (a second on average, one in five over ten, gigabytes at worst:
compile where it may be killed); afterwards a step is a look-up.

What to know of it:

- Its automata prefer the first alternative (`yes|yes please` allows `yes` only), unless the pattern ends with `$`; and
  a pattern that ends with `$` may not match the empty text. So that is said apart.
- It knows one end-of-sequence token only, so stop tokens are the adapter's.
- An `Index` gives a state's tokens as a Python list only: milliseconds where much is allowed. A `Guide` writes them as
  bits, ten to twenty times faster, but of the state that it is in. So a grammar has one guide, which is led to a state
  whose mask isn't kept along the tokens by which the state was first reached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import outlines_core
from numpy.typing import NDArray

from guided import regex
from guided.backends.mask_cache import MaskCache
from guided.backends.outlines_schema import to_regex
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint, ConstraintKind
from guided.errors import BackendError, TokenRejected, UnsupportedConstraint, bounded
from guided.vocabulary import Vocabulary

__all__ = ["OutlinesBackend"]

_MAX_FORCED = 64


class OutlinesBackend:
    """One vocabulary in outlines' own form, shared by all grammars.

    Args:
        masks: where masks are kept; one of its own where None.
    """

    name: ClassVar[str] = "outlines"
    kinds: ClassVar[frozenset[ConstraintKind]] = frozenset({"json_schema", "regex", "choice"})

    def __init__(self, vocabulary: Vocabulary, masks: MaskCache | None = None) -> None:
        self._vocabulary = vocabulary
        self._masks = MaskCache() if masks is None else masks
        tokens: dict[bytes, list[int]] = {}
        for token in vocabulary.text_token_ids:
            tokens.setdefault(vocabulary.token_bytes[token], []).append(token)
        with _native:
            self._tokens = outlines_core.Vocabulary(vocabulary.stop_token_ids[0], tokens)

    def compile(self, constraint: Constraint) -> OutlinesGrammar:
        """See `Backend.compile`."""
        pattern, empty = self._pattern(constraint)
        try:
            index = outlines_core.Index(f"(?:{pattern})$", self._tokens)
        except ValueError as error:
            raise UnsupportedConstraint(
                f"outlines refuses the {constraint.kind}: {bounded(error)}", param=constraint.kind
            ) from None
        return OutlinesGrammar(self._vocabulary, index, empty, self._masks)

    def load(self, constraint: Constraint, dumped: bytes) -> OutlinesGrammar:
        """See `Backend.load`."""
        if not dumped:
            return self.compile(constraint)
        with _native:
            index = outlines_core.Index.from_binary(dumped[1:])
        return OutlinesGrammar(self._vocabulary, index, dumped[:1] == b"\x01", self._masks)

    def _pattern(self, constraint: Constraint) -> tuple[str, bool]:
        """The constraint as one regex that doesn't match the empty text; and whether the constraint does."""
        match constraint.kind:
            case "json_schema":
                return to_regex(json.loads(constraint.source), constraint.whitespace), False
            case "regex":
                node = regex.parse(constraint.source)
                rest = regex.nonempty(node)
                if rest is None:
                    raise UnsupportedConstraint(
                        "outlines can't do a regex that only the empty text matches", param="regex"
                    )
                return regex.render(rest), regex.nullable(node)
            case "choice":
                return regex.render(regex.choice(map(regex.literal, constraint.choices))), False
        raise UnsupportedConstraint(
            f"backend 'outlines' does not support {constraint.kind!r} constraints", param=constraint.kind
        )


class OutlinesGrammar:
    """An automaton over tokens, and the masks that were made of its states."""

    def __init__(self, vocabulary: Vocabulary, index: Any, empty: bool, masks: MaskCache) -> None:
        self._vocabulary = vocabulary
        self._words = words(vocabulary.padded_vocab_size)
        self._index = index
        self._guide = outlines_core.Guide(index)
        self._start = int(index.get_initial_state())
        self._reached: dict[int, tuple[int, int]] = {}
        """State -> the state and the token from which it was first reached."""
        self.empty = empty
        """The empty output satisfies the constraint."""
        self._masks = masks.of_grammar()
        self._dumped = self._dump()
        self.nbytes = 5 * len(self._dumped)
        """An estimate: transitions are about 4 bytes when serialised and about 16 in a hash table. Masks apart."""

    def matcher(self) -> OutlinesMatcher:
        """See `CompiledGrammar.matcher`."""
        return OutlinesMatcher(self, [self._start])

    def dump(self) -> bytes:
        """Whether the empty text matches (one byte), then the automaton in outlines' own serialisation."""
        return self._dumped

    def _dump(self) -> bytes:
        with _native:
            _, (binary,) = self._index.__reduce__()
        return bytes([self.empty]) + bytes(binary)

    def next_state(self, state: int, token: int) -> int | None:
        """Where `token` leads; None where it is not allowed."""
        if not 0 <= token < self._vocabulary.padded_vocab_size:
            return None
        with _native:
            reached: int | None = self._index.get_next_state(state, token)
        if reached is not None and reached not in self._reached:
            self._reached[reached] = state, token
        return reached

    def is_final(self, state: int) -> bool:
        """The constraint is satisfied in `state`."""
        with _native:
            return bool(self._index.is_final_state(state))

    def is_stop(self, token: int) -> bool:
        """`token` ends an output."""
        return token in self._vocabulary.stop_token_ids

    def mask(self, state: int) -> NDArray[np.int32]:
        """What `state`, one that was reached, allows: int32 `[words]`, not to be written to. The library's own
        end-of-sequence is in it where it thinks so."""
        row = self._masks.get(state)
        if row is None:
            row = np.empty(self._words, dtype=np.int32)
            with _native:
                self._guide.reset()
                for token in self._path(state):
                    self._guide.advance(token, return_tokens=False)
                self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
            self._masks.put(state, row)
        return row

    def _path(self, state: int) -> list[int]:
        """Tokens that lead to `state` from the start; no state comes twice on the way."""
        path: list[int] = []
        while state != self._start:
            state, token = self._reached[state]
            path.append(token)
        return path[::-1]

    def only(self, state: int) -> int | None:
        """The token that is allowed in `state` where there is but one."""
        ids = allowed_ids(self.mask(state))
        return int(ids[0]) if len(ids) == 1 else None


class OutlinesMatcher:
    """One sequence: the states it went through."""

    def __init__(self, grammar: OutlinesGrammar, states: list[int], terminated: bool = False) -> None:
        self._grammar = grammar
        self._states = states
        self._terminated = terminated

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept_tokens`."""
        for token in token_ids:
            if self._terminated:
                raise TokenRejected("the sequence is over: a stop token was accepted")
            if self._grammar.is_stop(token):
                if not self.is_accepting():
                    raise TokenRejected(f"stop token {token} is not allowed here: the constraint is not satisfied")
                self._terminated = True
                continue
            state = self._grammar.next_state(self._states[-1], token)
            if state is None:
                raise TokenRejected(f"token {token} is not allowed here")
            self._states.append(state)

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """See `Matcher.fill_bitmask`."""
        row[:] = self._grammar.mask(self._states[-1])

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        if count and self._terminated:
            self._terminated = False
            count -= 1
        if count >= len(self._states):
            raise BackendError(f"can't take back {count} of {len(self._states) - 1} tokens")
        if count:
            del self._states[-count:]

    def fork(self) -> OutlinesMatcher:
        """See `Matcher.fork`."""
        return OutlinesMatcher(self._grammar, list(self._states), self._terminated)

    def is_accepting(self) -> bool:
        """See `Matcher.is_accepting`."""
        return self._grammar.is_final(self._states[-1]) or (self._grammar.empty and len(self._states) == 1)

    def is_terminated(self) -> bool:
        """See `Matcher.is_terminated`."""
        return self._terminated

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`: as long as a single token is allowed."""
        forced: list[int] = []
        state = self._states[-1]
        if self._terminated or self.is_accepting():
            return forced
        while len(forced) < _MAX_FORCED and not self._grammar.is_final(state):
            token = self._grammar.only(state)
            reached = None if token is None else self._grammar.next_state(state, token)
            if token is None or reached is None:
                break
            forced.append(token)
            state = reached
        return forced


class _Native:
    """Whatever the library raises becomes a `BackendError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, Exception):
            raise BackendError(f"outlines: {bounded(error)}") from error


_native = _Native()
