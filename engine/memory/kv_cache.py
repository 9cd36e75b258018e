"""The cache: keys and values of all attention layers in blocks of token slots, states
of recurrent layers, its size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.memory.recurrent import RecurrentStates, StateLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of what one attention layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


_GATHERED_BYTES = 1 << 20
"""Maximum size of the keys that a decode step gathers at once. They should stay in a
CPU's caches."""


class KVCache:
    """Keys and values of all layers: zeroed tensors `[(num_blocks + 1) * block_size,
    kv_heads, dim]`, by layer index. No sequence has the last block: what pads a step to
    a fixed size writes there. `states` are those of recurrent layers."""

    def __init__(
        self,
        layers: dict[int, LayerShapes],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: RecurrentStates | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.states = states
        self.gathers = device.type not in ("cuda", "meta")
        """Whether attention copies keys and values for torch, or the paged kernel reads
        them."""
        sizes = (
            shape.kv_heads * shape.key_dim * dtype.itemsize for shape in layers.values()
        )
        key_bytes = max(sizes, default=1)
        self.gather_tokens = _GATHERED_BYTES // key_bytes
        """Maximum number of tokens of which a decode step gathers the keys at once (or
        one longer sequence)."""
        slots = (num_blocks + 1) * block_size

        def empty(heads: int, dim: int) -> Tensor:
            # Written now: `torch.zeros` would take main memory only where it is first
            # used, at any time under load.
            return torch.empty(slots, heads, dim, dtype=dtype, device=device).zero_()

        self.keys = {
            index: empty(shape.kv_heads, shape.key_dim)
            for index, shape in layers.items()
        }
        self.values = {
            index: empty(shape.kv_heads, shape.value_dim)
            for index, shape in layers.items()
        }
        self._gathered = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]
        """Keys and values that were gathered last. Memory is reused: clearing new pages
        takes longer than the copy."""

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `[tokens, kv_heads, dim]` at `slots`, int64 `[tokens]`."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Read the keys and values of blocks `tables`, int64 `[rows, blocks]`, as
        `[rows, kv_heads, slots, dim]`. The tensors are overwritten by the next call."""
        return self._gather(self.keys[layer], tables, 0), self._gather(
            self.values[layer], tables, 1
        )

    def _gather(self, cache: Tensor, tables: Tensor, place: int) -> Tensor:
        _, heads, dim = cache.shape
        (rows, blocks) = tables.shape
        width = self.block_size * heads * dim
        size = rows * blocks * width
        if self._gathered[place].numel() < size:
            self._gathered[place] = cache.new_empty(size)
        picked = self._gathered[place][:size].view(rows * blocks, width)
        torch.index_select(cache.view(-1, width), 0, tables.reshape(-1), out=picked)
        return picked.view(rows, blocks * self.block_size, heads, dim).transpose(1, 2)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), in all layers. All sources are read
        before any target is written."""
        source, target = torch.tensor(list(pairs), device=self.device).unbind(1)
        for cache in (*self.keys.values(), *self.values.values()):
            blocks = cache.view(self.num_blocks + 1, -1)
            blocks.index_copy_(0, target, blocks.index_select(0, source))


class CachePlan(NamedTuple):
    """What fits in the memory."""

    num_blocks: int
    max_num_seqs: int
    """The configured number, or as many sequences as have a slot for their recurrent
    states."""


def plan_cache(
    config: EngineConfig,
    layers: dict[int, LayerShapes],
    layout: StateLayout | None,
    max_model_len: int,
    dtype: torch.dtype,
    available: Callable[[], int],
) -> CachePlan:
    """Plan the blocks: the configured number, or as many as fit in the configured or
    `available` bytes, and at most what `max_num_seqs` sequences of `max_model_len`
    tokens need. States take at most half of the memory, or all of it if there are no
    keys and values."""
    longest = -(-max_model_len // config.block_size)
    per_token = sum(
        shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in layers.values()
    )
    block = per_token * config.block_size * dtype.itemsize
    memory = 0
    slots = config.max_num_seqs
    if layout is not None or config.num_blocks is None:
        memory = config.kv_cache_bytes or available()
    if layout is not None:
        slots = min(slots, memory // (2 if layers else 1) // layout.slot_bytes)
        size = f"the states of a sequence take {layout.slot_bytes / 2**20:.1f} MiB"
        if slots == 0:
            raise ValueError(
                f"{size}, and {memory / 2**20:.1f} MiB are for the cache: raise kv_cache_bytes"
            )
        memory -= slots * layout.slot_bytes
        fit = f"{slots} sequences fit (max_num_seqs is {config.max_num_seqs})"
        logger.info(
            "recurrent layers: %s; %s. There is no state of a prefix: prefix caching is off",
            size,
            fit,
        )
    most = longest * slots
    blocks = config.num_blocks or min(memory // block if block else most, most)
    if blocks < longest:
        raise ValueError(
            f"the KV cache has {blocks} blocks of {config.block_size} tokens ({blocks * block / 2**20:.1f} MiB); one "
            f"sequence of max_model_len {max_model_len} needs {longest} ({longest * block / 2**20:.1f} MiB): raise "
            "kv_cache_bytes or lower max_model_len"
        )
    return CachePlan(int(blocks), slots)
