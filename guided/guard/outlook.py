"""What the text must not become: restrictions of the key or value that is read, and of the containers around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from guided.guard.rules import minified
from guided.guard.text import AFTER, BEFORE_KEY, BEFORE_VALUE, KEY, Choice, Frame, State

_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*"?)|[ \t\r\n]+', re.DOTALL)


class Forbidden(NamedTuple):
    """Texts that a key or value must not become, though the library may allow no others."""

    partial: bytes
    """The beginning of the key or value that was read, without whitespace; empty before it."""
    texts: list[bytes]
    """Whole texts (JSON without whitespace) that begin with `partial`."""
    is_avoidable: bool = False
    """Another value, which can be continued, may begin here."""


def restriction(state: State, text: bytearray) -> tuple[Choice, bytes] | None:
    """Return the restriction of the current or next key or value, and the part of it that was read."""
    mode, frame = state.mode, state.frame
    if mode == AFTER or frame is None or frame.rule is None or not frame.rule.vetoes:
        return None
    choice = frame.rule.choice(frame.state, mode in (KEY, BEFORE_KEY))
    return None if choice is None else (choice, _partial(state, text))


def may_continue(state: State, text: bytearray) -> bool:
    """Whether the current key or value may become one of the allowed texts, if these are restricted. Raises `Veto`."""
    found, frame = restriction(state, text), state.frame
    if found is None or found[0].only is None or any(one.startswith(found[1]) for one in found[0].only):
        return True
    if state.mode != BEFORE_KEY or frame is None or frame.keys or frame.rule is None:
        return False
    frame.rule.close(frame.state)  # no key may come: an object has to end at once
    return True


def forbidden(state: State, text: bytearray, ending_keys: Callable[[Frame], list[str]]) -> Iterator[Forbidden]:
    """Yield the forbidden texts that the current key or value, or an open container, may still become.

    Args:
        ending_keys: returns the keys of an object after which a key that begins like them may have to end.
    """
    frame = state.frame
    if frame is None:
        return
    if state.mode in (KEY, BEFORE_KEY) and (used := ending_keys(frame)):
        partial = _partial(state, text)
        if texts := [text for text in map(minified, used) if text.startswith(partial)]:
            yield Forbidden(partial, texts)
    if not frame.watched:
        return
    if (found := restriction(state, text)) is not None:
        choice, partial = found
        texts = [one for one in choice.never if one.startswith(partial) and not choice.goes_on(one, partial)]
        # Where few values are possible, one of them may come. But the library spells each number in one way only.
        if texts and (choice.only is None or partial[:1] not in (b"", b'"')):
            yield Forbidden(partial, texts, is_avoidable=not partial and bool(choice.endless))
    yield from _forbidden_containers(frame, text)


def _partial(state: State, text: bytearray) -> bytes:
    return b"" if state.mode in (BEFORE_KEY, BEFORE_VALUE) else bytes(text[state.begin :])


def _forbidden_containers(inner: Frame, text: bytearray) -> Iterator[Forbidden]:
    """Yield the forbidden texts that the open containers may become, for example in an array of unique objects."""
    while (outer := inner.parent) is not None:
        choice = outer.rule.choice(outer.state, False) if outer.rule is not None and outer.rule.vetoes else None
        if choice is not None and choice.never and text[inner.begin] not in choice.endless:
            partial = _SPACE.sub(lambda match: match[1] or b"", text[inner.begin :])
            if texts := [one for one in choice.never if one.startswith(partial)]:
                yield Forbidden(partial, texts)
        inner = outer
