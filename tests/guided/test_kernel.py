from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided import kernel
from guided.bitmask import pack, words
from guided.kernel import apply_bitmask, load_loose_kernel

SIZES = {"loose": st.integers(5000, 5100)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_loose_kernel()
    for thread in threading.enumerate():
        if thread.name == "load-xgrammar":
            thread.join(60)


@pytest.fixture(params=["tight", "loose", "others", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways that a row can go, whatever its mask."""
    names = ("tight", "loose", "others")
    if request.param in names:
        monkeypatch.setattr(
            kernel,
            "_sorted_by_density",
            lambda block, rows: tuple(rows if name == request.param else [] for name in names),
        )
    return str(request.param)


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_minus_infinity_is_written_exactly_where_forbidden(way: str, data: st.DataObject) -> None:
    size = data.draw(SIZES.get(way, st.integers(1, 100)))
    batch = data.draw(st.integers(1, 5))
    rows = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(0, batch))]
    allowed = [data.draw(st.sets(st.integers(0, size - 1))) for _ in rows]
    logits = noise(batch, size, torch.float64 if way == "torch" else data.draw(st.sampled_from(DTYPES)))
    expected = masked(logits, allowed, rows)
    masks: Any = [pack(ids, size) for ids in allowed]
    if rows and data.draw(st.booleans()):
        masks = np.stack(masks)

    apply_bitmask(logits, masks, rows)

    assert torch.equal(logits, expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_it_is_written_elsewhere_and_what_is_allowed_is_raised(way: str, data: st.DataObject) -> None:
    size = data.draw(SIZES.get(way, st.integers(1, 100)))
    rows = data.draw(st.permutations(range(4)))[: data.draw(st.integers(0, 4))]
    allowed = [data.draw(st.sets(st.integers(0, size - 1))) for _ in rows]
    dtype = torch.float64 if way == "torch" else data.draw(st.sampled_from(DTYPES))
    least = data.draw(st.sampled_from([None, -1.0, -1e4]))
    logits = noise(4, size + data.draw(st.sampled_from([0, 40])), dtype)
    before = logits.clone()
    out = logits if data.draw(st.booleans()) else torch.full_like(logits, 7.0)
    expected = masked(logits if least is None else logits.clamp(min=least), allowed, rows)
    others = [row for row in range(4) if row not in rows]
    expected[others] = out[others]

    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows, None if out is logits else out, least)

    assert torch.equal(out, expected)
    assert out is logits or torch.equal(logits, before)


@pytest.mark.parametrize("forbidden", [range(0), range(0, 5000, 3), range(2000, 3800)], ids=["none", "some", "a run"])
@pytest.mark.parametrize(
    "left", [range(5000), range(2), range(0, 5000, 2), range(600)], ids=["all", "two", "half", "few"]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_allowed_is_raised_unless_hundreds_are_more(forbidden: range, left: range, elsewhere: bool) -> None:
    """By whichever way the row goes; -inf where others forbid, and at least hundreds or all of what may be is there."""
    size = 5000
    logits = torch.full((1, size), -torch.inf)
    logits[0, list(left)] = torch.randn(len(left))
    allowed = sorted(set(range(size)) - set(forbidden))
    before, out = logits.clone(), torch.empty_like(logits) if elsewhere else None
    apply_bitmask(logits, [pack(allowed, size)], [0], out, -1e4)
    found = logits if out is None else out
    there = found[0].isfinite().nonzero().flatten().tolist()
    assert set(there) <= set(allowed)
    kept = sorted(set(allowed) & set(left))
    assert torch.equal(found[0, kept], before[0, kept])
    if len(there) < len(allowed):
        assert len(kept) > 512
        assert there == kept
    else:
        assert (found[0, sorted(set(allowed) - set(left))] == -1e4).all()


def test_columns_beyond_the_bitmask_are_forbidden(way: str) -> None:
    size = 4096
    logits = torch.zeros(2, size + 6, dtype=torch.float64 if way == "torch" else torch.float32)
    apply_bitmask(logits, np.full((1, size // 32), -1, np.int32), [1])
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1, :size]).all()
    assert torch.isneginf(logits[1, size:]).all()


def test_a_row_of_a_strided_bitmask_is_read_right(way: str) -> None:
    segment = np.zeros((4, 128), np.int32)
    segment[::2, 0] = 1
    logits = torch.zeros(2, 4096, dtype=torch.float64 if way == "torch" else torch.float32)
    apply_bitmask(logits, segment[::2], [0, 1])
    assert torch.isfinite(logits[:, 0]).all()
    assert torch.isneginf(logits[:, 1:]).all()


def test_logits_with_rows_or_columns_that_lie_apart(way: str) -> None:
    size = 4096
    allowed = [{3, 40}, set(range(size)) - {7}]
    for strided in (torch.zeros(4, 2 * size)[::2, :size], torch.zeros(size, 2).t()):
        expected = masked(strided, allowed, [1, 0])
        out = torch.zeros(2, size)
        apply_bitmask(strided, [pack(ids, size) for ids in allowed], [1, 0], out, -1.0)
        assert torch.equal(out, expected)
        apply_bitmask(strided, [pack(ids, size) for ids in allowed], [1, 0])
        assert torch.equal(strided, expected)


def test_rows_of_one_batch_each_go_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4096
    seen: list[tuple[list[int], list[int], list[int]]] = []
    sort = kernel._sorted_by_density

    def recorded(block: NDArray[np.int32], rows: list[int]) -> tuple[list[int], list[int], list[int]]:
        seen.append(sort(block, rows))
        return seen[-1]

    monkeypatch.setattr(kernel, "_sorted_by_density", recorded)
    everything = set(range(size))
    allowed = [everything - {1, 2, 3}, {0}, set(range(0, size, 2)), everything - {7}, everything, set()]
    rows = [6, 0, 3, 1, 5, 2]
    logits = noise(8, size, torch.float32)
    expected = masked(logits, allowed, rows)
    out = torch.empty_like(logits)
    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows, out)
    assert torch.equal(out[rows], expected[rows])
    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows)
    assert seen == [([0, 2], [6, 1, 5], [3])] * 2
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("batch", [20, 24], ids=["every row", "some rows"])
@pytest.mark.parametrize("odd", [None, 5], ids=["a common run", "one row allows a token of it"])
def test_special_tokens_in_front_are_forbidden_in_many_loose_rows(batch: int, odd: int | None) -> None:
    size, specials = 5000, 1000
    allowed = [set(range(specials + row, size)) for row in range(20)]
    if odd is not None:
        allowed[odd].add(64)
    rows = list(range(batch - 20, batch))
    logits = noise(batch, size, torch.float32)
    expected = masked(logits, allowed, rows)
    apply_bitmask(logits, [pack(ids, size) for ids in allowed], rows)
    assert torch.equal(logits, expected)


def test_without_xgrammar_every_row_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "xgrammar", raising=False)
    size = 8192
    logits = torch.zeros(1, size)
    apply_bitmask(logits, pack(set(range(size)) - {5}, size)[None], [0])
    assert torch.isneginf(logits[0]).nonzero().flatten().tolist() == [5]


class FakeDevice:
    """Streams that run nothing before they must: a copy reads its source when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.queued: list[Callable[[], object]] = []
        self.on_side = False
        copy = torch.Tensor.to

        def to(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
            assert self.on_side
            assert non_blocking
            target = torch.empty_like(tensor)
            self.queued.append(lambda: target.copy_(tensor))
            self.log.append("copy")
            return target

        @contextlib.contextmanager
        def stream(which: FakeDevice) -> Iterator[None]:
            monkeypatch.setattr(torch.Tensor, "to", to)
            self.on_side = True
            yield
            self.on_side = False
            monkeypatch.setattr(torch.Tensor, "to", copy)

        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("record"))
        monkeypatch.setattr(kernel, "_side_stream", lambda device: self)
        monkeypatch.setattr(kernel, "_pinned", lambda rows, columns: torch.empty(rows, columns, dtype=torch.int32))

    def wait_stream(self, other: FakeDevice) -> None:
        self.log.append("wait")
        for copy in self.queued:
            copy()
        self.queued.clear()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `TRITON_INTERPRET=1`, xgrammar's Triton kernel itself runs, on the CPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        name = "xgrammar.kernels.apply_token_bitmask_inplace_triton"
        properties = SimpleNamespace(multi_processor_count=4, gcnArchName="")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(
            "xgrammar.apply_token_bitmask_inplace", import_module(name).apply_token_bitmask_inplace_triton
        )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1], [3, 1], [4]], ids=str)
