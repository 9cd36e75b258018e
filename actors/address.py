"""Address: where an actor finds its channel."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Address"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor connects to; over TCP with the keys that CURVE (RFC 26) needs. Travels through Ray only."""

    endpoint: str
    server_key: bytes = b""
    client_key: bytes = b""
    client_secret: bytes = field(default=b"", repr=False)
