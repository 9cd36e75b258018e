"""Packages: small ones are bytes, large ones are memory that cannot change."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest

from actors.packages import (
    InvalidPackage,
    SealedMemory,
    buffer,
    receive_grammar,
    receive_package,
    seal,
    send_package,
    socket_pair,
)
from actors.protocol import Channel, connect


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_message_arrives_as_it_was(size: int) -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        send_package(ours, b"x" * size)
        package = receive_package(theirs)
        assert buffer(package)[:] == b"x" * size
        assert isinstance(package, bytes) == (size < 64 << 10)
        if isinstance(package, SealedMemory):
            assert not os.get_inheritable(package.fd), (
                "a process that is started now does not get it"
            )


def descriptors() -> int:
    """Number of descriptors of packages: threads that other tests left open other
    files."""
    number = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            number += "guided-package" in os.readlink(path)
    return number


def test_large_ones_need_one_descriptor_until_they_are_dropped() -> None:
    gc.collect()
    before = descriptors()
    package = seal(bytes(1 << 20))
    assert descriptors() == before + 1
    del package
    assert descriptors() == before


def test_its_memory_cannot_change() -> None:
    package = seal(bytes(1 << 20))
    for change in (
        lambda: os.ftruncate(package.fd, 10),
        lambda: os.pwrite(package.fd, b"y", 0),
    ):
        with pytest.raises(PermissionError):
            change()


def test_memory_that_can_change_is_refused() -> None:
    empty = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, 0xF)
    for fd in (
        os.memfd_create("x", os.MFD_ALLOW_SEALING),
        os.open("/dev/null", os.O_RDONLY),
        empty,
    ):
        with pytest.raises(InvalidPackage):
            SealedMemory(fd)


def test_an_invalid_grammar_does_not_end_its_receiver() -> None:
    ours, theirs = socket_pair()
    with ours, theirs, open("/dev/null", "rb") as file:
        socket.send_fds(ours, [b"m"], [file.fileno()])
        send_package(ours, b"next")
        assert receive_grammar(theirs) == b""
        assert receive_grammar(theirs) == b"next"


def test_memory_that_cannot_be_written_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    before = descriptors()
    monkeypatch.setattr(fcntl, "fcntl", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        seal(bytes(1 << 20))
    assert descriptors() == before


def test_a_large_frame_is_sealed_once_however_often_it_is_sent() -> None:
    channel = Channel()
    connecting = Thread(target=lambda: ends.extend(connect(channel.name, 2, 2)[:2]))
    ends: list[socket.socket] = []
    connecting.start()
    channel.accept(5.0, 2, 2)
    connecting.join()
    while True:  # until the socket takes no more
        channel.send(bytes(1 << 20))
        _, unsent = channel._unsent
        if unsent:
            break
    (package,) = unsent
    assert isinstance(package, SealedMemory)
    channel.push()
    assert [*unsent] == [package]
    channel.close()
    for end in ends:
        end.close()


def test_the_end_of_the_other_side_is_an_eof() -> None:
    ours, theirs = socket_pair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive_package(theirs)
