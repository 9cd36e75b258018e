"""Packed weights of a model on a CPU: oneDNN multiplies a matrix faster in its own
layout.

torch converts a weight to its library's layout in each call. A large matrix that is
converted once, as torch's inductor does with frozen weights, takes about half of the
time with a batch of 8 to 32 rows.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_ELEMENTS = (1 << 19) + 1
"""Smaller weights stay as they are: calling oneDNN costs as much as it saves."""


def pack(model: Any) -> None:
    """Give the large linear layers of a model packed weights. A plain weight is freed
    if no other layer uses it; its shape and data type stay.

    Raises:
        RuntimeError: oneDNN does not support the data type on this CPU.
    """
    modules: list[nn.Module] = list(model.modules())
    users = Counter(
        weight.data_ptr()
        for module in modules
        for weight in module.parameters(recurse=False)
    )
    for module in modules:
        if type(module) is nn.Linear and module.weight.numel() >= _LEAST_ELEMENTS:
            weight = module.weight
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            vars(module)["forward"] = partial(_multiply, packed, module.bias)
            if users[weight.data_ptr()] == 1:
                shape_only = nn.Parameter(
                    weight.new_zeros(()).expand(weight.shape), requires_grad=False
                )
                module._parameters = {**module._parameters, "weight": shape_only}


def _multiply(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows, packed, bias, "none", [], ""
    )
    return product
