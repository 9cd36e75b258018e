"""Follows a JSON value while it is written, token by token, and finds what no continuation mends."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Beginnings, Nodes, Place

_PART = re.compile(
    rb'(?P<mark>[{}\[\],:])|(?P<text>"(?:[^"\\]|\\.)*")|(?P<open>".*|[-+.\w]+\Z)|(?P<other>[-+.\w]+)', re.DOTALL
)
"""Matches a part of a JSON text: a bracket, comma or colon, a string, an open string or number, another scalar."""
_LONGEST_ESCAPE = 12
BLANKS = [b" ", b"\n", b"\r", b"\t"]
_AFTER_SCALAR = [bytes([byte]) for byte in b",]} \n"]


@dataclass(slots=True)
class _Open:
    """An open value, or an open key."""

    token: int
    """The number of the token in which it began."""
    nodes: Nodes
    """The subschemas that apply to it, or may."""
    value: Any = None
    """Of an object or array: its members so far, the open one too."""
    key: Any = None
    """Key or index of its newest member. None in an object: a key comes next."""

    def add(self, value: Any) -> None:
        """Add a member: with the key that was written, or at the end."""
        if isinstance(self.value, list):
            self.key = len(self.value)
            self.value.append(value)
        else:
            self.value[self.key] = value


class Violation(NamedTuple):
    """Why a token must not follow an output."""

    error: ConstraintNotMet
    token: int
    """The number of the token in which the invalid value began."""
    beginnings: list[bytes]
    """Tokens that begin with one of these are not to follow either."""


class Follower:
    """Follows one content of an output.

    Args:
        beginnings: validates the beginnings of the content.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self._open = [_Open(0, beginnings.around, [])]
        """The innermost open value last. The first one is not of the content: it has the content as its only item."""
        self._rest = b""
        """The text of the string, key, number or literal that is open."""
        self._is_free = False
        """It is a string without a pattern, or a key."""
        self.validates = False
        """Whether `read` looks for violations. If not, it follows an output that has been accepted."""

    @property
    def is_over(self) -> bool:
        """Whether the content has ended."""
        return len(self._open) == 1 and bool(self._open[0].value)

    @property
    def token(self) -> int:
        """The token in which the innermost open value began."""
        return self._open[-1].token

    @property
    def held_from(self) -> int | None:
        """The token in which the innermost value under a checked keyword began. None: there is none."""
        checked = (value.token for value in reversed(self._open) if self._beginnings.is_checked(value.nodes))
        return next(checked, None)

    def read(self, text: bytes, token: int) -> Violation | None:
        """Read the text of a token. After a violation, the state is undefined."""
        if self._is_free and b'"' not in text:
            self._rest += text
            return None
        known = len(self._rest)
        data = self._rest + text
        for match in _PART.finditer(data):
            part, written = match[0], text[: max(0, match.end() - known)]
            if match["mark"]:
                violation = self._mark(part, written, token, begins=not known and written == part)
            else:
                if not self._rest:
                    self._begin(token, "" if part.startswith(b'"') else None)
                self._rest = part if match["open"] else b""
                violation = self._string(written) if match["open"] else self._end(part, written)
            if violation is not None or self.is_over:
                return violation
        return None

    def _begin(self, token: int, value: Any) -> None:
        """Open a key, or a value like this one."""
        around = self._open[-1]
        is_key = self._takes_key(around)
        if not is_key:
            around.add(value)
        nodes = () if is_key else self._beginnings.below(around.nodes, around.key)
        self._open.append(_Open(token, nodes, value if isinstance(value, dict | list) else None))

    def _takes_key(self, around: _Open) -> bool:
        return isinstance(around.value, dict) and around.key is None

    def _mark(self, mark: bytes, written: bytes, token: int, begins: bool) -> Violation | None:
        """Read a bracket, comma or colon. `begins`: the token begins with it, and what is before it had ended."""
        if mark in b"{[":
            self._begin(token, {} if mark == b"{" else [])
        elif mark in b"}]":
            ended = self._open.pop()
            others = BLANKS if begins and ended.value else []  # leaves the comma
            return self._violation("value", ended, [written, *others])
        elif mark == b",":
            self._open[-1].key = None
        return None

    def _end(self, part: bytes, written: bytes) -> Violation | None:
        """Read the end of a string, key, number or literal."""
        ended, around = self._open.pop(), self._open[-1]
        self._is_free = False
        if self._takes_key(around):
            around.key = _read(part)
            around.add(None)
            return self._violation("key", ended, [written])
        around.value[around.key] = _read(part)
        is_string = part.startswith(b'"')
        return self._violation("value", ended, [written] if is_string else [written + end for end in _AFTER_SCALAR])

    def _string(self, written: bytes) -> Violation | None:
        """Read the beginning of something. A string may not match its pattern any more."""
        value, around = self._open[-1], self._open[-2]
        has_pattern = any("pattern" in node.schema for node in value.nodes)
        if not has_pattern or self._takes_key(around) or not self._rest.startswith(b'"'):
            self._is_free = self._rest.startswith(b'"')
            return None
        around.value[around.key] = _text(self._rest)
        return self._violation("string", value, [written])

    def _violation(self, place: Place, value: _Open, bad: list[bytes]) -> Violation | None:
        """Return what is wrong after, or within, a value."""
        if not (self.validates and any(self._beginnings.is_checked(part.nodes) for part in (*self._open, value))):
            return None
        path = [part.key for part in self._open[1 : None if place == "key" else -1]]
        error = self._beginnings.error(self._open[0].value[0], None if self.is_over else path, place)
        return None if error is None else Violation(error, value.token, bad)


def _text(part: bytes) -> str:
    """Return the characters of the beginning of a JSON string, without an incomplete one at its end."""
    whole = part.decode("utf-8", "ignore")
    for cut in range(len(whole), len(whole) - _LONGEST_ESCAPE, -1):
        with contextlib.suppress(ValueError):
            return str(json.loads(whole[:cut] + '"'))
    return ""


def _read(part: bytes) -> Any:
    """Return a scalar. What a grammar library allows may not be JSON, such as `7.e-9`: the final check refuses it."""
    try:
        return json.loads(part)
    except ValueError:
        return part.decode("utf-8", "replace")
