"""Logits from hidden states: by the head of a model or, where more than the head
follows its body, its own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]
"""Computes the logits `[rows, padded_vocab_size]` of hidden states `[rows, hidden]`."""


class _BodyOutput(dict[str | int, Any]):
    """The output of a body. What a forward pass looks for besides the hidden states is
    None."""

    __getattr__ = __getitem__ = dict.get


def body_name(model: Any) -> str:
    """Return the name of the part of a model that makes the hidden states."""
    names = [
        name
        for name, part in model.named_children()
        if isinstance(part, PreTrainedModel)
    ]
    return str(names[0])


def heads_of(model: Any, hidden: Tensor) -> list[Head]:
    """Return what may compute the model's logits, the likely one first.

    For most models the forward pass does the same as the head, and costs more: then
    there is only the head. `hidden`, `[rows, hidden]`, are hidden states of the model,
    compared at two scales: a soft cap changes large logits only.
    """
    head: Head = model.get_output_embeddings()
    forward = partial(_run, _without_body(model))
    scaled = torch.cat([hidden, hidden * 100])
    try:
        if torch.equal(forward(scaled).float(), head(scaled).float()):
            return [head]
    except Exception:  # a forward pass that does without its body may fail in any way
        return [head]
    return [forward, head]


def _without_body(model: Any) -> Any:
    """Return a model with the same weights, of which the body returns the embeddings
    that it is given."""
    name = body_name(model)
    body = copy.copy(model._modules[name])
    body.forward = lambda *args, inputs_embeds, **others: _BodyOutput(
        {"last_hidden_state": inputs_embeds, 0: inputs_embeds}
    )
    model = copy.copy(model)
    model._modules = {**model._modules, name: body}
    return model


def _run(model: Any, hidden: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits
