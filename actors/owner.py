"""The engine's process, as its actors know it: when it is gone, whatever killed it, they go too."""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass

import psutil
import ray

from guided.vocabulary import Vocabulary

__all__ = ["Owner", "exit_with"]


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


def exit_with(owner: Owner) -> bool:
    """End this process as soon as `owner` ends. On another node (False) Ray does that, when it loses the driver."""
    near = str(ray.get_runtime_context().get_node_id()) == owner.node_id
    if near:
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()
    return near


def _watch(owner: Owner) -> None:
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
