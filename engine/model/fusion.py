"""Fused kernels of a model on a GPU: a norm, a rotary embedding, a gated activation are
one kernel each.

They are Liger's (`pip install '.[gpu]'`), which replaces functions of transformers'
modules. Here they are bound to one model, so that another one of the same family, for
example on a CPU, stays as it is.
"""

from __future__ import annotations

import inspect
import logging
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_OF_TRAINING = ("cross_entropy", "fused_linear_cross_entropy")


def fuse(body: Any) -> None:
    """Give a language model without its head the fused kernels that Liger has for its
    type.

    Raises:
        ImportError: Liger is not installed.
        LookupError: it has none.
    """
    from liger_kernel.transformers.monkey_patch import (
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        LigerExperts,
    )

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(body.config.model_type)
    if apply is None:
        raise LookupError(f"Liger has none for {body.config.model_type}")
    # it warns of backends that are not installed
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    scopes = {
        id(scope): scope
        for scope in (type(part).forward.__globals__ for part in body.modules())
    }
    before = {key: scope.copy() for key, scope in scopes.items()}
    try:
        apply(
            model=body,
            **dict.fromkeys(
                inspect.signature(apply).parameters.keys() & _OF_TRAINING, False
            ),
        )
        after = {key: scope.copy() for key, scope in scopes.items()}
    finally:
        for key, scope in scopes.items():
            scope.update(before[key])
    for part in body.modules():
        forward = type(part).forward
        scope = after[id(forward.__globals__)]
        if "forward" in vars(part):
            if part.forward.__func__ is LigerExperts.forward:
                # it waits for the device, so that no graph can hold it
                del part.forward
        elif any(
            scope.get(name) is not forward.__globals__.get(name)
            for name in forward.__code__.co_names
        ):
            fused = FunctionType(
                forward.__code__,
                scope,
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            fused.__kwdefaults__ = forward.__kwdefaults__
            part.forward = MethodType(fused, part)


def attributes_of(body: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return the attributes of all parts of a model, for `restore`."""
    return {part: dict(vars(part)) for part in body.modules()}


def restore(attributes: dict[nn.Module, dict[str, Any]]) -> None:
    """Undo `fuse`."""
    for part, values in attributes.items():
        vars(part).clear()
        vars(part).update(values)
