"""Attention on a CPU: keys and values are gathered from their blocks, and torch
computes the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from engine.memory.kv_cache import KVCache

_MAX_SCORES = 1 << 26
"""Attention scores of a prefill that are in memory at once, where torch's own attention
cannot compute them."""


class Span(NamedTuple):
    """Which tokens a token attends to: as many as `length` up to itself, or those
    before it in its chunk of `length` tokens. None: all before it."""

    length: int | None = None
    is_chunk: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """Return the position of the first token that tokens at these positions attend
        to."""
        if self.length is None:
            return torch.zeros_like(positions)
        if self.is_chunk:
            return positions // self.length * self.length
        return positions + 1 - self.length


class Scores(NamedTuple):
    """What a layer does to its attention scores."""

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[heads]`: the score of a key without a value."""

    @property
    def are_changed(self) -> bool:
        """torch's own attention cannot compute them."""
        return self.softcap is not None or self.sinks is not None


Prefill = tuple[int, int, int]
"""A chunk: tokens `start` to `end` of the row, and the number of the sequence's tokens
before it, of which the keys and values are in the cache."""


class GatheredAttention:
    """The attention of one forward pass.

    Args:
        tables: int64 `[prefills + decodes, blocks]`, on the device.
        lengths: int64 `[decodes]`: lengths of the decoding sequences, with the current
            token.
    """

    def __init__(
        self,
        cache: KVCache,
        tables: Tensor,
        prefills: Sequence[Prefill],
        lengths: NDArray[np.int64],
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._prefills = prefills
        decoding = tables[len(prefills) :]
        self._decodes = split_decodes(
            decoding, lengths, cache.block_size, cache.gather_tokens
        )
        """(tables, lengths) of decoding sequences of which the keys are gathered
        together."""
        self._masks: dict[tuple[int, Span], Tensor] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scores: Scores,
        span: Span,
    ) -> Tensor:
        """Compute the attention of one layer: `query` is `[1, heads, tokens, dim]`,
        `key` and `value` are the new ones, `[1, kv_heads, tokens, dim]`. Returns `[1,
        tokens, heads, dim]`."""
        kv_heads = key.shape[1]
        if not self._prefills:
            return self._decode(query, layer, scores, span, kv_heads)
        parts: list[Tensor] = []
        for row, (start, end, before) in enumerate(self._prefills):
            part = slice(start, end)
            keys = key[..., part, :]
            values = value[..., part, :]
            if before:
                num_blocks = -(-(before + end - start) // self._cache.block_size)
                keys, values = self._cache.gather(
                    layer, self._tables[row : row + 1, :num_blocks]
                )
            parts.append(
                _prefill(query[..., part, :], keys, values, before, scores, span)
            )
        first = self._prefills[-1][1]
        if first < query.shape[2]:
            parts.append(
                self._decode(query[:, :, first:], layer, scores, span, kv_heads)
            )
        return _joined(parts, 1)

    def _decode(
        self, query: Tensor, layer: int, scores: Scores, span: Span, kv_heads: int
    ) -> Tensor:
        """Attention of one token per sequence: `[1, heads, decodes, dim]` in, `[1,
        decodes, heads, dim]` out."""
        _, heads, decodes, dim = query.shape
        # Query heads that share a key head take the place of query tokens, so that no
        # key is repeated.
        grouped = query.transpose(1, 2).reshape(
            decodes, kv_heads, heads // kv_heads, dim
        )
        parts: list[Tensor] = []
        rows = torch.split(grouped, [len(lengths) for _, lengths in self._decodes])
        for part, ((tables, _), queries) in enumerate(
            zip(self._decodes, rows, strict=True)
        ):
            keys, values = self._cache.gather(layer, tables)
            parts.append(
                _attend(
                    queries, keys, values, self._mask(part, span, query.dtype), scores
                )
            )
        return _joined(parts, 0).reshape(1, decodes, heads, -1)

    def _mask(self, part: int, span: Span, dtype: torch.dtype) -> Tensor:
        """Return the additive mask `[sequences, 1, 1, slots]` of the keys of a part,
        built once per step."""
        mask = self._masks.get((part, span))
        if mask is None:
            tables, lengths = self._decodes[part]
            positions = torch.arange(
                tables.shape[1] * self._cache.block_size, device=lengths.device
            )
            hidden = (positions >= lengths[:, None]) | (
                positions < span.first(lengths - 1)[:, None]
            )
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = self._masks[part, span] = mask.masked_fill_(hidden, float("-inf"))[
                :, None, None, :
            ]
        return mask


def split_decodes(
    tables: Tensor, lengths: NDArray[np.int64], block_size: int, gather_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Split the decoding sequences of a step into parts of at most `gather_tokens`
    tokens, with padding. `tables` is int64 `[sequences, blocks]`, on the device.
    `lengths`, int64 `[sequences]`, includes the current token."""
    starts = [0]
    longest = 0
    for row, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if row > starts[-1] and (row + 1 - starts[-1]) * longest > gather_tokens:
            starts.append(row)
            longest = length
    parts: list[tuple[Tensor, Tensor]] = []
    for start, part in zip(starts, np.split(lengths, starts[1:]), strict=True):
        if len(part):
            blocks = tables[
                start : start + len(part), : -(-int(part.max()) // block_size)
            ].contiguous()
            parts.append(
                (blocks, torch.from_numpy(part).to(tables.device, non_blocking=True))
            )
    return parts


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, before: int, scores: Scores, span: Span
) -> Tensor:
    """Attention within one sequence, with `before` tokens before the first of `query`:
    `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out. Keys after the last of
    `query` are ignored."""
    tokens = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    total = before + tokens
    key = key[:, :, :total]
    value = value[:, :, :total]
    if groups > 1:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    mask = None
    if before or scores.are_changed or (span.length or tokens) < tokens:
        positions = torch.arange(total, device=query.device)
        rows = positions[before:, None]
        mask = (positions <= rows) & (positions >= span.first(rows))
    # All scores of a long prompt would not fit into the memory.
    size = (
        max(1, _MAX_SCORES // (query.shape[1] * total))
        if scores.are_changed
        else tokens
    )
    masks = [None] if mask is None else torch.split(mask, size)
    queries = torch.split(query, size, dim=2)
    parts = [
        _attend(rows, key, value, part, scores)
        for rows, part in zip(queries, masks, strict=True)
    ]
    return _joined(parts, 2).transpose(1, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attention of `query`, `[rows, heads, tokens, dim]`, to as many heads of keys.
    `mask` is additive, or True where a token attends to a key. None: to all keys until
    its own."""
    if not scores.are_changed:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scaling,
        )
    assert mask is not None
    weights = query @ key.transpose(2, 3) * (scores.scaling or query.shape[3] ** -0.5)
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, float("-inf"))
    else:
        weights = weights + mask
    keys = weights.shape[3]
    if scores.sinks is not None:
        sinks = scores.sinks.to(weights.dtype).view(query.shape[1], -1, 1)
        weights = torch.cat([weights, sinks.expand(*weights.shape[:3], 1)], dim=3)
    return weights.softmax(3, dtype=torch.float32)[..., :keys].to(value.dtype) @ value


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=dim)
