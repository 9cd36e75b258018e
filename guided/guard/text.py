"""The JSON text of one sequence as a state that each token advances: open containers, used keys, start of the value.

The grammar library checks the syntax; a state only finds out where keys and values end. States are immutable, so
rollback and fork copy nothing; they refer to the text by offsets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

BEFORE_VALUE, BEFORE_KEY, AFTER, KEY, STRING, SCALAR = range(6)
"""Modes of a state: before a value or key, after either, in a key, in a string value, in a number or literal."""

_CHARACTERS = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]} \t\n\r]*")
_ZEROS = (b"0", b"-0")
_COLON, _COMMA, _QUOTE = b':,"'
_OPEN, _CLOSE, _SPACE = b"{[", b"}]", b" \t\n\r"


class Veto(Exception):
    """The text would violate the schema, whatever follows."""


class Choice(NamedTuple):
    """A restriction of the next key or value, as JSON texts without whitespace."""

    only: frozenset[bytes] | None
    """The only allowed texts. None: no such restriction."""
    never: frozenset[bytes]
    """Forbidden texts."""
    endless: frozenset[int]
    """First bytes of values that can always be continued, however they began. For other values, the library may allow
    forbidden texts only. The first bytes of numbers are included, although `0` can't be continued."""

    def goes_on(self, text: bytes, partial: bytes) -> bool:
        """Whether a value that begins with `partial` can certainly become another one than `text`."""
        return text[0] in self.endless and not (partial == text in _ZEROS)


class Rule(Protocol):
    """The rule of one object or array, and of the values in it."""

    @property
    def names(self) -> frozenset[bytes]:
        """Keys that may be vetoed, in UTF-8."""

    @property
    def vetoes(self) -> bool:
        """Whether the rule may veto something. Otherwise it only leads to the rules of inner values."""

    def start(self) -> Any:
        """Return the state in an empty container."""

    def key(self, state: Any, key: str) -> Any:
        """Return the state after a complete key. Raises `Veto`."""

    def value(self, state: Any, text: bytes) -> Any:
        """Return the state after the complete value of an item, or of the last key. Raises `Veto`."""

    def comma(self, state: Any) -> None:
        """Check that another key or item may come. Raises `Veto`."""

    def close(self, state: Any) -> None:
        """Check that the container may end. Raises `Veto`."""

    def is_quiet(self, state: Any, complete: bool) -> bool:
        """Whether neither a comma nor the end can be vetoed after the current value (`complete`: the last one)."""

    def choice(self, state: Any, is_key: bool) -> Choice | None:
        """Return which keys or values may come next; None for any that the library allows."""

    def member(self, state: Any, first: int) -> Rule | None:
        """Return the rule of the item or of the last key's value, a container that begins with the byte `first`."""


class Frame:
    """One open object or array."""

    __slots__ = ("begin", "is_object", "keys", "parent", "rule", "state", "watched")

    def __init__(
        self, parent: Frame | None, is_object: bool, begin: int, keys: frozenset[bytes], rule: Rule | None, state: Any
    ) -> None:
        self.parent = parent
        self.is_object = is_object
        self.begin = begin
        """Offset of its bracket in the text."""
        self.keys = keys
        """The keys so far, in UTF-8."""
        self.rule = rule
        self.state = state
        """The state of the rule."""
        self.watched: bool = (rule is not None and rule.vetoes) or (parent is not None and parent.watched)
        """A rule of this or of an outer container may veto something."""

    def keyed(self, text: bytes) -> Frame:
        """Return the frame after a complete key (JSON text with its quotes)."""
        key = encoded(json.loads(text)) if b"\\" in text else text[1:-1]
        if key in self.keys:
            raise Veto
        state = self.state if self.rule is None else self.rule.key(self.state, key.decode("utf-8", "surrogatepass"))
        return Frame(self.parent, True, self.begin, self.keys | {key}, self.rule, state)

    def filled(self, text: bytes) -> Frame:
        """Return the frame after a complete value."""
        assert self.rule is not None
        return Frame(self.parent, self.is_object, self.begin, self.keys, self.rule, self.rule.value(self.state, text))


class State(NamedTuple):
    """A position in the text."""

    mode: int = BEFORE_VALUE
    escaped: bool = False
    """In a string, after a backslash."""
    begin: int = 0
    """Offset of the key or value that is being read."""
    frame: Frame | None = None
    """The innermost open container."""


_NO_KEYS: frozenset[bytes] = frozenset()


def advance(state: State, text: bytearray, at: int, root: Callable[[int], Rule | None]) -> State:
    """Return the state after `text[at:]`.

    Args:
        text: the whole text so far.
        root: returns the rule of a document that begins with a byte.

    Raises:
        Veto: the text violates a rule, or repeats a key.
    """
    mode, escaped, begin, frame = state
    end = len(text)
    while at < end:
        if mode in (KEY, STRING):
            if escaped:
                at, escaped = at + 1, False
                continue
            at = _CHARACTERS.match(text, at).end()  # type: ignore[union-attr]
            if at == end:
                break
            escaped = text[at] != _QUOTE
            at += 1
            if escaped:
                continue
            if mode == KEY:
                assert frame is not None
                frame = frame.keyed(bytes(text[begin:at]))
            elif frame is not None and frame.rule is not None:
                frame = frame.filled(bytes(text[begin:at]))
            mode = AFTER
        elif mode == SCALAR:
            at = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
            if at < end:
                if frame is not None and frame.rule is not None:
                    frame = frame.filled(bytes(text[begin:at]))
                mode = AFTER
        else:
            byte = text[at]
            if byte == _QUOTE:
                mode, begin = (KEY if mode == BEFORE_KEY else STRING), at
            elif byte in _OPEN:
                if frame is None:
                    rule = root(byte)
                else:
                    rule = None if frame.rule is None else frame.rule.member(frame.state, byte)
                frame = Frame(frame, byte == _OPEN[0], at, _NO_KEYS, rule, None if rule is None else rule.start())
                mode = BEFORE_KEY if frame.is_object else BEFORE_VALUE
            elif byte in _CLOSE:
                assert frame is not None
                if frame.rule is not None:
                    frame.rule.close(frame.state)
                inner, frame = frame, frame.parent
                if frame is not None and frame.rule is not None:
                    frame = frame.filled(bytes(text[inner.begin : at + 1]))
                mode = AFTER
            elif byte == _COMMA:
                assert frame is not None
                if frame.rule is not None:
                    frame.rule.comma(frame.state)
                mode = BEFORE_KEY if frame.is_object else BEFORE_VALUE
            elif byte == _COLON:
                mode = BEFORE_VALUE
            elif byte not in _SPACE:
                mode, begin = SCALAR, at
            at += 1
    return State(mode, escaped, begin, frame)


def encoded(key: str) -> bytes:
    """Return a key in UTF-8. Lone surrogates, which JSON can escape, are kept."""
    return key.encode("utf-8", "surrogatepass")
