"""`V1Batch` against a model of vLLM's V1 batch that has only request ids and rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from guided.integrations.vllm.v1_batch import V1Batch


@dataclass
class Batch:
    """vLLM's persistent batch: rows 0 to n - 1, holes are filled from the end, any two rows may be swapped."""

    rows: list[str | None] = field(default_factory=list)
    guided: set[str] = field(default_factory=set)
    made: int = 0

    def enter(self, guided: bool) -> str:
        name = f"r{self.made}"
        self.made += 1
        if guided:
            self.guided.add(name)
        return name

    def expected(self) -> dict[int, str]:
        return {row: name for row, name in enumerate(self.rows) if name is not None and name in self.guided}


Step = tuple[list[int], list[bool], list[tuple[int, int]]]
steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=4, unique=True),  # rows that end
        st.lists(st.booleans(), max_size=4),  # requests that enter: guided or not
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),  # rows that swap
    ),
    max_size=12,
)


@settings(max_examples=300)
@given(steps=steps)
def test_requests_are_in_their_rows_and_those_that_leave_are_returned_once(steps: list[Step]) -> None:
    batch, subject = Batch(), V1Batch[str]()
    left: list[str] = []
    for ends, entering, swaps in steps:
        removed = sorted({row for row in ends if row < len(batch.rows)}, reverse=True)
        gone = [batch.rows[row] for row in removed]
        for row in removed:
            batch.rows[row] = None
        added: list[tuple[int, str | None]] = []
        for guided in entering:  # as vLLM: holes first, the lowest one, which then counts as not removed
            name = batch.enter(guided)
            hole = min((row for row in removed), default=None)
            if hole is None:
                batch.rows.append(name)
                hole = len(batch.rows) - 1
            else:
                removed.remove(hole)
                batch.rows[hole] = name
            added.append((hole, name if guided else None))
        moved = _condense(batch)
        for one, other in swaps:
            if one != other and max(one, other) < len(batch.rows):
                batch.rows[one], batch.rows[other] = batch.rows[other], batch.rows[one]
                moved.append((one, other, True))
        returned = subject.update(removed, added, moved)
        assert dict(subject) == batch.expected()
        assert sorted(returned) == sorted(name for name in gone if name in batch.guided)
        left += returned
    assert len(set(left)) == len(left)


def _condense(batch: Batch) -> list[tuple[int, int, bool]]:
    """Fill holes with the last rows, one-way."""
    moved: list[tuple[int, int, bool]] = []
    while None in batch.rows:
        if batch.rows[-1] is None:
            batch.rows.pop()
            continue
        hole, last = batch.rows.index(None), len(batch.rows) - 1
        batch.rows[hole] = batch.rows.pop()
        moved.append((last, hole, False))
    return moved


def test_removed_then_added_then_moved() -> None:
    subject = V1Batch[str]()
    assert subject.update([], [(0, "a"), (1, "b"), (2, None), (3, "d")], []) == []
    # The requests of rows 0 and 1 end, e enters row 1, d moves to row 0 and then swaps with e.
    assert subject.update([0], [(1, "e")], [(3, 0, False), (0, 1, True)]) == ["a", "b"]
    assert dict(subject) == {0: "e", 1: "d"}


def test_a_one_way_move_ends_the_request_in_the_target_row_and_a_swap_with_an_empty_row_is_a_move() -> None:
    subject = V1Batch[str]()
    subject.update([], [(0, "a"), (1, "b")], [])
    assert subject.update([], [], [(1, 0, False)]) == ["a"]
    assert subject.update([], [], [(5, 0, True)]) == []
    assert dict(subject) == {5: "b"}


def test_rows_come_in_order() -> None:
    subject = V1Batch[str]()
    subject.update([], [(7, "h"), (2, "c"), (11, "l")], [])
    assert list(subject) == [(2, "c"), (7, "h"), (11, "l")]
