"""Packed weights of a model on a CPU: oneDNN multiplies a matrix faster in its own
layout.

torch converts a weight to its library's layout in each call. Here, as in torch's
inductor with frozen weights, a large weight is converted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

_LEAST_ELEMENTS = (1 << 19) + 1
"""Smaller weights stay as they are: calling oneDNN costs as much as it saves."""


def pack(model: nn.Module, run: Callable[[], object]) -> None:
    """Give the large linear layers that `run` calls packed weights. A plain weight that
    only such layers use is freed; its shape and data type stay.

    Raises:
        RuntimeError: oneDNN does not support the data type on this CPU.
    """
    layers = _called_layers(model, run)
    users = Counter(
        weight.data_ptr()
        for module in model.modules()
        for weight in module.parameters(recurse=False)
    )
    packed_users = Counter(layer.weight.data_ptr() for layer in layers)
    packed: dict[int, Tensor] = {}
    for layer in layers:
        weight = layer.weight
        address = weight.data_ptr()
        if address not in packed:
            packed[address] = torch.ops.mkldnn._reorder_linear_weight(weight)
        vars(layer)["forward"] = _PackedForward(packed[address], layer.bias)
        if users[address] == packed_users[address]:
            layer.weight = nn.Parameter(
                weight.new_zeros(()).expand(weight.shape), requires_grad=False
            )


def unpack(model: nn.Module) -> None:
    """Undo `pack`."""
    plain: dict[int, nn.Parameter] = {}
    for layer in model.modules():
        forward = vars(layer).get("forward")
        if isinstance(layer, nn.Linear) and isinstance(forward, _PackedForward):
            del layer.forward
            if layer.weight.untyped_storage().nbytes() < layer.weight.nbytes:
                key = id(forward.weight)
                if key not in plain:
                    dense = forward.weight.to_dense()
                    plain[key] = nn.Parameter(dense, requires_grad=False)
                layer.weight = plain[key]


def _called_layers(model: nn.Module, run: Callable[[], object]) -> list[nn.Linear]:
    """Return the large linear layers that `run` calls: others may be of encoders, or
    their weights may be read directly."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    large = [layer for layer in layers if _is_large(layer)]
    if not large:
        return []
    called: dict[nn.Linear, None] = {}

    def note(layer: nn.Linear, _: object) -> None:
        called[layer] = None

    hooks = [layer.register_forward_pre_hook(note) for layer in large]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(called)


def _is_large(layer: nn.Linear) -> bool:
    """Return whether packing pays. Subclasses and quantized weights have their own
    ways."""
    is_plain = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
    return is_plain and layer.weight.numel() >= _LEAST_ELEMENTS


class _PackedForward:
    """The forward pass of a layer with a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self._bias, "none", [], ""
        )
        return product
