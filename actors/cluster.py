"""This process's connection to Ray: a light local cluster started here, or a cluster that runs already.

A process has one connection, which its pools share. The driver ends when this node's raylet has ended. Then the next
actor that is started connects again: to a new local cluster, or to the same cluster once that is up again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from actors.driver import Driver, Session
from actors.processes import CALL_SECONDS
from guided.errors import PoolUnavailable, bounded
from guided.pools.options import LOCAL, NodePlacement, RayPoolOptions

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # For its dashboard the GCS records every task, which grows with each grammar.
    "RAY_task_events_report_interval_ms": "0",
    # The engine has precedence over the masks. With Ray's default, 15, masks starve on busy cores and the engine waits.
    "RAY_worker_niceness": "5",
    # Under `uv run`, Ray would rebuild the Python environment for every actor.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_LOCAL_ENVIRONMENT = {
    # Without its GCS, a local Ray ends after this time, and is started again. By default it waits for a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    # With this setting all processes of the local Ray listen on 127.0.0.1 only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    # A process that Ray starts ends when a pipe to the raylet closes. Otherwise it looks for the raylet now and then.
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    # Without CPUs of its own, Ray would start the actors' processes one after the other.
    "RAY_worker_maximum_startup_concurrency": "4",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": None,
    "RAY_ADDRESS": None,
    # The key is for the server's process only.
    "GUIDED_API_KEY": None,
}
_LOST = "Ray is lost: the process that was connected to it ended"
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
        self._has_left = False
        self._failure = _LOST

    @classmethod
    def join(cls, address: str | None = None) -> Cluster:
        """Connect to the cluster that this process has joined already, or to `address`, or to a new local cluster.

        Raises:
            PoolUnavailable: Ray cannot be reached or started; says why.
        """
        with cls._lock:
            cluster = cls._current or cls(address)
            cluster._connected()
            cls._current = cluster
            cluster._users += 1
            return cluster

    def leave(self) -> None:
        """Give the connection back. The last user disconnects, and ends the cluster if it was started here."""
        with Cluster._lock:
            self._users -= 1
            if self._users == 0 and Cluster._current is self:
                Cluster._current = None
                self._has_left = True
                if self._driver is not None:
                    self._driver.close()

    @property
    def trouble(self) -> str | None:
        """Why there is no connection to Ray now; None if there is one."""
        return None if self.head is not None else self._failure

    @property
    def head(self) -> str | None:
        """The address of Ray's head. None: there is no connection now."""
        return None if self._driver is None else self._driver.head

    def check_room(self, options: RayPoolOptions) -> None:
        """Check that Ray has room for a pool, whatever runs there now.

        Raises:
            PoolUnavailable: it has not; says what there is, and which options lower what the pool takes.
        """
        with contextlib.closing(self.session(threading.Event())) as session:
            session.ask("describe its nodes", "check_room", *self.reserved(options), options.actors)

    def session(self, stopping: threading.Event) -> Session:
        """Return a new connection to the driver. Connects to Ray again if that connection is lost.

        Args:
            stopping: see `Driver.session`.

        Raises:
            PoolUnavailable: Ray cannot be reached or started now.
        """
        return self._connected().session(stopping)

    def reserved(self, options: RayPoolOptions) -> tuple[NodePlacement, float]:
        """Return where an actor may run, and the CPUs that Ray reserves for it there."""
        placement = NodePlacement.parse(options.placement)
        if self._address is None:  # one node, which has no CPUs
            return LOCAL if placement.kind == "spread" else placement, 0.0
        return placement, 1.0 if options.actor_cpus is None else options.actor_cpus

    def _connected(self) -> Driver:
        """Return a driver that is connected."""
        with self._connecting:
            if self._driver is not None and self._driver.head is not None:
                return self._driver
            try:
                if self._driver is not None:
                    _log.error("%s; connecting again", self._failure)
                    self._driver.close()
                if self._address is not None:
                    return self._join(_find_cluster() if self._address == "auto" else self._address)
                try:
                    return self._start_driver(*_local())
                except PoolUnavailable as error:  # a busy machine may be too slow for Ray's own time limits
                    _log.warning("Ray did not start: %s; trying once more", error)
                    return self._start_driver(*_local())
            except Exception as error:
                where = f"join the Ray cluster at {self._address}" if self._address else "start a local Ray"
                self._failure = f"cannot {where}: {bounded(error)}"
                raise PoolUnavailable(self._failure) from error

    def _join(self, address: str) -> Driver:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "://" in host:
            raise PoolUnavailable("name the cluster by its own address, HOST:6379")
        # Fails within seconds, where Ray would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_SECONDS).close()
        return self._start_driver({"address": address}, {})

    def _start_driver(
        self, options: dict[str, Any], environment: dict[str, str | None], directory: str | None = None
    ) -> Driver:
        given = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
        driver = self._driver = Driver({**options, **_QUIET}, {**given, **environment}, directory)
        try:
            if self._has_left:  # from now on `leave` ends the driver
                raise PoolUnavailable("the pool was shut down")
            driver.connect()
        except BaseException:
            driver.close()
            raise
        _log.info("connected to Ray at %s", driver.head)
        self._failure = _LOST
        return driver


def _local() -> tuple[dict[str, Any], dict[str, str | None], str]:
    """Return the arguments of `ray.init`, the environment and a new directory, for a local Ray."""
    directory = tempfile.mkdtemp(prefix="guided-")
    token = os.path.join(directory, "token")
    with open(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    # Size of Ray's object store, Ray's own minimum. A vocabulary or a grammar is there on its way to an actor only.
    options = {
        # "local" even if RAY_ADDRESS is set: a cluster is only joined if it was named.
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
        # The actors take no CPUs, and Ray would keep an idle process for every CPU.
        "num_cpus": 0,
        "num_gpus": 0,
        # A subdirectory, because Ray makes its own directory accessible to all users (0777).
        "_temp_dir": os.path.join(directory, "ray"),
    }
    return options, {**_LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": token}, directory


def _address_of_this_process() -> str | None:
    """Return the address of the cluster that this process is in without us, for example as a worker of Ray Serve."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return None


def _find_cluster() -> str:
    """Return the address of the cluster of this machine, for "auto": that of the latest `ray start`."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(directory, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        raise PoolUnavailable("`ray start` has not run on this machine: name the cluster as HOST:6379") from None