@pytest.mark.parametrize("beyond", [0, 5])
def test_the_way_of_cuda_keeps_its_books(monkeypatch: pytest.MonkeyPatch, rows: list[int], beyond: int) -> None:
    """On a CPU: which row goes where, and that the masks are read after they were copied, on the stream that waits."""
    device = FakeDevice(monkeypatch)
    size = 4090
    batch = len(rows) if rows == [0, 1, 2] else 5
    width = words(size) * 32 + beyond if beyond else size
    allowed = [{row, row + 700, size - 1} for row in rows]
    logits = noise(batch, width, torch.float32)
    expected = masked(logits, allowed, rows)
    kernel._apply_on_cuda(logits, [pack(ids, size) for ids in allowed], rows)
    assert torch.equal(logits, expected)
    assert device.log == ["copy", "wait", "record"]


def test_cuda_refuses_logits_that_its_kernel_would_misread() -> None:
    for logits in (torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64, 2).t()):
        with pytest.raises(ValueError, match="contiguous rows"):
            kernel._apply_on_cuda(logits, np.zeros((1, 2), np.int32), [0])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernel_in_its_interpreter() -> None:
    """The same books, with the kernel that runs on CUDA. Triton reads the variable when it is imported."""
    which = [__file__, "-k", "keeps_its_books", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *which], env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "8 passed" in done.stdout


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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1], [4]], ids=str)
def test_on_cuda_it_is_as_on_the_cpu(dtype: torch.dtype, rows: list[int]) -> None:
    allowed = [{row, row + 700, 4089} for row in rows]
    logits = noise(max(3, max(rows) + 1), 4090, dtype)
    on_gpu = logits.cuda()
    expected = masked(logits, allowed, rows)
    apply_bitmask(on_gpu, [pack(ids, 4090) for ids in allowed], rows)
    assert torch.equal(on_gpu.cpu(), expected)
    assert not kernel._cuda_failed
