"""The rules of objects and arrays that a grammar library does not enforce (`guided.guard.text.Rule`).

An array counts and compares its items. An object has conditions on which of some named properties it has, with which of
some listed values: for each condition, all combinations that satisfy it are listed before (`Table`), and a key or value
is vetoed if no combination is left. Named properties come in the order of the schema, and others after them, so a
property that was passed over can't come any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from guided.guard.text import Choice, Rule, Veto
from guided.schema.metaschema import identity

Member = Callable[[Any, int], Rule | None]
"""(key or index, first byte) -> the rule of a container that begins there."""


def minified(value: Any) -> bytes:
    """Return a value as JSON text without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


class Items(NamedTuple):
    """The items of an array so far."""

    count: int = 0
    used: frozenset[Any] = frozenset()
    texts: frozenset[bytes] = frozenset()
    """All items so far, for `uniqueItems`."""
    matches: int = 0
    """Items that `contains` describes."""


@dataclass(slots=True)
class ArrayRule:
    """`uniqueItems` and `contains`."""

    member_rule: Member
    unique: bool
    endless: frozenset[int]
    """See `Choice`."""
    contains: Callable[[Any], bool] | None
    least: int
    most: int | None
    listed: frozenset[bytes]
    """All texts of which `contains` allows at most `most`."""
    names: frozenset[str] = frozenset()

    @property
    def vetoes(self) -> bool:
        """See `Rule`."""
        return self.unique or self.contains is not None

    def start(self) -> Items:
        """See `Rule`."""
        return Items()

    def value(self, state: Items, text: bytes) -> Items:
        """See `Rule`."""
        count, used, texts, matches = state
        if self.vetoes:
            value = json.loads(text)
            if self.unique:
                same = identity(value)
                if same in used:
                    raise Veto
                used |= {same}
                texts |= {minified(value)}
            if self.contains is not None and self.contains(value):
                matches += 1
                if self.most is not None and matches > self.most:
                    raise Veto
        return Items(count + 1, used, texts, matches)

    def comma(self, state: Items) -> None:
        """See `Rule`."""

    def close(self, state: Items) -> None:
        """See `Rule`."""
        if state.matches < self.least:
            raise Veto

    def choice(self, state: Items, is_key: bool) -> Choice | None:
        """See `Rule`."""
        never = state.texts | self.listed if state.matches == self.most else state.texts
        return Choice(None, never, self.endless) if never else None

    def member(self, state: Items, first: int) -> Rule | None:
        """See `Rule`."""
        return self.member_rule(state.count, first)

    def key(self, state: Items, key: str) -> Items:
        """Never called: an array has no keys."""
        raise AssertionError


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a property that a condition does not tell apart."""

    listed: tuple[Any, ...] | None
    """None: all that are not listed in another class."""


class Table:
    """All combinations of some properties that satisfy a condition.

    Args:
        classes: for each property, its classes of values.
        rows: for each combination, the number of each property's class; -1: the property is absent.
    """

    def __init__(self, classes: dict[str, list[Values]], rows: list[tuple[int, ...]]) -> None:
        self.columns = {name: index for index, name in enumerate(classes)}
        self.classes = list(classes.values())
        self.rows = frozenset(rows)
        self._numbers = [
            {identity(value): number for number, one in enumerate(column) for value in one.listed or ()}
            for column in self.classes
        ]
        self._others = [
            next((number for number, one in enumerate(column) if one.listed is None), -1) for column in self.classes
        ]

    def number(self, name: str, value: Any) -> int:
        """Return the number of the class of a property's value; -1 for none."""
        column = self.columns[name]
        return self._numbers[column].get(identity(value), self._others[column])


Rows = frozenset[tuple[int, ...]]


class Members(NamedTuple):
    """The properties of an object so far."""

    position: int = 0
    """The next named property in the schema's order; those before it can't come any more."""
    key: str = ""
    """The last key."""
    count: int = 0
    others: frozenset[str] = frozenset()
    """The properties of tables that the schema does not name otherwise: they may come in any order."""
    rows: tuple[Rows, ...] = ()
    """For each table, the combinations that are left."""


