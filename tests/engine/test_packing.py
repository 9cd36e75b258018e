"""Packed weights of large linear layers on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.loader import _body
from engine.model.packing import pack
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
    pack(model)
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
def test_packed_weights_stay_if_the_logits_do() -> None:
    model = make(tied=False)
    probe = Probe(model, _body(model))
    probe.record()
    probe.optimise(probe.find_head(), partial(pack, model), "packed weights")
    assert len(packed(model)) == 4


@torch.inference_mode()
def test_weights_that_change_the_logits_are_unpacked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(tied=False)
    probe = Probe(model, _body(model))
    probe.record()
    head = probe.find_head()

    def spoil(model: Any) -> None:
        pack(model)
        model.lm_head.forward = lambda rows: rows @ torch.randn(256, 2304)

    before = model.lm_head.weight.clone()
    probe.optimise(head, partial(spoil, model), "packed weights")
    assert packed(model) == []
    assert torch.equal(model.lm_head.weight, before)
    assert (
        "the model runs without packed weights: the logits would differ" in caplog.text
    )
