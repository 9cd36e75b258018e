"""This process's connection to Ray: a light local cluster started here, or a cluster
that runs already.

A process has one connection, which its pools share. Ray (2.60) may end its driver
without a message when the raylet, one of its agents or the head of the cluster ends. So
the driver is a process of its own (`driver_process.py`), and the engine's process never
loads Ray. If the driver has ended, the next actor that is started connects again: to a
new local cluster, or to the same cluster once that is up again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.processes import (
    CALL_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    TICK_SECONDS,
    start_program,
)
from guided.errors import PoolUnavailable, bounded
from guided.pools.options import LOCAL, NodePlacement, RayPoolOptions

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # For its dashboard the GCS records every task, which grows with each grammar.
    "RAY_task_events_report_interval_ms": "0",
    # The engine has precedence over the masks. With Ray's default, 15, masks starve on
    # busy cores and the engine waits.
    "RAY_worker_niceness": "5",
    # Under `uv run`, Ray would rebuild the Python environment for every actor.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_LOCAL_ENVIRONMENT = {
    # Without its GCS, a local Ray ends after this time, and is started again. By
    # default it waits for a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    # With this setting all processes of the local Ray listen on 127.0.0.1 only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    # Ray's default for the raylet's start, 30 s, is too short for a machine with a load
    # of 15.
    "RAY_raylet_start_wait_time_s": f"{START_SECONDS:.0f}",
    # A process that Ray starts ends when a pipe to the raylet closes. Otherwise it
    # looks for the raylet now and then.
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    # Without CPUs of its own, Ray would start the actors' processes one after the
    # other.
    "RAY_worker_maximum_startup_concurrency": "4",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": None,
    "RAY_ADDRESS": None,
    # The key is for the server's process only.
    "GUIDED_API_KEY": None,
}
_STOPPED = "the pool was shut down"
_ENDED = "the process that was connected to Ray ended"
_log = logging.getLogger(__name__)


class Cluster:
    """A connection to Ray. `join` returns it, `leave` gives it back."""

    _lock = threading.Lock()
    _current: Cluster | None = None

    def __init__(self, address: str | None) -> None:
        self._address = address if address is not None else _address_of_this_process()
        self._driver: Driver | None = None
        self._connecting = threading.Lock()
        self._users = 0
        self._failure: str | None = None

    @classmethod
    def join(cls, address: str | None = None) -> Cluster:
        """Return the cluster that this process uses already, or that at `address`, or a
        new local one.

        The first session connects to it.
        """
        with cls._lock:
            cluster = cls._current
            if cluster is None or (
                cluster.head is None and cluster._address not in (None, address)
            ):
                cluster = cls._current = cls(address)
            cluster._users += 1
            return cluster

    def leave(self) -> None:
        """Give the connection back. The last user disconnects, and ends the cluster if
        it was started here."""
        with Cluster._lock:
            self._users -= 1
            if self._users == 0 and Cluster._current is self:
                Cluster._current = None
                if self._driver is not None:
                    self._driver.close()

    @property
    def trouble(self) -> str | None:
        """Why the connection to Ray is lost, or was not made. None: there is one, or
        nothing has failed yet."""
        if self.head is not None:
            return None
        return self._failure

    @property
    def head(self) -> str | None:
        """The address of Ray's head. None: there is no connection now."""
        if self._driver is None:
            return None
        return self._driver.head

    def check_room(self, options: RayPoolOptions, stopping: threading.Event) -> None:
        """Check that Ray has room for a pool, whatever runs there now.

        Args:
            stopping: see `session`.

        Raises:
            PoolUnavailable: it has not; says what there is, and which options lower
                what the pool takes.
        """
        with contextlib.closing(self.session(stopping)) as session:
            session.ask("describe its nodes", "check_room", *self.reserved(options))

    def session(self, stopping: threading.Event) -> Session:
        """Return a new connection to the driver. Connects to Ray again if that
        connection is lost.

        Args:
            stopping: once it is set, no answer is waited for.

        Raises:
            PoolUnavailable: Ray cannot be reached or started now.
        """
        return Session(self._connected(stopping).connection(), stopping)

    def reserved(self, options: RayPoolOptions) -> tuple[NodePlacement, float, int]:
        """Return where the actors of a pool may run, the CPUs that Ray reserves for
        each there, and their number."""
        placement = NodePlacement.parse(options.placement)
        cpus = options.actor_cpus
        if self._address is None:  # one node, which has no CPUs
            cpus = 0.0
            if placement.kind == "spread":
                placement = LOCAL
        elif cpus is None:
            cpus = 1.0
        return placement, cpus, options.actors

    def _connected(self, stopping: threading.Event) -> Driver:
        """Return a driver that is connected."""
        with self._connecting:
            if self._driver is not None and self._driver.head is not None:
                return self._driver
            if stopping.is_set():
                raise PoolUnavailable(_STOPPED)
            if self._driver is not None:
                _log.error("%s; connecting again", self._failure)
                self._driver.close()
            try:
                driver = self._driver = self._new_driver(stopping)
            except Exception as error:
                where = (
                    f"join the Ray cluster at {self._address}"
                    if self._address
                    else "start a local Ray"
                )
                self._failure = f"cannot {where}: {bounded(error)}"
                raise PoolUnavailable(self._failure) from error
            _log.info("connected to Ray at %s", driver.head)
            self._failure = f"Ray is lost: {_ENDED}"
            return driver

    def _new_driver(self, stopping: threading.Event) -> Driver:
        address = self._address
        if address is None:
            try:
                return Driver(stopping, *_local())
            except PoolUnavailable as error:
                # a busy machine may be too slow for Ray's own time limits
                if stopping.is_set():
                    raise
                _log.warning("Ray did not start: %s; trying once more", error)
                return Driver(stopping, *_local())
        if address == "auto":
            address = _find_cluster()
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "://" in host:
            raise PoolUnavailable("name the cluster by its own address, HOST:6379")
        # Fails within seconds, where Ray would try for minutes.
        socket.create_connection(
            (host.strip("[]"), int(port)), timeout=CALL_SECONDS
        ).close()
        return Driver(stopping, {"address": address}, {})


