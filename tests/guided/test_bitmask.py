from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from guided.bitmask import allowed_ids, pack, words


@given(st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_pack_and_allowed_ids_are_inverse(case: tuple[int, set[int]]) -> None:
    size, ids = case
    row = pack(ids, size)
    assert row.dtype == np.int32
    assert row.shape == (words(size),)
    assert allowed_ids(row).tolist() == sorted(ids)
