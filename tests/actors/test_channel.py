"""The step channel: one connection an incarnation, never blocking."""

from __future__ import annotations

import select
import threading
import time

import pytest
from thread_cluster import ConnectedPair

from actors.protocol import Channel, connect


def test_the_end_of_the_other_side_is_noticed() -> None:
    pair = ConnectedPair()
    pair.end.close()
    poller = select.poll()
    poller.register(pair.channel.fd, 0)
    assert poller.poll(10_000), "POLLHUP"
    pair.channel.send(b"not delivered")
    assert pair.channel.receive() is None
    pair.connection.close()
    pair.connection.close()


def test_a_worker_that_does_not_read_blocks_nothing() -> None:
    pair = ConnectedPair()
    messages = [bytes([index]) * 100_000 for index in range(100)]
    for message in messages:
        pair.channel.send(message)
    received: list[bytes | None] = []
    reader = threading.Thread(target=lambda: received.extend(pair.end.recv_bytes() for _ in messages))
    reader.start()
    deadline = time.monotonic() + 30
    while reader.is_alive():
        pair.channel.push()
        reader.join(0.001)
        assert time.monotonic() < deadline
    assert received == messages
    pair.end.close()
    pair.connection.close()


def test_nothing_can_connect_after_the_worker() -> None:
    pair = ConnectedPair()
    with pytest.raises(ConnectionRefusedError):
        connect(pair.channel.path)
    pair.connection.close()


def test_a_channel_without_a_worker() -> None:
    channel = Channel()
    assert not channel.accept(0.05)
    channel.send(b"x")
    channel.close()
