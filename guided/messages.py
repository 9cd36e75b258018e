"""Encoding of messages between processes: msgpack, typed on decode, nothing executable."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Return the msgpack bytes of a message."""
    return _encoder.encode(message)


def decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """Return a typed decoder; it raises `msgspec.MsgspecError` on anything that is not a `kind`."""
    return msgspec.msgpack.Decoder(kind)
