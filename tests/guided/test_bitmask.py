from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided import bitmask
from guided.bitmask import allowed_ids, apply_bitmask, load_loose_kernel, pack, words


@given(st.integers(1, 300).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_pack_and_allowed_ids_are_inverse(case: tuple[int, set[int]]) -> None:
    size, ids = case
    row = pack(ids, size)
    assert row.dtype == np.int32
    assert row.shape == (words(size),)
    assert allowed_ids(row).tolist() == sorted(ids)


@pytest.fixture(params=["table", "xgrammar", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways there are: a table's, xgrammar's for what is loose (here: everything), torch's for other types."""
    pytest.importorskip("xgrammar")
    if request.param == "table":
        monkeypatch.setattr(bitmask, "_loose_rows", lambda masks: np.zeros(len(masks), np.bool_))
    elif request.param == "xgrammar":
        monkeypatch.setattr(bitmask, "_loose_rows", lambda masks: np.ones(len(masks), np.bool_))
    return str(request.param)


def dtype(kernel: str) -> torch.dtype:
    return torch.bfloat16 if kernel == "torch" else torch.float32


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_apply_writes_minus_infinity_exactly_where_forbidden(kernel: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 100)) + (1000 if kernel == "xgrammar" else 0)
    batch = data.draw(st.integers(1, 5))
    rows = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(0, batch))]
    allowed = [data.draw(st.sets(st.integers(0, size - 1))) for _ in rows]
    logits = torch.randn(batch, size).to(dtype(kernel))
    logits[:, ::3] = float("inf")
    logits[:, 1::7] = -0.0
    before = logits.clone()
    masks = np.stack([pack(ids, size) for ids in allowed]) if rows else np.empty((0, words(size)), np.int32)

    apply_bitmask(logits, masks, rows)

    for row, ids in zip(rows, allowed, strict=True):
        before[row, [token for token in range(size) if token not in ids]] = float("-inf")
    assert torch.equal(logits, before)


def test_columns_beyond_the_bitmask_are_forbidden(kernel: str) -> None:
    logits = torch.zeros(2, 70, dtype=dtype(kernel))
    apply_bitmask(logits, np.full((1, 2), -1, np.int32), [1])
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1, :64]).all()
    assert torch.isneginf(logits[1, 64:]).all()


def test_a_row_of_a_strided_bitmask_is_read_right(kernel: str) -> None:
    segment = np.zeros((4, 3), np.int32)
    segment[::2, 0] = 1
    logits = torch.zeros(2, 96, dtype=dtype(kernel))
    apply_bitmask(logits, segment[::2], [0, 1])
    assert torch.isfinite(logits[:, 0]).all()
    assert torch.isneginf(logits[:, 1:]).all()


def test_loose_and_tight_rows_of_one_batch_each_go_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    load_loose_kernel()
    for thread in threading.enumerate():
        if thread.name == "load-xgrammar":
            thread.join(60)
    size, seen = 4096, []
    kernel = sys.modules["xgrammar"].apply_token_bitmask_inplace

    def recorded(logits: torch.Tensor, *arguments: object, indices: list[int], **others: object) -> None:
        seen.append(indices)
        kernel(logits, *arguments, indices=indices, **others)

    monkeypatch.setattr(sys.modules["xgrammar"], "apply_token_bitmask_inplace", recorded)
    forbidden = [{1, 2, 3}, set(range(1, size)), set(range(0, size, 2)), {7}, set()]
    masks = np.stack([pack(set(range(size)) - ids, size) for ids in forbidden])
    logits = torch.zeros(7, size)
    rows = [6, 0, 3, 1, 5]
    apply_bitmask(logits, masks, rows)
    assert seen == [[6, 1, 5]]
    for row, ids in zip(rows, forbidden, strict=True):
        assert set(torch.isneginf(logits[row]).nonzero().flatten().tolist()) == ids
    assert torch.isfinite(logits[[2, 4]]).all()


def test_without_xgrammar_every_row_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
    logits = torch.zeros(1, 64)
    apply_bitmask(logits, pack(set(range(64)) - {5}, 64)[None], [0])
    assert torch.isneginf(logits[0]).nonzero().flatten().tolist() == [5]
