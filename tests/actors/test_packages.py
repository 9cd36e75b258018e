"""Packages: small ones are bytes, large ones are memory that cannot change."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
from pathlib import Path

import pytest

from actors.packages import SealedMemory, buffer, receive_package, seal, send_package, socket_pair


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_message_arrives_as_it_was(size: int) -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        send_package(ours, b"x" * size)
        package = receive_package(theirs)
        assert buffer(package)[:] == b"x" * size
        assert isinstance(package, bytes) == (size < 64 << 10)
        if isinstance(package, SealedMemory):
            assert not os.get_inheritable(package.fd), "a process that is started now does not get it"


def descriptors() -> int:
    """Number of descriptors of packages: threads that other tests left open other files."""
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
    for change in (lambda: os.ftruncate(package.fd, 10), lambda: os.pwrite(package.fd, b"y", 0)):
        with pytest.raises(PermissionError):
            change()


def test_memory_that_can_change_is_refused() -> None:
    empty = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, 0xF)
    for fd in (os.memfd_create("x", os.MFD_ALLOW_SEALING), os.open("/dev/null", os.O_RDONLY), empty):
        with pytest.raises(OSError, match=r"sealed|Invalid|empty"):
            SealedMemory(fd)


def test_the_end_of_the_other_side_is_an_eof() -> None:
    ours, theirs = socket_pair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive_package(theirs)
