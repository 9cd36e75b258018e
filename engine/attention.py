"""Paged attention for transformers' models: keys and values live in blocks, found through block tables.

Registered with transformers' public `AttentionInterface`, so that its own modeling code calls it. All sequences of a
step come flattened in one row: prefills first, then one token of each decoding sequence. (The layout is vLLM's,
arXiv:2309.06180.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION", "KVStore", "PagedContext", "UnsupportedModelError", "register"]

ATTENTION = "guided_paged"
"""The name of `paged_attention` as an `attn_implementation`."""

_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "use_cache", "output_attentions", "dropout"})
"""Keywords that models pass to attention functions and that mean nothing, or the usual, to this one."""

_GATHER_BYTES = 256 << 20
"""Keys (and as many values) that a decode step gathers at once, at the most."""


class UnsupportedModelError(ValueError):
    """The model needs something that this engine doesn't have; the message names it."""


class KVStore(Protocol):
    """Where a layer's keys and values go."""

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `[tokens, kv_heads, dim]` at `slots` (int64 `[tokens]`)."""

    def gather(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks `tables` (int64 `[rows, blocks]`) as `[rows, kv_heads, slots, dim]`."""


@dataclass
class PagedContext:
    """One step, for the attention function.

    Args:
        store: keys and values.
        slots: int64 `[tokens]`: where each token's key and value go.
        prefills: (start, end) of each prefill within the row.
        tables: int64 `[decodes, blocks]`: blocks of the decoding sequences, padded with any valid block.
        lengths: int64 `[decodes]`: their tokens, the present one included.
    """

    store: KVStore
    slots: torch.Tensor
    prefills: list[tuple[int, int]]
    tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int = 1
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[decodes, 1, 1, slots]` for the gathered keys; made once a step for each window."""
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
    """Write this layer's keys and values, and attend.

    Args:
        query: `[1, heads, tokens, dim]`; key, value: `[1, kv_heads, tokens, dim]`; not repeated for grouped queries.
        attention_mask: always None: who sees whom is in `paged`.
        sliding_window: tokens that one sees, itself included; None is all.

    Returns:
        `[1, tokens, heads, dim]`, and no weights.

    Raises:
        UnsupportedModelError: the model passes a keyword that this function doesn't know.
    """
    unknown = [name for name in others.keys() - _HARMLESS if others[name] is not None]
    if unknown or attention_mask is not None:
        name = ", ".join(sorted(unknown)) or "attention_mask"
        raise UnsupportedModelError(f"{type(module).__name__} passes {name} to its attention, which can't be honoured")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, keys, values = query[0], key[0].transpose(0, 1), value[0].transpose(0, 1)
    paged.store.write(layer, paged.slots, keys, values)
    parts = [
        _prefill(query[:, start:end], key[0, :, start:end], value[0, :, start:end], scaling, sliding_window)
        for start, end in paged.prefills
    ]
    if len(paged.lengths):
        kv_bytes = keys[0].numel() * keys.element_size()
        first = paged.prefills[-1][1] if paged.prefills else 0
        parts.append(_decode(query[:, first:], paged, layer, scaling, sliding_window, kv_bytes))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """One sequence's tokens among themselves: `[heads, tokens, dim]` in, `[tokens, heads, dim]` out."""
    tokens, groups = query.shape[1], query.shape[0] // key.shape[0]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    mask = None
    if window is not None and window < tokens:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    attended = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return attended[0].transpose(0, 1)


def _decode(
    query: torch.Tensor,
    paged: PagedContext,
    layer: int,
    scaling: float | None,
    window: int | None,
    kv_bytes: int,
) -> torch.Tensor:
    """One token of each sequence over its blocks: query `[heads, decodes, dim]`, returns `[decodes, heads, dim]`.

    `kv_bytes`: of one token's keys. Rows go together as far as `_GATHER_BYTES` reach: all of them, ordinarily.
    """
    heads, decodes, dim = query.shape
    mask = paged.decode_mask(window, query.dtype)
    parts: list[torch.Tensor] = []
    slots = mask.shape[-1]
    chunk = max(1, _GATHER_BYTES // (slots * kv_bytes))
    for start in range(0, decodes, chunk):
        keys, values = paged.store.gather(layer, paged.tables[start : start + chunk])
        kv_heads = keys.shape[1]
        # The query heads that share a key head stand where a query's tokens would: nothing is repeated.
        grouped = query[:, start : start + chunk].transpose(0, 1).reshape(-1, kv_heads, heads // kv_heads, dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask[start : start + chunk], scale=scaling
        )
        parts.append(attended.reshape(len(grouped), heads, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def register() -> None:
    """Make `ATTENTION` known to transformers, with no mask of its own. Idempotent."""
    AttentionInterface.register(ATTENTION, paged_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
