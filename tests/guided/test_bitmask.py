from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided.bitmask import allowed_ids, apply_bitmask, pack, words


@given(st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_pack_and_allowed_ids_are_inverse(case: tuple[int, set[int]]) -> None:
    size, ids = case
    row = pack(ids, size)
    assert row.dtype == np.int32
    assert row.shape == (words(size),)
    assert allowed_ids(row).tolist() == sorted(ids)


@given(st.data())
def test_apply_writes_minus_infinity_exactly_where_forbidden(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 100))
    batch = data.draw(st.integers(1, 5))
    rows = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(0, batch))]
    allowed = [data.draw(st.sets(st.integers(0, size - 1))) for _ in rows]
    logits = torch.randn(batch, size)
    before = logits.clone()
    masks = np.stack([pack(ids, size) for ids in allowed]) if rows else np.empty((0, words(size)), np.int32)

    apply_bitmask(logits, masks, rows)

    for row in range(batch):
        for token in range(size):
            forbidden = row in rows and token not in allowed[rows.index(row)]
            assert logits[row, token] == (float("-inf") if forbidden else before[row, token])


def test_columns_beyond_the_bitmask_are_forbidden() -> None:
    logits = torch.zeros(2, 70)
    apply_bitmask(logits, np.full((1, 2), -1, np.int32), [1])
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1, :64]).all()
    assert torch.isneginf(logits[1, 64:]).all()


def test_a_row_of_a_strided_bitmask_is_read_right() -> None:
    segment = np.zeros((4, 3), np.int32)
    segment[::2, 0] = 1
    logits = torch.zeros(2, 96)
    apply_bitmask(logits, segment[::2], [0, 1])
    assert torch.isfinite(logits[:, 0]).all()
    assert torch.isneginf(logits[:, 1:]).all()
