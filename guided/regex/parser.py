"""The parser of regular expressions: a pattern becomes a tree of `guided.regex`.

Python's own parser reads the pattern, with the meaning of `re`, or of ECMA-262 in a
JSON Schema. Before, this syntax is rewritten:

    \\p{L} \\p{Letter} \\P{Script=Greek} \\pL    a class of code points
    \\u{41} \\x{41} \\ud83d\\ude00              one code point
    \\cJ                                      a control character
    (?<name>...)                             a group
    \\z                                       the end (in a regex, not in a schema's pattern)

`guided.schema.ecma` and a library check the patterns of schemas before. Syntax that no
token mask can enforce, or that the dialects read differently, is refused by name.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
import warnings
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

import regex as unicode_regex

from guided.errors import (
    ConstraintTooLarge,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
)
from guided.regex import automaton
from guided.regex.tree import (
    EMPTY,
    UNIVERSE,
    Chars,
    Interval,
    Node,
    Ranges,
    choice,
    complement,
    intersection,
    members,
    points,
    ranges_of,
    render,
    repeat,
    sequence,
)

_sre: Any = importlib.import_module("re._parser")
"""Python's own parser. The module is private, but its output has never changed. Other
parsers may differ from `re`."""
_ESCAPE = (
    r"\\[ux]\{(?P<code>[0-9A-Fa-f]{1,6})\}"
    r"|\\u(?P<high>[dD][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|\\(?P<sign>[pP])(?:\{(?P<property>\^?[\w:=. -]+)\}|(?P<letter>[A-Za-z]))"
    r"|\\c(?P<control>[A-Za-z])"
    r"|(?P<group>\(\?<[^\W\d][\w$]*+>)"
    r"|(?P<reference>\\k<[\w$]*+>)"
    r"|\\."
)
_IN_CLASS = re.compile(_ESCAPE, re.DOTALL)
_TOKEN = re.compile(
    _ESCAPE + r"|\[(?P<not>\^?)(?P<members>\]?(?:[^\]\\]|\\.)*+)(?P<end>\]?)", re.DOTALL
)
_REFUSED_MEMBERS = {
    r"\[[:.=]\^?\w+[:.=]$": (
        "a POSIX class",
        "which dialects read differently: write one such as [a-z] or \\p{L}",
    ),
    r"&&\[": ("'&&' between classes", "which only Rust reads as an intersection"),
}
_REFUSED_OPERATIONS = {
    "ASSERT": "lookaround",
    "ASSERT_NOT": "negative lookaround",
    "FAILURE": "negative lookaround",  # an empty one, since Python 3.13
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
"""Operations of Python's parser that no token mask can enforce."""
_LINE_FEED = points(b"\n")
_ECMA_LINES = points(map(ord, "\n\r\u2028\u2029"))
_ECMA_SPACES = ranges_of(
    [
        (0x09, 0x0D),
        (0x2000, 0x200A),
        *points(map(ord, " \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")),
    ]
)


def parse(pattern: str, *, param: str = "regex", lookaheads: bool = True) -> Node:
    """Parse `pattern` into a tree, with the meaning of `re.fullmatch(pattern, ...)` on
    valid Unicode.

    Args:
        lookaheads: whether lookaheads at the beginning are applied, which may take
            long, or refused.

    Raises:
        InvalidConstraint: `pattern` is not a regular expression, or no text matches it.
        UnsupportedConstraint: other lookaround, backreferences, possessive groups,
            anchors in the middle, ...
    """
    reader = _Translator(pattern, param)
    if lookaheads and re.search(r"\(\?[=!]", pattern) and r"\Z" not in pattern:
        return reader.search(reader.items, whole=True)
    return reader.sequence(reader.items, reader.flags, start=True, end=True)


@lru_cache(maxsize=256)
def parse_search(pattern: str) -> Node:
    """Return all strings that contain a match of `pattern`, a pattern of a JSON Schema
    with the meaning of ECMA-262.

    Raises the errors of `parse`.
    """
    reader = _Translator(pattern, "json_schema", ecma=True)
    return reader.search(reader.items)


