"""The slot table in shared memory."""

from __future__ import annotations

import dataclasses
import os

import pytest

from actors.protocol import IDLE, Segment, attach


def test_only_the_nonce_proves_that_it_is_the_same_memory() -> None:
    segment = Segment(2, 2)
    assert attach(segment.name) is not None
    assert attach(dataclasses.replace(segment.name, nonce=bytes(32))) is None
    assert attach(dataclasses.replace(segment.name, slots=3)) is None
    assert attach(dataclasses.replace(segment.name, fd=10**6)) is None
    assert attach(dataclasses.replace(segment.name, pid=2**22)) is None


def test_it_cannot_be_shrunk() -> None:
    segment = Segment(2, 2)
    fd = os.open(f"/proc/{os.getpid()}/fd/{segment.name.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)


def test_after_close_no_worker_can_map_it() -> None:
    segment = Segment(2, 2)
    segment.close()
    segment.close()
    assert attach(segment.name) is None


def test_the_columns_do_not_overlap() -> None:
    table = Segment(5, 3).table
    columns = ("target", "ready", "seconds", "status", "tokens", "forced", "mask")
    for value, name in enumerate(columns, 1):
        getattr(table, name)[:] = value
    for value, name in enumerate(columns, 1):
        assert (getattr(table, name) == value).all()
    assert table.tokens.shape == (5,)
    assert table.mark["busy"].tolist() == [[IDLE, IDLE]]
