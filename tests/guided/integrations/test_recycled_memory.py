"""Memory is reused once its tensor and all views of it are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from guided.integrations.recycled_memory import RecycledMemory

SHAPE = torch.zeros(4, 70_000)


def test_memory_of_a_dropped_tensor_is_reused() -> None:
    memory = RecycledMemory()
    seen = set()
    tensor = memory.like(SHAPE)
    for _ in range(10):
        tensor = memory.like(SHAPE)  # the previous tensor is still alive during the call
        seen.add(tensor.data_ptr())
    assert len(seen) == 2


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[2:, 5:],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
    ],
    ids=["itself", "a part", "detached", "numpy's view", "another type's", "its storage", "a memoryview"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_memory_in_use_is_not_written_to(keep: Callable[[torch.Tensor], Any], inference: bool) -> None:
    memory = RecycledMemory()
    kept = []
    with torch.inference_mode(inference):
        for number in range(6):
            tensor = memory.like(SHAPE).fill_(number)
            kept.append(keep(tensor))
            del tensor
        pointers = {memory.like(SHAPE).data_ptr() for _ in range(3)}
    for number, one in enumerate(kept):
        if isinstance(one, torch.UntypedStorage):
            one = torch.tensor([], dtype=torch.float32).set_(one)
        if isinstance(one, torch.Tensor) and one.dtype is torch.int32:
            one = one.view(torch.float32)
        values = torch.from_numpy(np.asarray(one))
        assert (values == number).all()
        assert values.data_ptr() not in pointers


@pytest.mark.parametrize(
    "like", [SHAPE.bfloat16(), torch.zeros(70_000, 4).t(), torch.zeros(5, 3).t(), torch.zeros(0, 7)]
)
def test_shape_type_and_device(like: torch.Tensor) -> None:
    memory = RecycledMemory()
    memory.like(SHAPE)
    tensor = memory.like(like)
    assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)
    assert tensor.is_contiguous()
    memory.clear()
    assert memory.like(SHAPE).shape == SHAPE.shape