def width(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum number of characters of a match (None:
    unbounded)."""
    low, high = _sre.parse(render(node)).getwidth()
    if high >= _sre.MAXREPEAT:
        return low, None
    return low, high


def _lookaheads(items: list[Any]) -> list[Any]:
    """Return the lookaheads that follow an anchor at the beginning."""
    if not (
        items and str(items[0][0]) == "AT" and _anchored(items[:1], 0, "AT_BEGINNING")
    ):
        return []
    return list(
        takewhile(
            lambda item: str(item[0]) in ("ASSERT", "ASSERT_NOT") and item[1][0] == 1,
            items[1:],
        )
    )


def _anchored(parsed: Any, edge: int, anchor: str) -> bool:
    """Return whether every alternative of `parsed` has `anchor` in its first (0) or
    last (-1) position."""
    items = list(parsed)
    if not items:
        return False
    operation = str(items[edge][0])
    argument = items[edge][1]
    if operation == "AT":
        return str(argument) in (anchor, f"{anchor}_STRING")
    if operation == "BRANCH":
        return all(_anchored(option, edge, anchor) for option in argument[1])
    return operation == "SUBPATTERN" and _anchored(argument[3], edge, anchor)


class _Translator:
    """Rewrites one pattern for Python's parser, and converts the parser's lists of
    operations to nodes.

    Args:
        ecma: whether classes, escapes and anchors have the meaning of ECMA-262 (JSON
            Schema), or of `re`.
    """

    def __init__(self, pattern: str, param: str, *, ecma: bool = False) -> None:
        self._name = f"the regex {bounded(pattern, 120)!r}"
        self._pattern = pattern
        self._param = param
        self._ecma = ecma
        parsed = self._parse()
        self.items: list[Any] = list(parsed)
        """The operations of Python's parser."""
        self.flags: int = parsed.state.flags

    def search(self, items: list[Any], *, whole: bool = False) -> Node:
        """Return all texts that contain a match of `items`, or that match as a whole
        (`whole`)."""
        if items and str(items[-1][0]) == "BRANCH":
            # The parser has moved the common prefix of all alternatives before the
            # branch.
            options = items[-1][1][1]
            return choice(
                self.search([*items[:-1], *option], whole=whole) for option in options
            )
        if whole and not _anchored(items, 0, "AT_BEGINNING"):
            items = [*_sre.parse("^"), *items]
        lookaheads = _lookaheads(items)
        if lookaheads:
            rest = [items[0], *items[1 + len(lookaheads) :]]
            machine = automaton.of(self.search(rest, whole=whole))
            for operation, (_, inner) in lookaheads:
                condition = automaton.of(self.search([items[0], *inner]))
                if str(operation) == "ASSERT_NOT":
                    machine = machine - condition
                else:
                    machine = machine & condition
            return automaton.texts(machine)
        start = _anchored(items, 0, "AT_BEGINNING")
        end = whole or _anchored(items, -1, "AT_END")
        before = after = repeat(Chars(UNIVERSE), 0, None)
        if start:
            before = EMPTY
        if whole or (end and self._ecma):
            after = EMPTY
        elif end:
            # outside of ECMA-262, `$` also matches before a line break at the end
            after = repeat(Chars(_LINE_FEED), 0, 1)
        return sequence(
            [before, self.sequence(items, self.flags, start=start, end=end), after]
        )

    def _parse(self) -> Any:
        """Return the list of operations of Python's parser."""
        rewritten = _TOKEN.sub(self._rewritten, self._pattern)
        # Maximum length of a rewritten pattern: `\p{L}` takes 13,000.
        if len(rewritten) > max(300_000, 2 * len(self._pattern)):
            raise ConstraintTooLarge(
                f"{self._name} contains too many Unicode properties", param=self._param
            )
        try:
            with warnings.catch_warnings():
                # "possible nested set": the meaning stays that of `re`
                warnings.simplefilter("ignore")
                return _sre.parse(rewritten)
        except re.error as error:
            if rewritten == self._pattern:
                raise self._invalid(f"is malformed: {error}") from None
            # without the position in `rewritten`
            raise self._invalid(f"is malformed: {error.msg}") from None
        except (OverflowError, RecursionError, ValueError) as error:
            # contradictory flags raise a ValueError
            raise self._invalid(f"can't be read: {error}") from None

    def _rewritten(self, match: re.Match[str]) -> str:
        """Return an escape, a group or a class in the syntax of `re`."""
        if match["members"] is None:
            return self._rewritten_escape(match, in_class=False)
        for syntax, (what, why) in _REFUSED_MEMBERS.items():
            if re.search(syntax, match["members"]):
                raise self._unsupported(what, why)
        inside = _IN_CLASS.sub(
            lambda inner: self._rewritten_escape(inner, in_class=True), match["members"]
        )
        return f"[{match['not']}{inside}{match['end']}"

    def _rewritten_escape(self, match: re.Match[str], *, in_class: bool) -> str:
        text = match[0]
        if match["code"]:
            code = int(match["code"], 16)
            if code > 0x10FFFF:
                raise self._invalid(f"contains the code point {code:#x}")
            return f"\\U{code:08x}"
        if match["high"]:
            high = int(match["high"], 16)
            low = int(match["low"], 16)
            return f"\\U{0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF):08x}"
        if match["sign"]:
            name = match["property"] or match["letter"]
            try:
                inside = _members_of_property(name.strip(), match["sign"] == "P")
            except unicode_regex.error:
                raise self._invalid(
                    f"contains \\p{{{bounded(name, 60)}}}, which is no Unicode property"
                ) from None
            if in_class:
                return inside
            return f"[{inside}]"
        if match["control"]:
            return f"\\x{ord(match['control']) & 31:02x}"
        if match["reference"]:
            raise self._unsupported(f"a backreference ({bounded(text, 40)})")
        if text == r"\z" and not self._ecma and not in_class:
            return r"\Z"
        if match["group"] and not in_class:
            return "("
        return text

    def sequence(self, items: Any, flags: int, *, start: bool, end: bool) -> Node:
        """Return the node for a list of operations.

        Args:
            start, end: whether no text can precede or follow. Anchors have no effect
                there and are dropped.
        """
        nodes: list[Node] = []
        for index, (operation, argument) in enumerate(items):
            first = start and all(node == EMPTY for node in nodes)
            last = end and all(str(later) == "AT" for later, _ in items[index + 1 :])
            nodes.append(
                self._item(str(operation), argument, flags, start=first, end=last)
            )
        return sequence(nodes)

    def _item(
        self, operation: str, argument: Any, flags: int, *, start: bool, end: bool
    ) -> Node:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return self._chars(operation, argument, flags)
            case "AT":
                place = str(argument)
                if self._ecma and place.endswith("_STRING"):
                    raise self._unsupported(
                        r"'\A' or '\Z'", "which is a letter in ECMA-262: write ^ or $"
                    )
                if "BOUNDARY" in place:
                    raise self._unsupported("a word boundary")
                if not (start and place.startswith("AT_BEGINNING")) and not (
                    end and place.startswith("AT_END")
                ):
                    raise self._unsupported("an anchor in the middle")
                return EMPTY
            case "BRANCH":
                return choice(
                    self.sequence(option, flags, start=start, end=end)
                    for option in argument[1]
                )
            case "SUBPATTERN":
                _group, added, removed, inner = argument
                return self.sequence(
                    inner, (flags | added) & ~removed, start=start, end=end
                )
            case "MAX_REPEAT" | "MIN_REPEAT":  # greedy and lazy match the same texts
                low, high, inner = argument
                once = high == 1
                node = self.sequence(
                    inner, flags, start=start and once, end=end and once
                )
                if high is _sre.MAXREPEAT:
                    return repeat(node, int(low), None)
                return repeat(node, int(low), int(high))
        raise self._unsupported(_REFUSED_OPERATIONS[operation])

    def _chars(self, operation: str, argument: Any, flags: int) -> Node:
        if operation == "ANY" and flags & re.DOTALL:
            return Chars(UNIVERSE)
        if operation == "ANY" and self._ecma:
            return Chars(complement(_ECMA_LINES))
        if operation == "ANY":
            return Chars(complement(_LINE_FEED))
        parts = argument
        if operation != "IN":
            parts = [("LITERAL", argument)]
        pairs: list[Interval] = []
        negated = operation == "NOT_LITERAL"
        for kind, value in parts:
            match str(kind):
                case "NEGATE":
                    negated = True
                case "LITERAL":
                    pairs.append((value, value))
                case "RANGE":
                    pairs.append(value)
                case "CATEGORY":
                    pairs.extend(
                        _category(str(value), bool(flags & re.ASCII), self._ecma)
                    )
        ranges = ranges_of(pairs)
        if ranges and flags & re.IGNORECASE:
            ranges = _fold(ranges, flags)
        if negated:
            ranges = complement(ranges)
        if not ranges:
            raise self._invalid("contains an empty character class")
        return Chars(ranges)

    def _invalid(self, what: str) -> InvalidConstraint:
        return InvalidConstraint(f"{self._name} {what}", param=self._param)

    def _unsupported(
        self,
        what: str,
        why: str = "which a token mask can't enforce: rewrite it without",
    ) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"{self._name} contains {what}, {why}", param=self._param
        )


