"""Recurrent layers (gated delta nets, Mamba, convolutions) keep a state per sequence instead of keys and values.

transformers' layers read and write these states through the cache of a forward pass (`past_key_values`): `StepStates`
has the methods that they call. A model with such layers runs once per chunk of a prefill, `[1, tokens]`, and once for
all decoding sequences, `[sequences, 1]`, because all rows of a forward pass take the same number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""The `layer_types` of configurations that have recurrent layers; a hybrid layer has attention beside one."""

StateKey = tuple[str, int, int]
"""Kind of a state, index of its layer, and its number in the layer."""


def is_recurrent(config: Any) -> bool:
    """Return whether a language model has recurrent layers."""
    return not RECURRENT_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


@dataclass(frozen=True)
class StateLayout:
    """The states of one sequence, and how the model takes them."""

    shapes: Mapping[StateKey, tuple[tuple[int, ...], torch.dtype]]
    argument: str = "past_key_values"
    """Name of the argument of the model's body: Mamba calls it `cache_params`."""
    resumes: bool = True
    """Whether several tokens can follow a state. If not (Mamba 1), a prompt is computed in one forward pass."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())


class RecurrentStates:
    """The states of all sequences: zeroed tensors `[slots, ...]`, by `StateKey`. A state that `shapes` lacks is added
    when a layer first writes it: so a probe learns the shapes."""

    def __init__(self, layout: StateLayout, slots: int, device: torch.device) -> None:
        self.argument = layout.argument
        self._slots, self._device = slots, device
        self._tensors = {
            key: torch.zeros((slots, *shape), dtype=dtype, device=device)
            for key, (shape, dtype) in layout.shapes.items()
        }

    @property
    def shapes(self) -> dict[StateKey, tuple[tuple[int, ...], torch.dtype]]:
        """The shape of each state of a sequence, and its dtype."""
        return {key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in self._tensors.items()}

    def clear(self, kinds: Collection[str]) -> None:
        """Set the states of some kinds to zero."""
        for key, tensor in self._tensors.items():
            if key[0] in kinds:
                tensor.zero_()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots, (source, target). All sources are read before any target is written."""
        if not pairs:
            return
        source, target = torch.tensor(list(pairs), device=self._device).unbind(1)
        for tensor in self._tensors.values():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def begin(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: Sequence[int], is_decode: bool, is_new: bool
    ) -> tuple[dict[str, Any], StepStates]:
        """Begin a forward pass. Returns the model's inputs, with one row for each decoding sequence or one for a chunk,
        and the cache among them, which is to be finished."""
        rows = len(tokens) if is_decode else 1
        step = StepStates(self, torch.tensor(slots, device=self._device), rows, is_new)
        inputs: dict[str, Any] = {"input_ids": tokens.view(rows, -1), self.argument: step}
        if self.argument == "past_key_values":  # the others have no attention, and no positions
            inputs["position_ids"] = positions.view(rows, -1)
        return inputs, step

    def read(self, key: StateKey, slots: torch.Tensor) -> torch.Tensor | None:
        """Copy the states of slots, int64 `[rows]`: `[rows, ...]`. None: the model has no such state."""
        tensor = self._tensors.get(key)
        return None if tensor is None else tensor.index_select(0, slots)

    def write(self, key: StateKey, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store states, `[rows, ...]`, in slots, int64 `[rows]`; one row in all of the slots."""
        if key not in self._tensors:
            # A sum over many tokens loses too much in 16 bits.
            dtype = torch.float32 if key[0] == "recurrent" else rows.dtype
            self._tensors[key] = torch.zeros((self._slots, *rows.shape[1:]), dtype=dtype, device=self._device)
        tensor = self._tensors[key]
        tensor.index_copy_(0, slots, rows.to(tensor.dtype).expand(len(slots), *rows.shape[1:]))


class StepStates:
    """The cache of one forward pass, with the methods of transformers' `Cache` that layers call.

    Args:
        slots: of the rows, int64 `[rows]`; with one row, all slots that get its states.
        rows: number of rows.
        is_new: the sequences begin. Layers then get None instead of a state.
    """

    def __init__(self, states: RecurrentStates, slots: torch.Tensor, rows: int, is_new: bool) -> None:
        self.layer = -1
        """The layer that was in use last."""
        self._states, self._slots, self._rows, self._is_new = states, slots, rows, is_new
        self._given: dict[StateKey, torch.Tensor] = {}
        """States of the current layer. A layer may change them in place, without a call."""

    def finish(self) -> None:
        """Store the states of the current layer."""
        for key, rows in self._given.items():
            self._states.write(key, self._slots, rows)
        self._given = {}

    def _enter(self, layer: int) -> None:
        if layer != self.layer:
            self.finish()
            self.layer = layer

    def _read(self, key: StateKey) -> torch.Tensor | None:
        self._enter(key[1])
        if key not in self._given and not self._is_new:
            rows = self._states.read(key, self._slots[: self._rows])
            if rows is not None:
                self._given[key] = rows
        return self._given.get(key)

    def _write(self, key: StateKey, rows: torch.Tensor) -> None:
        self._enter(key[1])
        self._given[key] = rows

    # -- what layers call

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution."""
        return self._read(("conv", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Add inputs of a convolution, `[rows, channels, tokens]`. Returns them after those before them."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            inputs = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            inputs = torch.cat([before, conv_states], dim=-1)
        self._write(("conv", layer_idx, state_idx), inputs[..., -size:])
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrence."""
        return self._read(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> torch.Tensor:
        """Replace the state of a recurrence. Returns it."""
        self._write(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of MiniMax's linear attention."""
        return self._read(("linear", layer_idx, 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replace the state of MiniMax's linear attention."""
        self._write(("linear", layer_idx, 0), linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether states of earlier tokens are kept too: never."""
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the layer. `paged_attention`, which comes next, stores keys and values."""
        self._enter(layer_idx)
        return key_states, value_states
