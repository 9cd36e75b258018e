"""Liger's fused kernels, in Triton's interpreter: in a process of its own, because
Triton reads that once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, sys
from functools import partial
import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter
from model_families import FAMILIES
from engine.model.fusion import attributes_of, fuse, restore
from engine.model.loader import _body
from engine.model.probe import Probe

logging.basicConfig(format="%(message)s")
real = interpreter._implicit_cvt

def converted(value):  # the interpreter leaves floats as they are, unlike the compiler
    if type(value) is not float:
        return real(value)
    handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
    return tl.tensor(handle, tl.float32)

interpreter._implicit_cvt = converted
# It has no libdevice.
rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
geglu.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)

def state(model):
    return [dict(vars(part)) for part in model.modules()], dict(vars(sys.modules[type(model).__module__]))

def probed(model):
    probe = Probe(model, _body(model))
    probe.record()
    return probe, probe.find_head()

torch.manual_seed(0)
by_title = {family.title: family for family in FAMILIES}
with torch.inference_mode():
    for title in ("Llama 3", "Qwen 3", "Gemma 2", "Mixtral"):
        model, other = by_title[title].make(), by_title[title].make()
        probe, head = probed(model)
        before = [part.forward for part in model.modules()], state(other)
        hidden = probe._compute()
        expected = head(hidden)
        probe.optimise(head, partial(fuse, probe._body), partial(restore, attributes_of(probe._body)), "fused kernels")
        fused = sum("forward" in vars(part) for part in model.modules())
        torch.testing.assert_close(head(probe._compute()), expected, rtol=1e-4, atol=1e-4)
        assert str(state(other)) == str(before[1])
        print(title, fused)
    probe, head = probed(by_title["CWM"].make())
    probe.optimise(head, partial(fuse, probe._body), partial(restore, attributes_of(probe._body)), "fused kernels")
    # Kernels that compute something else are taken away again.
    model = by_title["Llama 3"].make()
    probe, head = probed(model)
    expected, before = head(probe._compute()), state(model)

    def wrong(body):
        body.norm.forward = lambda hidden: hidden * 0 + 1

    probe.optimise(head, partial(wrong, probe._body), partial(restore, attributes_of(probe._body)), "fused kernels")
    assert torch.equal(head(probe._compute()), expected)
    assert str(state(model)) == str(before)
"""


def test_fused_kernels_belong_to_one_model_and_keep_its_logits() -> None:
    pytest.importorskip(
        "liger_kernel", reason="Liger is not installed: pip install '.[gpu]'"
    )
    paths = [str(Path(__file__).parents[1] / "support"), *sys.path]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Norms, attention with its rotary embedding, gated activations; the experts of a
    # mixture stay as they are.
    assert done.stdout.splitlines() == [
        "Llama 3 9",
        "Qwen 3 13",
        "Gemma 2 13",
        "Mixtral 7",
    ]
    assert (
        "the model runs without fused kernels: the logits would differ" in done.stderr
    )
    assert "Liger has none for cwm" in done.stderr
