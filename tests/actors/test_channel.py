"""The step channel: one connection an incarnation, never blocking, never replayed."""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from driven_pool import until
from thread_actor import ConnectedPair

from actors.channel import Channel, Transport, connect
from guided.errors import InternalError, PoolUnavailable


def readable(socket: Any, milliseconds: int = 10_000) -> bool:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    return bool(poller.poll(milliseconds))


def received(channel: Channel) -> bytes | None:
    assert readable(channel.socket)
    return channel.receive()


@pytest.mark.parametrize("shared", [True, False], ids=["ipc", "tcp"])
def test_messages_go_both_ways(transport: Transport, shared: bool) -> None:
    pair = ConnectedPair(transport, shared=shared)
    assert pair.channel.receive() is None
    pair.channel.send(b"there")
    assert pair.end.receive() == b"there"
    pair.end.send(b"and back")
    assert received(pair.channel) == b"and back"
    pair.close()
    pair.connection.close()


@pytest.mark.parametrize("shared", [True, False], ids=["ipc", "tcp"])
def test_the_end_of_the_other_side_is_noticed_and_nothing_blocks(transport: Transport, shared: bool) -> None:
    pair = ConnectedPair(transport, shared=shared)
    assert not pair.channel.is_disconnected()
    pair.close()
    assert readable(pair.channel.monitor)
    assert pair.channel.is_disconnected()
    pair.channel.send(b"not delivered")
    assert pair.channel.receive() is None
    pair.connection.close()
    pair.connection.close()


@pytest.mark.parametrize("shared", [True, False], ids=["ipc", "tcp"])
def test_a_peer_that_does_not_read_blocks_nothing_and_gets_everything_later(transport: Transport, shared: bool) -> None:
    pair = ConnectedPair(transport, shared=shared)
    messages = [bytes([index]) * 100_000 for index in range(100)]
    for message in messages:
        pair.channel.send(message)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(pair.end.receive() for _ in messages))
    reader.start()
    deadline = time.monotonic() + 30
    while reader.is_alive():
        pair.channel.push()
        reader.join(0.001)
        assert time.monotonic() < deadline
    assert received == messages
    pair.close()
    pair.connection.close()


def test_a_replacement_gets_nothing_that_was_meant_for_its_predecessor(transport: Transport) -> None:
    first = ConnectedPair(transport)
    for _ in range(10):
        first.channel.send(b"for the first")
    first.close()
    second = ConnectedPair(transport)
    assert second.channel.address != first.channel.address
    second.channel.send(b"for the second")
    assert second.end.receive() == b"for the second"
    for pair in (first, second):
        pair.connection.close()
    second.close()


def test_a_connected_socket_has_no_file_that_another_could_connect_to(transport: Transport) -> None:
    pair = ConnectedPair(transport)
    assert not Path(pair.channel.address.endpoint.removeprefix("unix://")).exists()
    pair.close()
    pair.connection.close()


def test_a_channel_without_a_client(transport: Transport) -> None:
    channel = transport.ipc()
    assert not channel.wait_connected(0.05)
    channel.send(b"x")
    channel.close()


def _knocks(channel: Channel, public: bytes, secret: bytes) -> bool:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = 0
    socket.curve_serverkey = channel.address.server_key
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.connect(channel.address.endpoint)
    let_in = channel.wait_connected(0.3)
    socket.close()
    context.term()
    return let_in


def test_tcp_admits_only_the_client_with_the_issued_key(transport: Transport) -> None:
    channel = transport.tcp()
    stranger = zmq.curve_keypair()
    assert not _knocks(channel, *stranger)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect(context, channel.address)
    assert channel.wait_connected(10)
    socket.close()
    context.term()
    channel.close()
    other = transport.tcp()
    assert not _knocks(other, channel.address.client_key, channel.address.client_secret)  # its channel is over
    other.close()


def test_keys_are_not_printed(transport: Transport) -> None:
    channel = transport.tcp()
    assert str(channel.address.client_secret) not in repr(channel.address)
    channel.close()


def test_a_path_that_doesnt_fit_a_socket_address_is_refused(tmp_path: Path) -> None:
    transport = Transport(str(tmp_path / ("d" * 100)), "127.0.0.1")
    with pytest.raises(InternalError, match="107"):
        transport.ipc()
    started = time.monotonic()
    transport.close()
    assert time.monotonic() - started < 60


def test_strangers_are_not_taken_for_the_actor(transport: Transport) -> None:
    """A port scan, garbage, and a client with a wrong key: before the actor connects, and while it is connected."""
    channel = transport.tcp()
    address = channel.address
    host, port = address.endpoint.removeprefix("tcp://").split(":")

    def knock() -> None:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
            with sockets.create_connection((host, int(port))) as stranger:
                stranger.sendall(garbage)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, secret = zmq.curve_keypair()
        end = connect(context, replace(address, client_key=public, client_secret=secret))
        time.sleep(0.2)
        end.close()
        context.term()

    staying = sockets.create_connection((host, int(port)))
    knock()
    assert not channel.wait_connected(0.1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = connect(context, address)
    assert channel.wait_connected(10)
    knock()
    staying.close()
    assert not channel.is_disconnected()
    end.send(b"still here")
    assert received(channel) == b"still here"
    end.close()
    context.term()
    until(channel.is_disconnected, 20)
    channel.close()


@pytest.fixture
def free_port() -> int:
    with sockets.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def make_transport(directory: Path, *arguments: Any) -> Iterator[Transport]:
    transport = Transport(str(directory), *arguments)
    yield transport
    transport.close()


def meet(transport: Transport) -> str:
    """Connect to a new channel and send a message through it; return its endpoint."""
    channel = transport.tcp()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = connect(context, channel.address)
    assert channel.wait_connected(10)
    channel.send(b"hello")
    assert end.receive() == b"hello"
    end.close()
    context.term()
    channel.close()
    return channel.address.endpoint


@pytest.mark.parametrize(
    ("host", "listen_on", "prefix"),
    [("::1", None, "tcp://[::1]:"), ("127.0.0.1", "[::1]", "tcp://[::1]:"), ("::1", "::", "tcp://[::1]:"),
     ("127.0.0.1", "0.0.0.0", "tcp://127.0.0.1:")],
)  # fmt: skip
def test_addresses(tmp_path: Path, host: str, listen_on: str | None, prefix: str) -> None:
    with contextlib.contextmanager(make_transport)(tmp_path, host, listen_on) as transport:
        assert meet(transport).startswith(prefix)


def test_channels_stay_within_the_ports_that_were_given(tmp_path: Path, free_port: int) -> None:
    with (
        contextlib.contextmanager(make_transport)(tmp_path, "127.0.0.1", None, range(free_port, free_port + 1)) as one,
        contextlib.contextmanager(make_transport)(tmp_path, "127.0.0.1", "192.0.2.1") as elsewhere,
    ):
        channel = one.tcp()
        assert channel.address.endpoint == f"tcp://127.0.0.1:{free_port}"
        with pytest.raises(PoolUnavailable, match=f"ports {free_port} to {free_port} are taken on 127.0.0.1"):
            one.tcp()
        with pytest.raises(PoolUnavailable, match=r"cannot listen on 192.0.2.1 port \*: .*channel_host"):
            elsewhere.tcp()
        channel.close()
