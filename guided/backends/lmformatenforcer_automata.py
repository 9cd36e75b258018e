"""lm-format-enforcer's parsers as automata over characters.

There are three: `JsonAutomaton` uses `JsonSchemaParser` together with the syntax of JSON, `RegexAutomaton` uses the
automaton that `RegexParser` builds, and `ChoiceAutomaton` a prefix tree of the choices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
from interegular.fsm import anything_else
from lmformatenforcer import CharacterLevelParserConfig, RegexParser
from numpy.typing import NDArray

from guided.backends.character_tokens import OTHER, CharacterTokens, Columns, Node
from guided.bitmask import pack

MAX_SPACES = 12
"""Maximum length of a run of whitespace in JSON."""
_MANY = 64
"""Number of children of a tree node above which only the characters that may follow are tried."""


class Automaton(Protocol):
    """A constraint over characters. States are opaque and immutable."""

    start: Any
    named: frozenset[str]
    """Characters beyond ASCII that the constraint distinguishes."""

    def step(self, state: Any, character: str) -> Any | None:
        """Return the state after `character` (any, or `OTHER`); None if it is not allowed."""

    def final(self, state: Any) -> bool:
        """Whether the text so far satisfies the constraint."""

    def mask(self, state: Any) -> NDArray[np.int32]:
        """Return the mask of the tokens that begin at a character: int32 `[words]`, read-only."""

    def following(self, state: Any) -> Collection[str]:
        """Return the characters that may follow."""

    def key(self, state: Any) -> Hashable | None:
        """Return a key that is equal for states with the same mask; None if there is none."""


def config(named: Iterable[str] = ()) -> CharacterLevelParserConfig:
    """Return the library's settings: the alphabet, and no bounds other than those of the schema."""
    alphabet = "".join(map(chr, [9, 10, 13, *range(32, 128)])) + OTHER + "".join(sorted(named))
    return CharacterLevelParserConfig(
        alphabet=alphabet, max_consecutive_whitespaces=MAX_SPACES, force_json_field_order=False, max_json_array_length=0
    )


def begins(automaton: Automaton, state: Any, cut: bytes) -> bool:
    """Return whether a character that starts with the bytes `cut` may follow."""
    low, high = _beginning_with(cut)
    points = _code_points(automaton.named)
    named = points[bisect_left(points, low) : bisect_right(points, high)]
    if len(named) <= high - low and automaton.step(state, OTHER) is not None:
        return True
    return any(automaton.step(state, chr(point)) is not None for point in named)


@lru_cache(maxsize=16)
def _code_points(characters: frozenset[str]) -> list[int]:
    return sorted(map(ord, characters))


@cache
def _beginning_with(cut: bytes) -> tuple[int, int]:
    """Return the first and the last code point of the characters that start with the bytes `cut`, in UTF-8."""
    width = 2 if cut[0] < 0xE0 else 3 if cut[0] < 0xF0 else 4
    point = cut[0] & (0x7F >> width)
    for byte in cut[1:]:
        point = point << 6 | byte & 0x3F
    bits = 6 * (width - len(cut))
    low, high = point << bits, (point + 1 << bits) - 1
    if cut == b"\xed":
        high = 0xD7FF  # before the surrogates
    return max(low, (0x80, 0x800, 0x10000)[width - 2]), min(high, 0x10FFFF)


def tree_tokens(automaton: Automaton, state: Any, tree: Node) -> list[int]:
    """Return the tokens of `tree` that may follow `state`: walks the tree and the automaton together."""
    found: list[int] = []
    pending = [(tree, state)]
    while pending:
        node, at = pending.pop()
        found += node.tokens
        if node.tails and (automaton.named or automaton.step(at, OTHER) is not None):
            for tail, tokens in node.tails.items():
                if begins(automaton, at, tail):
                    found += tokens
        characters: Iterable[str] = node.children
        if len(node.children) > _MANY:
            following = automaton.following(at)
            beyond = [character for character in node.children if character >= "\x80"] if OTHER in following else []
            characters = {*following, *beyond}
        for character in characters:
            child = node.children.get(character)
            if child is not None and (after := automaton.step(at, character)) is not None:
                pending.append((child, after))
    return found


