"""The memory between the engine and an actor."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from actors.segment import IDLE, Segment, attach


def test_what_another_process_writes_is_read_here_and_outlives_it() -> None:
    segment = Segment(4, 3)
    code = (
        "import pickle, sys, os, signal\n"
        "from actors.segment import attach\n"
        "rows = attach(pickle.load(sys.stdin.buffer))\n"
        "rows.masks[2] = [1, 2, 3]; rows.mark['busy'] = 2; rows.done[2] = 9; rows.seconds[2] = 0.5\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    other = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(segment.name), check=False)
    assert other.returncode == -signal.SIGKILL
    assert segment.rows.masks.tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert (segment.rows.mark["busy"][0], segment.rows.done[2], segment.rows.seconds[2]) == (2, 9, 0.5)
    again = attach(segment.name)
    assert again is not None
    assert again.masks[2].tolist() == [1, 2, 3]


def test_only_the_nonce_proves_that_it_is_the_same_memory() -> None:
    segment = Segment(2, 2)
    assert attach(segment.name) is not None
    assert attach(dataclasses.replace(segment.name, nonce=bytes(32))) is None
    assert attach(dataclasses.replace(segment.name, rows=3)) is None
    assert attach(dataclasses.replace(segment.name, fd=10**6)) is None
    assert attach(dataclasses.replace(segment.name, pid=2**22)) is None


def test_nobody_can_shrink_it() -> None:
    segment = Segment(2, 2)
    fd = os.open(f"/proc/{os.getpid()}/fd/{segment.name.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)


def test_closed_it_is_gone_and_a_worker_that_still_has_it_writes_into_nothing_of_ours() -> None:
    segment, other = Segment(2, 2), Segment(2, 2)
    worker = attach(segment.name)
    assert worker is not None
    assert worker.mark["busy"].tolist() == [IDLE]
    segment.close()
    segment.close()
    worker.masks[:] = -1
    assert segment.rows.masks.shape == (0, 2)
    assert attach(segment.name) is None
    assert np.count_nonzero(other.rows.masks) == 0
