"""MaskWorker: owns matchers, accepts tokens, fills rows. A plain object: no thread, no Ray, no socket.

The same class runs inside the caller (`InlinePool`) and inside an actor.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import pack
from guided.errors import BackendError, DeadEnd, to_wire
from guided.messages import FillRow, OpenSequence, RowResult, RowStatus, StepRequest
from guided.vocabulary import Vocabulary

__all__ = ["MaskWorker"]


@dataclass(slots=True)
class _OpenMatcher:
    """One sequence on this worker: its matcher, and the output tokens that the matcher has accepted."""

    grammar: str
    matcher: Matcher
    tokens: list[int] = field(default_factory=list)


class MaskWorker:
    """Holds compiled grammars and open matchers for one vocabulary.

    Args:
        vocabulary: every row is ANDed with its permitted tokens, and its stop tokens are set exactly where the
            matcher accepts: no backend is trusted with either.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._grammars: dict[str, CompiledGrammar] = {}
        self._sequences: dict[int, _OpenMatcher] = {}
        stop = pack(vocabulary.stop_token_ids, vocabulary.padded_vocab_size)
        self._permitted = pack(vocabulary.permitted_token_ids, vocabulary.padded_vocab_size) & ~stop
        self._stop_words = np.flatnonzero(stop)
        self._stop_bits = stop[self._stop_words]

    @property
    def num_open(self) -> int:
        """Matchers that are open."""
        return len(self._sequences)

    def install(self, key: str, grammar: CompiledGrammar) -> None:
        """Make a compiled grammar available under `key`."""
        self._grammars[key] = grammar

    def uninstall(self, key: str) -> None:
        """Drop a grammar; open matchers keep what they need of it."""
        self._grammars.pop(key, None)

    def free(self, sequences: Iterable[int]) -> None:
        """Close matchers. Unknown ids are ignored."""
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def handle(self, request: StepRequest, bitmask: NDArray[np.int32]) -> Iterator[RowResult]:
        """Do one step's work; yields each row's result as soon as it is decided.

        Args:
            bitmask: int32 `[rows, words]`; row `fill.row` is written for each fill that ends `READY`, and no other.

        Nothing is raised: a row that fails ends its own sequence.
        """
        self.free(request.frees)
        opening = {message.sequence: message for message in request.opens}
        for fill in request.fills:
            yield self._fill(fill, opening.get(fill.sequence), bitmask)

    def forced_tokens(self, sequence: int) -> list[int]:
        """The only possible continuation of an open sequence, as token ids."""
        return self._sequences[sequence].matcher.forced_tokens()

    def _fill(self, fill: FillRow, opening: OpenSequence | None, bitmask: NDArray[np.int32]) -> RowResult:
        started = time.perf_counter()
        status, error = RowStatus.READY, None
        try:
            if opening is not None and fill.sequence not in self._sequences:
                self._open(opening)
            if self._advance(fill):
                self._write(self._sequences[fill.sequence].matcher, bitmask[fill.row])
            else:
                status = RowStatus.NEEDS_HISTORY
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # anything, a Rust panic too (no `Exception`): it ends this row and no other
            self._sequences.pop(fill.sequence, None)
            status, error = RowStatus.FAILED, to_wire(failure)
        seconds = time.perf_counter() - started
        return RowResult(fill.sequence, fill.position, fill.row, status, seconds, error)

    def _open(self, opening: OpenSequence) -> None:
        parent = self._sequences.get(opening.parent) if opening.parent is not None else None
        if parent is not None:
            copy = _OpenMatcher(parent.grammar, parent.matcher.fork(), list(parent.tokens))
        else:
            grammar = self._grammars.get(opening.grammar)
            if grammar is None:
                raise BackendError(f"grammar {opening.grammar} is not installed on this worker")
            copy = _OpenMatcher(opening.grammar, grammar.matcher())
        self._sequences[opening.sequence] = copy

    def _advance(self, fill: FillRow) -> bool:
        """Bring the matcher to `fill.position`: accept what is new, roll back what is not so any more."""
        state = self._sequences.get(fill.sequence)
        if state is None or fill.start > len(state.tokens):
            return False
        overlap = state.tokens[fill.start :]
        keep = fill.start + _common_prefix(overlap, fill.tokens)
        if keep < len(state.tokens):
            state.matcher.rollback(len(state.tokens) - keep)
            del state.tokens[keep:]
        fresh = fill.tokens[keep - fill.start :]
        if fresh:
            state.matcher.accept_tokens(fresh)
            state.tokens.extend(fresh)
        return True

    def _write(self, matcher: Matcher, row: NDArray[np.int32]) -> None:
        accepting = matcher.is_accepting()
        if matcher.is_terminated():
            row[:] = 0
        else:
            matcher.fill_bitmask(row)
            np.bitwise_and(row, self._permitted, out=row)
        if accepting or matcher.is_terminated():
            row[self._stop_words] |= self._stop_bits
        elif not row.any():
            raise DeadEnd("no token is allowed here, and the constraint is not satisfied")


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
