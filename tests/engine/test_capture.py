"""Which models' decode steps a CUDA graph can hold, and how many kernels they launch,
on the device "meta".

There, what waits for the device raises (`.item()`, `nonzero`, boolean indices), and an
operation that mixes devices is seen. What runs is what is captured: the model's body
with our attention and caches, and its head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_families import FAMILIES, REFUSED, Family, documented_needs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.logits_processors import VllmConfig
from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.model.attention import ATTENTION
from engine.model.config import model_factory
from engine.model.fusion import fuse
from engine.model.head import Head
from engine.model.loader import LoadedModel, _body
from engine.model.probe import Probe
from engine.model.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.step.scheduler import Batch
from tests.engine.conftest import new_sequence

META = torch.device("meta")
ROWS, BLOCKS = 3, 2
"""A number of rows that the sizes of no model have."""
VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "expand",
    "slice",
    "select",
)
VIEWS += ("split", "split_with_sizes", "unbind", "alias", "detach", "as_strided")
NO_KERNEL = frozenset((*VIEWS, "empty", "empty_like", "new_empty"))
NO_ITEM = "Tensor.item() cannot be called on meta tensors"
WAITS: dict[str, dict[str, str]] = {
    "attention": {
        "Llama, dynamic RoPE": NO_ITEM,  # the length decides on the frequencies
        "Gemma 3n": NO_ITEM,
        "GPT-2": NO_ITEM,  # only with a pad token: it looks for one in the input
    },
    "mixtures": {"Phi-3.5-MoE": "aten._to_copy.default"},
    "recurrent": {},
}
"""By group and family: the steps that stay eager, and why."""


class Kernels(TorchDispatchMode):
    """Counts kernels, and lists operations on tensors of several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.mixed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            leaf
            for leaf in tree_leaves((args, kwargs, result))
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if len({tensor.device for tensor in tensors}) > 1:
            self.mixed.append(str(func))
        if func.__name__.partition(".")[0] not in NO_KERNEL:
            self.count[func.__name__] += 1
        return result


@pytest.fixture
def triton_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches of Triton's kernels, which are counted instead."""
    from triton.runtime.jit import JITFunction

    launches: Counter[str] = Counter()
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda kernel, *args, **others: launches.update([kernel.__name__]),
    )
    return launches


def layer_kernels(family: Family, fused: bool, launches: Counter[str]) -> int:
    """Return the number of kernels of the second layer."""
    totals = []
    for layers in (1, 2):
        launches.clear()
        totals.append(captured(family, layers, fused).count.total() + launches.total())
    return totals[1] - totals[0]


def captured(family: Family, layers: int | None = None, fused: bool = False) -> Kernels:
    """Run what a graph of a decode step holds."""
    config = family.config()
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    with META, torch.no_grad():  # inference mode would hide parts of operations
        model = (
            model_factory(config)
            .from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
            .eval()
        )
        body = _body(model)
        probe = Probe(model, body)
        probe.record()
        if fused:
            fuse(body)
    head: Head = model.get_output_embeddings()
    others: dict[str, Any] = dict.fromkeys(("name", "tokenizer", "vocabulary"))
    loaded = LoadedModel(
        config=text, body=body, head=head, layers=probe.layers, max_model_len=64, dtype=torch.bfloat16, device=META,
        layout=probe.layout, **others,
    )  # fmt: skip
    runner = ModelRunner(loaded, 16)
    runner._allocate(4, ROWS)
    inputs = torch.zeros(4, ROWS, dtype=torch.int64, device=META)
    tables = torch.zeros(ROWS, BLOCKS, dtype=torch.int64, device=META)
    with Kernels() as kernels, torch.no_grad():
        runner._decode(inputs, tables)
    return kernels


@pytest.mark.parametrize("group", ["attention", "mixtures", "recurrent"])
def test_what_a_step_does_that_no_graph_can_hold(group: str) -> None:
    needs = documented_needs()
    found: dict[str, str] = {}
    for family in FAMILIES:
        if family.group != group or needs[family.entry].startswith(REFUSED):
            continue
        try:
            if mixed := captured(family).mixed:
                found[family.title] = ", ".join(mixed)
        except RuntimeError as error:
            found[family.title] = str(error)
    assert found == WAITS[group]


@pytest.mark.parametrize(
    ("title", "kernels", "fused"),
    [("Llama 3", 40, 16), ("Mistral", 40, 16), ("Qwen 3", 56, 18)],
)
def test_kernels_of_a_layer(
    title: str, kernels: int, fused: int, triton_launches: Counter[str]
) -> None:
    family = next(family for family in FAMILIES if family.title == title)
    assert layer_kernels(family, False, triton_launches) == kernels
    pytest.importorskip(
        "liger_kernel", reason="Liger is not installed: pip install '.[gpu]'"
    )
    assert layer_kernels(family, True, triton_launches) == fused <= 20


def test_sampling_mixes_no_devices() -> None:
    """Only copies of what the host knows go to the device."""
    batch = Batch([], [new_sequence(SamplingParams(top_p=0.5, top_k=3), [1])], [], [])
    sampler = Sampler(CustomLogitsProcessors(VllmConfig(), META), {0})
    sampler.processors.begin(batch)
    # the tokens have no values
    with Kernels() as kernels, pytest.raises(NotImplementedError):
        sampler.sample(torch.empty(1, 3000, device=META), batch)
    assert kernels.count["searchsorted"] or kernels.count["searchsorted.Tensor"]
    assert set(kernels.mixed) == {"aten._to_copy.default"}
