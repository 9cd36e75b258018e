"""A grammar with a mask that waits until the test releases it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scripted_grammar import ScriptedGrammar, ScriptedMatcher


class SlowGrammar(ScriptedGrammar):
    """The mask at position `slow_at` comes when `release` is set; `reached` says that it was asked for.

    Forks of its matchers are quick.
    """

    def __init__(self, sentences: Sequence[Sequence[int]], slow_at: int) -> None:
        super().__init__(sentences)
        self.slow_at = slow_at
        self.reached = threading.Event()
        self.release = threading.Event()
        self.fills_at: Counter[int] = Counter()
        """Masks that were computed, by position."""

    def matcher(self) -> ScriptedMatcher:
        return _SlowMatcher(self, [])


class _SlowMatcher(ScriptedMatcher):
    grammar: SlowGrammar

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        self.grammar.fills_at[len(self.tokens)] += 1
        if len(self.tokens) == self.grammar.slow_at:
            self.grammar.reached.set()
            assert self.grammar.release.wait(60)
        return super().fill_bitmask(row)
