"""Placement: which sequence is on which actor, where the next one goes, and who has to leave for whom.

Sticky: a sequence stays where it is, unless somebody holds its actor up (a straggler gets a slow lane), or may end it
(a suspect is filled where nobody else is). Used from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.leases import NOBODY
from actors.link import Link
from actors.placed import Placed

__all__ = ["Placement"]

_SEPARATE_SECONDS = 10.0
"""So long a suspect waits for an actor that is empty, or that others can leave for another: longer than one takes to
start."""


class Placement:
    """The actors that are up, and the sequences on them."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.sequences: dict[int, Placed] = {}
        self.suspects: set[int] = set()
        """Ids of the sequences that may have ended an actor, until they have had a mask where nobody else was."""
        self.uneven = False
        """A slow lane isn't one any more, and has few sequences; or an actor is to be emptied."""

    def able(self, sequence: Placed) -> list[Link]:
        """The actors that could take a sequence: they have its grammar, and nobody has them to itself."""
        grammar = sequence.opening.grammar
        return [link for link in self.links if link.reserved_for is None and grammar in link.installed]

    def can_place(self, sequence: Placed, now: float) -> bool:
        """Whether it would find a place now."""
        if sequence.suspect:
            return self._cell(sequence, now) is not None
        return bool(self.able(sequence))

    def place(self, sequence: Placed, prompt: float, now: float) -> bool:
        """Put a sequence on its parent's actor, or on the one with the fewest; False where none can take it.

        Args:
            prompt: seconds that an actor may take for a mask without holding others up.
        """
        opening = sequence.opening
        parent = self.sequences.get(opening.parent) if opening.parent is not None else None
        link = parent.link if parent is not None else None
        if link is None or link.reserved_for is not None or link.retiring:
            able = self.able(sequence)
            if not able:
                return False
            able = [link for link in able if not link.retiring] or able
            # Where there are slow lanes, those who straggle go there and nobody else does.
            able = [link for link in able if bool(link.stragglers) == sequence.straggles] or able
            able = [link for link in able if link.is_prompt(now, prompt)] or able
            link = min(able, key=lambda link: len(link.sequences))
        if sequence.straggles:
            link.stragglers.add(opening.sequence)
        self._put(sequence, link)
        return True

    def withdraw(self, sequence: Placed) -> None:
        """Take a sequence off its actor, which lives: it has no place then."""
        link, sequence_id = sequence.link, sequence.opening.sequence
        if link is None:
            return
        link.sequences.discard(sequence_id)
        if sequence_id in link.stragglers:
            link.stragglers.discard(sequence_id)
            self.uneven = not link.stragglers
        if link.reserved_for == sequence_id:
            link.reserved_for = None
        if sequence.row != NOBODY:
            link.leases.give_back(sequence.row, watched=link.shared)
        if sequence.sent:
            link.free(sequence_id)
        sequence.displace()

    def remove(self, link: Link) -> list[Placed]:
        """An actor is gone: who was there, and still is as far as they know."""
        self.links.remove(link)
        return [self.sequences[each] for each in link.sequences]

    def _put(self, sequence: Placed, link: Link) -> None:
        sequence.link = link
        sequence.waiting_since = 0.0
        link.sequences.add(sequence.opening.sequence)

    # sequences that hold others up

    def to_lane(self, sequence: Placed) -> None:
        """It straggles: where there is a slow lane elsewhere it goes there."""
        link = sequence.link
        if link is not None and not link.stragglers and any(each.stragglers for each in self.links):
            self.withdraw(sequence)

    def make_way(self, prompt: float, now: float) -> list[int]:
        """A mask deadline was missed: where one mask holds an actor up, get the others out of its way.

        They are opened again elsewhere, from their histories. The actor that is held up is a slow lane from now on,
        unless there are enough: then the straggler goes to one with its next mask.

        Returns:
            Who has to be placed again.
        """
        stuck = [link for link in self.links if not link.is_prompt(now, prompt)]
        moved: list[int] = []
        for link in stuck:
            culprit = link.busy_with()
            straggler = self.sequences.get(culprit) if culprit is not None else None
            if straggler is not None and straggler.link is link:
                straggler.prompt_rows = 0
                lanes = sum(bool(each.stragglers) for each in self.links)
                if link.stragglers or lanes < len(self.links) // 2:
                    link.stragglers.add(straggler.opening.sequence)
            elsewhere = [each for each in self.links if each not in stuck and each.reserved_for is None]
            if any(not each.stragglers for each in elsewhere):
                # Who holds it up may be gone from it already.
                moved += self._clear(link, link.stragglers | {culprit})
        return moved

    def level(self) -> None:
        """Empty actors that are to be replaced; share with one that is no slow lane any more."""
        self.uneven = False
        for link in self.links:
            if link.retiring and any(not each.retiring and each.reserved_for is None for each in self.links):
                self._clear(link, {each for each in link.sequences if self.sequences[each].ask is not None})
                self.uneven |= bool(link.sequences)  # in a mask now: at the next step
        usual = [link for link in self.links if not link.stragglers and link.reserved_for is None and not link.retiring]
        if not usual:
            return
        most = max(usual, key=lambda link: len(link.sequences))
        fewest = min(usual, key=lambda link: len(link.sequences))
        movable = [each for each in most.sequences if self.sequences[each].ask is None]
        for sequence_id in movable[: (len(most.sequences) - len(fewest.sequences)) // 2]:
            self.withdraw(self.sequences[sequence_id])

    # sequences that may end an actor

    def isolate(self, sequence: Placed, now: float) -> bool:
        """Give a suspect an actor to itself; False where there is none to be had now. Others may have to leave it."""
        sequence_id, link = sequence.opening.sequence, sequence.link
        if link is not None and link.reserved_for == sequence_id:
            return True
        cell = self._cell(sequence, now)
        if cell is None:
            return False
        self._clear(cell, {sequence_id})
        if link is not cell:
            self.withdraw(sequence)
            self._put(sequence, cell)
        cell.reserved_for = sequence_id
        return True

    def clear_suspects(self) -> None:
        """Who has had a mask where nobody else was is like any other; so is an actor whose suspect is gone."""
        for sequence_id in list(self.suspects):
            sequence = self.sequences.get(sequence_id)
            if sequence is None or sequence.error is not None or sequence.confirmed:
                self.suspects.discard(sequence_id)
                if sequence is not None:
                    sequence.suspect = False
        for link in self.links:
            if link.reserved_for not in self.suspects:
                link.reserved_for = None

    def _cell(self, sequence: Placed, now: float) -> Link | None:
        """An actor for a suspect alone: an empty one, or one whose sequences can go elsewhere."""
        able = [link for link in self.able(sequence) if not link.leases.owes]
        if not able:
            return None
        fewest = min(able, key=lambda link: len(link.sequences))
        alone = fewest.sequences <= {sequence.opening.sequence}
        refuge = any(link is not fewest and link.reserved_for is None for link in self.links)
        waited = sequence.waiting_since and now - sequence.waiting_since > _SEPARATE_SECONDS
        return fewest if alone or refuge or waited else None

    def _clear(self, link: Link, staying: Iterable[int | None]) -> list[int]:
        """Take everybody else off an actor that lives."""
        leaving = list(link.sequences.difference(staying))
        for sequence_id in leaving:
            self.withdraw(self.sequences[sequence_id])
        return leaving
