"""Logits from hidden states: by the head of a model or, where more than the head follows its body, its own forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel


class _BodyOutput(dict[str, Any]):
    """The output of a body: hidden states. What a forward pass looks for besides them is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: str | int) -> Any:
        return self["last_hidden_state"] if key == 0 else self.get(str(key))


class _GivenBody(torch.nn.Module):
    """Takes the place of a model's body. It returns the embeddings that it is given as hidden states."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not a submodule: other attributes are the body's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **others: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


class OwnForward(torch.nn.Module):
    """Computes logits by the model's own forward pass, with its body replaced: scales and soft caps are included."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        shell = copy.copy(model)
        shell._modules = dict(model._modules)
        name = body_name(model)
        shell._modules[name] = _GivenBody(model._modules[name])
        self.__dict__["_shell"] = shell  # not a submodule: its weights are the model's

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits `[rows, padded_vocab_size]` of hidden states `[rows, hidden]`."""
        logits: torch.Tensor = self.__dict__["_shell"](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def body_name(model: Any) -> str:
    """Return the name of the part of a model that makes the hidden states."""
    names = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    return str(names[0])


def heads_of(model: Any, hidden: torch.Tensor) -> list[torch.nn.Module]:
    """Return what may compute the model's logits, the likely one first.

    For most models the forward pass does the same as the head, and costs more: then there is only the head. `hidden`,
    `[rows, hidden]`, are hidden states of the model, compared at two scales: a soft cap changes large logits only.
    """
    head: torch.nn.Module = model.get_output_embeddings()
    own = OwnForward(model)
    try:
        scaled = torch.cat([hidden, hidden * 100])
        if torch.equal(own(scaled).float(), head(scaled).float()):
            return [head]
    except Exception:  # a forward pass that does without its body may fail in any way
        return [head]
    return [own, head]
