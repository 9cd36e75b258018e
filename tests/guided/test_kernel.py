from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_device import GPU, FakeDevice, fake_device
from hypothesis import given
from hypothesis import strategies as st

from guided.bitmask import pack, words
from guided.processors import kernel
from guided.processors.kernel import BitmaskKernel, apply_bitmask
from guided.processors.pinned_masks import pin_masks, pinned_end, unpin_masks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
"""The last one is masked by torch."""


def masked(
    logits: torch.Tensor, allowed: list[set[int]], rows: list[int]
) -> torch.Tensor:
    expected = logits.clone()
    for row, ids in zip(rows, allowed, strict=True):
        expected[
            row, [token for token in range(logits.shape[1]) if token not in ids]
        ] = float("-inf")
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
    allowed = [
        ids if data.draw(st.booleans()) else set(range(size)) - ids
        for ids in (data.draw(tokens) for _ in rows)
    ]
    logits = noise(
        4,
        size + data.draw(st.sampled_from([0, 40])),
        data.draw(st.sampled_from(DTYPES)),
    )
    expected = masked(logits, allowed, rows)
    others = [row for row in range(4) if row not in rows]
    expected[others] = logits[others]
    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows)
    assert torch.equal(logits, expected)


# -- the kernel on CUDA


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    with fake_device(monkeypatch) as device:
        yield device


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    ("size", "beyond"), [(31, 0), (640, 5), (4090, 100), (50257, 64)]
)
def test_the_kernel_masks_as_on_the_cpu(
    device: FakeDevice, dtype: torch.dtype, size: int, beyond: int
) -> None:
    """Masks in two tables, of which one is pinned in part, and rows that are not the
    batch's first."""
    rng = np.random.default_rng(size)
    tables = [
        rng.integers(-(1 << 31), 1 << 31, (9, words(size)), np.int64).astype(np.int32)
        for _ in range(2)
    ]
    pin_masks(tables[1], 3, GPU)
    masks = [(tables[0], np.array([8, 0])), (tables[1], np.array([2, 5, 1]))]
    rows = np.array([4, 0, 6, 1, 3])
    logits = noise(7, size + beyond, dtype)
    expected = logits.clone()
    BitmaskKernel().apply(expected, masks, rows)
    BitmaskKernel().apply(device.tensor(logits), masks, rows)
    assert torch.equal(logits, expected)
    assert device.launched == [[False, False, True, False, True]], (
        "which of the masks it read where they lie"
    )


def test_masks_that_are_not_pinned_are_copied_to_buffers_that_are_kept(
    device: FakeDevice,
) -> None:
    kernel = BitmaskKernel()
    addresses: set[int] = set()
    for count in (1, 3, 60, 2):
        table = np.stack([pack({row}, 640) for row in range(count)])
        logits = torch.zeros(count, 640)
        kernel.apply(
            device.tensor(logits), [(table, np.arange(count))], np.arange(count)
        )
        assert logits.isfinite().nonzero()[:, 1].tolist() == list(range(count))
        addresses.add(device.addresses[0])
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "failure", ["driver", "code", "wrong", "exception", "none", "cpu"]
)
def test_a_self_test_decides_whether_masks_are_read_where_they_lie(
    device: FakeDevice, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    table = np.zeros((8, 20), np.int32)
    address = table.ctypes.data
    device.failure = failure
    pin_masks(table, 4, torch.device("cpu") if failure == "cpu" else GPU)
    assert pinned_end(address) == (address + 4 * 80 if failure == "none" else 0)
    assert len(caplog.records) == (failure not in ("none", "cpu"))
    unpin_masks(table)
    unpin_masks(table)
    pinned = [("register", address, 320, 3)]
    unpinned = [("wait",), ("unregister", address)]
    calls = {"driver": [], "cpu": [], "code": pinned, "exception": pinned}
    assert device.calls == calls.get(failure, pinned + unpinned)
    assert pinned_end(address) == 0


def test_a_kernel_that_fails_is_replaced_by_torch_for_good(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.failure = "launch"
    for _ in range(3):
        logits = noise(2, 640, torch.float32)
        expected = masked(logits, [{3}, {600}], [0, 1])
        apply_bitmask(device.tensor(logits), [pack({3}, 640), pack({600}, 640)], [0, 1])
        assert torch.equal(logits, expected)
    assert [record.message for record in caplog.records] == [
        "the kernel of masks failed on cuda:0: this process goes on with torch"
    ]


def test_after_too_little_memory_the_kernel_is_tried_again(device: FakeDevice) -> None:
    logits = noise(1, 640, torch.float32)
    expected = masked(logits, [{3}], [0])
    device.failure = "memory"
    with pytest.raises(torch.OutOfMemoryError):
        apply_bitmask(device.tensor(logits), [pack({3}, 640)], [0])
    device.failure = "none"
    apply_bitmask(device.tensor(logits), [pack({3}, 640)], [0])
    assert torch.equal(logits, expected)
    assert len(device.launched) == 1


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from guided.processors.mask_kernel import write_minus_infinity

for capability, dtype in ((80, "fp32"), (90, "fp32"), (100, "fp32"), (80, "bf16"), (90, "fp16")):
    numbers = dict.fromkeys(("width", "words", "stride"), "i32")
    types = {"logits": "*" + dtype, "plan": "*i64", **numbers, "WORDS": "constexpr"}
    source = ASTSource(write_minus_infinity, types, {"WORDS": 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    print(compiled.metadata.shared < 99 << 10, len(compiled.asm["cubin"]) > 0)
"""


def test_the_kernel_compiles_for_three_generations_of_gpus(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    found = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ["True True"] * 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1], [4]], ids=str)
def test_on_cuda_it_is_as_on_the_cpu(dtype: torch.dtype, rows: list[int]) -> None:
    allowed = [{row, row + 700, 4089} for row in rows]
    logits = noise(max(3, max(rows) + 1), 4090, dtype)
    on_gpu = logits.cuda()
    expected = masked(logits, allowed, rows)
    table = np.stack([pack(ids, 4090) for ids in allowed])
    segment = np.frombuffer(mmap.mmap(-1, 4 * table.nbytes), np.int32).reshape(
        -1, table.shape[1]
    )
    pin_masks(segment, 2 * len(rows), on_gpu.device)
    assert pinned_end(segment.ctypes.data)
    segment[: len(rows)] = segment[-len(rows) :] = table
    # pinned, and copied
    for lines in (
        np.arange(len(rows)),
        np.arange(len(segment) - len(rows), len(segment)),
    ):
        masked_logits = on_gpu.clone()
        subject = BitmaskKernel()
        subject.apply(masked_logits, [(segment, lines)], rows)
        assert torch.equal(masked_logits.cpu(), expected)
        subject.wait()
    unpin_masks(segment)
    assert not kernel._cuda_failed
