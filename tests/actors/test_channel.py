"""Between the engine and an actor: the step channel, which never blocks, and the slot
table in shared memory."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from thread_cluster import ConnectedPair

from actors.packages import receive
from actors.protocol import Channel, SlotTable, _address, connect, create_table


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
    reader = threading.Thread(
        target=lambda: received.extend(bytes(receive(pair.end)) for _ in messages)
    )
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
        connect(pair.channel.name, 2, 2)
    pair.connection.close()
    channel = Channel()
    with pytest.raises(TimeoutError):
        channel.accept(0.05, 2, 2)
    channel.send(b"x")
    channel.close()


def test_a_worker_in_another_container_does_not_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel()
    monkeypatch.setattr("actors.protocol.os.readlink", lambda _: "pid:[1]")
    with pytest.raises(ConnectionRefusedError):
        connect(channel.name, 2, 2)
    channel.close()


def test_both_ends_have_the_same_table_and_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pair = ConnectedPair()
    for name in SlotTable.__dataclass_fields__:
        column = getattr(pair.table, name)
        column.view("u1")[-1] = 7
        assert (getattr(pair.workers_table, name).view("u1") == column.view("u1")).all()
        assert column.flags.aligned
    pair.connection.close()
    del pair, column
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_table_cannot_be_shrunk() -> None:
    _, memory = create_table(2, 2)
    with memory, pytest.raises(PermissionError):
        memory.truncate(10)


def test_connections_of_another_user_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All users can see the address. The first connection is the other user's."""
    channel = Channel()
    engine = threading.current_thread()
    users = iter([os.getuid() + 1])

    def user(end: socket.socket) -> int:
        if threading.current_thread() is engine:
            return next(users, os.getuid())
        return os.getuid()

    monkeypatch.setattr("actors.protocol._user", user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(_address(channel.name))
        with ThreadPoolExecutor() as threads:
            worker = threads.submit(connect, channel.name, 2, 2)
            table = channel.accept(10, 2, 2)
            end, grammars, theirs = worker.result()
        theirs.tokens[1] = 7
        assert table.tokens[1] == 7
        assert other.recv(1) == b""
    end.close()
    grammars.close()
    channel.close()


def test_a_worker_of_another_user_does_not_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel()
    monkeypatch.setattr("actors.protocol._user", lambda end: os.getuid() + 1)
    with pytest.raises(ConnectionRefusedError):
        connect(channel.name, 2, 2)
    channel.close()
