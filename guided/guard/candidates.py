"""The tokens of a mask that the guard may have to veto. Each of them is then checked on its own."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from guided.bitmask import allows, pack
from guided.guard.outlook import forbidden, restriction
from guided.guard.plan import Plan
from guided.guard.text import AFTER, BEFORE_KEY, KEY, SCALAR, STRING, Choice, Frame, State
from guided.guard.tokens import TokenIndex

_DIGITS = re.compile(rb"-?\d*")


class Candidates:
    """The candidates in one mask.

    Args:
        text: the whole text so far.
        row: int32 `[words]`: the tokens that the library allows.
    """

    def __init__(self, index: TokenIndex, state: State, text: bytearray, row: NDArray[np.int32]) -> None:
        self._index = index
        self._state = state
        self._text = text
        self._row = row
        self._in_key = state.mode in (KEY, BEFORE_KEY)
        self._leads = (b"",) if state.mode in (KEY, STRING, SCALAR) else (b"", b" ")
        """Text that may come before a key or value in the token that begins it."""

    def find(self, plan: Plan, *, look_ahead: bool) -> Iterable[int]:
        """Return all allowed tokens that may have to be vetoed. Some that must be are cleared in `row` instead.

        Args:
            look_ahead: also return tokens after which the library may allow forbidden texts only.
        """
        index, state, row = self._index, self._state, self._row
        mode, frame = state.mode, state.frame
        if state.escaped:
            return index.quoted.allowed(row)
        found = set(index.has_later_key.allowed(row))
        if self._in_key:
            assert frame is not None
            found.update(self._ending_keys(frame))
        if plan.planner is not None:
            found.update((index.ends_string_and_opens if mode in (KEY, STRING) else index.opens).allowed(row))
            if frame is None or frame.watched:
                found.update(self._ending_in_violation())
        if look_ahead:
            found.update(self._towards_forbidden(plan))
        return found

    def _ending_keys(self, frame: Frame) -> Iterable[int]:
        """Return the tokens that may end a key which is not allowed."""
        index, row = self._index, self._row
        keys = frame.keys if frame.rule is None else frame.keys | frame.rule.names
        if not keys:
            return ()
        if self._state.mode == BEFORE_KEY:
            return self._allowed(token for key in keys for token in index.by_key.get(key, ()))
        started = bytes(self._text[self._state.begin + 1 :])
        if b"\\" in started:
            return index.quoted.allowed(row)
        rests = [key[len(started) :] + b'"' for key in keys if key.startswith(started)]
        found = index.ends_after_escape.allowed(row) if rests else []
        return found + self._allowed(token for rest in rests for token in index.starting_with(rest))

    def _ending_in_violation(self) -> Iterable[int]:
        """Return the tokens that may complete a forbidden value, or end a container too early or too late."""
        index, state, row = self._index, self._state, self._row
        found: set[int] = set()
        if not _is_quiet(state):
            if state.mode in (KEY, STRING):
                found.update(index.ends_string_and_more.allowed(row))
            else:
                ends = {AFTER: index.after_value, SCALAR: index.ends_scalar}.get(state.mode, index.has_end)
                found.update(ends.allowed(row))
        if (restricted := restriction(state, self._text)) is not None:
            found.update(self._restricted(*restricted))
        return found

    def _restricted(self, choice: Choice, partial: bytes) -> Iterable[int]:
        """Return the tokens that may violate a restriction. Clears tokens that continue none of the texts in `only`."""
        index, row = self._index, self._row
        if choice.only is not None:
            rests = [text[len(partial) :] for text in choice.only if text.startswith(partial)]
            found = {*self._along(rests), *self._completing(rests)}
            found.update(index.blank.allowed(row), index.after_value.allowed(row))
            row &= pack(sorted(found), len(row) * 32)[: len(row)]
            return self._allowed(found)
        rests = [text[len(partial) :] for text in choice.never if text.startswith(partial)]
        found = set(self._allowed(self._completing(rests)))
        if b"\\" in partial:
            found.update(index.quoted.allowed(row))
        elif partial.startswith(b"-0") or (partial[:1] != b'"' and not _DIGITS.fullmatch(partial)):
            found.update(index.ends_scalar.allowed(row))  # another way to write a number
        return found

    def _towards_forbidden(self, plan: Plan) -> Iterable[int]:
        """Return the tokens that lead towards a forbidden text."""
        index, mode, frame = self._index, self._state.mode, self._state.frame
        found: set[int] = set()
        outer = frame
        while outer is not None and not plan.runs_out(outer):
            outer = outer.parent
        if outer is not None and not self._in_key:  # the end of a value may be followed by a comma and a key
            ends = {STRING: index.ends_string_and_more, SCALAR: index.ends_scalar}.get(mode, index.has_end)
            found.update(ends.allowed(self._row))
        if plan.ending_names is not None:
            found.update(index.begins_later_key.allowed(self._row))
        for partial, texts, _ in forbidden(self._state, self._text, plan.ending_keys):
            rests = [text[len(partial) :] for text in texts]
            found.update(self._along(rests), self._completing(rests))
            if texts[0][:1] in (b"{", b"[") and mode not in (KEY, STRING):
                found.update(index.spaced.allowed(self._row))
        return self._allowed(found)

    def _along(self, rests: list[bytes]) -> Iterable[int]:
        """Return the tokens that begin the rest of a text, and do not complete it."""
        return (token for rest in rests for lead in self._leads for token in self._index.beginning(lead + rest))

    def _completing(self, rests: list[bytes]) -> Iterable[int]:
        """Return the tokens that complete a text. After a complete number, these are the tokens that end it."""
        for rest in rests:
            if not rest:
                yield from self._index.ends_scalar.allowed(self._row)
            for lead in self._leads if rest else ():
                yield from self._index.starting_with(lead + rest)

    def _allowed(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if allows(self._row, token)]


def _is_quiet(state: State) -> bool:
    """Whether no comma and no end of a container can be vetoed next."""
    frame, complete = state.frame, state.mode == AFTER
    if frame is None:
        return False
    outer = False
    while frame is not None:
        rule = frame.rule
        if rule is not None and rule.vetoes:
            if not rule.is_quiet(frame.state, complete):
                return False
            if outer and not frame.is_object and rule.choice(frame.state, False) is not None:
                return False  # the end of the inner container completes an item of this one
        frame, complete, outer = frame.parent, False, True
    return True