class Driver:
    """A process that is connected to Ray. When it ends, its actors end. It is never
    restarted.

    Args:
        stopping: once it is set, the connection to Ray is not waited for.
        options: arguments of `ray.init`.
        environment: variables that it and a Ray that it starts have in addition; None
            removes one.
        directory: of a local Ray, which is started. It is removed when the driver ends.
            None: join a cluster.

    Raises:
        PoolUnavailable: it cannot connect to Ray.
    """

    def __init__(
        self,
        stopping: threading.Event,
        options: dict[str, Any],
        environment: Mapping[str, str | None],
        directory: str | None = None,
    ) -> None:
        given = {
            name: value
            for name, value in _ENVIRONMENT.items()
            if name not in os.environ
        }
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        self._directory = directory
        self._head: str | None = None
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = start_program(
                    "actors.driver_process",
                    [theirs.fileno()],
                    directory or "",
                    environment={**given, **environment},
                    # an interrupt from the terminal is for the engine's process
                    start_new_session=True,
                )
        except OSError:
            self._release()
            raise
        try:
            session = Session(self.connection(), stopping)
            what = "answer (its GCS server, and this node's raylet)"
            # Ray adds the directory of this program to the path of its workers.
            self._head = session.ask(what, "connect", {**options, **quiet}, sys.argv[0])
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> str | None:
        """The address of Ray's head. None: it is not connected yet, or has ended."""
        if self._process.poll() is None:
            return self._head
        return None

    def connection(self) -> Connection[Any, Any]:
        """Return a new connection to the process, at once. Raises `PoolUnavailable` if
        that has ended."""
        ours, theirs = Pipe()
        with theirs:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise PoolUnavailable(_ENDED) from None
        return ours

    def close(self) -> None:
        """End the process, which ends the actors, and Ray itself if the driver has
        started it. Idempotent."""
        if self.head is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("Ray did not end by itself: its processes are killed")
        self._process.kill()
        self._process.wait()
        self._release()

    def _release(self) -> None:
        self._control.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class Session:
    """A connection to the driver, and the actor that was created through it, if any.
    For one thread.

    See `driver_process.DriverSession`: the engine sends the name of a method and its
    arguments, and the driver the result, or the error. Both are pickled, over a socket
    pair that only these two processes have.
    """

    def __init__(
        self, connection: Connection[Any, Any], stopping: threading.Event
    ) -> None:
        self._connection = connection
        self._stopping = stopping

    def ask(self, action: str, name: str, *arguments: Any) -> Any:
        """Call a method of `driver_process.DriverSession`. Returns its result.

        Raises:
            PoolUnavailable: Ray did not `action` in time, the driver or the actor has
                ended, or the method raised.
        """
        began = time.monotonic()
        warn_after = CALL_SECONDS
        try:
            self._connection.send((name, arguments))
            while not self._connection.poll(TICK_SECONDS):
                waited = time.monotonic() - began
                if self._stopping.is_set():
                    raise PoolUnavailable(_STOPPED)
                if waited > START_SECONDS:
                    raise PoolUnavailable(
                        f"Ray did not {action} within {START_SECONDS:g} s"
                    )
                if waited > warn_after:
                    _log.warning(
                        "waiting for Ray to %s, for %g s at most", action, START_SECONDS
                    )
                    warn_after = START_SECONDS
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise PoolUnavailable(_ENDED) from None
        if error is not None:
            raise error
        return result

    def fileno(self) -> int:
        """Return the descriptor to poll: `POLLHUP` once the driver has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Have Ray end the actor, at once or as soon as it is created. Does not
        wait."""
        self._connection.close()


def _local() -> tuple[dict[str, Any], dict[str, str | None], str]:
    """Return the arguments of `ray.init`, the environment and a new directory, for a
    local Ray."""
    directory = tempfile.mkdtemp(prefix="guided-")
    token = os.path.join(directory, "token")
    with open(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    options = {
        # even if RAY_ADDRESS is set: a cluster is only joined if it was named
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": 80
        << 20,  # Ray's own minimum: a vocabulary is there on its way to an actor only
        # The actors take no CPUs, and Ray would keep an idle process for every CPU.
        "num_cpus": 0,
        "num_gpus": 0,
        # A subdirectory, because Ray makes its own directory accessible to all users
        # (0777).
        "_temp_dir": os.path.join(directory, "ray"),
    }
    return options, {**_LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": token}, directory


def _address_of_this_process() -> str | None:
    """Return the address of the cluster that this process is in without us, for example
    as a worker of Ray Serve."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return None


def _find_cluster() -> str:
    """Return the address of the cluster of this machine, for "auto": that of the latest
    `ray start`."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(directory, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        raise PoolUnavailable(
            "`ray start` has not run on this machine: name the cluster as HOST:6379"
        ) from None
