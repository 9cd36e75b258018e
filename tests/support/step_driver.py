"""Drives a `Dispatcher` (or a pool) step by step: opens sequences, sets their outputs, reads the masks as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from byte_vocabulary import allowed, tokens
from numpy.typing import NDArray

from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.pools.protocol import Grammar, StepMasks
from guided.sequence import GuidedSequence

WAIT = 30.0


class Steps(Protocol):
    """The step methods of a pool."""

    def open(self, sequence: GuidedSequence, grammar: Grammar) -> None: ...
    def submit(self, sequences: list[GuidedSequence], new_tokens: NDArray[np.int32] | None = None) -> None: ...
    def collect(self, deadline: float | None = None) -> StepMasks: ...


def grammar_named(key: str) -> Grammar:
    return Grammar(key, "scripted", Constraint.json_object())


Outcome = str | GuidedError
"""A row's mask as the allowed characters, "late", or the error that it failed with."""


class StepDriver:
    """Sequences by number, and steps of them."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.sequences: dict[int, GuidedSequence] = {}
        self._submitted: list[int] = []

    def open(self, *numbers: int, grammar: str | Grammar = "fast", parent: int | None = None, text: str = "") -> None:
        for number in numbers:
            sequence = GuidedSequence(f"request-{number}", number, tokens(text), parent_id=parent)
            self.sequences[number] = sequence
            self.steps.open(sequence, grammar_named(grammar) if isinstance(grammar, str) else grammar)

    def submit(self, *outputs: tuple[int, str]) -> None:
        """Begin a step of sequences, each with its whole output."""
        for number, text in outputs:
            self.sequences[number].output_token_ids = tokens(text)
        self._submitted = [number for number, _ in outputs]
        self.steps.submit([self.sequences[number] for number in self._submitted])

    def collect(self, deadline: float | None = None) -> list[Outcome]:
        return outcomes(self.steps.collect(deadline), len(self._submitted))

    def step(self, *outputs: tuple[int, str], deadline: float | None = None) -> list[Outcome]:
        self.submit(*outputs)
        return self.collect(deadline)


def outcomes(found: StepMasks, count: int) -> list[Outcome]:
    """What became of each row of a step."""
    rows: dict[int, Outcome] = dict.fromkeys(found.late, "late")
    rows.update(found.failed)
    for part in found.ready:
        for row, slot in zip(part.rows.tolist(), part.slots.tolist(), strict=True):
            assert row not in rows, "a row has one outcome"
            rows[row] = allowed(part.masks[slot])
    return [rows[row] for row in range(count)]


def all_ready(found: Iterable[Outcome]) -> bool:
    return all(isinstance(each, str) and each != "late" for each in found)
