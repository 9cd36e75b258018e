"""The attention on CUDA: one Triton kernel reads keys and values where the cache has
them. It serves decodes, prefills, chunks and cached prefixes alike, and a CUDA graph
can hold it: grid and shapes depend on padded sizes only.

A program computes a tile: some tokens of one sequence, for the query heads that share a
key head. Where tiles are few and keys may be many, several programs take a part of the
keys each (flash decoding). This has not run on a GPU yet: tests run it in Triton's
interpreter, and compile it.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512
"""Programs that keep a GPU busy."""
_KEYS_OF_SPLIT = 256
"""Minimum number of keys of a program, where the keys are split."""


@triton.jit(
    do_not_specialize=["positions", "starts", "tables", "span", "sequences", "width"]
)
def _attend(
    query, keys, values, sinks, positions, starts, tables, out, sums, scale, span, sequences, width,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, IS_CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, IS_DECODE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    sequence = tile
    if not IS_DECODE:  # the last sequence with a first tile that is not after this one
        sequence = 0
        high = sequences
        while sequence + 1 < high:
            middle = (sequence + high) // 2
            if (tl.load(starts + middle) + middle * (TOKENS - 1)) // TOKENS <= tile:
                sequence = middle
            else:
                high = middle
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    first = start + (tile - (start + sequence * (TOKENS - 1)) // TOKENS) * TOKENS
    if first >= end:
        return
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < end)
    position = tl.load(positions + first).to(tl.int32) + row // GROUP
    query_head = head * GROUP + row % GROUP
    place = token * key_heads * GROUP + query_head
    column = tl.arange(0, KEY_COLUMNS)[None, :]
    is_column = column < KEY_DIM
    value_column = tl.arange(0, VALUE_COLUMNS)[None, :]
    is_value_column = value_column < VALUE_DIM
    q = tl.load(
        query + place[:, None] * KEY_DIM + column,
        mask=is_row[:, None] & is_column,
        other=0.0,
    )

    since = position + 1 - span
    if IS_CHUNK:
        since = position // span * span
    first_key = tl.maximum(tl.min(since, 0), 0) // KEYS * KEYS
    end_key = tl.max(tl.where(is_row, position, 0), 0) + 1
    part = tl.cdiv(end_key - first_key, KEYS * splits) * KEYS
    first_key += split * part
    end_key = tl.minimum(first_key + part, end_key)

    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    if sinks is not None:  # noqa: SIM102  (Triton decides it when it compiles, and the next one when it runs)
        if split == 0:
            peak = tl.load(sinks + query_head).to(tl.float32)
            total += 1.0
    for key in range(first_key, end_key, KEYS):
        key += tl.arange(0, KEYS)
        is_key = key < end_key
        block = tl.load(tables + sequence * width + key // BLOCK, mask=is_key, other=0)
        slot = ((block * BLOCK + key % BLOCK) * key_heads + head)[:, None]
        k = tl.load(keys + slot * KEY_DIM + column, mask=is_column, other=0.0)
        # What is after the last key may be NaN.
        v = tl.load(
            values + slot * VALUE_DIM + value_column,
            mask=is_key[:, None] & is_value_column,
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if SOFTCAP is not None:
            # a tanh
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp(scores * 2 / SOFTCAP) + 1)
        is_attended = (key <= position[:, None]) & (key >= since[:, None]) & is_key
        scores = tl.where(is_attended, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        shrunk = tl.exp(peak - new_peak)
        total = total * shrunk + tl.sum(weights, 1)
        result = result * shrunk[:, None] + tl.dot(
            weights.to(v.dtype), v, input_precision="tf32x3"
        )
        peak = new_peak
    result /= tl.maximum(total, 1e-30)[:, None]
    place = place * splits + split
    at = out + place[:, None] * VALUE_DIM + value_column
    tl.store(
        at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_value_column
    )
    if sums is not None:
        tl.store(sums + place, peak + tl.log(total), mask=is_row)


def constants(
    query: Tensor, keys: Tensor, values: Tensor, is_decode: bool
) -> dict[str, Any]:
    """Return those constants of `_attend` that depend on the model, and on whether each
    sequence has one token."""
    key_dim = query.shape[2]
    value_dim = values.shape[2]
    group = query.shape[1] // keys.shape[1]
    key_columns = max(16, triton.next_power_of_2(key_dim))
    value_columns = max(16, triton.next_power_of_2(value_dim))
    size = query.element_size()
    row_bytes = max(key_columns, value_columns) * size
    # So much fits in the shared memory of any GPU, 99 KB.
    rows = 16 if is_decode else max(16, min(64, (1 << 16) // (row_bytes * size)))
    rows = max(rows, triton.next_power_of_2(group))
    return {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "IS_DECODE": is_decode,
        "TOKENS": 1 if is_decode else rows // group,
        "ROWS": rows,
        "KEYS": max(16, min(64, (1 << 14) // row_bytes)),
        "KEY_COLUMNS": key_columns,
        "VALUE_COLUMNS": value_columns,
        "num_warps": 8 if rows * value_columns > 1 << 13 else 4,
        "num_stages": 3,
    }


@torch.library.custom_op("guided::attend", mutates_args=())
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    positions: Tensor,
    starts: Tensor,
    tables: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None,
    span: int,
    is_chunk: bool,
) -> Tensor:
    """Compute the attention of a step: `[tokens, heads, value_dim]`. All but `query` is
    contiguous.

    Args:
        query: `[tokens, heads, key_dim]`.
        keys: all of the cache, `[slots, kv_heads, key_dim]`, with the keys of the step.
        values: `[slots, kv_heads, value_dim]`.
        sinks: `[heads]`: scores of a key without a value.
        positions: int64 `[tokens]`.
        starts: int64 `[sequences + 1]`: the first token of each sequence, and the
            number of tokens. With as many tokens as sequences, each sequence has one.
            What comes after the last sequence is not computed.
        tables: int64 `[sequences, blocks]`: blocks of each sequence, padded with any
            number.
        scale: factor of the scores.
        softcap: bound of the scores, which a tanh keeps.
        span: number of tokens that a token attends to, with itself; or length of the
            chunks.
        is_chunk: a token attends to the tokens before it in its chunk.
    """
    num_tokens, heads, _ = query.shape
    sequences, width = tables.shape
    key_heads, value_dim = values.shape[1:]
    shape = constants(query, keys, values, num_tokens == sequences)
    tiles = (num_tokens + sequences * (shape["TOKENS"] - 1)) // shape["TOKENS"]
    splits = max(
        1, min(_PROGRAMS // (tiles * key_heads), width * block_size // _KEYS_OF_SPLIT)
    )
    result: Tensor = _output(query, keys, values)
    parts = result
    sums = None
    if splits > 1:
        parts = result.new_empty(
            num_tokens, heads, splits, value_dim, dtype=torch.float32
        )
        sums = parts.new_empty(parts.shape[:3])
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _attend[tiles, key_heads, splits](
            query.contiguous(), keys, values, sinks, positions, starts, tables, parts, sums, scale, span, sequences,
            width, BLOCK=block_size, IS_CHUNK=is_chunk, SOFTCAP=softcap, **shape,
        )  # fmt: skip
    if sums is not None:
        result.copy_((sums.softmax(2)[..., None, :] @ parts).squeeze(2))
    return result


@attend.register_fake
def _output(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    result: Tensor = query.new_empty(*query.shape[:2], values.shape[2])
    return result
