"""What a pool and a mask worker say to each other. msgpack arrays: small, typed on decode, nothing executable.

Every message to a worker is idempotent: it carries the position. A worker that has less history than `FillRow.start`
says so (`NEEDS_HISTORY`) and gets all of it. Preemption, replay, forks, a move to another actor and a lost message are
then one mechanism.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from guided.errors import Wire

__all__ = [
    "FillRow",
    "OpenSequence",
    "RowResult",
    "RowStatus",
    "StepAnswer",
    "StepRequest",
    "decoder",
    "encode",
]


class RowStatus(IntEnum):
    """What became of a row."""

    READY = 0
    """The bitmask is written."""
    NEEDS_HISTORY = 1
    """The worker holds less than `start` tokens of this sequence: send all of them."""
    FAILED = 2
    """The sequence is over; `error` says why."""


class OpenSequence(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Open a matcher: for grammar `grammar`, or as a copy of `parent`'s where the worker has that one."""

    sequence: int
    grammar: str
    parent: int | None = None


class FillRow(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Fill the worker's row `row` with the mask after `start + len(tokens)` output tokens of `sequence`."""

    sequence: int
    row: int
    start: int
    tokens: list[int]

    @property
    def position(self) -> int:
        """Output tokens before the mask."""
        return self.start + len(self.tokens)


class StepRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Work for one worker: `frees`, then `opens`, then `fills`."""

    incarnation: int
    step: int
    """The number of this request: greater than that of any before, which a worker then takes no more."""
    fills: list[FillRow]
    opens: list[OpenSequence] = []
    frees: list[int] = []


class RowResult(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What became of one `FillRow`: matched by incarnation, request, sequence and row; ignored where nobody waits.

    Where the worker shares memory with the pool, a row that is ready is told there, and not in words.
    """

    sequence: int
    position: int
    row: int
    status: RowStatus
    seconds: float = 0.0
    """Accept and fill together, seconds."""
    error: Wire | None = None
    mask: bytes = b""
    """The row itself, where the worker shares no memory with the pool."""


class StepAnswer(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Rows that are decided; a request may be answered in several messages."""

    incarnation: int
    step: int
    """The number of the request."""
    results: list[RowResult]


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """msgpack bytes of a message."""
    return _encoder.encode(message)


def decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """A typed decoder; raises `msgspec.MsgspecError` on anything that is not a `kind`."""
    return msgspec.msgpack.Decoder(kind)
