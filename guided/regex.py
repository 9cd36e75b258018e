"""Regular expressions in a common subset that every grammar library reads in the same way.

The libraries differ in `\\d`, `.` and anchors. So a pattern is parsed with Python's own parser (its meaning is that of
`re.fullmatch`, with the other spellings of `regex_syntax`), turned into a small tree, and written in the common subset:
literals, classes of code point ranges, groups, alternatives, repetitions. Anything else is refused by name.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.regex_syntax import python_syntax

Ranges = tuple[tuple[int, int], ...]
"""Code points as inclusive ranges: ascending, disjoint, not adjacent."""

UNIVERSE: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""Every code point in UTF-8."""

_BIG = 30_000
"""Number of code points above which a class is too large to enumerate its members."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character in `ranges`."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """All items in order; without items: the empty string."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of at least two options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times (None: unbounded)."""

    item: Node
    low: int
    high: int | None


Node = Chars | Sequence | Choice | Repeat
EMPTY = Sequence(())
Restricted = Callable[[Node, list[tuple[bool, Node]]], Node]
"""See `guided.schema.automaton.restricted`."""


def literal(text: str) -> Node:
    """Return a node that matches exactly `text`."""
    return sequence(Chars(((ord(character), ord(character)),)) for character in text)


def parse(pattern: str, restricted: Restricted | None = None, *, param: str = "regex") -> Node:
    """Parse `pattern` into a tree, with the meaning of `re.fullmatch(pattern, ...)` on valid Unicode.

    Args:
        restricted: applies lookaheads at the beginning, which may take long. None: they are refused.

    Raises:
        InvalidConstraint: not a regular expression, or no text matches it.
        UnsupportedConstraint: lookaround, backreferences, possessive or atomic groups, anchors in the middle, ...
    """
    parsed = _parsed(pattern, param, ecma=False)
    if restricted is not None and re.search(r"\(\?[=!]", pattern) and r"\Z" not in pattern:
        return _search(parsed, parsed.state.flags, _Reader(pattern, param), restricted, whole=True)
    return _Reader(pattern, param).sequence(parsed, parsed.state.flags, start=True, end=True)


def parse_search(pattern: str, restricted: Restricted, *, param: str = "regex") -> Node:
    """Return all texts that contain a match of `pattern`, as in JSON Schema: read as ECMA-262 reads it.

    Args:
        restricted: applies lookaheads, which may follow an anchor at the beginning.

    Raises as `parse` does.
    """
    parsed = _parsed(pattern, param, ecma=True)
    return _search(parsed, parsed.state.flags, _Reader(pattern, param, ecma=True), restricted)


def _search(parsed: Any, flags: int, reader: _Reader, restricted: Restricted, *, whole: bool = False) -> Node:
    """Return all texts that contain a match, or with `whole`, that are one."""
    items = list(parsed)
    if items and str(items[-1][0]) == "BRANCH":  # the parser has moved the common prefix of all alternatives before it
        options = items[-1][1][1]
        return choice(_search([*items[:-1], *option], flags, reader, restricted, whole=whole) for option in options)
    if whole and not _anchored(items, 0, "AT_BEGINNING"):
        items = [*_sre.parse("^"), *items]
    if ahead := _lookaheads(items):
        parts = [(str(operation) == "ASSERT_NOT", inner) for operation, (_, inner) in ahead]
        conditions = [(negated, _search([items[0], *inner], flags, reader, restricted)) for negated, inner in parts]
        rest = [items[0], *items[1 + len(ahead) :]]
        return restricted(_search(rest, flags, reader, restricted, whole=whole), conditions)
    start, end = _anchored(items, 0, "AT_BEGINNING"), whole or _anchored(items, -1, "AT_END")
    node = reader.sequence(items, flags, start=start, end=end)
    anything = Repeat(Chars(UNIVERSE), 0, None)
    after: Node = anything
    if end:  # outside of ECMA-262, `$` also matches before a line break at the end
        after = EMPTY if whole or reader.ecma else Repeat(Chars(((10, 10),)), 0, 1)
    return sequence([EMPTY if start else anything, node, after])


def _lookaheads(items: list[Any]) -> list[Any]:
    """Return the lookaheads that follow an anchor at the beginning."""
    if not (items and str(items[0][0]) == "AT" and _anchored(items[:1], 0, "AT_BEGINNING")):
        return []
    return list(takewhile(lambda item: str(item[0]) in ("ASSERT", "ASSERT_NOT") and item[1][0] == 1, items[1:]))


