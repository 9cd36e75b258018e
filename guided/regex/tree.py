"""Regular expressions as trees, and as text in a common subset that all grammar
libraries read in the same way.

The libraries differ in `\\d`, `.` and anchors. A pattern is therefore parsed into a
small tree (`parser.py`) and written in the common subset: literals, classes of code
point ranges, groups, alternatives, repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

Interval = tuple[int, int]
"""The first and the last code point of a range."""
Ranges = tuple[Interval, ...]
"""Code points as ranges: ascending, disjoint, not adjacent."""

UNIVERSE: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All code points that UTF-8 can encode."""


@dataclass(frozen=True, slots=True)
class Chars:
    """A character class: one character in `ranges`."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    """A sequence of all items in order. Without items, it matches the empty string."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """An alternation: one of at least two options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repetition: `item`, `low` to `high` times (None: unbounded)."""

    item: Node
    low: int
    high: int | None


Node = Chars | Concatenation | Choice | Repeat
EMPTY = Concatenation(())
_COUNTS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def literal(text: str) -> Node:
    """Return a node that matches exactly `text`."""
    return sequence(Chars(points([ord(character)])) for character in text)


def points(codes: Iterable[int]) -> Ranges:
    """Return single code points as ranges. Drop surrogates."""
    return ranges_of((code, code) for code in codes)


def ranges_of(pairs: Iterable[Interval]) -> Ranges:
    """Sort and merge ranges. Drop surrogates."""
    merged: list[Interval] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return intersection(tuple(merged), UNIVERSE)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Return the code points that are both in `left` and in `right`."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(pair for pair in pairs if pair[0] <= pair[1])


def complement(ranges: Ranges) -> Ranges:
    """Return all code points that are not in `ranges`."""
    gaps: list[Interval] = []
    start = 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x10FFFF))
    return intersection(tuple(gaps), UNIVERSE)


def count(ranges: Ranges) -> int:
    """Return the number of code points in `ranges`."""
    return sum(high - low + 1 for low, high in ranges)


def map_chars(node: Node, change: Callable[[Chars], Node]) -> Node:
    """Replace every character class of a tree by the result of `change`."""
    match node:
        case Chars():
            return change(node)
        case Concatenation(items):
            return sequence(map_chars(item, change) for item in items)
        case Choice(options):
            return choice(map_chars(option, change) for option in options)
        case Repeat(item, low, high):
            return repeat(map_chars(item, change), low, high)


def sequence(items: Iterable[Node]) -> Node:
    """Return `items` in order as one node."""
    flat: list[Node] = []
    for item in items:
        if isinstance(item, Concatenation):
            flat += item.items
        else:
            flat.append(item)
    if len(flat) == 1:
        return flat[0]
    return Concatenation(tuple(flat))


def choice(options: Iterable[Node]) -> Node:
    """Return a choice of `options` as one node."""
    distinct = tuple(dict.fromkeys(options))
    some = tuple(option for option in distinct if option != EMPTY)
    # an empty option becomes an optional item, because not every library reads `a|`
    if len(some) < len(distinct):
        if some:
            return repeat(choice(some), 0, 1)
        return EMPTY
    if len(some) == 1:
        return some[0]
    return Choice(some)


def repeat(item: Node, low: int, high: int | None) -> Node:
    """Return `item`, `low` to `high` times, in its simplest form."""
    if item == EMPTY or high == 0:
        return EMPTY
    if (low, high) == (1, 1):
        return item
    return Repeat(item, low, high)


def render(node: Node) -> str:
    """Write `node` as a pattern in the common subset."""
    match node:
        case Chars(ranges):
            return _render_chars(ranges)
        case Concatenation(items):
            return "".join(
                f"(?:{render(item)})" if isinstance(item, Choice) else render(item)
                for item in items
            )
        case Choice(options):
            return "|".join(map(render, options))
        case Repeat(item, low, high):
            if isinstance(item, Chars) and item.ranges != UNIVERSE:
                inner = render(item)
            else:
                inner = f"(?:{render(item)})"
            counts = f"{{{low},{high}}}"
            if high is None:
                counts = f"{{{low},}}"
            elif low == high:
                counts = f"{{{low}}}"
            return inner + _COUNTS.get((low, high), counts)


def _render_chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escape(ranges[0][0], r"\.^$*+?{}[]|()")
    if ranges == UNIVERSE:
        return r"(?:[^\n]|\n)"
    rest = complement(ranges)
    if count(rest) < count(ranges):
        return f"[^{members(across_surrogates(rest))}]"
    return f"[{members(ranges)}]"


def across_surrogates(ranges: Ranges) -> Ranges:
    """Join the ranges before and after the surrogates, which no token contains.
    Libraries read one range correctly."""
    for index, (before, after) in enumerate(pairwise(ranges)):
        if (before[1], after[0]) == (0xD7FF, 0xE000):
            return (*ranges[:index], (before[0], after[1]), *ranges[index + 2 :])
    return ranges


def members(ranges: Ranges) -> str:
    """Write ranges as the members of a class."""
    return "".join(_range(low, high) for low, high in ranges)


def _range(low: int, high: int) -> str:
    first = _escape(low, r"\[]^-&~|")
    last = _escape(high, r"\[]^-&~|")
    if low == high:
        return first
    if high == low + 1:
        return first + last
    return f"{first}-{last}"


def _escape(code: int, special: str) -> str:
    character = chr(code)
    if character in special:
        return "\\" + character
    if code < 32 or code == 127:
        return {9: r"\t", 10: r"\n", 13: r"\r"}.get(code, f"\\x{code:02x}")
    return character
