"""Packed weights of large linear layers on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model import packing
from engine.model.loader import _body
from engine.model.packing import pack, unpack
from engine.model.probe import Probe

ROWS = 24


def make(*, tied: bool) -> Any:
    """Make a model with large layers: the gated activation's, and the head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2304,
        hidden_size=256,
        intermediate_size=2304,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def packed(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_give_the_same_logits(tied: bool) -> None:
    model = make(tied=tied)
    tokens = torch.arange(ROWS)[None]
    expected = model(tokens).logits
    shape = model.lm_head.weight.shape
    pack(model, lambda: model(tokens))
    assert packed(model) == [
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    ]
    torch.testing.assert_close(model(tokens).logits, expected)
    assert model.lm_head.weight.shape == shape
    # The weight of the head stays where it is the embeddings' too.
    assert model.lm_head.weight.untyped_storage().nbytes() == (
        shape.numel() * 4 if tied else 4
    )
    assert model.model.layers[0].mlp.up_proj.weight.untyped_storage().nbytes() == 4


@torch.inference_mode()
def test_layers_that_are_not_called_stay_as_they_are() -> None:
    """Their weights may be read directly, or they are of an encoder."""
    model = make(tied=False)
    model.encoder = torch.nn.Linear(1024, 1024)
    before = model.encoder.weight.clone()
    pack(model, lambda: model(torch.arange(ROWS)[None]))
    assert "encoder" not in packed(model)
    assert torch.equal(model.encoder.weight, before)


@torch.inference_mode()
def test_layers_with_one_weight_share_the_packed_one() -> None:
    model = make(tied=False)
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = layer.gate_proj.weight
    tokens = torch.arange(ROWS)[None]
    expected = model(tokens).logits
    pack(model, lambda: model(tokens))
    assert layer.up_proj.forward.weight is layer.gate_proj.forward.weight
    assert layer.up_proj.weight.untyped_storage().nbytes() == 4
    torch.testing.assert_close(model(tokens).logits, expected)
    unpack(model)
    assert layer.up_proj.weight is layer.gate_proj.weight
    assert torch.equal(model(tokens).logits, expected)


def optimised(model: Any) -> None:
    probe = Probe(model, _body(model))
    probe.record()
    head = probe.find_head()
    change = partial(pack, model, partial(probe.run, head))
    probe.optimise(head, change, partial(unpack, model), "packed weights")


@torch.inference_mode()
def test_packed_weights_stay_if_the_logits_do() -> None:
    model = make(tied=False)
    optimised(model)
    assert len(packed(model)) == 4


@torch.inference_mode()
def test_weights_that_change_the_logits_are_unpacked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tied=False)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    multiply = packing._PackedForward.__call__
    monkeypatch.setattr(
        packing._PackedForward,
        "__call__",
        lambda self, rows: multiply(self, rows).roll(1, -1),
    )
    optimised(model)
    assert packed(model) == []
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
    assert (
        "the model runs without packed weights: the logits would differ" in caplog.text
    )
