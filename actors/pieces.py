"""Constraints as Ray takes them: in pieces, however large.

Ray puts an argument of more than 100 KiB into its shared memory, and where its raylet is gone that ends the caller's
process: the engine's (Ray 2.60: `ray.put` then exits).
"""

from __future__ import annotations

from collections.abc import Iterable

from guided.constraint import Constraint
from guided.messages import decoder, encode

__all__ = ["in_pieces", "joined"]

_PIECE_BYTES = 64 << 10
_decode = decoder(Constraint).decode


def in_pieces(constraint: Constraint) -> tuple[bytes, ...]:
    """Arguments for a call through Ray."""
    data = encode(constraint)
    return tuple(data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))


def joined(pieces: Iterable[bytes]) -> Constraint:
    """The constraint that `in_pieces` took apart."""
    constraint: Constraint = _decode(b"".join(pieces))
    return constraint
