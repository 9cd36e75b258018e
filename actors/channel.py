"""The step channel: one connection per actor incarnation, created by the engine, never used twice. Sends never block.

`LocalChannel` is a Unix socket to a process of the same machine. The engine's thread itself writes to it. ZeroMQ would
hand each message to another thread: each wake-up costs tens of microseconds, and may take the CPU from the thread that
has just sent (`python -m benchmarks.channel` measures both). `RemoteChannel` is a ZeroMQ PAIR connection over TCP to
another machine, authenticated and encrypted (CURVE, RFC 26). A bound ZeroMQ socket delivers messages that a dead peer
left unread to the next peer, so every incarnation gets an endpoint of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket as sockets
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from guided.errors import InternalError, PoolUnavailable

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_SCHEME = "unix://"
_IPC_PATH_BYTES = 107
"""sockaddr_un.sun_path, without its NUL."""
_ALL_ADDRESSES = ("0.0.0.0", "::", "*")
_CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): process, user, group."""
_SEND_TIMEOUT = struct.pack("ll", 5, 0)
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
_HANDSHAKE_MS = 5_000
"""Time limit for a client to prove that it has the key. After it, the client is disconnected."""
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor connects to; over TCP with the keys that CURVE needs. Sent through Ray only."""

    endpoint: str
    server_key: bytes = b""
    client_key: bytes = b""
    client_secret: bytes = field(default=b"", repr=False)


class Channel(Protocol):
    """Engine side of one incarnation's connection. Created on one thread, then used by one that sends and receives."""

    @property
    def address(self) -> Address:
        """Where the actor connects to."""

    @property
    def socket(self) -> Any:
        """A ZeroMQ socket or a file descriptor to poll: readable if there is a message, or the connection ended."""

    @property
    def monitor(self) -> Any:
        """A ZeroMQ socket or a file descriptor to poll: readable if the connection may be lost. For the supervisor."""

    def wait_connected(self, timeout: float) -> bool:
        """Return whether the actor connected within `timeout` seconds. No other client can connect after it."""

    def is_disconnected(self) -> bool:
        """Return whether the connection was lost."""

    def send(self, message: bytes) -> None:
        """Queue a message and send what the connection takes now. A lost connection is noticed by the monitor."""

    def push(self) -> None:
        """Send what is left of the queue."""

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""

    def close(self) -> None:
        """Close the connection. Idempotent. By the thread that sends and receives."""


class WorkerEnd(Protocol):
    """Actor side of a channel. It never reconnects: a lost connection ends the incarnation."""

    def receive(self, *, wait: bool = True) -> bytes | None:
        """Return the next message. If there is none: wait for it, or return None. Raises if the connection is lost."""

    def send(self, message: bytes) -> None:
        """Send a message. Raises if the engine does not read, or is gone."""

    def close(self) -> None:
        """Close the connection, which ends a `receive` that waits."""


