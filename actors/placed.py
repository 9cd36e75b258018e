"""Placed: one open sequence, as the engine's thread knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.leases import NOBODY
from actors.link import Link
from guided.errors import GuidedError
from guided.messages import OpenSequence
from guided.pool import Fill

__all__ = ["Ask", "Placed"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A fill that was late: what was asked for, and the number of the request it went out with."""

    number: int
    fill: Fill

    def is_for(self, fill: Fill) -> bool:
        """Whether `fill` asks for the same: nothing new, or the same tokens once more."""
        mine = self.fill
        if mine.start + len(mine.tokens) != fill.start + len(fill.tokens):
            return False
        return not fill.tokens or (mine.start == fill.start and list(mine.tokens) == list(fill.tokens))


@dataclass(slots=True, eq=False)
class Placed:
    """An open sequence: where it is, and what is under way for it."""

    opening: OpenSequence
    link: Link | None
    """Where it is placed; None while it has to be placed (again)."""
    row: int = NOBODY
    """The row of that actor's segment that it keeps from step to step."""
    usual: bool = False
    """Nothing about it needs a thought: it is open there, prompt, and nothing of it is under way."""
    serial: int = 0
    """The step that it was last filled in."""
    sent: bool = False
    """The actor may have a matcher for it."""
    confirmed: bool = False
    """The actor has a matcher for it."""
    ask: Ask | None = None
    """Its newest fill, where that was late; it is in `row`."""
    seconds: float = 0.0
    """What its last row took in the worker, where that was long."""
    prompt_rows: int = -1
    """Where it holds others up: how many rows in a row it hasn't; -1 where it doesn't."""
    waiting_since: float = 0.0
    """`time.monotonic()` since when it has been on no actor, and would be; 0 where it is on one."""
    displaced: bool = False
    """It was somewhere else before: no actor has its history."""
    suspect: bool = False
    """It may have ended an actor: its next row is filled where nobody else is."""
    deaths: int = 0
    """Actors that ended with its row, and no other, in their hands."""
    moves: int = 0
    """Actors that ended while it was there, since it last had a mask."""
    error: GuidedError | None = None
    """Why it is over."""

    @property
    def straggles(self) -> bool:
        """Whether it belongs on a slow lane."""
        return self.prompt_rows >= 0

    def displace(self) -> None:
        """Forget where it was: it is placed again when it is next filled."""
        if self.sent:
            # Its parent may be anywhere by then: it goes its own way, with its own history.
            self.opening = OpenSequence(self.opening.sequence, self.opening.grammar)
            self.displaced = True
        self.waiting_since = time.monotonic()
        self.link = self.ask = None
        self.row = NOBODY
        self.usual = self.sent = self.confirmed = False
