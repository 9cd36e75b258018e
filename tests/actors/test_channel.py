"""Between the engine and an actor: the step channel, which never blocks, and the slot table in shared memory."""

from __future__ import annotations

import os
import select
import threading
import time

import pytest
from thread_cluster import ConnectedPair

from actors.packages import receive
from actors.protocol import Channel, Segment, attach, connect


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
    reader = threading.Thread(target=lambda: received.extend(bytes(receive(pair.end)) for _ in messages))
    reader.start()
    deadline = time.monotonic() + 30
    while reader.is_alive():
        pair.channel.push()
        reader.join(0.001)
        assert time.monotonic() < deadline
    assert received == messages
    pair.end.close()
    pair.connection.close()


def test_one_worker_connects_or_none() -> None:
    pair = ConnectedPair()
    with pytest.raises(ConnectionRefusedError):
        connect(pair.channel.path)
    pair.connection.close()
    channel = Channel()
    assert not channel.accept(0.05)
    channel.send(b"x")
    channel.close()


def test_only_the_nonce_proves_that_it_is_the_same_memory() -> None:
    segment = Segment(2, 2)
    assert attach(segment.name) is not None
    for wrong in ({"nonce": bytes(32)}, {"slots": 3}, {"fd": 10**6}, {"pid": 2**22}):
        assert attach(segment.name._replace(**wrong)) is None
    segment.close()
    segment.close()
    assert attach(segment.name) is None


def test_the_table_cannot_be_shrunk() -> None:
    segment = Segment(2, 2)
    fd = os.open(f"/proc/{os.getpid()}/fd/{segment.name.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)
