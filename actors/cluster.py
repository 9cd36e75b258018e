"""This process's connection to Ray: a light local cluster started here, or a cluster that runs already.

A process has one connection, which its pools share. Ray's processes die with the thread that started them. So one
thread connects, and lives until the last pool has left.
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

from actors.processes import node_id
from guided.errors import PoolUnavailable, bounded

_LEAST_STORE_BYTES, _MOST_STORE_BYTES = 80 << 20, 320 << 20
"""Size of Ray's object store: at least Ray's own minimum, at most room for all cached grammars
(`RayPoolOptions.max_cache_bytes`). The store takes memory as it fills; what does not fit is written to disk."""
_SHARED_MEMORY = "/dev/shm"
_START_SECONDS = 120.0
_REACH_SECONDS = 10.0
_STOP_SECONDS = 30.0
_PROBE_INTERVAL_SECONDS = 1.0
_PROBE_SECONDS = 2.0
_RAYLET = "this node's raylet"
_ENVIRONMENT = {
    # Ray ends a driver if its GCS is gone for 60 s. Steps do not need the GCS, so the engine outlives it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_USAGE_STATS_ENABLED": "0",
    # For its dashboard the GCS records every task, which grows with each grammar.
    "RAY_task_events_report_interval_ms": "0",
    # The engine has precedence over the masks. With Ray's default, 15, masks starve on busy cores and the engine waits.
    "RAY_worker_niceness": "5",
    # Under `uv run`, Ray would rebuild the Python environment for every actor.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


# The janitor: a shell process that waits for a line (there is nothing to clean up) or the end of its input (the process
# is gone). Then it kills Ray's processes that have their logs in the directory, because Ray's agents would wait a day
# for the GCS, and removes the directory; several times, because processes that are ending may still write.
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

# The shell that starts the janitor ends at once, so that the janitor becomes a child of init. A host that kills all its
# descendants, as vLLM does, does not find it. Descriptor 3, because a shell gives background processes no input.
_START_JANITOR = """
exec 3<&0
/bin/sh -c "$1" guided-janitor "$2" <&3 3<&- &
"""


class ScratchDirectory:
    """A private (0700) directory with a short path. It is removed when this process ends, killed or not."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="guided-")
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
        if not os.path.exists(self.path):  # otherwise a process still writes there, and the janitor tries again
            with contextlib.suppress(OSError, ValueError):  # the janitor has ended already
                self._janitor.write(b"\n")
                self._janitor.flush()
        with contextlib.suppress(OSError):
            self._janitor.close()


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Call a function of Ray on a new thread: it blocks as long as Ray's head is gone, up to a day."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return done


class Cluster:
    """A connection to Ray. `join` returns it, `leave` gives it back."""

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
        self._endpoints: dict[str, tuple[str, int]] = {}
        """Addresses of the processes of Ray that are needed to start an actor."""
        self.trouble: str | None = None
        """What was wrong with Ray at the latest probe, a few seconds ago; None if nothing was."""
        self._when_raylet_ends: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="ray-connection", daemon=True)

    @classmethod
    def join(cls, address: str | None = None) -> Cluster:
        """Connect to the cluster that this process has joined already, or to `address`, or to a new local cluster.

        Raises:
            PoolUnavailable: Ray cannot be reached or started; says why.
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
        """Give the connection back. The last user disconnects, and ends the cluster if it was started here."""
        with Cluster._lock:
            self._users -= 1
            if self._users == 0 and Cluster._current is self:
                Cluster._current = None
                self._leaving.set()
                self._thread.join(_STOP_SECONDS)
                if self._thread.is_alive():
                    _log.error("Ray does not end: its processes will end with this one")
                    atexit.unregister(ray.shutdown)  # it would wait again, without a limit

    @property
    def node_id(self) -> str:
        """Ray's id of this process's node."""
        return node_id()

    @property
    def node_ids(self) -> list[str]:
        """Ray's ids of the nodes that are up, sorted."""
        return sorted(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])

    @property
    def host(self) -> str:
        """The address of this node for other nodes."""
        return str(ray.util.get_node_ip_address())

    def when_raylet_ends(self, call: Callable[[], None]) -> None:
        """Register a function that is called once if this node's raylet ends. It has to release all objects in Ray.

        Ray (2.60) ends a process that owns objects on a dead node, some ten seconds after the node's end.
        """
        self._when_raylet_ends.append(call)

    def check(self) -> None:
        """Probe Ray now.

        Raises:
            PoolUnavailable: a process of Ray is gone that is needed to start an actor.
        """
        self.trouble = self._probe()
        if self.trouble is not None:
            raise PoolUnavailable(self.trouble)

    def _probe(self) -> str | None:
        if not ray.is_initialized():
            return "Ray was shut down"
        for name, (host, port) in self._endpoints.items():
            try:
                socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
            except OSError as error:
                if name == _RAYLET and isinstance(error, ConnectionRefusedError):
                    self._raylet_ended.set()
                return f"{name} at {host}:{port} does not answer: {error}"
        return None

    def _start(self) -> None:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise PoolUnavailable(f"Ray did not start within {_START_SECONDS:g} s")
        if self._error is not None:
            where = f"join the Ray cluster at {self._address}" if self._address else "start a local Ray"
            raise PoolUnavailable(f"cannot {where}: {bounded(self._error)}") from self._error

    def _run(self) -> None:
        already = ray.is_initialized()
        try:
            if not already:
                self._connect()
            for node in ray.nodes():
                if node["NodeID"] == self.node_id:
                    self._endpoints[_RAYLET] = node["NodeManagerAddress"], node["NodeManagerPort"]
            head, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
            self._endpoints["Ray's head"] = head.strip("[]"), int(port)
        except Exception as error:
            self._error = error
            self._clean_up()
            return
        finally:
            self._ready.set()
        while not self._leaving.wait(_PROBE_INTERVAL_SECONDS):
            before, self.trouble = self.trouble, self._probe()
            if self._raylet_ended.is_set():
                while self._when_raylet_ends:
                    self._when_raylet_ends.pop()()
            if self.trouble != before:
                _log.error("%s", self.trouble or "Ray answers again")
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
        free_bytes = shutil.disk_usage(_SHARED_MEMORY).free  # containers may have little
        ray.init(
            # "local" even if RAY_ADDRESS is set: a cluster is only joined if it was named.
            address="local",
            include_dashboard=False,
            object_store_memory=max(_LEAST_STORE_BYTES, min(_MOST_STORE_BYTES, free_bytes // 2)),
            # The actors take no CPUs, and Ray would keep an idle process for every CPU.
            num_cpus=0,
            num_gpus=0,
            # A subdirectory, because Ray makes its own directory accessible to all users (0777).
            _temp_dir=os.path.join(self._scratch.path, "ray"),
            **quiet,
        )

    def _clean_up(self) -> None:
        with contextlib.suppress(Exception):
            if self._scratch is not None:
                self._scratch.remove()


def _check_reachable(address: str) -> None:
    """Fail within seconds, where Ray would try for minutes. Addresses like "auto" are left to Ray."""
    if address.startswith("ray://"):
        raise PoolUnavailable("Ray Client addresses are not supported: use the cluster's own address, HOST:6379")
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
