"""Recurrent layers (gated delta nets, Mamba, convolutions) keep a state per sequence
instead of keys and values.

transformers' layers read and write these states through the cache of a forward pass
(`past_key_values`): `StepStates` has the methods that they call. A model with such
layers runs once per chunk of a prefill, `[1, tokens]`, and once for all decoding
sequences, `[sequences, 1]`, because all rows of a forward pass take the same number of
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""The `layer_types` of configurations that have recurrent layers; a hybrid layer has
attention beside one."""

StateKey = tuple[str, int, int]
"""Kind of a state, index of its layer, and its number in the layer."""


def is_recurrent(config: Any) -> bool:
    """Return whether a language model has recurrent layers."""
    return not RECURRENT_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


@dataclass(frozen=True)
class StateLayout:
    """The states of one sequence, and how the model takes them."""

    shapes: Mapping[StateKey, Tensor]
    """Each state `[1, ...]`, on the device "meta"."""
    argument: str = "past_key_values"
    """Name of the argument of the model's body: Mamba calls it `cache_params`."""
    resumes: bool = True
    """Whether several tokens can follow a state. If not (Mamba 1), a prompt is computed
    in one forward pass."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(state.nbytes for state in self.shapes.values())


class RecurrentStates:
    """The states of all sequences: zeroed tensors `[slots, ...]`, by `StateKey`. A
    state that `layout` lacks is added when a layer first writes it: so a probe learns
    the shapes."""

    def __init__(self, layout: StateLayout, slots: int, device: torch.device) -> None:
        self.argument = layout.argument
        self.tensors: dict[StateKey, Tensor] = {}
        self._slots = slots
        self._device = device
        for key, state in layout.shapes.items():
            self._add(key, state, state.dtype)

    def _add(self, key: StateKey, state: Tensor, dtype: torch.dtype) -> None:
        shape = self._slots, *state.shape[1:]
        self.tensors[key] = torch.zeros(shape, dtype=dtype, device=self._device)

    @property
    def shapes(self) -> dict[StateKey, Tensor]:
        """As `StateLayout.shapes`."""
        return {key: tensor[:1].to("meta") for key, tensor in self.tensors.items()}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots, (source, target). All sources are read before any
        target is written."""
        if pairs:
            source, target = torch.tensor(pairs, device=self._device).unbind(1)
            for tensor in self.tensors.values():
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def write(self, key: StateKey, slots: Tensor, state: Tensor) -> None:
        """Store states, `[rows, ...]`, in slots, int64 `[rows]`; one row in all of the
        slots."""
        if key not in self.tensors:
            # A sum over many tokens loses too much in 16 bits.
            self._add(
                key, state, torch.float32 if key[0] == "recurrent" else state.dtype
            )
        tensor = self.tensors[key]
        tensor.index_copy_(
            0, slots, state.to(tensor.dtype).expand(len(slots), *state.shape[1:])
        )


class StepStates:
    """The cache of one forward pass, with the methods of transformers' `Cache` that
    layers call.

    Args:
        slots: of the rows, int64 `[rows]`; with one row, all slots that get its states.
        rows: number of rows.
        is_new: the sequences begin. Layers then get None instead of a state.
    """

    def __init__(
        self, states: RecurrentStates, slots: Tensor, rows: int, is_new: bool
    ) -> None:
        self.layer = -1
        """The layer that was in use last."""
        self._states = states
        self._slots = slots
        self._is_new = is_new
        self._read_slots = slots[:rows]
        self._given: dict[StateKey, Tensor] = {}
        """States of this layer. It may change them in place, without a call."""

    def _enter(self, layer: int) -> None:
        """Store the states of the layer before this one."""
        if layer != self.layer:
            self.finish()
            self.layer = layer

    def finish(self) -> None:
        """Store the states of the last layer."""
        for key, state in self._given.items():
            self._states.write(key, self._slots, state)
        self._given = {}

    def _get(self, kind: str, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._enter(layer_idx)
        key = kind, layer_idx, state_idx
        if not self._is_new and key not in self._given and key in self._states.tensors:
            self._given[key] = self._states.tensors[key].index_select(
                0, self._read_slots
            )
        return self._given.get(key)

    def _set(
        self,
        kind: str,
        state: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **others: object,
    ) -> Tensor:
        self._enter(layer_idx)
        self._given[kind, layer_idx, state_idx] = state
        return state

    # What layers call. `conv` are the last inputs of a convolution, `linear` the states
    # of MiniMax.

    get_conv_state = partialmethod(_get, "conv")
    get_recurrent_state = partialmethod(_get, "recurrent")
    update_recurrent_state = partialmethod(_set, "recurrent")
    get_linear_cache = partialmethod(_get, "linear")

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Replace a state of MiniMax."""
        self._set("linear", linear_cache, layer_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Add inputs of a convolution, `[rows, channels, tokens]`. Returns them after
        those before them."""
        before = self._get("conv", layer_idx, state_idx)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            inputs = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            inputs = torch.cat([before, conv_states], dim=-1)
        self._set("conv", inputs[..., -size:], layer_idx, state_idx)
        return inputs

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether states of earlier tokens are kept too: never."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object
    ) -> tuple[Tensor, Tensor]:
        """Note the layer. `paged_attention`, which comes next, stores keys and
        values."""
        self._enter(layer_idx)
        return key_states, value_states
