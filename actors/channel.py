"""The step channel: one ZeroMQ PAIR connection per actor incarnation, bound by the engine, never used twice.

A bound socket replays what a dead peer left unread into its replacement, so every incarnation gets an endpoint of its
own, and a channel that was disconnected once is closed. Sends never block; nothing lingers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from guided.errors import InternalError

__all__ = ["Address", "Channel", "Transport", "connect"]

_IPC_PATH_BYTES = 107
"""sockaddr_un.sun_path, less its NUL."""
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor connects to; over TCP with the keys that CURVE (RFC 26) needs. Travels through Ray only."""

    endpoint: str
    server_key: bytes = b""
    client_key: bytes = b""
    client_secret: bytes = field(default=b"", repr=False)


class Transport:
    """What the channels of a pool share: the ZeroMQ context, the socket directory, the clients that may connect.

    Args:
        directory: for ipc sockets; mode 0700, short.
        host: the address that other nodes reach this one at.
    """

    def __init__(self, directory: str, host: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = directory
        self._host = host
        self._clients: set[bytes] = set()
        self._authenticator: ThreadAuthenticator | None = None
        self._lock = threading.Lock()

    def ipc(self) -> Channel:
        """A channel to an actor on this node."""
        path = os.path.join(self._directory, f"{next(_serial)}")
        if len(os.fsencode(path)) > _IPC_PATH_BYTES:
            raise InternalError(f"socket path {path!r} is longer than {_IPC_PATH_BYTES} bytes")
        socket = self._socket()
        socket.bind(f"ipc://{path}")
        return Channel(self, socket, Address(f"ipc://{path}"))

    def tcp(self) -> Channel:
        """A channel to an actor on another node: authenticated both ways, encrypted."""
        self._authenticate()
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        with self._lock:
            self._clients.add(client_key)
        socket = self._socket()
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = server_secret, server_key
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        address = Address(f"tcp://{self._host}:{port}", server_key, client_key, client_secret)
        return Channel(self, socket, address)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's public key is one that was handed out (asked by the authenticator's thread)."""
        return key in self._clients

    def forget(self, client_key: bytes) -> None:
        """The channel of that client is closed."""
        with self._lock:
            self._clients.discard(client_key)

    def close(self) -> None:
        """Stop the authenticator, close every socket."""
        with self._lock:
            authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.stop()
        self.context.destroy(linger=0)

    def _socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PAIR)
        socket.linger = 0
        return socket

    def _authenticate(self) -> None:
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self.context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback("*", credentials_provider=self)


class Channel:
    """Engine side of one incarnation's connection. Made on one thread, then handed to the one that sends and receives.

    `monitor` stays with the thread that watches, as long as that does.
    """

    def __init__(self, transport: Transport, socket: zmq.Socket[bytes], address: Address) -> None:
        self._transport = transport
        self.socket = socket
        self.address = address
        name = f"inproc://monitor-{next(_serial)}"
        socket.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.monitor = transport.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.connect(name)

    def wait_connected(self, timeout: float) -> bool:
        """Whether the actor's handshake came within `timeout` seconds. Nobody else can connect after it."""
        connected = bool(self.monitor.poll(int(timeout * 1000))) and not self.is_disconnected()
        self._unlink()
        return connected

    def is_disconnected(self) -> bool:
        """Read the monitor's events: whether the connection was lost."""
        lost = False
        while self.monitor.poll(0):
            event: Any = recv_monitor_message(self.monitor)
            lost |= event["event"] == zmq.EVENT_DISCONNECTED
        return lost

    def send(self, message: bytes) -> bool:
        """Send without blocking; False where the peer is gone or doesn't read."""
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message that is there; None where there is none."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the connection. Idempotent. By the thread that sends and receives, when nobody watches any more: libzmq
        blocks where it has an event to report and the monitor is gone before the socket."""
        if not self.socket.closed:
            self._transport.forget(self.address.client_key)
            self.socket.monitor(None, 0)
            self.socket.close(linger=0)
            self.monitor.close(linger=0)
            self._unlink()

    def _unlink(self) -> None:
        # libzmq leaves the files of ipc sockets behind.
        if self.address.endpoint.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.endpoint.removeprefix("ipc://"))


def connect(context: zmq.Context[zmq.Socket[bytes]], address: Address) -> zmq.Socket[bytes]:
    """Actor side. Never reconnects: what comes after a lost connection is another incarnation."""
    socket = context.socket(zmq.PAIR)
    socket.linger = 0
    socket.reconnect_ivl = -1
    if address.server_key:
        socket.curve_serverkey = address.server_key
        socket.curve_publickey, socket.curve_secretkey = address.client_key, address.client_secret
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
    socket.connect(address.endpoint)
    return socket
