"""Follows a JSON value while it is written, token by token, and finds what no continuation mends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Applied, Beginnings, Path, Patterns, PlaceKind, matches

_QUOTE, _OBJECT, _ARRAY, _CONTENT, _KEY, _SCALAR = b'"{[ k0'
"""Kinds of open values: a string, an object, an array, the frame around a content; a key, a number or literal."""
_CLOSING = {_QUOTE: '"', _OBJECT: "}", _ARRAY: "]", _CONTENT: "", _SCALAR: ""}
_REST = {"t": "rue", "f": "alse", "n": "ull", "-": "0"}
"""What completes a number or literal after its first character."""
_REST_OF_SCALAR = re.compile(rb"[^\s,\]}]*")
_FIRST = ('"', "{", "[", "-0123456789", "t", "f", "n")
"""The first characters of values, by type."""
_AFTER_SCALAR = [b",", b"]", b"}", b" ", b"\n"]
_BESIDES_COMMA = [bytes([byte]) for byte in b"0123456789.eE+- \n\r\t"]


class OpenValue(NamedTuple):
    """A value that has begun, or a key. It does not change: each token has its own."""

    kind: int
    token: int
    """The number of the token in which it began."""
    begin: int
    """The byte of the output with which it began."""
    applied: Applied
    parent: OpenValue | None = None
    place: str | int | None = None
    """Key or index of the member that is open, or comes next. None in an object: a key comes next."""

    @property
    def path(self) -> Path:
        """The keys and indices of the member that is open."""
        above = [] if self.parent is None else self.parent.path
        return above if self.place is None else [*above, self.place]

    @property
    def closing(self) -> str:
        """The text that closes it and all values around it."""
        return _CLOSING[self.kind] + ("" if self.parent is None else self.parent.closing)

    @property
    def held_from(self) -> int | None:
        """The token in which the innermost value under a checked keyword began. None: there is none."""
        if self.kind != _CONTENT and self.applied.is_checked:
            return self.token
        return None if self.parent is None else self.parent.held_from

    @property
    def is_loose(self) -> bool:
        """Whether any part of it may violate a keyword that is checked."""
        return self.applied.is_loose or (self.parent is not None and self.parent.is_loose)


class _Place(NamedTuple):
    """A place in an output at which it can be wrong."""

    at: int
    """The number of bytes before it."""
    top: OpenValue
    """The innermost open value."""
    kind: PlaceKind
    value: OpenValue
    """What has begun or ended here."""
    rest: str = ""
    """What makes the text valid once it is closed."""


class Condition(NamedTuple):
    """What a string or key that is open has to match."""

    lists: Patterns
    text: str
    """Its text so far."""
    begin: bytes = b""
    """The beginning of the next token that belongs to the text so far: a quotation mark."""

    def can_follow(self, more: str) -> bool:
        """Return whether it can go on with a text."""
        return all(matches(self.text + more, patterns, partial=True) for patterns in self.lists)

    def can_end(self, more: str) -> bool:
        """Return whether it can end after a text."""
        return all(matches(self.text + more, patterns, partial=False) for patterns in self.lists)


class Violation(NamedTuple):
    """Why a token must not follow an output."""

    error: ConstraintNotMet
    token: int
    """The number of the token in which the invalid value began."""
    beginnings: Sequence[bytes]
    """Tokens that begin with one of these are not to follow either."""
    condition: Condition | None = None
    """Of the string or key that is open, before the token or its first quotation mark."""


class Follower:
    """Follows one content of an output.

    Args:
        beginnings: validates the beginnings of the content.
        begin: the byte of the output with which the content begins.
    """

    def __init__(self, beginnings: Beginnings, begin: int) -> None:
        self._beginnings = beginnings
        self._begin = begin

    def start(self, token: int) -> OpenValue:
        """Return the frame of a content that begins in a token."""
        return OpenValue(_CONTENT, token, self._begin, self._beginnings.root)

    def read(self, top: OpenValue, output: bytes, at: int, token: int) -> tuple[OpenValue | None, Violation | None]:
        """Read the bytes of a token. Returns the innermost open value after it, or why it must not follow.

        Args:
            top: the innermost open value before it.
            output: the whole output, with the token.
            at: where to begin.
            token: the number of the token. None: the content has ended.
        """
        start = at
        for place in self._places(top, output, at, token):
            top = place.top
            violation = self._at(place, output, start)
            if violation is not None or top.kind == _CONTENT:
                return None, violation
        return top, self._in_text(top, output, start)

    def _places(self, top: OpenValue, output: bytes, at: int, token: int) -> Iterator[_Place]:
        """Yield the places in a token, then the innermost open value at its end."""
        while at < len(output):
            byte = output[at]
            if top.kind in (_QUOTE, _KEY):
                end = _end_of_string(output, at)
                if end is None:
                    break
                at, value, top = end, top, _around(top)
                if value.kind == _KEY:
                    key = json.loads(output[value.begin : at], strict=False)
                    top = top._replace(place=key)
                is_key = value.kind == _KEY
                yield _Place(at, top, "key" if is_key else "end", value, ":null" if is_key else "")
            elif top.kind == _SCALAR:
                rest = _REST_OF_SCALAR.match(output, at)
                at = len(output) if rest is None else rest.end()
                if at < len(output):
                    value, top = top, _around(top)
                    yield _Place(at, top, "end", value)
            elif byte in b" \t\r\n:":
                at += 1
            elif byte in b"}]":
                at += 1
                value, top = top, _around(top)
                yield _Place(at, top, "end", value)
            elif byte == ord(","):
                at += 1
                top = top._replace(place=top.place + 1 if isinstance(top.place, int) else None)
                yield _Place(at, top, "comma", top, "null" if top.kind == _ARRAY else '"":null')
            elif top.kind == _OBJECT and top.place is None:
                top = OpenValue(_KEY, token, at, top.applied, top)
                at += 1
            else:
                kind = byte if byte in (_QUOTE, _OBJECT, _ARRAY) else _SCALAR
                applied = top.applied if top.place is None else self._beginnings.below(top.applied, top.place)
                top = OpenValue(kind, token, at, applied, top, 0 if kind == _ARRAY else None)
                at += 1
                yield _Place(at, top, "begin", top)
        yield _Place(at, top, "within", top)

    def _at(self, place: _Place, output: bytes, start: int) -> Violation | None:
        """Return what is wrong at a place."""
        at, top, kind, value, rest = place
        around = top.parent
        path = None if around is None else around.path
        if kind == "key":
            path = top.path
        can_be_wrong = {
            "key": top.is_loose or top.applied.is_checked,
            "end": top.is_loose or top.applied.is_checked or value.applied.is_checked,
            "comma": top.applied.is_bounded,
            "begin": around is not None and around.is_loose,
            "within": False,
        }
        if not can_be_wrong[kind]:
            return None
        written = output[start:at]
        if kind == "begin":
            return self._at_begin(value, path or [], output, written)
        text = output[self._begin : at].decode("utf-8", "replace") + rest + top.closing
        error = self._beginnings.violation(text, path, kind)
        if error is None:
            return None
        bad = [written]
        if kind == "end" and value.kind == _SCALAR:
            bad = [written + end for end in _AFTER_SCALAR]
        elif kind == "end" and value.kind != _QUOTE and at == start + 1 and output[start - 1] not in b"{[,":
            bad += _BESIDES_COMMA  # the token has also ended the last member, which stays as it is
        return Violation(error, value.token, bad)

    def _at_begin(self, value: OpenValue, path: Path, output: bytes, written: bytes) -> Violation | None:
        """Return what is wrong with the type of a value that has begun with the last byte of `written`."""
        text = output[self._begin : value.begin].decode("utf-8", "replace")
        around = _around(value).closing

        def wrong(first: str) -> ConstraintNotMet | None:
            own = first + _REST.get(first, "") + _CLOSING.get(ord(first), "")
            return self._beginnings.violation(text + own + around, path, "begin")

        error = wrong(chr(output[value.begin]))
        if error is None:
            return None
        bad = [first for firsts in _FIRST if wrong(firsts[0]) is not None for first in firsts]
        return Violation(error, value.token, [written[:-1] + first.encode() for first in bad])

    def _in_text(self, top: OpenValue, output: bytes, start: int) -> Violation | None:
        """Return what is wrong within a string or key: it cannot match a pattern any more."""
        before = max(start, top.begin + 1)
        condition = self.condition(top, output[:before], output[start:before])
        if condition is None or condition.can_follow(_text(output[before:])):
            return None
        keyword = "pattern" if top.kind == _QUOTE else "propertyNames"
        error = ConstraintNotMet(f"no text that begins like this satisfies {keyword}", param="json_schema")
        error.keyword = keyword
        return Violation(error, top.token, [output[start:]], condition)

    def condition(self, top: OpenValue, output: bytes, begin: bytes = b"") -> Condition | None:
        """Return the condition of the string or key at the end of an output; None: there is none."""
        lists = top.applied.names if top.kind == _KEY else top.applied.texts if top.kind == _QUOTE else None
        if not lists or top.held_from is None:
            return None
        return Condition(lists, _text(output[top.begin + 1 :]), begin)


def _around(value: OpenValue) -> OpenValue:
    assert value.parent is not None
    return value.parent


def _end_of_string(output: bytes, at: int) -> int | None:
    """Return where the string ends that is open at `at`."""
    while (quote := output.find(b'"', at)) >= 0:
        before = output[:quote]
        if (quote - len(before.rstrip(b"\\"))) % 2 == 0:
            return quote + 1
        at = quote + 1
    return None


def _text(written: bytes) -> str:
    """Return the characters of the beginning of a JSON string, without an incomplete one at its end."""
    whole = written.decode("utf-8", "ignore")
    for cut in range(len(whole), max(-1, len(whole) - 12), -1):  # the longest escape has 12 characters
        try:
            return str(json.loads(f'"{whole[:cut]}"'))
        except ValueError:
            continue
    return ""
