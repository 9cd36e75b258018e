"""The rules of objects and arrays that a grammar library does not enforce (`guided.guard.text.Rule`).

An array counts and compares its items. An object counts its properties. Named properties come in the order of the
schema, and others after them, so a property that was passed over can't come any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from guided.guard.text import Choice, Rule, Veto, encoded
from guided.schema.metaschema import identity

Member = Callable[[Any, int], Rule | None]
"""(key or index, first byte) -> the rule of a container that begins there."""


def minified(value: Any) -> bytes:
    """Return a value as JSON text without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


_SPELLINGS = 4
"""Maximum number of texts that `equal_texts` returns for one value: 0, 0.0, -0 and -0.0."""


def equal_texts(values: Iterable[Any]) -> dict[Any, frozenset[bytes]]:
    """Return the texts of `values` and of zero by `identity`. Texts with one identity are the same value.

    xgrammar writes numbers with 17 digits, and llguidance writes them without exponents.
    """
    found = {identity(0): frozenset((b"0", b"-0"))}
    for value in values:
        texts = {minified(value)}
        if isinstance(value, float):
            spelled = (f"{value:.17g}", f"{Decimal(repr(value)):f}")
            texts |= {text.encode() for text in spelled if identity(json.loads(text)) == identity(value)}
        found[identity(value)] = found.get(identity(value), frozenset()) | texts
    return found


def texts_of(values: Collection[Any], equal: dict[Any, frozenset[bytes]]) -> frozenset[bytes]:
    """Return the texts of `values` in `equal`, which `equal_texts` returned."""
    return frozenset[bytes]().union(*(equal[identity(value)] for value in values))


def _as_written(text: bytes) -> frozenset[bytes]:
    """Return a text without its whitespace, unless some may be within strings."""
    kept = bytes(text).translate(None, b" \t\r\n")
    return frozenset((kept,)) if len(kept) == len(text) or b'"' not in kept else frozenset()


class Items(NamedTuple):
    """The items of an array so far."""

    number: int = 0
    used: frozenset[Any] = frozenset()
    texts: frozenset[bytes] = frozenset()
    """All items so far, for `uniqueItems`."""
    matches: int = 0
    """Items that `contains` describes."""


@dataclass(slots=True)
class ArrayRule:
    """`uniqueItems` and `contains`. For the methods, see `Rule`."""

    member_rule: Member
    unique: bool
    endless: frozenset[int]
    """See `Choice`."""
    is_free: bool
    """All items are endless, and none is a number."""
    domains: tuple[frozenset[bytes] | None, ...]
    """The texts of all possible items at each position; the last one is for all further positions. None: there are
    many, or they are not known."""
    equal: dict[Any, frozenset[bytes]]
    """`equal_texts` of the domains."""
    contains: Callable[[Any], bool] | None
    least: int
    most: int | None
    listed: frozenset[bytes]
    """All texts that `contains` matches. At most `most` of them are allowed."""
    names: frozenset[bytes] = frozenset()

    @property
    def vetoes(self) -> bool:
        return self.unique or self.contains is not None

    def start(self) -> Items:
        return Items()

    def value(self, state: Items, text: bytes) -> Items:
        number, used, texts, matches = state
        if self.vetoes:
            value = json.loads(text)
            if self.unique:
                same = identity(value)
                if same in used:
                    raise Veto
                used |= {same}
                texts |= self.equal.get(same, frozenset((minified(value),))) | _as_written(text)
            if self.contains is not None and self.contains(value):
                matches += 1
                if self.most is not None and matches > self.most:
                    raise Veto
        return Items(number + 1, used, texts, matches)

    def comma(self, state: Items) -> None:
        choice = self.choice(state, False)
        if choice is not None and choice.only is not None and not choice.only:
            raise Veto

    def is_quiet(self, state: Items, complete: bool) -> bool:
        if state.matches < self.least:
            return False
        near = [self._domain(state.number), self._domain(state.number + 1)]
        for domain in near:
            if domain is not None and (self.most is not None or len(domain - state.texts) <= _SPELLINGS):
                return False  # there may be only one value left
        return None not in near or self.is_free or not (complete or self.unique)

    def close(self, state: Items) -> None:
        if state.matches < self.least:
            raise Veto

    def choice(self, state: Items, is_key: bool) -> Choice | None:
        never = state.texts | self.listed if state.matches == self.most else state.texts
        if not never:
            return None
        domain = self._domain(state.number)
        only = None if domain is None else domain - never
        return Choice(only, never, self.endless)

    def _domain(self, position: int) -> frozenset[bytes] | None:
        return self.domains[min(position, len(self.domains) - 1)]

    def member(self, state: Items, first: int) -> Rule | None:
        return self.member_rule(state.number, first)

    def key(self, state: Items, key: str) -> Items:
        """Never called: an array has no keys."""
        raise AssertionError


