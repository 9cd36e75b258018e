"""The attention of a step by the kernel and by the CPU's way. As a script, with
TRITON_INTERPRET=1, it prints the differences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.memory.kv_cache import KVCache, LayerShapes
from engine.model.attention import PagedContext, paged_attention, running
from engine.model.gathered_attention import Prefill

BLOCK = 16
CPU = torch.device("cpu")


@dataclass
class Case:
    prefills: tuple[tuple[int, int], ...] = ()
    """Tokens before each chunk, and tokens of the chunk."""
    decodes: tuple[int, ...] = ()
    """Lengths of decoding sequences."""
    heads: tuple[int, int] = (4, 2)
    """Query heads and key heads."""
    dims: tuple[int, int] = (64, 64)
    """Of keys and values."""
    dtype: torch.dtype = torch.float32
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    padding: int = 0
    """Rows that pad the decodes."""
    width: int = 0
    """Blocks of a table, at least."""
    is_column: bool = False
    """One row per sequence, as for a model with recurrent layers."""


MIXED: dict[str, Any] = {
    "prefills": ((0, 21), (37, 18), (16, 1), (0, 3)),
    "decodes": (1, 16, 17, 50),
}
FEW: dict[str, Any] = {"prefills": ((5, 16),), "decodes": (33,)}
LENGTHS = (1, 2, 16, 17, 33, 65, 100)
CASES = {
    "decodes": Case(decodes=LENGTHS),
    "mixed": Case(**MIXED),
    "one prefill": Case(prefills=((0, 70),)),
    "cached prefix": Case(prefills=((48, 70),)),
    "one token each": Case(prefills=((0, 1), (40, 1)), decodes=(5, 20)),
    "padded decodes": Case(decodes=LENGTHS[:5], padding=3, width=9),
    "rows of a model with states": Case(decodes=LENGTHS, is_column=True),
    "window": Case(**MIXED, window=20),
    "window of decodes": Case(decodes=LENGTHS, window=16),
    "window of one": Case(**MIXED, window=1),
    "chunks": Case(**MIXED, chunk=16),
    "chunks of decodes": Case(decodes=LENGTHS, chunk=24),
    "capped": Case(**MIXED, softcap=0.5),
    "sinks": Case(**MIXED, has_sinks=True),
    "all at once": Case(
        **MIXED, softcap=20.0, has_sinks=True, window=33, dtype=torch.bfloat16
    ),
    "split keys": Case(decodes=(1, 300, 1000), width=64),
    "split keys with sinks": Case(
        decodes=(5, 1000), width=64, has_sinks=True, softcap=2.0, dtype=torch.bfloat16
    ),
    "split keys of a window": Case(decodes=(700,), width=64, window=300),
    "split keys of a prefix": Case(prefills=((600, 3),)),
    **{
        f"{group} heads a key": Case(**FEW, heads=(2 * group, 2), dtype=torch.bfloat16)
        for group in range(1, 9)
    },
    "71 heads a key": Case(
        prefills=((3, 4),), decodes=(9,), heads=(71, 1), dtype=torch.bfloat16
    ),
    **{
        f"size {dim}, {str(dtype)[6:]}": Case(**FEW, dims=(dim, dim), dtype=dtype)
        for dim in (8, 64, 80, 96, 128, 192, 256)
        for dtype in (torch.float32, torch.bfloat16)
    },
    "float16": Case(**FEW, dtype=torch.float16),
    "keys of 192, values of 128": Case(**FEW, dims=(192, 128), dtype=torch.bfloat16),
}


def difference(case: Case, device: torch.device) -> float:
    """Return the largest difference of the kernel's outputs on a device from the CPU's
    in float32."""
    generator = torch.Generator().manual_seed(3)
    spans = [*case.prefills, *((length - 1, 1) for length in case.decodes)]
    total = sum(length for _, length in spans)
    num_blocks = sum(-(-sum(span) // BLOCK) for span in spans)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [
        np.array([free.pop() for _ in range(-(-sum(span) // BLOCK))]) for span in spans
    ]
    content: list[torch.Tensor] = []
    for dim in case.dims:
        content.append(
            torch.randn(num_blocks * BLOCK, case.heads[1], dim, generator=generator).to(
                case.dtype
            )
        )
    query = torch.randn(
        total + case.padding, case.heads[0], case.dims[0], generator=generator
    ).to(case.dtype)
    sinks = (
        torch.randn(case.heads[0], generator=generator).to(case.dtype)
        if case.has_sinks
        else None
    )

    positions = np.concatenate(
        [np.arange(before, before + length) for before, length in spans]
    )
    where = [(table * BLOCK)[:, None] + np.arange(BLOCK) for table in tables]
    slots = [
        row.ravel()[before : before + length]
        for row, (before, length) in zip(where, spans, strict=True)
    ]
    used = np.concatenate(
        [row.ravel()[: sum(span)] for row, span in zip(where, spans, strict=True)]
    )
    packed = np.stack([positions, positions, np.concatenate(slots)])
    prefills: list[Prefill] = []
    end = 0
    for before, length in case.prefills:
        prefills.append((end, end + length, before))
        end += length
    width = max([case.width, *map(len, tables)])
    rows = np.zeros((len(tables) + case.padding, width), np.int64)
    for row, blocks in zip(rows, tables, strict=False):
        row[: len(blocks)] = blocks
    pads = np.tile([[0], [0], [num_blocks * BLOCK]], case.padding)

    def attended(place: torch.device, gathers: bool) -> torch.Tensor:
        dtype = torch.float32 if gathers else case.dtype
        shapes = {0: LayerShapes(case.heads[1], *case.dims)}
        store = KVCache(shapes, num_blocks, BLOCK, dtype, place)
        store.gathers = gathers
        for target, source in zip(
            (store.keys[0], store.values[0]), content, strict=True
        ):
            if not gathers:  # what no sequence has written may be anything
                target.fill_(float("nan"))
            target[used] = source[used].to(target)
        padded = packed if gathers else np.concatenate([packed, pads], axis=1)
        context = PagedContext(
            padded, prefills, rows[: len(tables)] if gathers else rows
        )
        context.move(store, context.send(place))
        own_slots = torch.from_numpy(padded[2])
        inputs = [query[: len(own_slots)]]
        for source in content:
            inputs.append(torch.cat([source, source[:BLOCK]])[own_slots])
        sent = [tensor.to(place, dtype) for tensor in inputs]
        shaped = [
            tensor[:, :, None] if case.is_column else tensor.transpose(0, 1)[None]
            for tensor in sent
        ]
        layer_types = ["chunked_attention"] if case.chunk else None
        config = SimpleNamespace(
            layer_types=layer_types, attention_chunk_size=case.chunk
        )
        layer: Any = SimpleNamespace(layer_idx=0, config=config)
        others: dict[str, Any] = {} if case.chunk else {"sliding_window": case.window}
        s_aux = None if sinks is None else sinks.to(place, dtype)
        with running(context):
            output, _ = paged_attention(
                layer, *shaped, None, softcap=case.softcap, s_aux=s_aux, **others
            )
        return output.flatten(0, 1)[:total].cpu().float()

    found = attended(device, gathers=False)
    return float((found - attended(CPU, gathers=True)).abs().max())


def tolerance(case: Case) -> float:
    """Return the largest difference that rounding explains: values are around 1."""
    return {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[case.dtype]


def correct_the_interpreter() -> None:
    """Triton's interpreter takes the bits of bfloat16 for integers in a product of
    matrices."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def corrected(builder: Any, *arguments: Any) -> Any:
        *matrices, total, precision, imprecise = arguments
        for place, matrix in enumerate(matrices):
            if matrix.dtype.scalar == tl.bfloat16:
                matrices[place] = builder.cast_impl(
                    matrix, tl.block_type(tl.float32, list(matrix.data.shape))
                )
        return create_dot(builder, *matrices, total, precision, imprecise)

    InterpreterBuilder.create_dot = corrected


if __name__ == "__main__":
    correct_the_interpreter()
    print(json.dumps({name: difference(case, CPU) for name, case in CASES.items()}))
