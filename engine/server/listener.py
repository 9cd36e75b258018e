"""The server's address, taken before anything slow, so that it being in use is known at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["listener_on"]


@contextlib.contextmanager
def listener_on(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that doesn't listen yet: who connects now is refused rather than kept waiting.

    Raises:
        OSError: it can't be had; says which and why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"can't listen on {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise OSError(f"can't listen on {host} port {port}: {error.strerror}; choose another --port") from None
        yield listener