class ObjectRule:
    """Conditions on the properties of an object.

    Args:
        order: the named properties in the order of generation.
        required: those that the library enforces.
        is_open: the library allows others after them.
        counts: minimum and maximum number of properties.
        endless: see `Choice`, for the values of a property.
    """

    def __init__(
        self,
        member_rule: Member,
        order: Sequence[str],
        required: Sequence[str],
        is_open: bool,
        tables: list[Table],
        counts: tuple[int, int | None],
        endless: Callable[[str], frozenset[int]],
    ) -> None:
        self._member_rule = member_rule
        self._order = list(order)
        self._positions = {name: position for position, name in enumerate(order)}
        self._required = set(required)
        self._is_open = is_open
        self._tables = tables
        self._unordered = {name for table in tables for name in table.columns if name not in self._positions}
        self._choices: dict[Members, Choice | None] = {}
        self._endless = endless
        self._least, self._most = counts
        self.vetoes = bool(tables) or counts != (0, None)
        self.names = frozenset(self._positions).union(self._unordered) if self.vetoes else frozenset()

    def start(self) -> Members:
        """See `Rule`."""
        return Members(rows=tuple(table.rows for table in self._tables))

    def key(self, state: Members, key: str) -> Members:
        """See `Rule`."""
        if not self.vetoes:
            return Members(key=key)
        end = len(self._order)
        position = self._positions.get(key, end)
        choice = self.choice(state, True)
        allowed = choice is None or choice.only is None or minified(key) in choice.only
        if position < state.position or not allowed:
            raise Veto
        rows = self._rows(state, position, key)
        if not all(rows) or not self._fits(state, position):
            raise Veto
        others = state.others | {key} if key in self._unordered else state.others
        return Members(min(position + 1, end), key, state.count + 1, others, rows)

    def _rows(self, state: Members, position: int, key: str | None) -> tuple[Rows, ...]:
        """Return the combinations that are left if `key` comes next; if it is None, nothing comes any more."""
        passed = set(self._order[state.position : position])
        if key is None:
            passed |= self._unordered - state.others
        result = []
        for table, rows in zip(self._tables, state.rows, strict=True):
            absent = [column for name, column in table.columns.items() if name in passed]
            present = table.columns.get(key) if key is not None else None
            if absent or present is not None:
                rows = frozenset(
                    row
                    for row in rows
                    if all(row[column] < 0 for column in absent) and (present is None or row[present] >= 0)
                )
            result.append(rows)
        return tuple(result)

    def _fits(self, state: Members, position: int) -> bool:
        """Whether a number of properties is possible if the one at `position` comes next (beyond all: another one)."""
        later = self._order[position + 1 :]
        most = self._most is None or state.count + 1 + sum(name in self._required for name in later) <= self._most
        return most and (self._is_open or state.count + 1 + len(later) >= self._least)

    def value(self, state: Members, text: bytes) -> Members:
        """See `Rule`."""
        rows = state.rows
        for index, table in enumerate(self._tables):
            if state.key in table.columns:
                column, number = table.columns[state.key], table.number(state.key, json.loads(text))
                left = frozenset(row for row in rows[index] if row[column] == number)
                if not left:
                    raise Veto
                rows = (*rows[:index], left, *rows[index + 1 :])
        return state._replace(rows=rows)

    def comma(self, state: Members) -> None:
        """See `Rule`."""
        choice = self.choice(state, True)
        if choice is not None and choice.only is not None and not choice.only:
            raise Veto

    def close(self, state: Members) -> None:
        """See `Rule`."""
        if state.count < self._least or not all(self._rows(state, len(self._order), None)):
            raise Veto

    def choice(self, state: Members, is_key: bool) -> Choice | None:
        """See `Rule`."""
        if not self.vetoes:
            return None
        if not is_key:
            return self._values(state)
        if state not in self._choices:
            if len(self._choices) > 1000:
                self._choices.clear()
            self._choices[state] = self._keys(state)
        return self._choices[state]

    def _keys(self, state: Members) -> Choice | None:
        end = len(self._order)
        later = self._order[state.position :]
        within = next((index + 1 for index, name in enumerate(later) if name in self._required), None)
        possible = [name for name in later[:within] if self._may_follow(state, name)]
        if within is None and self._is_open and self._fits(state, end):
            if all(self._rows(state, end, None)):
                return None  # any other key may come: the wrong ones are vetoed at their ends
            # Before the end, something else is needed: it comes first.
            possible += [name for name in self._unordered - state.others if self._may_follow(state, name)]
        return Choice(frozenset(map(minified, possible)), frozenset(), frozenset())

    def _may_follow(self, state: Members, name: str) -> bool:
        position = self._positions.get(name, len(self._order))
        return self._fits(state, position) and all(self._rows(state, position, name))

    def _values(self, state: Members) -> Choice | None:
        """Return the restriction of the value of the last key."""
        only: set[bytes] | None = None
        never: set[bytes] = set()
        for table, rows in zip(self._tables, state.rows, strict=True):
            column = table.columns.get(state.key)
            if column is None:
                continue
            classes, allowed = table.classes[column], {row[column] for row in rows}
            listed = {
                number: set(map(minified, one.listed)) for number, one in enumerate(classes) if one.listed is not None
            }
            if all(number in listed for number in allowed):
                texts: set[bytes] = set().union(*(listed[number] for number in allowed))
                only = texts if only is None else only & texts
            else:
                never.update(*(texts for number, texts in listed.items() if number not in allowed))
        if only is None and not never:
            return None
        endless = self._endless(state.key) if never else frozenset()
        return Choice(None if only is None else frozenset(only - never), frozenset(never), endless)

    def member(self, state: Members, first: int) -> Rule | None:
        """See `Rule`."""
        choice = self.choice(state, False)
        if choice is not None and choice.only is not None:
            raise Veto  # only listed values, which are no containers
        return self._member_rule(state.key, first)