class Members(NamedTuple):
    """The properties of an object so far."""

    position: int = 0
    """The next named property in the schema's order; those before it can't come any more."""
    key: str = ""
    """The last key."""
    number: int = 0


class ObjectRule:
    """`minProperties` and `maxProperties`. For the methods, see `Rule`.

    Args:
        order: the named properties in the order of generation.
        required: the required ones, which the library enforces.
        is_open: the library allows other properties after the named ones.
        counts: minimum and maximum number of properties.
    """

    def __init__(
        self,
        member_rule: Member,
        order: Sequence[str],
        required: Sequence[str],
        is_open: bool,
        counts: tuple[int, int | None],
    ) -> None:
        self._member_rule = member_rule
        self._order = list(order)
        self._positions = {name: position for position, name in enumerate(order)}
        self._required = set(required)
        self._is_open = is_open
        self._choices: dict[Members, Choice | None] = {}
        self._least, self._most = counts
        self.vetoes = counts != (0, None)
        self.names = frozenset(map(encoded, self._positions if self.vetoes else ()))

    def start(self) -> Members:
        return Members()

    def key(self, state: Members, key: str) -> Members:
        if not self.vetoes:
            return Members(key=key)
        position = self._positions.get(key, len(self._order))
        choice = self.choice(state, True)
        allowed = choice is None or choice.only is None or minified(key) in choice.only
        if position < state.position or not allowed or not self._fits(state, position):
            raise Veto
        return Members(min(position + 1, len(self._order)), key, state.number + 1)

    def _fits(self, state: Members, position: int) -> bool:
        """Whether the counts can be satisfied if the property at `position` is next (beyond the last: another one)."""
        later = self._order[position + 1 :]
        most = self._most is None or state.number + 1 + sum(name in self._required for name in later) <= self._most
        return most and (self._is_open or state.number + 1 + len(later) >= self._least)

    def value(self, state: Members, text: bytes) -> Members:
        return state

    def comma(self, state: Members) -> None:
        choice = self.choice(state, True)
        if choice is not None and choice.only is not None and not choice.only:
            raise Veto

    def close(self, state: Members) -> None:
        if state.number < self._least:
            raise Veto

    def is_quiet(self, state: Members, complete: bool) -> bool:
        return state.number >= self._least and self.choice(state, True) is None

    def choice(self, state: Members, is_key: bool) -> Choice | None:
        if not (self.vetoes and is_key):
            return None
        if state not in self._choices:
            if len(self._choices) > 1000:
                self._choices.clear()
            self._choices[state] = self._keys(state)
        return self._choices[state]

    def _keys(self, state: Members) -> Choice | None:
        later = self._order[state.position :]
        required = next((index for index, name in enumerate(later) if name in self._required), None)
        if required is None and self._is_open and self._fits(state, len(self._order)):
            return None  # any other key may come: the wrong ones are vetoed at their ends
        possible = later if required is None else later[: required + 1]
        names = [name for name in possible if self._fits(state, self._positions[name])]
        return Choice(frozenset(map(minified, names)), frozenset(), frozenset())

    def member(self, state: Members, first: int) -> Rule | None:
        return self._member_rule(state.key, first)
