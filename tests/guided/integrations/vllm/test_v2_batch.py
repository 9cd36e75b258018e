"""Slots of vLLM's V2 runner: reused without notice, with tokens that are copied step by step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from guided.integrations.vllm.v2_batch import V2Batch, V2Row


def test_filling_a_slot_returns_the_previous_request() -> None:
    subject = V2Batch[str]()
    assert subject.put(3, "a", 5, 0) is None
    assert subject.put(3, "b", 2, 0) == "a"
    assert subject.put(3, None, 2, 0) == "b"
    assert subject.put(3, None, 2, 0) is None
    assert list(subject) == []


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20), st.integers(1, 3))
def test_copied_tokens_are_added(steps: list[tuple[int, bool]], width: int) -> None:
    """Some steps add more tokens than were copied, some copies are never read."""
    subject = V2Batch[str]()
    subject.put(0, "a", 3, 0)
    real = [90, 91, 92]
    for count, read in steps:
        real += [len(real) + place for place in range(count)]
        if not read:
            continue
        start = subject[0].length
        window = (real[start:] + [77] * width)[:width]
        short = subject.add_tokens({0: len(real)}, {0: window})
        assert short == ([0] if len(real) - start > width else [])
        if short:
            assert subject.add_tokens({0: len(real)}, {0: real[start:]}) == []
        assert subject[0].tokens == real[3:]


def test_an_output_that_became_shorter_is_cut() -> None:
    subject = V2Batch[str]()
    subject.put(1, "a", 2, 3)
    subject.add_tokens({1: 5}, {1: [10, 11, 12, 0]})
    assert (subject[1].tokens, subject[1].prior) == ([10, 11, 12], 0)
    subject.add_tokens({1: 3}, {1: [9, 9]})
    assert subject[1].tokens == [10]


def test_a_request_that_is_absent_for_long_is_returned_once() -> None:
    subject = V2Batch[str]()
    subject.put(0, "a", 1, 0)
    subject.put(1, "b", 1, 0)
    assert [subject.count_absent({0}, 2) for _ in range(4)] == [[], ["b"], [], []]
    assert subject.count_absent({1}, 2) == []
    assert [subject.count_absent({0}, 2) for _ in range(2)] == [[], ["b"]]


def test_rows_of_a_request_are_ordered_by_draft_count() -> None:
    subject = V2Batch[str]()
    subject.put(4, "a", 1, 0)
    subject.put(2, "b", 1, 0)
    rows = subject.rows([4, 4, 4, 9, 2, 2], [0, 1, 2, 0, 0, 1])
    assert rows == [V2Row(2, 4, 0), V2Row(2, 5, 1), V2Row(4, 0, 0), V2Row(4, 1, 1), V2Row(4, 2, 2)]