def _anchored(parsed: Any, edge: int, anchor: str) -> bool:
    """Whether every alternative of `parsed` has `anchor` in its first (0) or last (-1) position."""
    items = list(parsed)
    if not items:
        return False
    operation, argument = str(items[edge][0]), items[edge][1]
    if operation == "AT":
        return str(argument) in (anchor, f"{anchor}_STRING")
    if operation == "BRANCH":
        return all(_anchored(option, edge, anchor) for option in argument[1])
    return operation == "SUBPATTERN" and _anchored(argument[3], edge, anchor)


def _parsed(pattern: str, param: str, *, ecma: bool) -> Any:
    rewritten = python_syntax(pattern, param, ecma=ecma)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set": the meaning is that of `re`
            return _sre.parse(rewritten)
    except re.error as error:
        why = error if rewritten == pattern else error.msg  # without the position, which refers to `rewritten`
        raise InvalidConstraint(f"the regex {bounded(pattern, 120)!r} is malformed: {why}", param=param) from None
    except (OverflowError, RecursionError) as error:
        raise InvalidConstraint(f"the regex {bounded(pattern, 120)!r} is too large: {error}", param=param) from None
    except ValueError as error:  # flags that exclude each other
        raise InvalidConstraint(f"the regex {bounded(pattern, 120)!r} is malformed: {error}", param=param) from None


_sre: Any = importlib.import_module("re._parser")
"""Python's own parser. It is private, but its output has never changed; another parser could disagree with `re`."""


_ONLY_PYTHON = frozenset(rf"\{letter}" for letter in "AZaNU")
"""Escapes that are letters in ECMA-262."""
_TOKEN = re.compile(r"\\.|\[\^?\]|\[(?:\\.|[^\]\\])+\]|\{,", re.DOTALL)
"""Escapes, classes, and counts without a minimum, in a pattern that `re` can read."""
_ECMA_LINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_ECMA_SPACES: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)


class _Reader:
    """Turns the parser's `(operation, argument)` lists into nodes.

    Args:
        ecma: give classes, escapes and anchors their meaning in ECMA-262 (JSON Schema), not that in `re`.
    """

    def __init__(self, pattern: str, param: str, *, ecma: bool = False) -> None:
        self._pattern = pattern
        self._param = param
        self.ecma = ecma
        if ecma:
            self._refuse_python()

    def _refuse_python(self) -> None:
        """Refuse syntax that has different meanings in `re` and in ECMA-262."""
        for token in _TOKEN.finditer(self._pattern):
            other = next((escape for escape in re.findall(r"\\.", token[0], re.DOTALL) if escape in _ONLY_PYTHON), None)
            if other is not None or token[0] in ("[]", "{,"):
                raise self._unsupported(f"{other or token[0]!r}, which is not the same in Python and in ECMA-262")

    def sequence(self, parsed: Any, flags: int, *, start: bool, end: bool) -> Node:
        """Return the node for a list of operations.

        Args:
            start, end: no text can precede or follow, so anchors have no effect there and are dropped.
        """
        items = list(parsed)
        nodes: list[Node] = []
        for index, (operation, argument) in enumerate(items):
            first = start and all(node == EMPTY for node in nodes)
            last = end and all(str(later) == "AT" for later, _ in items[index + 1 :])
            nodes.append(self._item(str(operation), argument, flags, start=first, end=last))
        return sequence(nodes)

    def _item(self, operation: str, argument: Any, flags: int, *, start: bool, end: bool) -> Node:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return self._chars(operation, argument, flags)
            case "AT":
                return self._anchor(str(argument), start=start, end=end)
            case "BRANCH":
                return choice(self.sequence(option, flags, start=start, end=end) for option in argument[1])
            case "SUBPATTERN":
                _group, added, removed, inner = argument
                return self.sequence(inner, (flags | added) & ~removed, start=start, end=end)
            case "MAX_REPEAT" | "MIN_REPEAT":  # greedy and lazy match the same texts
                low, high, inner = argument
                once = high == 1
                node = self.sequence(inner, flags, start=start and once, end=end and once)
                return repeat(node, int(low), None if high is _sre.MAXREPEAT else int(high))
        names = {
            "ASSERT": "lookaround",
            "ASSERT_NOT": "negative lookaround",
            "GROUPREF": "a backreference",
            "GROUPREF_EXISTS": "a conditional group",
            "ATOMIC_GROUP": "an atomic group",
            "POSSESSIVE_REPEAT": "a possessive quantifier",
        }
        raise self._unsupported(names.get(operation, operation))

    def _anchor(self, where: str, *, start: bool, end: bool) -> Node:
        if not where.startswith(("AT_BEGINNING", "AT_END")):
            raise self._unsupported("a word boundary")
        if not (start if where.startswith("AT_BEGINNING") else end):
            raise self._unsupported("an anchor in the middle")
        return EMPTY

    def _chars(self, operation: str, argument: Any, flags: int) -> Node:
        if operation == "ANY":
            ranges = UNIVERSE if flags & re.DOTALL else complement(_ECMA_LINES if self.ecma else ((10, 10),))
        elif operation == "IN":
            ranges = self._class(argument, flags)
        else:
            ranges = ranges_of([(argument, argument)])
            if flags & re.IGNORECASE:
                ranges = self._fold(ranges, negated=operation == "NOT_LITERAL")
            if operation == "NOT_LITERAL":
                ranges = complement(ranges)
        if not ranges:
            raise InvalidConstraint(
                f"the regex {bounded(self._pattern, 120)!r} contains an empty character class", param=self._param
            )
        return Chars(ranges)

    def _class(self, members: list[tuple[Any, Any]], flags: int) -> Ranges:
        found: list[tuple[int, int]] = []
        negated = False
        for operation, argument in members:
            match str(operation):
                case "NEGATE":
                    negated = True
                case "LITERAL":
                    found.append((argument, argument))
                case "RANGE":
                    found.append((argument[0], argument[1]))
                case "CATEGORY":
                    found.extend(_category(str(argument), bool(flags & re.ASCII) or self.ecma, self.ecma))
        ranges = ranges_of(found)
        if flags & re.IGNORECASE:
            ranges = self._fold(ranges, negated=negated)
        return complement(ranges) if negated else ranges

    def _fold(self, ranges: Ranges, *, negated: bool) -> Ranges:
        """Add the characters that are equal under IGNORECASE."""
        if _count(ranges) > _BIG:
            raise self._unsupported("a large character class under IGNORECASE")
        if negated and ranges and ranges[-1][1] > 127:
            raise self._unsupported("a negated class beyond ASCII under IGNORECASE")
        codes = (code for low, high in ranges for code in range(low, high + 1))
        return ranges_of([*ranges, *((other, other) for code in codes for other in _same_letter(code))])

    def _unsupported(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"the regex {bounded(self._pattern, 120)!r} contains {what}, which a token mask can't enforce:"
            " rewrite it without",
            param=self._param,
        )


