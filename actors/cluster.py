"""This process's connection to Ray: a light local cluster of its own, or one that is there already.

One a process, shared by its pools. Ray starts processes that die with the thread that started them, so all of it
happens on a thread that lives until the last pool is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import ray

from guided.errors import PoolUnavailable, bounded

__all__ = ["Cluster", "ScratchDirectory", "call_in_thread"]

_LEAST_STORE_BYTES, _MOST_STORE_BYTES = 80 << 20, 320 << 20
"""Ray's least; and room for all compiled grammars that are kept (`RayPool(max_cache_bytes=...)`), what there isn't room
for being written to disk and read again, by processes that Ray starts for it. Memory is taken when it is used."""
_SHARED_MEMORY = "/dev/shm"
_START_SECONDS = 120.0
_REACH_SECONDS = 10.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_KNOCK_SECONDS = 2.0
_RAYLET = "this node's raylet"
_ENVIRONMENT = {
    # Ray ends a driver whose GCS is gone for 60 s. Steps don't pass through it: outlive it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The GCS keeps a record of every task for Ray's dashboard: it grows with each grammar.
    "RAY_task_events_report_interval_ms": "0",
    # The engine first, then its masks: with Ray's default, 15, they starve on busy cores, and the engine waits.
    "RAY_worker_niceness": "5",
    # Started by `uv run`, Ray would rebuild the environment for every actor.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


# Waits for a line, that it isn't needed, or for the end of its input, that is, of the process that holds the other end.
# Then ends those of Ray's processes that have their logs in the directory (its agents otherwise wait for as long as the
# GCS may be gone: a day), and removes it; several times, because what is going down may still write.
_JANITOR = r"""
read -r _ && exit
for pause in 0 1 3 5; do
    sleep "$pause"
    for process in /proc/[0-9]*; do
        case "$(cat "$process/comm" 2>/dev/null)" in
        ray::*) ls -l "$process/fd" 2>/dev/null | grep -qF -- "$1/" && kill -9 "${process#/proc/}" ;;
        esac
    done
    rm -rf -- "$1"
