"""A vocabulary for libraries that work on characters: its tokens as texts, in a prefix tree and as columns.

Tokens of byte-level tokenizers may begin or end within a character. If one ends within a character, its last bytes
(`tail`) stay pending until the rest follows. A token that begins within a character is possible only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import pack
from guided.schema import json_syntax
from guided.vocabulary import Vocabulary

OTHER = "\udfff"
"""Any character beyond ASCII that a grammar doesn't name: this keeps alphabets small. (A surrogate: in no text.)"""

Ids = NDArray[np.int64]


class TokenText(NamedTuple):
    """A token that begins at a character."""

    token: int
    text: str
    """Its complete characters."""
    tail: bytes
    """The first bytes of one more character."""


class Node:
    """A node of a prefix tree: the tokens that end here, and the nodes after further characters."""

    __slots__ = ("children", "tails", "tokens")

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.children: dict[str, Node] = _NO_CHILDREN
        self.tails: dict[bytes, tuple[int, ...]] = _NO_TAILS

    def add(self, token: int, text: Iterable[str], tail: bytes = b"") -> None:
        """Add a token to the tree below this node."""
        node = self
        for character in text:
            if node.children is _NO_CHILDREN:
                node.children = {}
            if character not in node.children:
                node.children[character] = Node()
            node = node.children[character]
        if not tail:
            node.tokens += (token,)
            return
        if node.tails is _NO_TAILS:
            node.tails = {}
        node.tails[tail] = (*node.tails.get(tail, ()), token)


_NO_CHILDREN: dict[str, Node] = {}
_NO_TAILS: dict[bytes, tuple[int, ...]] = {}
"""Shared by all nodes without any: a large vocabulary has several hundred thousand nodes."""


class Columns:
    """Texts as columns of characters, the longest text first. A table automaton processes one column per step.

    Args:
        texts: each with the first bytes of one more character, or b"".
    """

    def __init__(self, texts: Sequence[tuple[str, bytes]]) -> None:
        self.order = np.array(sorted(range(len(texts)), key=lambda index: -len(texts[index][0])), dtype=np.int64)
        """Positions in `texts`, in the order of the result of `run`."""
        ordered = [texts[index][0] for index in self.order]
        self.tails = [texts[index][1] for index in self.order]
        self.cut = np.flatnonzero([bool(tail) for tail in self.tails])
        """Positions, in this order, of the texts that end within a character."""
        self.alphabet = sorted({character for text in ordered for character in text})
        number = {character: index for index, character in enumerate(self.alphabet)}
        self._count = len(ordered)
        self._columns: list[NDArray[np.int32]] = []
        for at in range(len(ordered[0]) if ordered else 0):
            longer = takewhile(lambda text: len(text) > at, ordered)  # noqa: B023 -- read at once
            self._columns.append(np.array([number[text[at]] for text in longer], dtype=np.int32))

    def run(self, table: NDArray[np.int32], symbols: NDArray[np.int32], start: int, dead: int) -> NDArray[np.int32]:
        """Return the state after each text, in `order`.

        Args:
            table: int32 `[states, symbols]`, the next state.
            symbols: int32 `[len(alphabet)]`, the column of `table` for each character.
            dead: the state that is never left.
        """
        states = np.full(self._count, start, dtype=np.int32)
        if not self._columns:
            return states
        first = self._columns[0]
        states[: len(first)] = table[start][symbols][first]
        live = np.flatnonzero(states[: len(first)] != dead)
        for column in self._columns[1:]:  # skips texts in the dead state, usually nearly all
            live = live[: np.searchsorted(live, len(column))]
            after = table[states[live], symbols[column[live]]]
            states[live] = after
            live = live[after != dead]
        return states


class CharacterTokens:
    """The text tokens of a vocabulary as characters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        texts: list[TokenText] = []
        self.continuing: list[int] = []
        """Tokens that begin within a character."""
        for token in vocabulary.text_token_ids:
            content = vocabulary.token_bytes[token]
            if 0x80 <= content[0] < 0xC0:
                self.continuing.append(token)
            elif (parts := cut(content)) is not None:
                texts.append(TokenText(token, *parts))
        self.tree = Node()
        """The tokens that begin at a character, as a prefix tree."""
        for token, text, tail in texts:
            self.tree.add(token, text, tail)
        self.columns = Columns([(text, tail) for _, text, tail in texts])
        """The same tokens as columns."""
        self.ids = np.array([texts[index].token for index in self.columns.order], dtype=np.int64)
        """Token ids in the order of `columns`."""
        self.strings = StringTokens(texts, vocabulary.padded_vocab_size)
        """The tokens that may follow within a JSON string."""


class StringTokens:
    """Tokens within a JSON string: either content only, or content, the closing quote, and the text after it.

    Attributes (int64 arrays):
        tokens: their ids.
        lengths: number of characters that each adds to the string; an escape or an incomplete character counts as one.
        rests: a number for the text after the quote; -1 if the string stays open. `rest_tree` has them by text.
        closing: positions of tokens with the closing quote.
        plain: positions of tokens without an escape; `contents` has their contents as columns.
    """

    def __init__(self, texts: list[TokenText], padded_vocab_size: int) -> None:
        numbers: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        plain: list[tuple[int, str, bytes]] = []
        for token, text, tail in texts:
            parts = _split(text)
            if parts is None or (tail and parts[2] is not None):
                continue
            content, length, rest = parts
            if "\\" not in content:
                plain.append((len(rows), content, tail))
            rows.append((token, length + bool(tail), -1 if rest is None else numbers.setdefault(rest, len(numbers))))
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self.tokens, self.lengths, self.rests = (table[:, column].copy() for column in range(3))
        self.rest_tree = Node()
        for rest, number in numbers.items():
            self.rest_tree.add(number, rest)
        self.closing = np.flatnonzero(self.rests >= 0)
        self.contents = Columns([(content, tail) for _, content, tail in plain])
        self.plain = np.array([position for position, _, _ in plain], dtype=np.int64)[self.contents.order]
        self.longest = int(self.lengths.max(initial=0))
        self._padded_vocab_size = padded_vocab_size
        self._open: dict[int, NDArray[np.int32]] = {}

    def open(self, most: int) -> NDArray[np.int32]:
        """Return the mask of tokens that leave the string open and add at most `most` characters.

        It is int32 `[words]`, read-only, and cached: there are as many masks as the longest token has characters.
        """
        most = min(most, self.longest)
        if most not in self._open:
            inside = (self.rests < 0) & (self.lengths <= most)
            self._open[most] = pack(self.tokens[inside], self._padded_vocab_size)
        return self._open[most]


def cut(content: bytes) -> tuple[str, bytes] | None:
    """Split into complete characters and the first bytes of one more; None if that is not possible."""
    try:
        return content.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return content[: error.start].decode("utf-8"), content[error.start :]


def _split(text: str) -> tuple[str, int, str | None] | None:
    """Return (content, its length, the text after the closing quote or None); None: not possible in a string."""
    if '"' not in text and "\\" not in text and min(text, default=" ") >= " ":
        return text, len(text), None
    state: json_syntax.State | None = ("", "text")
    length = 0
    for index, character in enumerate(text):
        assert state is not None
        length += json_syntax.in_string(state) and character != '"'
        state = json_syntax.step(state, character)
        if state is None:
            return None
        if json_syntax.complete(state):
            return text[:index], length, text[index + 1 :]
    return text, length, None
