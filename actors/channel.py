"""The step channel: one connection an actor incarnation, made by the engine, never used twice. Sends never block.

`LocalChannel` on the same machine, `RemoteChannel` to another one; a pool's come from its `Transport`.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from actors.address import Address
from actors.local_channel import LocalChannel, LocalEnd
from actors.remote_channel import RemoteChannel, RemoteEnd
from guided.errors import InternalError

__all__ = ["Channel", "End", "Transport", "connect"]

_IPC_PATH_BYTES = 107
"""sockaddr_un.sun_path, less its NUL."""
_serial = itertools.count()


class Channel(Protocol):
    """Engine side of one incarnation's connection. Made on one thread, then handed to that which sends and receives."""

    @property
    def address(self) -> Address:
        """Where the actor finds it."""

    @property
    def socket(self) -> Any:
        """A ZeroMQ socket or a file descriptor, to poll: readable where there is a message, or the end."""

    @property
    def monitor(self) -> Any:
        """The same: readable where the connection may be lost. Stays with the thread that watches."""

    def wait_connected(self, timeout: float) -> bool:
        """Whether the actor connected within `timeout` seconds. Nobody else can after it."""

    def is_disconnected(self) -> bool:
        """Whether the connection was lost."""

    def send(self, message: bytes) -> bool:
        """Send without blocking; False where the peer is gone or doesn't read."""

    def push(self) -> None:
        """Send what may be left of a message."""

    def receive(self) -> bytes | None:
        """The next message that is there; None where there is none."""

    def close(self) -> None:
        """Close the connection. Idempotent. By the thread that sends and receives."""


class End(Protocol):
    """Actor side. Never reconnects: what comes after a lost connection is another incarnation."""

    def fileno(self) -> int:
        """To poll for messages."""

    def recv(self) -> bytes:
        """Wait for the next message. Raises where the connection is lost."""

    def send(self, message: bytes) -> None:
        """Raises where the engine doesn't read, or is gone."""

    def close(self) -> None:
        """End it."""


class Transport:
    """What the channels of a pool share: the socket directory, the ZeroMQ context, the clients that may connect.

    Args:
        directory: for the sockets of local channels; mode 0700, short.
        host: the address that other nodes reach this one at.
    """

    def __init__(self, directory: str, host: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = directory
        self._host = host
        self._channels: weakref.WeakSet[LocalChannel] = weakref.WeakSet()
        self._clients: set[bytes] = set()
        self._authenticator: ThreadAuthenticator | None = None
        self._lock = threading.Lock()

    def ipc(self) -> Channel:
        """A channel to an actor on this node."""
        path = os.path.join(self._directory, f"{next(_serial)}")
        if len(os.fsencode(path)) > _IPC_PATH_BYTES:
            raise InternalError(f"socket path {path!r} is longer than {_IPC_PATH_BYTES} bytes")
        channel = LocalChannel(path)
        self._channels.add(channel)
        return channel

    def tcp(self) -> Channel:
        """A channel to an actor on another node: authenticated both ways, encrypted."""
        self._authenticate()
        return RemoteChannel(self._context, self._host, self._admit, self._forget)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key is one that was handed out (asked by the authenticator's thread)."""
        return key in self._clients

    def close(self) -> None:
        """Stop the authenticator, close every socket."""
        for channel in list(self._channels):
            channel.close()
        with self._lock:
            authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.stop()
        self._context.destroy(linger=0)

    def _admit(self, client_key: bytes) -> None:
        with self._lock:
            self._clients.add(client_key)

    def _forget(self, client_key: bytes) -> None:
        with self._lock:
            self._clients.discard(client_key)

    def _authenticate(self) -> None:
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self._context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback("*", credentials_provider=self)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: Address) -> End:
    """Actor side."""
    return LocalEnd(address) if LocalEnd.serves(address) else RemoteEnd(context, address)
