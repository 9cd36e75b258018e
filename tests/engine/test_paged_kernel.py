"""The kernel of CUDA's attention: in Triton's interpreter against the CPU's way,
compiled for GPUs, and on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CASES, difference, tolerance
from model_families import FAMILIES

from engine.model.attention import PagedContext
from engine.model.loader import prepare_model

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.model import paged_kernel

ROOT = Path(__file__).parents[2]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(64, 64, 64), (192, 192, 128), (256, 256, 256)]
"""Of queries, keys and values."""
GPUS = [80, 90, 100]
SHARED_BYTES = 99 << 10


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "attention_cases"]
    found: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_it_is_as_on_the_cpu(
    name: str, differences: dict[str, float]
) -> None:
    assert differences[name] < tolerance(CASES[name])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_cuda_it_is_as_on_the_cpu(name: str) -> None:
    assert difference(CASES[name], torch.device("cuda")) < tolerance(CASES[name])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled in place of a launch."""
    kernel, kept = paged_kernel._attend, []

    class Compiler:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *inputs, **constants: kept.append(
                kernel.warmup(*inputs, grid=grid, **constants)
            )

    monkeypatch.setattr(paged_kernel, "_attend", Compiler())
    return kept


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize("dtype", range(3))
def test_it_compiles_for_gpus(
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    dtype: int,
    size: int,
    is_decode: bool,
) -> None:
    """Each GPU with each type and each size. All combinations take minutes."""
    if dtype == 1 and not is_decode:
        pytest.skip("float16 is compiled as bfloat16 is")
    gpu = GPUS[(dtype + size + is_decode) % 3]
    target = GPUTarget("cuda", gpu, 32)
    device = SimpleNamespace(
        get_current_device=lambda: gpu,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    monkeypatch.setattr(driver, "_active", device)
    rows = [
        torch.zeros(48, heads, dim, dtype=TYPES[dtype])
        for heads, dim in zip((8, 2, 2), SIZES[size], strict=True)
    ]
    sinks = rows[0][0, :, 0].contiguous() if size == 0 else None
    numbers = torch.zeros(49, dtype=torch.int64)
    softcap = 30.0 if dtype == 0 else None
    width = 64 if size == 1 else 1  # with 64 blocks, keys are split
    tables = torch.zeros(48 if is_decode else 2, width, dtype=torch.int64)
    paged_kernel.attend(
        *rows, sinks, numbers[:48], numbers, tables, 16, 0.1, softcap, 64, size == 1
    )
    (kernel,) = compiled
    assert len(kernel.asm["cubin"]) > 1000
    assert kernel.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("title", ["Qwen 3", "Llama 4 (text)", "gpt-oss", "Qwen 3.5"])
def test_a_step_reads_only_what_is_on_the_device(
    title: str, tiny_tokenizer: Any
) -> None:
    """The device "meta" has no numbers: what waits for some, or makes tensors of some,
    fails there."""
    family = next(family for family in FAMILIES if family.title == title)
    model = prepare_model(family.make().to(torch.bfloat16), tiny_tokenizer)
    meta = torch.device("meta")
    model.device = meta
    cache = model.new_cache(8, 16, 2)
    packed = np.zeros((3, 2), np.int64)
    decodes = PagedContext(packed, [], np.zeros((2, 8), np.int64), state_slots=[0, 1])
    tensors = decodes.send(meta)
    hidden = decodes.forward(model.body.to(meta), cache, tensors)
    assert hidden.shape == (2, model.config.hidden_size)
