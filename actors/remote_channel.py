"""The step channel to another machine: a ZeroMQ PAIR connection over TCP, authenticated and encrypted (CURVE, RFC 26).

A bound socket replays what a dead peer left unread into its replacement, so every incarnation gets an endpoint of its
own, and a channel that was disconnected once is closed. Sends never block; nothing lingers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from actors.address import Address

__all__ = ["RemoteChannel", "RemoteEnd"]

_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_serial = itertools.count()


class RemoteChannel:
    """Engine side of one incarnation's connection. Made on one thread, then handed to the one that sends and receives.

    `monitor` stays with the thread that watches, as long as that does.

    Args:
        host: the address of this machine that others reach it at.
        admit, forget: take the public key of the one client that may connect, for as long as it may.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        admit: Callable[[bytes], None],
        forget: Callable[[bytes], None],
    ) -> None:
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        admit(client_key)
        self._forget = forget
        socket = context.socket(zmq.PAIR)
        socket.linger = 0
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = server_secret, server_key
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        port = socket.bind_to_random_port(f"tcp://{host}")
        self.socket = socket
        self.address = Address(f"tcp://{host}:{port}", server_key, client_key, client_secret)
        name = f"inproc://monitor-{next(_serial)}"
        socket.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.connect(name)

    def wait_connected(self, timeout: float) -> bool:
        """Whether the actor's handshake came within `timeout` seconds. Nobody else can connect after it."""
        return bool(self.monitor.poll(int(timeout * 1000))) and not self.is_disconnected()

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

    def push(self) -> None:
        """Nothing is ever left: ZeroMQ sends whole messages."""

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
            self._forget(self.address.client_key)
            self.socket.monitor(None, 0)
            self.socket.close(linger=0)
            self.monitor.close(linger=0)


class RemoteEnd:
    """Actor side of a `RemoteChannel`. Never reconnects: what comes after a lost connection is another incarnation.

    Args:
        context: ending it ends whoever waits in `recv`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> None:
        self._socket = socket = context.socket(zmq.PAIR)
        socket.linger = 0
        socket.reconnect_ivl = -1
        if address.server_key:
            socket.curve_serverkey = address.server_key
            socket.curve_publickey, socket.curve_secretkey = address.client_key, address.client_secret
            socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.connect(address.endpoint)

    def fileno(self) -> int:
        """To poll for messages."""
        return int(self._socket.fileno())

    def recv(self) -> bytes:
        """Wait for the next message."""
        return self._socket.recv()

    def send(self, message: bytes) -> None:
        """Raises where the engine doesn't read, or is gone."""
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """End it."""
        self._socket.close(linger=0)