def _fold(ranges: Ranges, flags: int) -> Ranges:
    """Add the characters that are equal to one of `ranges` under IGNORECASE."""
    equal = re.findall(
        f"[{members(ranges)}]", _cased(), flags & (re.IGNORECASE | re.ASCII)
    )
    return ranges_of([*ranges, *points(map(ord, equal))])


@cache
def _category(name: str, ascii_only: bool, ecma: bool) -> Ranges:
    """Return the characters of `\\d`, `\\w`, `\\s` or a complement, as in this Python's
    `re` or in ECMA-262."""
    if "_NOT_" in name:
        return complement(_category(name.replace("_NOT_", "_"), ascii_only, ecma))
    if ecma and name == "CATEGORY_SPACE":
        return _ECMA_SPACES
    letter = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}[
        name
    ]
    if ascii_only or ecma:
        letter = f"(?a:{letter})"
    return _runs(re.finditer(f"{letter}+", _every_character()))


@lru_cache(maxsize=64)
def _members_of_property(name: str, negated: bool) -> str:
    """Return the members of a class with the code points of a property, or with
    surrogates if there are none."""
    sign = "p"
    if negated:
        sign = "P"
    matching = unicode_regex.compile(rf"\{sign}{{{name}}}+")
    runs = _runs(matching.finditer(_every_character()))
    if not negated:
        runs = intersection(runs, _assigned())
    return (
        "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in runs) or "\ud800-\udfff"
    )


def _runs(matches: Iterable[Any]) -> Ranges:
    """Return the code points of matches in `_every_character`, which are runs of
    adjacent code points."""
    return ranges_of((ord(match[0][0]), ord(match[0][-1])) for match in matches)


@cache
def _every_character() -> str:
    return "".join(chr(code) for low, high in UNIVERSE for code in range(low, high + 1))


@cache
def _assigned() -> Ranges:
    """Return the characters of Python's version of Unicode. Readers of the output may
    not know newer characters."""
    return points(
        ord(character)
        for character in _every_character()
        if unicodedata.category(character) != "Cn"
    )


@cache
def _cased() -> str:
    """Return the characters that have another case."""
    return "".join(
        char
        for char in _every_character()
        if char.lower() != char or char.upper() != char
    )
