"""Processes of a pool: identify, measure, limit and end them. Linux only (`/proc`, pidfds, cgroups)."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

START_SECONDS = 120.0
"""Time limit for whatever starts: Ray, an actor, a grammar library, the fork server. Seconds on a quiet machine."""
CALL_SECONDS = 10.0
"""Time limit for an answer that takes milliseconds on a quiet machine."""
STOP_SECONDS = 15.0
"""Time limit for whatever ends, before it is killed or given up."""
RETRY_SECONDS = 2.0
"""Pause before another attempt to start or reach what could not be started or reached."""
_DEFAULT_BYTES = 2 << 30
"""Memory limit of a mask actor. With all backends loaded for 131,072 tokens it takes 0.55 GiB."""
_SLACK_BYTES = 1 << 30
"""Address space that is never resident: stacks of some sixty threads, memory that allocators keep."""
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SESSION_NICENESS = 5
"""A third of the weight of the engine's session, so that masks make progress while the engine takes all CPUs."""
_AUTOGROUP_ATTEMPTS = 5


def enter_session() -> None:
    """Move this process to a session of its own, and give precedence to the engine's.

    Linux may share out the CPUs among sessions first ("autogroups"; sched(7)). A niceness counts within a session only.
    """
    try:
        if os.getpgrp() == os.getpid():  # true of each process of Ray; setsid(2) fails for the leader of a group
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    except PermissionError:
        return
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            Path("/proc/self/autogroup").write_text(str(_SESSION_NICENESS))
        except BlockingIOError:  # allowed once per 0.1 s, on the whole machine
            time.sleep(0.1)
        except OSError:  # a kernel without them
            return
        else:
            return


class ProcessHandle:
    """A process of this machine, held by a pidfd: never confused with a later process that gets the same pid.

    Args:
        pid: None stands for a process on another machine. It cannot be measured, waited for or killed.
    """

    def __init__(self, pid: int | None) -> None:
        self.fd = -1
        """The pidfd, readable once the process has ended; -1 if there is none."""
        self._pid = pid
        if pid is not None:
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(pid)

    def resident(self) -> int:
        """Return the resident memory in bytes; takes about 10 µs. 0 if the process is gone, or on another machine."""
        if self.fd < 0:
            return 0
        try:
            with open(f"/proc/{self._pid}/statm", "rb") as file:  # proc_pid_statm(5)
                return int(file.read().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    def kill(self, after: float = 0.0) -> None:
        """Kill the process unless it ends within `after` seconds, wait for its end, close the handle. Idempotent."""
        if self.fd < 0:
            return
        end = select.poll()
        end.register(self.fd, select.POLLIN)
        if not end.poll(after * 1000):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)
            end.poll(STOP_SECONDS * 1000)
        fd, self.fd = self.fd, -1
        os.close(fd)


def package_version() -> str:
    """Return the installed version of this package, or "" if it is not installed."""
    try:
        return version("guided")
    except PackageNotFoundError:
        return ""


def memory_limit(wanted: int | None) -> int:
    """Return an actor's memory limit in bytes: `wanted`, at most the machine's memory. None: 2 GiB, at most half."""
    machine = machine_bytes()
    return min(wanted, machine) if wanted is not None else min(_DEFAULT_BYTES, machine // 2)


def machine_bytes() -> int:
    """Return the memory of the machine, or of this container, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            total = min(total, int(file.read_text()))
    return total


def limit_memory(limit: int) -> None:
    """Make allocations fail in this process once it has taken `limit` bytes and some slack.

    On the engine's node, the supervisor ends an actor that takes more than `limit` bytes. This holds elsewhere too.
    """
    _, ceiling = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = limit + _SLACK_BYTES
    resource.setrlimit(
        resource.RLIMIT_DATA, (allowed if ceiling == resource.RLIM_INFINITY else min(allowed, ceiling), ceiling)
    )
