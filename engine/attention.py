"""Paged attention for transformers' models: keys and values are stored in blocks, and block tables find them.

The function is registered with transformers' `AttentionInterface`, so that transformers' modeling code calls it. All
sequences of a step are flattened in one row: chunks of prefills first, then one token of each decoding sequence. (The
layout is vLLM's, arXiv:2309.06180.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

ATTENTION = "guided_paged"
"""The name of `paged_attention` as an `attn_implementation`."""

_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "use_cache", "output_attentions", "dropout"})
"""Keywords that models pass to attention functions and that this one can ignore."""

GATHER_BYTES = 256 << 20
"""Maximum size of the keys that a decode step gathers at once. The values take as much again."""


class UnsupportedModelError(ValueError):
    """The model needs something that this engine does not support. The message names it."""


class KVStore(Protocol):
    """Storage of keys and values."""

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `[tokens, kv_heads, dim]` at `slots` (int64 `[tokens]`)."""

    def gather(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the keys and values of blocks `tables` (int64 `[rows, blocks]`) as `[rows, kv_heads, slots, dim]`."""


class Prefill(NamedTuple):
    """A chunk of a sequence: tokens `start` to `end` of the row."""

    start: int
    end: int
    before: int = 0
    """Number of the sequence's tokens before the chunk. Their keys and values are in the store."""
    table: torch.Tensor | None = None
    """int64 `[1, blocks]`: the sequence's blocks, if there are tokens before."""


@dataclass
class PagedContext:
    """The step, as the attention function needs it.

    Args:
        store: keys and values.
        slots: int64 `[tokens]`: slot of each token's key and value.
        prefills: the chunks, which come first in the row.
        tables: int64 `[decodes, blocks]`: blocks of the decoding sequences, padded with any valid block.
        lengths: int64 `[decodes]`: their numbers of tokens, including the current one.
    """

    store: KVStore
    slots: torch.Tensor
    prefills: list[Prefill]
    tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int = 1
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `[decodes, 1, 1, slots]` of the gathered keys, built once per step and window."""
        mask = self._masks.get(window)
        if mask is None:
            positions = torch.arange(self.tables.shape[1] * self.block_size, device=self.lengths.device)
            hidden = positions >= self.lengths[:, None]
            if window is not None:
                hidden |= positions < (self.lengths - window)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
            self._masks[window] = mask
        return mask


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
    """Store this layer's keys and values, and compute attention.

    Args:
        query: `[1, heads, tokens, dim]`. key, value: `[1, kv_heads, tokens, dim]`, not repeated for grouped queries.
        attention_mask: always None. `paged` determines which tokens attend to which.
        sliding_window: number of tokens that a token attends to, including itself. None: all.

    Returns:
        `[1, tokens, heads, dim]`, and None for the attention weights.
    """
    if attention_mask is not None or not _HARMLESS.issuperset(others):
        _refuse_unknown(module, attention_mask, others)
    layer: int = module.layer_idx  # type: ignore[assignment]
    paged.store.write(layer, paged.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if not paged.prefills:
        return _decode(query, paged, layer, scaling, sliding_window, key.shape), None
    parts: list[torch.Tensor] = []
    for prefill in paged.prefills:
        part = slice(prefill.start, prefill.end)
        keys, values = key[..., part, :], value[..., part, :]
        if prefill.table is not None:
            keys, values = paged.store.gather(layer, prefill.table)
        parts.append(_prefill(query[..., part, :], keys, values, prefill.before, scaling, sliding_window))
    first = paged.prefills[-1].end
    if first < query.shape[2]:
        parts.append(_decode(query[:, :, first:], paged, layer, scaling, sliding_window, key.shape))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _refuse_unknown(module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which is not supported"
        )


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attention within one sequence: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out.

    Args:
        key, value: those of all tokens up to the last of `query`; what follows is ignored.
        before: number of tokens before the first of `query`.
    """
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
    query: torch.Tensor,
    paged: PagedContext,
    layer: int,
    scaling: float | None,
    window: int | None,
    key_shape: torch.Size,
) -> torch.Tensor:
    """Attention of one token per sequence to its blocks: `[1, heads, decodes, dim]` in, `[1, decodes, heads, dim]` out.

    `GATHER_BYTES` limits how many rows are computed at once. Usually all fit.
    """
    _, heads, decodes, dim = query.shape
    kv_heads, key_dim = key_shape[1], key_shape[3]
    # Query heads that share a key head take the place of query tokens, so that no key is repeated.
    grouped = query.transpose(1, 2).reshape(decodes, kv_heads, heads // kv_heads, dim)
    mask, tables = paged.decode_mask(window, query.dtype), paged.tables
    chunk = GATHER_BYTES // (mask.shape[-1] * kv_heads * key_dim * query.element_size()) or 1
    parts: list[torch.Tensor] = []
    for start in range(0, decodes, chunk):
        rows = slice(start, start + chunk)
        keys, values = paged.store.gather(layer, tables[rows])
        parts.append(F.scaled_dot_product_attention(grouped[rows], keys, values, attn_mask=mask[rows], scale=scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(1, decodes, heads, -1)


def register() -> None:
    """Register `ATTENTION` with transformers. Idempotent.

    It has no entry in `AttentionMaskInterface`. Without one, transformers builds no mask and does not search the
    positions for packed sequences, which costs as much as one layer's attention.
    """
    AttentionInterface.register(ATTENTION, paged_attention)
