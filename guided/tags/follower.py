"""Follows a JSON value while it is written, token by token, and finds what no continuation mends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Applied, Beginnings, Path, can_go_on

_QUOTE, _OBJECT, _ARRAY, _CONTENT, _KEY, _SCALAR = b'"{[ k0'
"""Kinds of open values: a string, an object, an array, the frame around a content; a key, a number or literal."""
_CLOSING = {_OBJECT: "}", _ARRAY: "]", _CONTENT: ""}
_REST_OF_SCALAR = re.compile(rb"[^\s,\]}]*")
_AFTER_SCALAR = [b",", b"]", b"}", b" ", b"\n"]
_IN_STRING = [chr(code) for code in range(32, 127)]


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


class Violation(NamedTuple):
    """Why a token must not follow an output."""

    error: ConstraintNotMet
    token: int
    """The number of the token in which the invalid value began."""
    beginnings: Sequence[bytes]
    """Tokens that begin with one of these violate the schema as well."""


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
        for now, ended, at in self._values(top, output, at, token):
            if ended is None:
                return now, self._in_text(now, output, start, at)
            violation = self._after(now, ended, output, start, at)
            if violation is not None or now.kind == _CONTENT:
                return None, violation
        raise AssertionError("the last item has no ended value")

    def _values(
        self, top: OpenValue, output: bytes, at: int, token: int
    ) -> Iterator[tuple[OpenValue, OpenValue | None, int]]:
        """Yield the innermost open value after each value and key, the value or key, and its end; None at the end."""
        while at < len(output):
            byte = output[at]
            if top.kind in (_QUOTE, _KEY):
                end = _end_of_string(output, at)
                if end is None:
                    break
                at, ended, top = end, top, _around(top)
                if ended.kind == _KEY:
                    key = json.loads(output[ended.begin : at], strict=False)
                    top = top._replace(place=key)
                yield top, ended, at
            elif top.kind == _SCALAR:
                rest = _REST_OF_SCALAR.match(output, at)
                at = len(output) if rest is None else rest.end()
                if at < len(output):
                    ended, top = top, _around(top)
                    yield top, ended, at
            elif byte in b" \t\r\n:":
                at += 1
            elif byte in b"}]":
                at += 1
                ended, top = top, _around(top)
                yield top, ended, at
            elif byte == ord(","):
                at += 1
                top = top._replace(place=top.place + 1 if isinstance(top.place, int) else None)
                if top.applied.is_bounded:
                    yield top, top, at
            else:
                kind = byte if byte in (_QUOTE, _OBJECT, _ARRAY) else _SCALAR
                if top.kind == _OBJECT and top.place is None:
                    kind, applied = _KEY, top.applied
                elif top.kind == _CONTENT:
                    applied = top.applied
                else:
                    assert top.place is not None
                    applied = self._beginnings.below(top.applied, top.place)
                top = OpenValue(kind, token, at, applied, top, 0 if kind == _ARRAY else None)
                at += kind != _SCALAR
        yield top, None, len(output)

    def _after(self, top: OpenValue, ended: OpenValue, output: bytes, start: int, at: int) -> Violation | None:
        """Return what is wrong after a value, a key, or the comma of a container (then `ended` is `top`)."""
        if ended.held_from is None:
            return None
        path = None if top.parent is None else top.parent.path
        is_key, is_comma, placeholder = ended.kind == _KEY, ended is top, ""
        if is_key:
            placeholder, path = ":null", top.path
        elif is_comma:
            placeholder = "null" if top.kind == _ARRAY else '"":null'
        text = output[self._begin : at].decode("utf-8", "replace") + placeholder + top.closing
        error = self._beginnings.violation(text, path, unfinished=is_key, counts=is_comma)
        if error is None:
            return None
        written = output[start:at]
        ends = _AFTER_SCALAR if ended.kind == _SCALAR else [b""]
        return Violation(error, ended.token, [written + end for end in ends])

    def _in_text(self, top: OpenValue, output: bytes, start: int, at: int) -> Violation | None:
        """Return what is wrong within a string or key: it cannot match a pattern any more."""
        lists = top.applied.names if top.kind == _KEY else top.applied.texts if top.kind == _QUOTE else ()
        before = max(start, top.begin + 1)
        if not lists or before >= at:
            return None
        if all(can_go_on(_text(output[top.begin + 1 : at]), patterns) for patterns in lists):
            return None
        text, written = _text(output[top.begin + 1 : before]), output[start:before]
        bad = [char for char in _IN_STRING if not all(can_go_on(text + char, patterns) for patterns in lists)]
        if '"' not in bad or "\\" not in bad:
            bad = [char for char in bad if char != "\\"]  # it begins an escape
        keyword = "pattern" if top.kind == _QUOTE else "propertyNames"
        error = ConstraintNotMet(f"no text that begins like this satisfies {keyword}", param="json_schema")
        error.keyword = keyword
        return Violation(error, top.token, [output[start:at], *(written + char.encode() for char in bad if char != '"')])


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
