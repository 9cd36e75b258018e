"""The attention function against a plain implementation, and the KV cache's
arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.memory.kv_cache import CachePlan, KVCache, LayerShapes, plan_cache
from engine.memory.recurrent import StateLayout
from engine.model.attention import PagedContext, paged_attention, running
from engine.model.gathered_attention import Prefill, split_decodes

BLOCK, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
CPU = torch.device("cpu")


def cache(num_blocks: int = 32, gather_tokens: int = 1000) -> KVCache:
    shapes = {0: LayerShapes(KV_HEADS, DIM, DIM)}
    store = KVCache(
        shapes, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    store.gather_tokens = gather_tokens
    return store


def context_of(
    store: KVCache,
    slots: list[int],
    prefills: list[Prefill],
    tables: list[list[int]],
    lengths: list[int],
) -> PagedContext:
    width = max(map(len, tables))
    padded = np.array(
        [[*blocks, *[0] * (width - len(blocks))] for blocks in tables], np.int64
    )
    packed = np.zeros((3, len(slots)), np.int64)
    packed[2] = slots
    packed[1, len(slots) - len(lengths) :] = np.array(lengths, np.int64) - 1
    context = PagedContext(packed, prefills, padded)
    context.move(store, context.send(CPU))
    return context


def plainly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The last `len(query)` tokens over all: query `[n, heads, dim]`, keys `[m,
    kv_heads, dim]`."""
    total, asked = len(keys), len(query)
    out = torch.zeros_like(query)
    for row in range(asked):
        at = total - asked + row
        first = 0 if window is None else max(0, at - window + 1)
        if chunk is not None:
            first = at // chunk * chunk
        for head in range(HEADS):
            k, v = (
                t[first : at + 1, head // (HEADS // KV_HEADS)] for t in (keys, values)
            )
            scores = k @ query[row, head] / math.sqrt(DIM)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            rest = 0.0 if sinks is None else sinks[head].exp()
            out[row, head] = scores.exp() / (scores.exp().sum() + rest) @ v
    return out


@settings(max_examples=40, deadline=None)
@given(
    prefills=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
    decodes=st.lists(st.integers(1, 17), max_size=4),
    span=st.sampled_from(
        [
            (None, None),
            (1, None),
            (3, None),
            (50, None),
            (None, 1),
            (None, 4),
            (None, 50),
        ]
    ),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
    max_scores=st.sampled_from([1, 1 << 26]),
    seed=st.integers(0, 99),
    gather_tokens=st.integers(1, 40),
)
def test_prefills_and_decodes_in_one_row(
    prefills: list[tuple[int, int]],
    decodes: list[int],
    span: tuple[int | None, int | None],
    softcap: float | None,
    has_sinks: bool,
    max_scores: int,
    seed: int,
    gather_tokens: int,
) -> None:
    if not prefills and not decodes:
        return
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    window, chunk = span
    sinks = random(HEADS) if has_sinks else None
    config = SimpleNamespace(
        layer_types=["chunked_attention"] if chunk else None, attention_chunk_size=chunk
    )
    layer: Any = SimpleNamespace(layer_idx=0, config=config)
    store, width = (
        cache(64, gather_tokens),
        max([-(-length // BLOCK) for length in decodes], default=0),
    )
    tables = torch.randperm(64, generator=generator)[: width * len(decodes)].view(
        len(decodes), width
    )
    # prefills may overlap decodes' padding only: give them the rest
    free = torch.randperm(64, generator=generator)
    rest = [
        block for block in free.tolist() if block not in set(tables.flatten().tolist())
    ]
    blocks: list[list[int]] = []
    expected, slots, spans, keys, values, queries = [], [], [], [], [], []
    end = 0
    for before, length in prefills:
        total = before + length
        k, v, q = (
            random(total, KV_HEADS, DIM),
            random(total, KV_HEADS, DIM),
            random(length, HEADS, DIM),
        )
        mine = [rest.pop() for _ in range(-(-total // BLOCK))]
        where = [mine[at // BLOCK] * BLOCK + at % BLOCK for at in range(total)]
        store.write(
            0, torch.tensor(where[:before], dtype=torch.int64), k[:before], v[:before]
        )
        slots += where[before:]
        spans.append((end, end + length, before))
        blocks.append(mine)
        end += length
        keys.append(k[before:]), values.append(v[before:]), queries.append(q)
        expected.append(plainly(q, k, v, window, chunk, softcap, sinks))
    for row, length in zip(tables, decodes, strict=True):
        k, v, q = (
            random(length, KV_HEADS, DIM),
            random(length, KV_HEADS, DIM),
            random(1, HEADS, DIM),
        )
        where = torch.tensor(
            [row[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)]
        )
        store.write(0, where[:-1], k[:-1], v[:-1])
        slots.append(int(where[-1]))
        keys.append(k[-1:]), values.append(v[-1:]), queries.append(q)
        expected.append(plainly(q, k, v, window, chunk, softcap, sinks))
    context = context_of(store, slots, spans, blocks + tables.tolist(), decodes)

    def flat(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).transpose(0, 1)[None]

    passed = {} if chunk else {"sliding_window": window}  # as Llama 4 does
    with (
        running(context),
        mock.patch("engine.model.gathered_attention._MAX_SCORES", max_scores),
    ):
        found, _ = paged_attention(
            layer, flat(queries), flat(keys), flat(values), None,
            scaling=DIM**-0.5, softcap=softcap, s_aux=sinks, position_ids=object(), **passed,
        )  # fmt: skip
    torch.testing.assert_close(found[0], torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_short_sequences_are_not_padded_to_long_ones() -> None:
    lengths = np.array([3, 5, 9, 400, 410, 420], np.int64)
    parts = split_decodes(
        torch.zeros(6, 420 // BLOCK, dtype=torch.int64),
        lengths,
        BLOCK,
        gather_tokens=1_000,
    )
    assert [tuple(tables.shape) for tables, _ in parts] == [(3, 3), (2, 103), (1, 105)]
    assert torch.cat([own for _, own in parts]).tolist() == lengths.tolist()


def test_all_sources_are_read_before_any_target_is_written() -> None:
    store = cache(4)
    slots = torch.arange(4 * BLOCK)
    content = (
        torch.arange(4.0)
        .repeat_interleave(BLOCK)[:, None, None]
        .expand(-1, KV_HEADS, DIM)
    )
    store.write(0, slots, content, content)
    store.copy_blocks([(0, 1), (1, 2)])
    keys, values = store.gather(0, torch.tensor([[0, 1, 2, 3]]))
    assert (
        keys[0, 0, ::BLOCK, 0].tolist()
        == values[0, 1, ::BLOCK, 3].tolist()
        == [0, 0, 1, 3]
    )


def test_the_cache_is_sized_from_a_number_a_budget_or_the_need() -> None:
    layers = {0: LayerShapes(2, 8, 8), 1: LayerShapes(2, 8, 4)}

    def plan(**config: Any) -> int:
        return plan_cache(
            EngineConfig(**config), layers, None, 64, torch.float16, lambda: 20 * 1792
        ).num_blocks

    assert plan(num_blocks=7) == 7
    assert plan(kv_cache_bytes=10 * 1792 + 5) == 10
    assert plan() == 20
    assert plan(max_num_seqs=3) == 12
    with pytest.raises(ValueError, match="needs 4"):
        plan(num_blocks=3)


def test_states_take_half_of_the_memory_and_bound_the_sequences() -> None:
    layout = StateLayout(
        {
            ("conv", 0, 0): torch.zeros(1, 4, 8).half(),
            ("recurrent", 0, 0): torch.zeros(1, 2, 64),
        }
    )
    assert layout.slot_bytes == 576

    def plan(layers: dict[int, LayerShapes], memory: int, **config: Any) -> CachePlan:
        return plan_cache(
            EngineConfig(**config), layers, layout, 64, torch.float16, lambda: memory
        )

    layers = {0: LayerShapes(2, 8, 8)}  # 1,024 bytes a block
    assert plan(layers, 10 * 1152) == CachePlan(num_blocks=5, max_num_seqs=10)
    assert plan(layers, 1 << 20, max_num_seqs=3) == CachePlan(
        num_blocks=12, max_num_seqs=3
    )
    assert plan({}, 5 * 576) == CachePlan(num_blocks=20, max_num_seqs=5), (
        "without keys, all of it"
    )
    with pytest.raises(
        ValueError,
        match=r"the states of a sequence take 0\.0 MiB.*raise kv_cache_bytes",
    ):
        plan(layers, 1000)