class Transport:
    """What a pool's channels share: the socket directory, the ZeroMQ context, the keys of the clients that may connect.

    Args:
        directory: for the sockets of local channels; mode 0700, short.
        host: this machine's address for other nodes.
        listen_on: address that remote channels listen on. None: `host`. If it is one address, actors connect to it.
        ports: ports of remote channels. None: any free port.
    """

    def __init__(
        self, directory: str, host: str, listen_on: str | None = None, ports: Sequence[int] | None = None
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directory = directory
        self._listen_on = (listen_on or host).strip("[]")
        self.host = host if self._listen_on in _ALL_ADDRESSES else self._listen_on
        """This machine's address for actors."""
        self._ports = ports
        self._channels: weakref.WeakSet[LocalChannel] = weakref.WeakSet()
        self._clients: set[bytes] = set()
        """Public keys of the clients that may connect."""
        self._authenticator: ThreadAuthenticator | None = None
        self._lock = threading.Lock()

    def ipc(self) -> Channel:
        """Create a channel to an actor on this node."""
        path = os.path.join(self._directory, f"{next(_serial)}")
        if len(os.fsencode(path)) > _IPC_PATH_BYTES:
            raise InternalError(f"socket path {path!r} is longer than {_IPC_PATH_BYTES} bytes")
        channel = LocalChannel(path)
        self._channels.add(channel)
        return channel

    def tcp(self) -> Channel:
        """Create a channel to an actor on another node: authenticated both ways, encrypted.

        Raises:
            PoolUnavailable: the address cannot be listened on, or no port is free.
        """
        with self._lock:
            if self._authenticator is None:
                self._authenticator = ThreadAuthenticator(self.context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback("*", credentials_provider=self)
        return RemoteChannel(self)

    def bind(self, socket: zmq.Socket[bytes]) -> int:
        """Bind a socket to a free port and return the port."""
        for port in self._ports or ("*",):
            try:
                socket.bind(_tcp_endpoint(self._listen_on, port))
                return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    text = (
                        f"cannot listen on {self._listen_on} port {port}: {error.strerror}; choose another channel_host"
                    )
                    raise PoolUnavailable(text) from None
        taken = "no port is free" if self._ports is None else f"ports {self._ports[0]} to {self._ports[-1]} are taken"
        raise PoolUnavailable(f"{taken} on {self._listen_on}: widen channel_ports")

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's public key was handed out (called by the authenticator's thread)."""
        return key in self._clients

    def admit(self, client_key: bytes) -> None:
        """Let the client with this public key connect."""
        self._clients.add(client_key)

    def forget(self, client_key: bytes) -> None:
        """Undo `admit`."""
        self._clients.discard(client_key)

    def close(self) -> None:
        """Stop the authenticator and close every socket."""
        for channel in list(self._channels):
            channel.close()
        with self._lock:
            authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.stop()
        self.context.destroy(linger=0)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: Address) -> WorkerEnd:
    """Connect an actor to its channel. Ending `context` ends a `receive` that waits over TCP."""
    return _LocalEnd(address) if address.endpoint.startswith(_SCHEME) else _RemoteEnd(context, address)


def _tcp_endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class _Frames:
    """Splits a stream of bytes into messages, each after its length."""

    def __init__(self, stream: sockets.socket) -> None:
        self._stream = stream
        self._bytes = bytearray()

    def next(self) -> bytes | None:
        """Return the next complete message, or None."""
        have = len(self._bytes)
        if have < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if have < end:
            return None
        message = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message

    def read(self, flags: int = 0) -> bool:
        """Read what has arrived; return False at the end. Raises `BlockingIOError` on a non-blocking empty stream."""
        chunk = self._stream.recv(_CHUNK, flags)
        self._bytes += chunk
        return bool(chunk)


class LocalChannel:
    """Engine side of a Unix socket; see `Channel`. A second connection carries nothing: it closes when the actor's
    process ends.

    Args:
        path: of the socket, in a directory that other users cannot enter.
    """

    def __init__(self, path: str) -> None:
        self.address = Address(_SCHEME + path)
        self._path = path
        self._listening = sockets.socket(sockets.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(2)
        self._stream, self._lifeline = sockets.socket(sockets.AF_UNIX), sockets.socket(sockets.AF_UNIX)
        self._frames = _Frames(self._stream)
        self._unsent = b""

    def wait_connected(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        try:
            connections = [self._accept(deadline) for _ in range(2)]
        except TimeoutError:
            return False
        finally:
            self._stop_listening()
        for old, new in zip((self._stream, self._lifeline), connections, strict=True):
            old.close()
            new.setblocking(False)
        self._stream, self._lifeline = connections
        self._frames = _Frames(self._stream)
        return True

    def _accept(self, deadline: float) -> sockets.socket:
        while True:
            self._listening.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
            connection, _ = self._listening.accept()
            packed = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(packed)[1] == os.getuid():
                return connection
            connection.close()

    @property
    def socket(self) -> int:
        return self._stream.fileno()

    @property
    def monitor(self) -> int:
        return self._lifeline.fileno()

    def is_disconnected(self) -> bool:
        try:
            return not self._lifeline.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: bytes) -> None:
        self._unsent += _LENGTH.pack(len(message)) + message
        self.push()

    def push(self) -> None:
        if self._unsent:
            with contextlib.suppress(OSError):  # the socket's buffer is full, or the connection is lost
                self._unsent = self._unsent[self._stream.send(self._unsent, sockets.MSG_NOSIGNAL) :]

    def receive(self) -> bytes | None:
        while (message := self._frames.next()) is None:
            try:
                if not self._frames.read():
                    return None
            except OSError:  # nothing has arrived, or the connection is lost
                return None
        return message

    def close(self) -> None:
        self._stop_listening()
        self._stream.close()
        self._lifeline.close()
        self._unsent = b""

    def _stop_listening(self) -> None:
        self._listening.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class _LocalEnd:
    """Actor side of a `LocalChannel`."""

    def __init__(self, address: Address) -> None:
        path = address.endpoint.removeprefix(_SCHEME)
        self._stream, self._lifeline = sockets.socket(sockets.AF_UNIX), sockets.socket(sockets.AF_UNIX)
        self._stream.connect(path)
        self._lifeline.connect(path)
        self._stream.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._frames = _Frames(self._stream)

    def receive(self, *, wait: bool = True) -> bytes | None:
        try:
            while (message := self._frames.next()) is None:
                if not self._frames.read(0 if wait else sockets.MSG_DONTWAIT):
                    raise ConnectionResetError("the engine closed the channel")
        except BlockingIOError:
            return None
        return message

    def send(self, message: bytes) -> None:
        self._stream.sendall(_LENGTH.pack(len(message)) + message, sockets.MSG_NOSIGNAL)

    def close(self) -> None:
        for each in (self._stream, self._lifeline):
            with contextlib.suppress(OSError):
                each.shutdown(sockets.SHUT_RDWR)
            each.close()


class RemoteChannel:
    """Engine side of a ZeroMQ connection; see `Channel`. One client may connect: the one that has `address`."""

    def __init__(self, transport: Transport) -> None:
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        self._transport = transport
        context = transport.context
        socket = context.socket(zmq.PAIR)
        socket.linger = 0
        socket.ipv6 = True
        socket.sndhwm = 0  # an actor that does not read is ended by its supervisor; until then nothing is dropped
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = server_secret, server_key
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            port = transport.bind(socket)
        except PoolUnavailable:
            socket.close()
            raise
        transport.admit(client_key)
        self.socket = socket
        self.address = Address(_tcp_endpoint(transport.host, port), server_key, client_key, client_secret)
        name = f"inproc://monitor-{next(_serial)}"
        socket.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._candidates: set[int] = set()
        """Connections, as descriptors, of which one is the actor's. The others lack the key, and end within
        `_HANDSHAKE_MS`. ZeroMQ does not tell which connection has succeeded, but only one client can."""
        self._has_connected = False
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.connect(name)

    def wait_connected(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._has_connected:
            if not self.monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                return False
            self._read_events()
        return not self.is_disconnected()

    def is_disconnected(self) -> bool:
        self._read_events()
        return self._has_connected and not self._candidates

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event: Any = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._has_connected = True
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._candidates.discard(event["value"])
            elif not self._has_connected:
                self._candidates.add(event["value"])

    def send(self, message: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is lost
            self.socket.send(message, zmq.NOBLOCK)

    def push(self) -> None:
        """Do nothing: ZeroMQ keeps the queue."""

    def receive(self) -> bytes | None:
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        # The supervisor's thread must not use the monitor any more: libzmq blocks if it has an event to report and the
        # monitor was closed before the socket.
        if not self.socket.closed:
            self._transport.forget(self.address.client_key)
            self.socket.monitor(None, 0)
            self.socket.close(linger=0)
            self.monitor.close(linger=0)


class _RemoteEnd:
    """Actor side of a `RemoteChannel`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> None:
        self._socket = socket = context.socket(zmq.PAIR)
        socket.linger = 0
        socket.ipv6 = True
        socket.reconnect_ivl = -1
        if address.server_key:
            socket.curve_serverkey = address.server_key
            socket.curve_publickey, socket.curve_secretkey = address.client_key, address.client_secret
            socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.connect(address.endpoint)

    def receive(self, *, wait: bool = True) -> bytes | None:
        try:
            return self._socket.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, message: bytes) -> None:
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)
