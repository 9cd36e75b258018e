"""The server's socket. It is bound before the model is loaded, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["listener_on"]


@contextlib.contextmanager
def listener_on(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket. It does not listen yet, so early connections are refused instead of kept waiting.

    Raises:
        OSError: the address cannot be bound. The message says why.
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
