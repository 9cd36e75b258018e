"""Follows a JSON value while it is written, token by token, and finds what no
continuation mends."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Beginnings, Part, Place

_REST = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
"""Matches text within a string, up to its end or an incomplete escape."""
_LEXEME = re.compile(rb'(?P<scalar>[-+.\w]+)|["{}\[\],:]|[^-+.\w"{}\[\],:]+')
"""Matches a number or literal, a quotation mark, bracket, comma or colon, or blanks."""
_CHARACTERS = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
"""Matches the beginning of a string without an incomplete character."""
_VALUES = {
    b"{": b"{}",
    b"[": b"[]",
    b'"': b'""',
    b"tf": b"false",
    b"n": b"null",
    b"-+.0123456789": b"0",
}
"""A value of each type, by the characters with which its values begin."""
_FIRST = {
    first: ([bytes([byte]) for byte in firsts], value)
    for firsts, value in _VALUES.items()
    for first in firsts
}
BLANKS = [b" ", b"\n", b"\r", b"\t"]
_AFTER_NUMBER = [*BLANKS, b",", b"]", b"}"]
_NO_COMMA = [*BLANKS, *(bytes([byte]) for byte in b"0123456789.eE")]
"""What may follow a value in an object or array, other than a comma and the end."""
_TRIED = set(range(0x20, 0x7F)).difference(b'"\\')
_SCALAR = ord("0")
_STRING_END = ord("'")
_BLANK = ord(" ")
"""Marks of a text beside those that stand for themselves, see `_marks`."""
_name = lru_cache(maxsize=4096)(json.loads)
"""Returns a key from its text in JSON."""


@dataclass(slots=True)
class _OpenValue:
    """An open value."""

    part: Part
    is_deep: bool
    """A keyword that is checked may be violated anywhere in it."""
    held_from: int | None
    """The token in which the innermost value with a checked keyword began: this one, or
    one around it."""
    start: int
    """Its first byte."""
    newest: int
    """The token in which its newest member began, or else it."""
    is_object: bool = False
    key: bytes | int | None = None
    """The key, in JSON, or the index of its newest member. None in an object: a key
    comes next."""


class Violation(NamedTuple):
    """Why a token must not follow an output."""

    error: ConstraintNotMet
    token: int
    """The number of the token in which the invalid value, or its newest member,
    began."""
    beginnings: list[bytes]
    """Tokens that begin with one of these must not follow either."""


class Follower:
    """Follows one content of an output.

    Args:
        beginnings: validates the beginnings of the content.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self._open = [_OpenValue(beginnings.around, False, None, 0, 0, key=-1)]
        """Objects and arrays, the innermost last. The first one has the content as its
        only item."""
        self._scalar: _OpenValue | None = None
        """The string, number or literal that is open, if it is validated."""
        self._is_number = False
        """A number or literal is open."""
        self._key_start = 0
        """The first byte of the newest key."""
        self._text = b""
        self._state = 0
        """See `_marks`."""
        self.is_over = False
        """Whether the content has ended."""
        self.validates = False
        """Whether `read` looks for violations. If not, it follows an output that has
        been accepted."""

    @property
    def held_from(self) -> int | None:
        """The token in which the innermost open value with a checked keyword began."""
        return (self._scalar or self._open[-1]).held_from

    @property
    def has_pattern(self) -> bool:
        """Whether a string with a pattern is open that is validated."""
        return (
            self._scalar is not None
            and self._state > 0
            and bool(self._scalar.part.patterns)
        )

    def read(self, text: bytes, token: int) -> Violation | None:
        """Read the text of a token. After a violation, the state is undefined."""
        known = len(self._text)
        self._text += text
        marks, self._state = _marks(text, self._state)
        violation = None
        for mark, start, end in marks:
            if mark == _STRING_END:
                violation = self._end(text[:end], known + end, [b""])
            elif mark in b'"{[' or (mark == _SCALAR and not self._is_number):
                violation = self._begin(token, text[start], text[:start], known + start)
            elif mark != _SCALAR:
                if self._is_number:
                    violation = self._end(text[:start], known + start, _AFTER_NUMBER)
                if mark in b"}]" and violation is None:
                    violation = self._close(text[:end], known + end)
                elif mark == ord(",") and self._open[-1].is_object:
                    self._open[-1].key = None
            if violation is not None or self.is_over:
                return violation
        if self.validates and self.has_pattern:
            return self._mismatch(self._string(), text)
        return None

    def characters(self) -> list[bytes]:
        """Return the characters in ASCII that may follow in a string with a pattern
        that is checked, with its end."""
        text = self._string()
        characters: list[bytes] = []
        for code in _TRIED:
            character = bytes([code])
            if self._mismatch(text[:-1] + character + b'"', b"") is None:
                characters.append(character)
        if self._violation("value", text, b"", []) is None:
            characters.append(b'"')
        return characters

    def _string(self) -> bytes:
        """Return the text with an end of the open string, without an incomplete
        character."""
        assert self._scalar is not None
        start = self._scalar.start
        string = _CHARACTERS.findall(self._text[start:].decode("utf-8", "ignore"))[0]
        return self._text[:start] + str(string).encode() + b'"'

    def _mismatch(self, text: bytes, written: bytes) -> Violation | None:
        """Return why no string that begins as the last one in `text` matches its
        patterns."""
        assert self._scalar is not None
        if self._scalar.part.may_match(json.loads(text[self._scalar.start :])):
            return None
        return self._violation("string", text, written, [b""])

    def _begin(
        self, token: int, first: int, before: bytes, start: int
    ) -> Violation | None:
        """Open a key, or a value with this first character, after the text `before` in
        its token."""
        around = self._open[-1]
        around.newest = token
        key = around.key
        if key is None:
            self._key_start = start
            return None
        if isinstance(key, int):
            around.key = key + 1
            part = self._beginnings.below(around.part, 0)
        else:
            part = self._beginnings.below(around.part, _name(key))
        value = _OpenValue(
            part,
            around.is_deep or part.is_deep,
            around.held_from,
            start,
            token,
            first == ord("{"),
        )
        if part.is_checked:
            value.held_from = token
        violation = None
        if value.is_deep:
            firsts, example = _FIRST[first]
            violation = self._violation(
                "first", self._text[:start] + example, before, firsts
            )
        if first == ord("["):
            value.key = -1
        if first in b"{[":
            self._open.append(value)
        else:
            self._is_number = first != ord('"')
            if value.is_deep or part.is_checked or around.part.is_checked:
                self._scalar = value
        return violation

    def _end(self, written: bytes, end: int, endings: list[bytes]) -> Violation | None:
        """End a key, string, number or literal after the text `written` of a token."""
        around = self._open[-1]
        if around.key is None:
            around.key = self._text[self._key_start : end]
            if around.is_deep or around.part.is_checked:
                return self._violation(
                    "key", self._text[:end] + b":null", written, endings
                )
            return None
        self._is_number = False
        self.is_over = len(self._open) == 1
        value = self._scalar
        self._scalar = None
        if value is None:
            return None
        return self._violation("value", self._text[:end], written, endings)

    def _close(self, written: bytes, end: int) -> Violation | None:
        """End an object or array after the text `written` of a token."""
        value = self._open.pop()
        self.is_over = len(self._open) == 1
        is_validated = value.is_deep or value.part.is_checked
        if not is_validated and not self._open[-1].part.is_checked:
            return None
        violation = self._violation("value", self._text[:end], written, [b""])
        if violation is None:
            return None
        if len(written) == 1 and self._text[value.start : end].strip(b"{}[] \n\r\t"):
            violation.beginnings.extend(_NO_COMMA)
        if is_validated:
            return violation._replace(token=value.newest)
        return violation

    def _violation(
        self, place: Place, text: bytes, written: bytes, endings: list[bytes]
    ) -> Violation | None:
        """Return what is finally wrong with `text`, with the open objects and arrays
        closed after it.

        Args:
            written, endings: no token that begins with `written` and one of `endings`
                may follow then.
        """
        if not self.validates:
            return None
        path: list[str | int] = []
        closing = b""
        try:
            for value in self._open[1:]:
                if value.is_object:
                    closing = b"}" + closing
                else:
                    closing = b"]" + closing
                key = value.key or 0
                if isinstance(key, bytes):
                    key = _name(key)
                path.append(key)
            document = json.loads(text + closing)
        except (ValueError, RecursionError):
            # too deep, or no JSON, such as `7.e-9`: the final check refuses it
            return None
        if place != "value":
            error = self._beginnings.error(document, path, place)
        elif path:
            error = self._beginnings.error(document, path[:-1], place)
        else:
            error = self._beginnings.error(document, None, place)
        if error is None:
            return None
        return Violation(
            error, self._open[-1].newest, [written + ending for ending in endings]
        )


@lru_cache(maxsize=16384)
def _marks(text: bytes, state: int) -> tuple[list[tuple[int, int, int]], int]:
    """Return the marks in the text of a token, with the places where each begins and
    ends, and the state after it.

    Args:
        state: 0 outside of strings, 1 in a string, 2 after a backslash in a string.
    """
    marks: list[tuple[int, int, int]] = []
    start = 0
    while start < len(text):
        if state:
            match = _REST.match(text, start + state - 1)
            assert match is not None
            start = match.end()
            state = 1
            if text[start:] == b"\\":
                return marks, 2
            if start < len(text):
                state = 0
                marks.append((_STRING_END, start, start + 1))
                start += 1
            continue
        match = _LEXEME.match(text, start)
        assert match is not None
        mark = match[0][0]
        if match["scalar"]:
            mark = _SCALAR
        elif mark == ord('"'):
            state = 1
        elif mark not in b"{}[],:":
            mark = _BLANK
        marks.append((mark, start, match.end()))
        start = match.end()
    return marks, state
