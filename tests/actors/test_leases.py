"""A row is lent to one sequence at a time, until the worker answered for what it was sent out with."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.leases import NOBODY, Leases
from actors.segment import Rows

ROWS = 5


class Machine(RuleBasedStateMachine):
    """Leases against a model: who holds a row, what the worker owes, and what came back and may not be lent yet."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Rows.private(ROWS, 1)
        self.leases = Leases(self.memory)
        self.held: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.kept: set[int] = set()
        self.number = 0
        self.sequence = 0

    @rule()
    def take(self) -> None:
        self.sequence += 1
        row = self.leases.take(self.sequence)
        if row == NOBODY:
            assert len(self.held.keys() | self.kept) == ROWS
            return
        assert row not in self.held, "lent twice"
        assert row not in self.kept, "lent while the worker may still write it, or its mask be read"
        assert self.leases.owners[row] == self.sequence
        self.held[row] = self.sequence

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.number += 1
        self.leases.ask(np.array(rows, np.intp), self.number, float(self.number))
        self.asked.update(dict.fromkeys(rows, self.number))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), late=st.booleans())
    def the_worker_answers(self, data: st.DataObject, late: bool) -> None:
        """In the memory; perhaps for a request that was not the newest."""
        row = data.draw(st.sampled_from(sorted(self.asked)))
        self.memory.done[row] = self.asked[row] - late
        if not late:
            del self.asked[row]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[row]
        self.leases.give_back(row)
        self.kept.add(row)

    @rule()
    def renew(self) -> None:
        self.leases.renew()
        self.kept &= self.asked.keys()

    @invariant()
    def what_is_owed_is_known(self) -> None:
        assert self.leases.outstanding() == sorted(self.asked)
        oldest = min(self.asked.values(), default=math.inf)
        assert self.leases.oldest() == oldest
        assert self.leases.unanswered(oldest + 0.5) == sorted(r for r, n in self.asked.items() if n == oldest)
        assert self.leases.owes == bool(self.asked)


TestLeases = Machine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nobody_waits_for_the_answer_of_a_row_that_is_not_watched() -> None:
    leases = Leases(Rows.private(1, 1))
    row = leases.take(7)
    leases.ask(np.array([row]), 1, 0.0)
    leases.give_back(row, watched=False)
    assert leases.oldest() == math.inf
    assert leases.owes
    leases.renew()
    assert leases.take(8) == NOBODY, "it is the worker's all the same"
