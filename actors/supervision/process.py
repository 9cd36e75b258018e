"""What a process takes, what one of a pool's may take, and what the machine has. Linux only: `/proc`, cgroups."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import ray

from guided.vocabulary import Vocabulary

__all__ = [
    "ActorLocation",
    "MemoryLimit",
    "Owner",
    "ProcessReading",
    "exit_with_owner",
    "limit_memory",
    "machine_bytes",
]

_WATCH_SECONDS = 0.2
_SLACK_BYTES = 1 << 30
"""Address space without pages of its own: stacks of some sixty threads, what allocators keep."""
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """Where an actor runs."""

    pid: int
    node_id: str
    host: str


def machine_bytes() -> int:
    """Physical memory, or what the container may take of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            total = min(total, int(file.read_text()))
    return total


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Resident bytes of one actor."""

    hard: int
    """It is ended."""
    DEFAULT: ClassVar[int] = 2 << 30
    """A mask actor with all backends loaded for 131,072 tokens takes 0.55 GiB."""

    @classmethod
    def of(cls, wanted: int | None) -> MemoryLimit:
        """What was asked for, or the default, but never more than the machine has (half of it, by default)."""
        machine = machine_bytes()
        return cls(min(wanted, machine) if wanted is not None else min(cls.DEFAULT, machine // 2))

    def soft(self, fresh: int) -> int:
        """Where an actor that took `fresh` bytes when it was new is replaced as soon as nobody is hurt: half way."""
        return fresh + max(0, self.hard - fresh) // 2


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One look at a process of this machine."""

    resident: int
    """Bytes."""
    stopped: bool
    """By a signal: none of its threads runs."""

    @classmethod
    def of(cls, pid: int) -> ProcessReading | None:
        """None where there is no such process. Takes some ten microseconds: proc_pid_stat(5)."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return cls(int(fields[21]) * resource.getpagesize(), fields[0] == b"T")


def limit_memory(limit: MemoryLimit, watched: bool) -> None:
    """In an actor: end this process rather than let it take more than `limit`.

    Args:
        watched: somebody on this machine looks after it, who also knows whose mask it was. Else it looks itself, as far
            as the grammar library lets other threads run.
    """
    # The second line, and the exact one: beyond it an allocation fails, whoever looks, or is kept from looking.
    most = limit.hard + _SLACK_BYTES
    _, ceiling = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, (most if ceiling == resource.RLIM_INFINITY else min(most, ceiling), ceiling)
    )
    if not watched:
        threading.Thread(target=_watch_memory, args=(limit.hard,), name="memory-watch", daemon=True).start()


def _watch_memory(most: int) -> None:
    me = os.getpid()
    while (reading := ProcessReading.of(me)) is not None:
        if reading.resident > most:
            _log.error("this mask actor took more than %d MiB of memory", most >> 20)
            os.kill(me, signal.SIGKILL)
        time.sleep(_WATCH_SECONDS)


@dataclass(slots=True)
class Owner:
    """A process that can't be mistaken for a later one with the same id, nor for one on another node."""

    pid: int
    started: float
    """Seconds since the epoch."""
    node_id: str
    """Ray's."""
    vocabulary: ray.ObjectRef | None
    """What it has for its actors: a `Vocabulary`; None where Ray's shared memory is gone, and with it all there was."""

    @classmethod
    def me(cls, vocabulary: Vocabulary) -> Owner:
        """This process."""
        node_id = str(ray.get_runtime_context().get_node_id())
        return cls(os.getpid(), psutil.Process().create_time(), node_id, ray.put(vocabulary))

    def fetch(self) -> Vocabulary:
        """In an actor, once. Keeps no reference: as long as somebody has one, the engine's process owns the object."""
        vocabulary: Vocabulary = ray.get(self.vocabulary)
        self.vocabulary = None
        return vocabulary

    def is_alive(self) -> bool:
        """Whether that process is there. Asked on its own node."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def exit_with_owner(owner: Owner) -> bool:
    """End this process as soon as `owner` ends. On another node (False) Ray does that, when it loses the driver."""
    near = str(ray.get_runtime_context().get_node_id()) == owner.node_id
    if near:
        threading.Thread(target=_watch_owner, args=(owner,), name="owner-watch", daemon=True).start()
    return near


def _watch_owner(owner: Owner) -> None:
    try:
        watched = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        os._exit(0)
    if owner.is_alive():
        gone = select.poll()
        gone.register(watched, select.POLLIN)
        gone.poll()
    # Not sys.exit: a grammar library may hold the main thread for ever.
    os._exit(0)