def _same_letter(code: int) -> Iterable[int]:
    character = chr(code)
    # Special cases of Python: the Kelvin sign equals k, the long s equals s, and the two Turkish i's equal i.
    extra = {"k": "\u212a", "s": "\u017f", "i": "\u0130\u0131"}.get(character.lower(), "")
    for other in {character.lower(), character.upper(), *extra}:
        if len(other) == 1 and re.fullmatch(re.escape(character), other, re.IGNORECASE):
            yield ord(other)


@cache
def _category(name: str, ascii_only: bool, ecma: bool) -> Ranges:
    """Return `\\d`, `\\w`, `\\s` or a complement, exactly as in this Python's `re` or in ECMA-262."""
    if "_NOT_" in name:
        return complement(_category(name.replace("_NOT_", "_"), ascii_only, ecma))
    if ecma and name == "CATEGORY_SPACE":
        return _ECMA_SPACES
    letter = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}[name]
    codes = range(128) if ascii_only else (code for low, high in UNIVERSE for code in range(low, high + 1))
    flags = re.ASCII if ascii_only else 0  # without it, white space includes U+001C to U+001F
    return ranges_of((ord(found[0]), ord(found[0])) for found in re.finditer(letter, "".join(map(chr, codes)), flags))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and merge ranges, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return intersection(tuple(merged), UNIVERSE)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Return the code points that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(pair for pair in pairs if pair[0] <= pair[1])


def complement(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x10FFFF))
    return intersection(tuple(gaps), UNIVERSE)


def _count(ranges: Ranges) -> int:
    return sum(high - low + 1 for low, high in ranges)


def has_large_class(node: Node) -> bool:
    """Whether a class of `node` is neither small nor nearly everything, as `\\w` is."""
    match node:
        case Chars(ranges):
            return min(_count(ranges), _count(complement(ranges))) > _BIG
        case Sequence(inner) | Choice(inner):
            return any(map(has_large_class, inner))
        case Repeat(item):
            return has_large_class(item)


