"""Processes of a pool: identify, measure, limit and end them. Linux only (`/proc`, pidfds, cgroups)."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import resource
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

_DEFAULT_BYTES = 2 << 30
"""Memory limit of a mask actor. With all backends loaded for 131,072 tokens it takes 0.55 GiB."""
_POLL_SECONDS = 0.2
"""Between two memory readings of an actor that watches itself."""
_KILL_SECONDS = 5.0
"""Maximum time to wait for a killed process to end."""
_SLACK_BYTES = 1 << 30
"""Address space that is never resident: stacks of some sixty threads, memory that allocators keep."""
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SESSION_NICENESS = 5
"""A third of the weight of the engine's session, so that masks make progress while the engine takes all CPUs."""
_AUTOGROUP_ATTEMPTS = 5
_PF_EXITING = 0x4
"""Flag in `/proc/<pid>/stat` (linux/sched.h): the process is exiting."""
_PENDING_SIGKILL = 1 << (signal.SIGKILL - 1)
_log = logging.getLogger(__name__)


class ProcessLocation(NamedTuple):
    """Where an actor or the engine runs, and which version of this package it has."""

    pid: int
    node_id: str
    """Ray's id of the node."""
    host: str = ""
    address: str = ""
    """Address of the node for other nodes."""
    pid_namespace: int = 0
    """The number of the namespace that the pid belongs to: each container has its own."""
    started: int = 0
    """As in `ProcessReading`."""
    version: str = ""

    @classmethod
    def here(cls, node_id: str, address: str = "") -> ProcessLocation:
        """Describe the current process, on the node with that id."""
        reading = ProcessReading.of(os.getpid())
        assert reading is not None
        return cls(os.getpid(), node_id, platform.node(), address, _pid_namespace(), reading.started, package_version())

    @classmethod
    def of_this_actor(cls) -> ProcessLocation:
        """Describe the current process, an actor."""
        import ray  # only actors load Ray

        return cls.here(_node_id(), str(ray.util.get_node_ip_address()))

    def is_beside(self, node_id: str) -> bool:
        """Return whether the calling process, on node `node_id`, can look up this location's pid.

        The node id is not enough: a container has its own pids, but may use its host's Ray, with the same node id.
        """
        return self.node_id == node_id and self.pid_namespace == _pid_namespace()


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One reading of a process of this machine."""

    resident: int
    """Resident memory in bytes."""
    stopped: bool
    """Stopped by a signal (SIGSTOP): none of its threads runs."""
    ending: bool
    """It was killed, or is exiting: its connections stay open until the kernel has freed its memory."""
    started: int
    """Start time in clock ticks since boot. Together with the pid it identifies the process."""

    @classmethod
    def of(cls, pid: int) -> ProcessReading | None:
        """Read `/proc/<pid>/stat`, see proc_pid_stat(5); takes about 10 µs. None if there is no such process."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        ending = bool(int(fields[6]) & _PF_EXITING or int(fields[28]) & _PENDING_SIGKILL)
        return cls(int(fields[21]) * resource.getpagesize(), fields[0] == b"T", ending, int(fields[19]))


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
        pid: None stands for a process on another machine. It cannot be read, waited for or killed.
    """

    def __init__(self, pid: int | None) -> None:
        self.fd = -1
        """The pidfd, readable once the process has ended; -1 if there is none."""
        self._pid = pid
        if pid is not None:
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(pid)

    def read(self) -> ProcessReading | None:
        """Read the state of the process. None if it is gone, or on another machine."""
        return ProcessReading.of(self._pid) if self._pid is not None and self.fd >= 0 else None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the process, at most `seconds`. Returns whether it has ended."""
        if self.fd < 0:
            return True
        end = select.poll()
        end.register(self.fd, select.POLLIN)
        return bool(end.poll(None if seconds is None else seconds * 1000))

    def send_kill(self) -> None:
        """Send SIGKILL and return at once. From any thread."""
        with contextlib.suppress(OSError):
            if self.fd >= 0:
                signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def kill(self, after: float = 0.0) -> None:
        """Kill the process unless it ends within `after` seconds, wait for its end, close the handle. Idempotent."""
        if self.fd < 0:
            return
        if not self.wait(after):
            self.send_kill()
            self.wait(_KILL_SECONDS)
        fd, self.fd = self.fd, -1
        os.close(fd)


def exit_with_owner(owner: ProcessLocation) -> bool:
    """End this process as soon as the owner's process ends.

    Returns:
        Whether the owner is on this node, and not in another container. If it is elsewhere, Ray ends this process when
        it loses the driver.
    """

    def watch() -> None:
        process = ProcessHandle(owner.pid)
        reading = process.read()
        if reading is not None and reading.started == owner.started:
            process.wait()
        os._exit(0)  # not sys.exit: a grammar library may block the main thread forever

    is_beside = owner.is_beside(_node_id())
    if is_beside:
        threading.Thread(target=watch, name="owner-watch", daemon=True).start()
    return is_beside


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def package_version() -> str:
    """Return the installed version of this package, or "" if it is not installed."""
    try:
        return version("guided")
    except PackageNotFoundError:
        return ""


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def remove_later(directory: str) -> None:
    """Remove a directory once the processes that still write there have ended. Does not wait."""
    command = 'for pause in 0 1 3 5; do sleep "$pause"; rm -rf -- "$1"; done'
    subprocess.Popen(
        ["/bin/sh", "-c", command, "guided-cleanup", directory],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


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


def limit_memory(limit: int, watched: bool) -> None:
    """Limit the resident memory of this process to `limit` bytes: an actor above the limit is killed.

    Args:
        watched: a supervisor on this machine watches the process. If not, it watches itself, as far as the grammar
            library lets other threads run.
    """
    # A second limit, which holds even if nothing can watch the process: allocations above it fail.
    data_bytes = limit + _SLACK_BYTES
    _, ceiling = resource.getrlimit(resource.RLIMIT_DATA)
    if ceiling != resource.RLIM_INFINITY:
        data_bytes = min(data_bytes, ceiling)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, ceiling))
    if not watched:
        threading.Thread(target=_watch_memory, args=(limit,), name="memory-watch", daemon=True).start()


def _watch_memory(limit: int) -> None:
    process = ProcessHandle(os.getpid())
    while (reading := process.read()) is not None:
        if reading.resident > limit:
            _log.error("this mask actor took more than %d MiB of memory", limit >> 20)
            process.send_kill()
        time.sleep(_POLL_SECONDS)
