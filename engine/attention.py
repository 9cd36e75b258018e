"""Paged attention for transformers' models: keys and values are stored in blocks, and block tables find them.

transformers' modeling code calls the function through its `AttentionInterface`. All sequences of a step are flattened
in one row: chunks of prefills first, then one token of each decoding one. (The layout is vLLM's, arXiv:2309.06180.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from transformers import AttentionInterface

from engine.kv_cache import KVCache

ATTENTION = "guided_paged"
"""The name of `paged_attention` as an `attn_implementation`."""

_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "use_cache", "output_attentions", "dropout"})
"""Keywords that models pass to attention functions and that this one can ignore."""


class UnsupportedModelError(ValueError):
    """The engine cannot serve this model. The message says why."""


Prefill = tuple[int, int, int, NDArray[np.int64] | None]
"""A chunk: tokens `start` to `end` of the row, the number of the sequence's tokens before it; their keys and values are
in the cache, and, if there are such tokens, its blocks, int64 `[1, blocks]`."""


@dataclass
class PagedContext:
    """A step for the model: the chunks' tokens first, then one of each decoding sequence. With tensor parallelism each
    rank gets it."""

    packed: NDArray[np.int64]
    """int64 `[3, tokens]`: token ids, positions and slots. One array, so that one transfer is enough."""
    prefills: Sequence[Prefill]
    tables: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """int64 `[decodes, blocks]`: blocks of the decoding sequences, padded with any valid block."""
    copies: Sequence[tuple[int, int]] = ()
    """As `Batch.copies`."""

    def run(self, body: torch.nn.Module, cache: KVCache, device: torch.device) -> torch.Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`, in the order of the input."""
        if self.copies:
            cache.copy_blocks(self.copies)
        tokens, positions, slots = torch.from_numpy(self.packed).to(device, non_blocking=True)
        self.move(cache, slots)
        output = body(input_ids=tokens[None], position_ids=positions[None], paged=self, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def move(self, cache: KVCache, slots: torch.Tensor) -> None:
        """Prepare the attention of the step. `slots` is int64 `[tokens]`, on the device."""
        self.cache, self.slots = cache, slots
        self.prefill_tables = [
            None if table is None else torch.from_numpy(table).to(slots.device) for *_, table in self.prefills
        ]
        lengths = self.packed[1, self.packed.shape[1] - len(self.tables) :] + 1
        tables = torch.from_numpy(self.tables).to(slots.device, non_blocking=True)
        self.decodes = split_decodes(tables, lengths, cache.block_size, cache.gather_tokens)
        """(tables, lengths) of decoding sequences of which the keys are gathered together."""
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def mask(self, part: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `[sequences, 1, 1, slots]` of the keys of a part, built once per step."""
        mask = self._masks.get((part, window))
        if mask is None:
            tables, lengths = self.decodes[part]
            positions = torch.arange(tables.shape[1] * self.cache.block_size, device=lengths.device)
            hidden = positions >= lengths[:, None]
            if window is not None:
                hidden |= positions < (lengths - window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = self._masks[part, window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return mask


def split_decodes(
    tables: torch.Tensor, lengths: NDArray[np.int64], block_size: int, gather_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Split the decoding sequences of a step into parts of at most `gather_tokens` tokens, with padding. `tables` is
    int64 `[sequences, blocks]`, on the device. `lengths`, int64 `[sequences]`, includes the current token."""
    starts, longest = [0], 0
    for row, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if row > starts[-1] and (row + 1 - starts[-1]) * longest > gather_tokens:
            starts.append(row)
            longest = length
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, own in zip(starts, np.split(lengths, starts[1:]), strict=True):
        if len(own):
            own_tables = tables[start : start + len(own), : -(-int(own.max()) // block_size)].contiguous()
            parts.append((own_tables, torch.from_numpy(own).to(tables.device, non_blocking=True)))
    return parts


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store this layer's keys and values, `[1, kv_heads, tokens, dim]`, and compute the attention of `query`,
    `[1, heads, tokens, dim]`: `[1, tokens, heads, dim]`, and None for its weights. `sliding_window` is the number of
    tokens that a token attends to, including itself; None: all. `attention_mask` is always None."""
    others["attention_mask"] = attention_mask
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which is not supported"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    paged.cache.write(layer, paged.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if not paged.prefills:
        return _decode(query, paged, layer, scaling, sliding_window, key.shape[1]), None
    parts: list[torch.Tensor] = []
    for (start, end, before, _), table in zip(paged.prefills, paged.prefill_tables, strict=True):
        part = slice(start, end)
        keys, values = key[..., part, :], value[..., part, :]
        if table is not None:
            keys, values = paged.cache.gather(layer, table)
        parts.append(_prefill(query[..., part, :], keys, values, before, scaling, sliding_window))
    first = paged.prefills[-1][1]
    if first < query.shape[2]:
        parts.append(_decode(query[:, :, first:], paged, layer, scaling, sliding_window, key.shape[1]))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attention within one sequence, with `before` tokens before the first of `query`: `[1, heads, tokens, dim]` in,
    `[1, tokens, heads, dim]` out. Keys after the last of `query` are ignored."""
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    total = before + tokens
    key, value = key[:, :, :total], value[:, :, :total]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = None
    if before or (window is not None and window < tokens):
        mask = torch.ones(tokens, total, dtype=torch.bool, device=query.device).tril_(before)
        if window is not None:
            mask = mask.triu_(before + 1 - window)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return attended.transpose(1, 2)


def _decode(
    query: torch.Tensor, paged: PagedContext, layer: int, scaling: float | None, window: int | None, kv_heads: int
) -> torch.Tensor:
    """Attention of one token per sequence: `[1, heads, decodes, dim]` in, `[1, decodes, heads, dim]` out."""
    _, heads, decodes, dim = query.shape
    # Query heads that share a key head take the place of query tokens, so that no key is repeated.
    grouped = query.transpose(1, 2).reshape(decodes, kv_heads, heads // kv_heads, dim)
    parts: list[torch.Tensor] = []
    rows = torch.split(grouped, [len(lengths) for _, lengths in paged.decodes])
    for part, ((tables, _), own) in enumerate(zip(paged.decodes, rows, strict=True)):
        keys, values = paged.cache.gather(layer, tables)
        mask = paged.mask(part, window, query.dtype)
        parts.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(1, decodes, heads, -1)


# There is no entry in `AttentionMaskInterface`: without one, transformers builds no mask, and does not search the
# positions for packed sequences, which costs as much as one layer's attention.
AttentionInterface.register(ATTENTION, paged_attention)
