"""The step channel: one connection an incarnation, never blocking."""

from __future__ import annotations

import select
import threading
import time

import pytest
from thread_cluster import ConnectedPair

from actors.protocol import Channel, connect


def wait(channel: Channel, events: int) -> bool:
    poller = select.poll()
    poller.register(channel.fd, events)
    return bool(poller.poll(10_000))


def test_messages_go_both_ways() -> None:
    pair = ConnectedPair()
    assert pair.channel.receive() is None
    assert not pair.end.poll(0)
    pair.channel.send(b"there")
    assert pair.end.recv_bytes() == b"there"
    pair.end.send_bytes(b"and back")
    assert wait(pair.channel, select.POLLIN)
    assert pair.channel.receive() == b"and back"
    pair.end.close()
    pair.connection.close()


def test_the_end_of_the_other_side_is_noticed() -> None:
    pair = ConnectedPair()
    pair.end.close()
    assert wait(pair.channel, 0), "POLLHUP"
    pair.channel.send(b"not delivered")
    assert pair.channel.receive() is None
    pair.connection.close()
    pair.connection.close()


def test_the_end_of_the_engine_ends_the_workers_wait() -> None:
    pair = ConnectedPair()
    threading.Timer(0.1, pair.connection.close).start()
    with pytest.raises(EOFError):
        pair.end.recv_bytes()
    pair.end.close()


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
    pair.end.close()
    pair.connection.close()


def test_a_channel_without_a_worker() -> None:
    channel = Channel()
    assert not channel.accept(0.05)
    channel.send(b"x")
    channel.close()
