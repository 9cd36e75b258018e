"""Random numbers of sequences: each has its own generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch


def sequence_seed(
    engine_seed: int, request_id: str, seed: int | None, index: int
) -> int:
    """Derive a 63-bit seed from `index` and the request's seed, or else the engine's
    seed and the request id."""
    if seed is not None:
        root = f"seed {seed}"
    else:
        root = f"request {engine_seed} {request_id}"
    digest = hashlib.blake2b(
        f"{root} {index}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seed: int) -> Iterator[float]:
    """Yield the random numbers in [0, 1) of one sequence. They depend on its seed
    only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.rand(32, generator=generator, dtype=torch.float64).tolist()
