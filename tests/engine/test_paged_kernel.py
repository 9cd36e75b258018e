"""The kernel of CUDA's attention: in Triton's interpreter against the CPU's way, compiled for GPUs, and on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CASES, difference, tolerance
from model_families import FAMILIES

from engine.attention import PagedContext
from engine.model_loader import prepare_model

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
SIZES = [(64, 64), (192, 128), (256, 256)]
GPUS = [80, 90, 100]
SHARED_BYTES = 99 << 10


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attention_cases"]
    found: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_it_is_as_on_the_cpu(name: str, differences: dict[str, float]) -> None:
    assert differences[name] < tolerance(CASES[name])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_cuda_it_is_as_on_the_cpu(name: str) -> None:
    assert difference(CASES[name], torch.device("cuda")) < tolerance(CASES[name])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize("dtype", range(3))
def test_it_compiles_for_gpus(dtype: int, size: int, is_decode: bool) -> None:
    """Each GPU with each type and each size; all of it takes minutes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from engine import paged_kernel

    kind, (key_dim, value_dim) = list(TYPES)[dtype], SIZES[size]
    key, value = (torch.empty(1, 4, dim, dtype=kind, device="meta") for dim in (key_dim, value_dim))
    constants = paged_kernel.constants(key.repeat(1, 4, 1), key, value, is_decode)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants |= {"BLOCK": 16, "IS_CHUNK": size == 1, "SOFTCAP": 30.0 if dtype == 0 else None}
    signature = dict.fromkeys(("sinks", "query", "keys", "values", "out"), TYPES[kind])
    if size == 2:
        constants |= {"sinks": None, "sums": None}
    else:
        signature |= {"out": "*fp32", "sums": "*fp32"}
    signature |= dict.fromkeys(("positions", "starts", "tables"), "*i64")
    signature |= {"scale": "fp32", "span": "i32", "sequences": "i32", "width": "i32"}
    names = paged_kernel._attend.arg_names
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in ("sinks", "query", "keys", "values", "out", "sums") and name not in constants
    }
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    target = GPUTarget("cuda", GPUS[(dtype + size + is_decode) % 3], 32)
    compiled = compile_kernel(
        ASTSource(paged_kernel._attend, types, constants, aligned), target=target, options=options
    )
    assert len(compiled.asm["cubin"]) > 1000
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("title", ["Qwen 3", "Llama 4 (text)", "gpt-oss", "Qwen 3.5"])
def test_a_step_reads_only_what_is_on_the_device(title: str, tiny_tokenizer: Any) -> None:
    """The device "meta" has no numbers: what waits for some, or makes tensors of some, fails there."""
    family = next(family for family in FAMILIES if family.title == title)
    model = prepare_model(family.make().to(torch.bfloat16), tiny_tokenizer)
    meta = torch.device("meta")
    model.device = meta
    cache = model.new_cache(8, 16, 2)
    packed = np.zeros((3, 2), np.int64)
    decodes = PagedContext(packed, [], np.zeros((2, 8), np.int64), state_slots=[0, 1])
    tensors = decodes.send(16, meta)
    hidden = decodes.forward(model.body.to(meta), cache, tensors)
    assert hidden.shape == (2, model.config.hidden_size)
