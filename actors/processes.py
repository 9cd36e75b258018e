"""Processes of a pool: measure, limit and end them. Linux only (`/proc`, cgroups)."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 120.0
"""Time limit for whatever starts: Ray, an actor, a grammar library, the fork server.
Seconds on a quiet machine."""
CALL_SECONDS = 10.0
"""Time limit for an answer that takes milliseconds on a quiet machine."""
STOP_SECONDS = 15.0
"""Time limit for whatever ends, before it is killed or given up."""
RETRY_SECONDS = 2.0
"""Pause before another attempt to start or reach what could not be started or
reached."""
TICK_SECONDS = 0.2
"""Interval in which a wait looks whether it is to end, and of readings of an actor's
memory: one that takes 1 GiB/s is found 0.2 GiB above its limit."""
_CGROUP_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def start_program(
    module: str,
    descriptors: Sequence[int],
    *arguments: str,
    environment: Mapping[str, str | None],
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a module of this package as a program, which can import what this process
    can.

    Args:
        descriptors: the program has these, and their numbers as its first arguments.
        environment: variables that it has in addition; None removes one.
        options: of `subprocess.Popen`.
    """
    path = [os.environ.get("PYTHONPATH"), *sys.path]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, descriptors), *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=2,  # stderr
        env={name: value for name, value in variables.items() if value is not None},
        **options,
    )


def enter_session() -> None:
    """Move this process to a session of its own, and give precedence to the engine's.

    Linux may share out the CPUs among sessions first ("autogroups"; sched(7)). A
    niceness counts within a session only.
    """
    try:
        # true of each process of Ray; setsid(2) fails for the leader of a group
        if os.getpgrp() == os.getpid():
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    except PermissionError:
        return
    for _ in range(5):
        try:
            # A third of the weight of the engine's session: masks make progress while
            # the engine takes all CPUs.
            Path("/proc/self/autogroup").write_text("5")
        except BlockingIOError:  # allowed once per 0.1 s, on the whole machine
            time.sleep(0.1)
        except OSError:  # a kernel without them
            return
        else:
            return


def thread_times(
    thread: int | None, process: int | str = "self"
) -> tuple[float, float]:
    """Return the seconds that a thread has run, and has waited for a CPU (proc(5)).
    Zeros where that is not known."""
    try:
        ran, waited, _ = map(
            int, Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
        )
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran / 1e9, waited / 1e9


def thread_state(thread: int, process: int) -> str:
    """Return the state of a thread (proc(5)): R runs or waits for a CPU, T is stopped.
    Empty where it is not known."""
    try:
        return (
            Path(f"/proc/{process}/task/{thread}/stat")
            .read_text()
            .rpartition(") ")[2][:1]
        )
    except OSError:
        return ""


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended, or cannot be
    read now."""
    try:
        return int(process.memory_info().rss)
    except (psutil.Error, OSError):  # for example, this process has no free descriptor
        return 0


def kill(process: psutil.Process, after: float = 0.0) -> None:
    """Kill a process unless it ends within `after` seconds, and wait for its end."""
    with contextlib.suppress(psutil.Error):
        try:
            process.wait(after)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


def memory_limit(wanted: int | None) -> int:
    """Return an actor's memory limit in bytes: `wanted`, at most the machine's memory.
    None: 2 GiB, at most half."""
    machine = machine_bytes()
    if wanted is not None:
        return min(wanted, machine)
    return min(2 << 30, machine // 2)


def machine_bytes() -> int:
    """Return the memory of the machine, or of this container, in bytes."""
    total = int(psutil.virtual_memory().total)
    for file in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            total = min(total, int(file.read_text()))
    return total


def limit_memory(limit: int) -> None:
    """Make allocations fail in this process once it has taken `limit` bytes and some
    slack.

    On the engine's node, the supervisor ends an actor that takes more than `limit`
    bytes. This holds elsewhere too.
    """
    # Address space that is never resident: stacks of some sixty threads, memory that
    # allocators keep.
    allowed = limit + (1 << 30)
    with contextlib.suppress(ValueError):  # there is a lower limit already
        psutil.Process().rlimit(resource.RLIMIT_DATA, (allowed, allowed))