class ChoiceAutomaton(Automaton):
    """One of several texts. A state is a node of their prefix tree."""

    def __init__(self, choices: Iterable[str], tokens: CharacterTokens) -> None:
        self.start = Node()
        for index, choice in enumerate(choices):
            self.start.add(index, choice)
        self.named = frozenset(character for choice in choices for character in choice if character >= "\x80")
        self._tokens = tokens

    def step(self, state: Node, character: str) -> Node | None:
        return state.children.get(character)

    def final(self, state: Node) -> bool:
        return bool(state.tokens)

    def mask(self, state: Node) -> NDArray[np.int32]:
        return pack(tree_tokens(self, state, self._tokens.tree), self._tokens.vocabulary.padded_vocab_size)

    def following(self, state: Node) -> Collection[str]:
        return state.children

    def key(self, state: Node) -> Hashable | None:
        return id(state)  # unique: the tree keeps its nodes alive


class RegexAutomaton(Automaton):
    """A regex. A state is a row of `table`.

    Args:
        pattern: in the common subset (`guided.regex`), a full match.
    """

    def __init__(self, pattern: str, tokens: CharacterTokens) -> None:
        self.parser = RegexParser(pattern, config())
        self._fsm = self.parser.context.pattern
        self.numbers = {state: index for index, state in enumerate(self._fsm.map)}
        """The library's state -> its row."""
        self._dead = len(self.numbers)
        """The last row, which is never left."""
        columns = 1 + max(self._fsm.alphabet.values(), default=0)
        self._table = np.full((self._dead + 1, columns), self._dead, np.int32)
        for state, transitions in self._fsm.map.items():
            for symbol, target in transitions.items():
                self._table[self.numbers[state], symbol] = self.numbers[target]
        self.start = self.numbers[self._fsm.initial]
        self.finals = np.zeros(self._dead + 1, dtype=bool)
        """Whether the state of each row is final."""
        self.finals[[self.numbers[state] for state in self._fsm.finals]] = True
        self._characters = frozenset(c for c in self._fsm.alphabet if c is not anything_else)
        surrogates = "\ud800", "\udfff"  # no text has them
        self.named = frozenset(c for c in self._characters if c >= "\x80" and not surrogates[0] <= c <= surrogates[1])
        self._tokens = tokens
        self._symbols: dict[Columns, NDArray[np.int32]] = {}

    def _symbol(self, character: str) -> int:
        """Return the column of a character."""
        known = character in self._characters and character != OTHER
        return int(self._fsm.alphabet[character if known else anything_else])

    def step(self, state: int, character: str) -> int | None:
        after = int(self._table[state, self._symbol(character)])
        return None if after == self._dead else after

    def final(self, state: int) -> bool:
        return bool(self.finals[state])

    def ends(self, texts: Columns, start: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the state after each of `texts`, and whether the text may follow `start`, both in their order."""
        if texts not in self._symbols:
            self._symbols[texts] = np.array([self._symbol(character) for character in texts.alphabet], np.int32)
        ends = texts.run(self._table, self._symbols[texts], start, self._dead)
        live = ends != self._dead
        may: dict[tuple[int, bytes], bool] = {}
        for index in texts.cut[live[texts.cut]].tolist():
            at = int(ends[index]), texts.tails[index]
            if at not in may:
                may[at] = begins(self, *at)
            live[index] = may[at]
        return ends, live

    def mask(self, state: int) -> NDArray[np.int32]:
        _, live = self.ends(self._tokens.columns, state)
        return pack(self._tokens.ids[live], self._tokens.vocabulary.padded_vocab_size)

    def following(self, state: int) -> Collection[str]:
        live = np.flatnonzero(self._table[state] != self._dead).tolist()
        found = [character for symbol in live for character in self._fsm.alphabet.by_transition[symbol]]
        return [OTHER if character is anything_else else character for character in found]

    def key(self, state: int) -> Hashable | None:
        return state
