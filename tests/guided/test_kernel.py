from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided import kernel
from guided.bitmask import pack, words
from guided.kernel import apply_bitmask

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
"""The last one is masked by torch."""


def masked(logits: torch.Tensor, allowed: list[set[int]], rows: list[int]) -> torch.Tensor:
    expected = logits.clone()
    for row, ids in zip(rows, allowed, strict=True):
        expected[row, [token for token in range(logits.shape[1]) if token not in ids]] = float("-inf")
    return expected


def noise(batch: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(batch, size).to(dtype)
    logits[:, ::3] = float("inf")
    logits[:, 1::7] = -0.0
    logits[:, 2::11] = float("-inf")
    return logits


@given(data=st.data())
def test_forbidden_logits_become_minus_infinity(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    rows = data.draw(st.permutations(range(4)))[: data.draw(st.integers(0, 4))]
    tokens = st.sets(st.integers(0, size - 1))
    allowed = [ids if data.draw(st.booleans()) else set(range(size)) - ids for ids in (data.draw(tokens) for _ in rows)]
    logits = noise(4, size + data.draw(st.sampled_from([0, 40])), data.draw(st.sampled_from(DTYPES)))
    expected = masked(logits, allowed, rows)
    others = [row for row in range(4) if row not in rows]
    expected[others] = logits[others]
    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1], [3, 1], [4]], ids=str)
@pytest.mark.parametrize("beyond", [0, 5])
def test_the_cuda_way_masks_the_right_rows(monkeypatch: pytest.MonkeyPatch, rows: list[int], beyond: int) -> None:
    """On a CPU, which has neither a current device nor pinned memory."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **named: empty(*shape, **named))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    size = 4090
    width = words(size) * 32 + beyond if beyond else size
    allowed = [{row, row + 700, size - 1} for row in rows]
    logits = noise(5, width, torch.float32)
    expected = masked(logits, allowed, rows)
    kernel._apply_on_cuda(logits, [pack(ids, size) for ids in allowed], rows)
    assert torch.equal(logits, expected)


def test_a_kernel_that_fails_is_replaced_by_torch_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def broken(logits: torch.Tensor, masks: Any, rows: list[int]) -> None:
        calls.append(len(rows))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernel, "_apply_on_cuda", broken)
    monkeypatch.setattr(kernel, "_cuda_failed", False)
    for _ in range(3):
        logits = noise(2, 640, torch.float32)
        expected = masked(logits, [{3}, {600}], [0, 1])
        kernel._apply_on_cuda_or_by_torch(logits, [pack({3}, 640), pack({600}, 640)], [0, 1])
        assert torch.equal(logits, expected)
    assert calls == [2]
    assert [record.message for record in caplog.records] == [
        "the kernel of masks failed on cpu: this process goes on with torch"
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1], [4]], ids=str)
def test_on_cuda_it_is_as_on_the_cpu(dtype: torch.dtype, rows: list[int]) -> None:
    allowed = [{row, row + 700, 4089} for row in rows]
    logits = noise(max(3, max(rows) + 1), 4090, dtype)
    on_gpu = logits.cuda()
    expected = masked(logits, allowed, rows)
    apply_bitmask(on_gpu, [pack(ids, 4090) for ids in allowed], rows)
    assert torch.equal(on_gpu.cpu(), expected)
    assert not kernel._cuda_failed