def within(node: Node, allowed: Ranges) -> Node | None:
    """Return `node` without the texts that have a character outside `allowed`; None if nothing is left."""
    match node:
        case Chars(ranges):
            kept = intersection(ranges, allowed)
            return Chars(kept) if kept else None
        case Sequence(items):
            parts = [part for item in items if (part := within(item, allowed)) is not None]
            return sequence(parts) if len(parts) == len(items) else None
        case Choice(options):
            parts = [part for option in options if (part := within(option, allowed)) is not None]
            return choice(parts) if parts else None
        case Repeat(item, low, high):
            inner = within(item, allowed)
            if inner is None:
                return None if low else EMPTY
            return repeat(inner, low, high)


def map_chars(node: Node, change: Callable[[Chars], Node]) -> Node:
    """Replace every character class."""
    match node:
        case Chars():
            return change(node)
        case Sequence(items):
            return sequence(map_chars(item, change) for item in items)
        case Choice(options):
            return choice(map_chars(option, change) for option in options)
        case Repeat(item, low, high):
            return repeat(map_chars(item, change), low, high)


def sequence(items: Iterable[Node]) -> Node:
    """Return `items` in order as one node."""
    flat: list[Node] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Sequence) else [item])
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(options: Iterable[Node]) -> Node:
    """Return a choice of `options` as one node."""
    distinct = tuple(dict.fromkeys(options))
    some = tuple(option for option in distinct if option != EMPTY)
    if len(some) < len(distinct):  # an empty alternative becomes an optional item: not every library reads `a|`
        return repeat(choice(some), 0, 1) if some else EMPTY
    return some[0] if len(some) == 1 else Choice(some)


def repeat(item: Node, low: int, high: int | None) -> Node:
    """Return `item`, `low` to `high` times, in its simplest form."""
    if item == EMPTY or high == 0:
        return EMPTY
    return item if (low, high) == (1, 1) else Repeat(item, low, high)


def nullable(node: Node) -> bool:
    """Whether the empty text matches `node`."""
    match node:
        case Sequence(items):
            return all(map(nullable, items))
        case Choice(options):
            return any(map(nullable, options))
        case Repeat(item, low, _):
            return low == 0 or nullable(item)
    return False


def nonempty(node: Node) -> Node | None:
    """Return `node` without the empty text; None if nothing is left."""
    match node:
        case Sequence(items):
            options = []
            for index, item in enumerate(items):
                first = nonempty(item)
                options += [] if first is None else [sequence([first, *items[index + 1 :]])]
                if not nullable(item):
                    break
            return choice(options) if options else None
        case Choice(alternatives):
            options = [option for option in map(nonempty, alternatives) if option is not None]
            return choice(options) if options else None
        case Repeat(item, low, high):
            once = nonempty(item)
            if once is None:
                return None
            fewer = max(low - 1, 0) if not nullable(item) else 0
            return sequence([once, repeat(item, fewer, None if high is None else high - 1)])
    return node


def render(node: Node) -> str:
    """Write `node` as a pattern in the common subset."""
    match node:
        case Chars(ranges):
            return _render_chars(ranges)
        case Sequence(items):
            return "".join(f"(?:{render(item)})" if isinstance(item, Choice) else render(item) for item in items)
        case Choice(options):
            return "|".join(map(render, options))
        case Repeat(item, low, high):
            inner = render(item) if isinstance(item, Chars) and item.ranges != UNIVERSE else f"(?:{render(item)})"
            counts = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
            return inner + {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), counts)


def _render_chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escape(ranges[0][0], r"\.^$*+?{}[]|()")
    if ranges == UNIVERSE:
        return r"(?:[^\n]|\n)"
    rest = complement(ranges)
    inner, sign = (across_surrogates(rest), "^") if _count(rest) < _count(ranges) else (ranges, "")
    return f"[{sign}{''.join(_render_range(low, high) for low, high in inner)}]"


def across_surrogates(ranges: Ranges) -> Ranges:
    """Join the ranges before and after the surrogates, which no token has. Libraries read one range rightly."""
    for index, (before, after) in enumerate(pairwise(ranges)):
        if (before[1], after[0]) == (0xD7FF, 0xE000):
            return (*ranges[:index], (before[0], after[1]), *ranges[index + 2 :])
    return ranges


def _render_range(low: int, high: int) -> str:
    first, last = _escape(low, r"\[]^-&~|"), _escape(high, r"\[]^-&~|")
    if low == high:
        return first
    return first + last if high == low + 1 else f"{first}-{last}"


def _escape(code: int, special: str) -> str:
    character = chr(code)
    if character in special:
        return "\\" + character
    if code < 32 or code == 127:
        return {9: r"\t", 10: r"\n", 13: r"\r"}.get(code, f"\\x{code:02x}")
    return character
