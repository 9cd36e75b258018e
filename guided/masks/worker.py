"""MaskWorker: owns matchers, accepts tokens, fills bitmask rows. A plain object: no
thread, no Ray, no socket.

The same class runs in the calling process (`InlinePool`) and in a mask actor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import numpy as np

from guided.backends.base import CompiledGrammar, Matcher, guard
from guided.bitmask import Bitmask
from guided.errors import BackendError, ConstraintNotMet, DeadEnd, GuidedError
from guided.masks.completing import BudgetedSequence, Completions
from guided.masks.slot_state import SlotState
from guided.vocabulary import TokenIds, Vocabulary

if TYPE_CHECKING:
    from guided.masks.vetoes import VetoedSlot

_native = guard("the grammar library")
_LOOK_AHEAD_SECONDS = 0.002
"""CPU time after which a look-ahead ends."""


class MaskWorker:
    """Open matchers for one vocabulary.

    Every row is ANDed with the vocabulary's text tokens (and the special tokens that a
    structural tag names), and its stop tokens are set exactly where the matcher
    accepts. No backend is trusted with either.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._slots: dict[int, SlotState] = {}
        self._stop_token_ids = frozenset(vocabulary.stop_token_ids)
        stop = vocabulary.mask(vocabulary.stop_token_ids)
        self._vocabulary = vocabulary
        self._stops = [(int(word), stop[word]) for word in np.flatnonzero(stop)]
        """(word of a mask, bits of stop tokens in it)."""
        self._nothing = bytes(stop.nbytes)
        """A mask that allows no token. Comparing bytes takes a quarter of the time of
        `row.any()`."""
        self._completions: Completions | None = None
        """Created for the first sequence with a budget."""
        self.steered: set[int] = set()
        """Slots in which a mask was restricted, so that the output fits in its
        budget."""
        self.vetoed: dict[int, VetoedSlot] = {}
        """Slot -> sequence of which tokens may be taken back."""

    @property
    def num_open(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def open(
        self,
        slot: int,
        grammar: CompiledGrammar,
        tokens: TokenIds = (),
        budget: int | None = None,
        final: int | None = None,
    ) -> None:
        """Open a matcher in a slot. An error is kept and returned by the slot's first
        `fill`.

        Args:
            tokens: the sequence's whole output so far.
            budget: the constraint is completed within so many output tokens, with the
                stop token.
            final: tokens after the first `final` may be taken back, as the report of
                `vetoed` says after each `fill`. None: all stay.
        """
        self.free([slot])
        self.steered.discard(slot)
        permitted = self._vocabulary.text_mask
        if grammar.special_token_ids:
            permitted = permitted | self._vocabulary.mask(grammar.special_token_ids)
        form = SlotState
        if final is not None and grammar.checked:
            # needed only where something is checked
            from guided.masks.vetoes import VetoedSlot

            form = VetoedSlot
        state = self._slots[slot] = form(
            permitted, grammar, rules=grammar.rules, edit=(0, tokens)
        )
        try:
            with _native:
                state.matcher = grammar.matcher()
                if budget is not None:
                    self._completions = self._completions or Completions(
                        self._vocabulary
                    )
                    state.budgeted = BudgetedSequence(
                        self._completions.of(grammar), budget
                    )
                if final is not None and grammar.checked:
                    self.vetoed[slot] = vetoed = cast("VetoedSlot", state)
                    vetoed.begin(self._vocabulary, final)
        except GuidedError as error:
            state.error = error

    def edit(self, slot: int, start: int, tokens: TokenIds) -> None:
        """Replace the output of a slot's sequence from position `start` on. Applied by
        the next `fill`."""
        state = self._slots.get(slot)
        if state is not None:
            pending_start, pending = state.edit or (start, ())
            if start > pending_start:  # the earlier edit has not been applied
                tokens = [*pending[: start - pending_start], *tokens]
                start = pending_start
            state.edit = start, tokens

    def length(self, slot: int) -> int:
        """Return how many output tokens of a slot's sequence the worker knows."""
        state = self._slots.get(slot)
        if state is None:
            return 0
        if state.edit is None:
            return len(state.tokens)
        return state.edit[0] + len(state.edit[1])

    def free(self, slots: Iterable[int]) -> None:
        """Close matchers. Free slots are ignored."""
        for slot in slots:
            self._slots.pop(slot, None)
            self.vetoed.pop(slot, None)

    def fill(self, slot: int, tokens: TokenIds, row: Bitmask) -> GuidedError | None:
        """Accept new tokens and write the next mask.

        Args:
            tokens: output tokens after those that the worker knows.
            row: int32 `[words]`; undefined if the result is an error.

        Returns:
            None, or why the sequence is over. Nothing is raised.
        """
        state = self._slots.get(slot)
        if state is None:
            return BackendError(f"slot {slot} is not open on this worker")
        if state.error is None:
            try:
                with _native:
                    self._advance(state, tokens, row)
                if state.budgeted is not None and state.budgeted.steered:
                    self.steered.add(slot)
            except GuidedError as error:
                state.error = error
                self._mend(state, row)
        return state.error

    def _mend(self, state: SlotState, row: Bitmask) -> None:
        """Go on from an earlier place, if the sequence has one. If not, it is over."""
        with contextlib.suppress(GuidedError), _native:
            for _ in state.retries():
                assert state.matcher is not None
                with contextlib.suppress(ConstraintNotMet, DeadEnd):
                    self._write(state, state.matcher, state.tokens, row)
                    state.error = None
                    return
        state.matcher = None

    def look_ahead(self, slot: int, row: Bitmask, run: Bitmask) -> None:
        """Write the forced tokens from a mask on: each is the only one that its mask
        allows, and would be sampled.

        Args:
            row: the mask that `fill` has written.
            run: int32 `[at least 2]`: receives the tokens, first that of `row`; -1
                after the last.
        """
        run[:] = -1
        token = _only_token(row)
        if token is None:
            return
        state = self._slots[slot]
        scratch = np.empty_like(row)
        matcher = state.matcher
        assert matcher is not None
        deadline = time.thread_time() + _LOOK_AHEAD_SECONDS
        # ignored: `fill` reports the error if the output gets there
        with contextlib.suppress(GuidedError), _native:
            ahead = matcher.fork()
            for place in range(len(run)):
                run[place] = token
                if token in self._stop_token_ids or time.thread_time() > deadline:
                    break
                ahead.accept_tokens([token])
                self._write(
                    state, ahead, [*state.tokens, *run[: place + 1].tolist()], scratch
                )
                token = _only_token(scratch)
                if token is None:
                    break

    def _advance(self, state: SlotState, tokens: TokenIds, row: Bitmask) -> None:
        matcher = state.matcher
        assert matcher is not None
        if state.edit is not None:
            tokens = self._rewind(state, tokens)
        if tokens:
            state.accept(tokens)
        self._write(state, matcher, state.tokens, row)

    def _rewind(self, state: SlotState, new_tokens: TokenIds) -> TokenIds:
        """Roll the matcher back to where the edited output differs from the accepted
        one; return what to accept."""
        assert state.edit is not None
        start, tokens = state.edit
        state.edit = None
        tokens = [*tokens, *new_tokens]
        pairs = zip(state.tokens[start:], tokens, strict=False)
        keep = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if keep < len(state.tokens):
            state.roll_back(keep)
        return tokens[keep - start :]

    def _write(
        self,
        state: SlotState,
        matcher: Matcher,
        output: TokenIds,
        row: Bitmask,
        anywhere: bool = False,
    ) -> None:
        """Write the mask after `output`. `anywhere`: with unusual line breaks, because
        nothing else is possible."""
        lines = state.grammar.line_breaks
        if anywhere:
            lines = None
        if matcher.is_terminated():
            row[:] = 0
            accepting = True
        else:
            accepting = matcher.fill_bitmask(row)
            permitted = state.permitted
            if lines:
                permitted = lines.permitted(
                    output, row, state.grammar.special_token_ids
                )
            np.bitwise_and(row, permitted, out=row)
            for rule in state.rules:
                rule.restrict(output, row, accepting)
            if state.budgeted is not None and matcher is state.matcher:
                state.budgeted.restrict(matcher, row)
                state.restrict(output, row, accepting)
        if accepting:
            for word, bits in self._stops:
                row[word] |= bits
        elif row.tobytes() == self._nothing:
            if lines:
                return self._write(state, matcher, output, row, anywhere=True)
            raise matcher.violation() or DeadEnd(
                "no token is allowed here, and the constraint is not satisfied"
            )


def _only_token(row: Bitmask) -> int | None:
    """Return the token that a mask allows if it is the only one."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1