done
"""


# What starts the janitor ends at once, which makes it a child of init's: a host that ends all its descendants, as vLLM
# does, doesn't find it. Its input is named, because a shell gives what it starts in the background none.
_START_JANITOR = """
exec 3<&0
/bin/sh -c "$1" guided-janitor "$2" <&3 3<&- &
"""


class ScratchDirectory:
    """A short, private (0700) directory that is gone when this process is, killed or not."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="guided-")
        # A shell: it survives this process, and costs next to nothing.
        start = subprocess.Popen(
            ["/bin/sh", "-c", _START_JANITOR, "guided-janitor", _JANITOR, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert start.stdin is not None
        self._janitor = start.stdin
        start.wait()

    def remove(self) -> None:
        """Remove it now. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not os.path.exists(self.path):  # else something still writes there, and the janitor has more patience
            with contextlib.suppress(OSError, ValueError):  # it was killed; it was told before
                self._janitor.write(b"\n")
                self._janitor.flush()
        with contextlib.suppress(OSError):
            self._janitor.close()


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call of Ray's that waits for its head, for as long as that is gone (a day), on a thread of its own."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return done


class Cluster:
    """Ray, connected. Get it with `join`, give it back with `leave`."""

    _lock = threading.Lock()
    _current: Cluster | None = None

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._scratch: ScratchDirectory | None = None
        self._users = 0
        self._ready = threading.Event()
        self._leaving = threading.Event()
        self._raylet_ended = threading.Event()
        self._error: Exception | None = None
        self._doors: dict[str, tuple[str, int]] = {}
        """Where Ray's processes that actors can't be started without listen."""
        self._trouble: str | None = None
        self._when_raylet_ends: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._live, name="ray-home", daemon=True)

    @classmethod
    def join(cls, address: str | None = None) -> Cluster:
        """Connect: to the cluster this process is in already; else to `address`; else to a local one, started here.

        Raises:
            PoolUnavailable: Ray can't be reached or started; says why.
        """
        with cls._lock:
            cluster = cls._current
            if cluster is None:
                cluster = cls(address)
                cluster._start()
                cls._current = cluster
            cluster._users += 1
            return cluster

    def leave(self) -> None:
        """One user less; the last one disconnects, and ends the cluster if it was started here."""
        with Cluster._lock:
            self._users -= 1
            if self._users == 0 and Cluster._current is self:
                Cluster._current = None
                self._leaving.set()
                self._thread.join(_STOP_SECONDS)
                if self._thread.is_alive():
                    _log.error("Ray doesn't end: its processes end with this one")
                    atexit.unregister(ray.shutdown)  # which would wait again, for ever

    @property
    def node_id(self) -> str:
        """Ray's id of this process's node."""
        return str(ray.get_runtime_context().get_node_id())

    @property
    def node_ids(self) -> list[str]:
        """Ray's ids of the nodes that are up, in an order that stays."""
        return sorted(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])

    @property
    def host(self) -> str:
        """The address that other nodes reach this one at."""
        return str(ray.util.get_node_ip_address())

    @property
    def trouble(self) -> str | None:
        """What is wrong with Ray, as it was looked after a few seconds ago; None where nothing is."""
        return self._trouble

    def when_raylet_ends(self, call: Callable[[], None]) -> None:
        """Have `call` made, once, where this node's raylet is gone: to let go of all that Ray holds for this process.

        Ray (2.60) ends a process that owns objects on a node which it declares dead, some ten seconds later, because
        the shared memory for what became of them is gone as well.
        """
        self._when_raylet_ends.append(call)

    def check(self) -> None:
        """Look now.

        Raises:
            PoolUnavailable: a process of Ray's is gone that an actor can't be started without.
        """
        self._trouble = self._look()
        if self._trouble is not None:
            raise PoolUnavailable(self._trouble)

    def _look(self) -> str | None:
        if not ray.is_initialized():
            return "Ray was shut down"
        for who, door in self._doors.items():
            try:
                socket.create_connection(door, timeout=_KNOCK_SECONDS).close()
            except OSError as error:
                if who == _RAYLET and isinstance(error, ConnectionRefusedError):
                    self._raylet_ended.set()
                return f"{who} at {door[0]}:{door[1]} doesn't answer: {error}"
        return None

    def _find_doors(self) -> None:
        node_id = self.node_id
        for node in ray.nodes():
            if node["NodeID"] == node_id:
                self._doors[_RAYLET] = node["NodeManagerAddress"], node["NodeManagerPort"]
        head, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._doors["Ray's head"] = head.strip("[]"), int(port)

    def _start(self) -> None:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise PoolUnavailable(f"Ray didn't start within {_START_SECONDS:g} s")
        if self._error is not None:
            where = f"join the Ray cluster at {self._address}" if self._address else "start a local Ray"
            raise PoolUnavailable(f"can't {where}: {bounded(self._error)}") from self._error

    def _live(self) -> None:
        already = ray.is_initialized()
        try:
            if not already:
                self._connect()
            self._find_doors()
        except Exception as error:
            self._error = error
            self._clean_up()
            return
        finally:
            self._ready.set()
        while not self._leaving.wait(_LOOK_SECONDS):
            before, self._trouble = self._trouble, self._look()
            if self._raylet_ended.is_set():
                while self._when_raylet_ends:
                    self._when_raylet_ends.pop()()
            if self._trouble != before:
                _log.error("%s", self._trouble or "Ray is there again")
        if not already:
            ray.shutdown()
            self._clean_up()

    def _connect(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address is not None:
            _check_reachable(self._address)
            ray.init(address=self._address, **quiet)
            return
        self._scratch = ScratchDirectory()
        ray.init(
            # "local" also where RAY_ADDRESS is set: a cluster is joined when one is named, not by accident.
            address="local",
            include_dashboard=False,
            object_store_memory=_store_bytes(),
            # The actors take no CPUs, and Ray keeps an idle process ready for every CPU it has.
            num_cpus=0,
            num_gpus=0,
            # Within, because Ray opens its own directory to everybody (0777).
            _temp_dir=os.path.join(self._scratch.path, "ray"),
            **quiet,
        )

    def _clean_up(self) -> None:
        with contextlib.suppress(Exception):
            if self._scratch is not None:
                self._scratch.remove()


def _store_bytes() -> int:
    """For Ray's object store: in shared memory, of which containers may have little."""
    return max(_LEAST_STORE_BYTES, min(_MOST_STORE_BYTES, shutil.disk_usage(_SHARED_MEMORY).free // 2))


def _check_reachable(address: str) -> None:
    """Find out in seconds what Ray itself tries for minutes. "auto" and the like are left to Ray."""
    if address.startswith("ray://"):
        raise PoolUnavailable("Ray Client addresses don't do: give the cluster's own, HOST:6379, from one of its nodes")
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
