"""This process's connection to Ray: a light local cluster started here, or a cluster that runs already.

A process has one connection, which its pools share. One thread connects, and connects again when the driver has ended:
to a new local cluster, or to the same cluster once that is up again.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from actors.driver import Driver, RemoteActor
from actors.processes import CALL_SECONDS, RETRY_SECONDS
from guided.errors import PoolUnavailable, bounded
from guided.pools.options import LOCAL, NodePlacement, RayPoolOptions

_STORE_BYTES = 80 << 20
"""Size of Ray's object store, Ray's own minimum. A vocabulary or a grammar is there on its way to an actor only."""
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
_log = logging.getLogger(__name__)


class Cluster:
    """A connection to Ray. `join` returns it, `leave` gives it back."""

    _lock = threading.Lock()
    _current: Cluster | None = None

    def __init__(self, address: str | None) -> None:
        self._address = address if address is not None else _address_of_this_process()
        self._driver: Driver | None = None
        self._users = 0
        self.head: str | None = None
        """The address of Ray's head. None: there is no connection now."""
        self.connected = threading.Event()
        """Set while there is a driver that is connected."""
        self._leaving = threading.Event()
        self.trouble: str | None = None
        """Why there is no connection to Ray now; None if there is one."""
        self._thread = threading.Thread(target=self._watch, name="ray-connection", daemon=True)

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
                try:
                    cluster._connect()
                except BaseException as error:
                    cluster._disconnect()
                    if not isinstance(error, Exception):  # interrupted
                        raise
                    where = f"join the Ray cluster at {cluster._address}" if cluster._address else "start a local Ray"
                    raise PoolUnavailable(f"cannot {where}: {bounded(error)}") from error
                cluster._thread.start()
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
                driver = self._driver
                if driver is not None and self.connected.is_set():
                    driver.close()
                elif driver is not None:
                    driver.kill()
                self._thread.join()

    def check_room(self, options: RayPoolOptions) -> None:
        """Check that Ray has room for a pool, whatever runs there now.

        Raises:
            PoolUnavailable: it has not; says what there is, and which options lower what the pool takes.
        """
        try:
            self._ask().ask("check_room", *self._reserved(options), options.actors).result(CALL_SECONDS)
        except TimeoutError:
            raise PoolUnavailable(f"Ray did not describe its nodes within {CALL_SECONDS:g} s") from None

    def start_actor(self, index: int, options: RayPoolOptions, *arguments: Any) -> RemoteActor:
        """Start mask actor `index` of a pool.

        Args:
            arguments: of `MaskActor`.

        Raises:
            PoolUnavailable: there is no connection to Ray now.
        """
        return RemoteActor(self._ask(), *self._reserved(options), index, arguments)

    def _ask(self) -> Driver:
        driver = self._driver
        if driver is None or not self.connected.is_set():
            raise PoolUnavailable(self.trouble or "Ray is being started")
        return driver

    def _reserved(self, options: RayPoolOptions) -> tuple[NodePlacement, float]:
        """Return where an actor may run, and the CPUs that Ray reserves for it there."""
        placement = NodePlacement.parse(options.placement)
        if self._address is None:  # one node, which has no CPUs
            return LOCAL if placement.kind == "spread" else placement, 0.0
        return placement, 1.0 if options.actor_cpus is None else options.actor_cpus

    def _watch(self) -> None:
        """Connect again whenever the driver ends, which it does when this node's raylet has ended."""
        while not self._leaving.is_set():
            if self.connected.is_set():
                assert self._driver is not None
                self._driver.ended.wait()
                if self._leaving.is_set():
                    break
                self.trouble = "Ray is lost: the process that was connected to it ended"
                _log.error("%s; it is %s again", self.trouble, "joined" if self._address else "started")
            self._disconnect()
            try:
                self._connect()
            except Exception as error:
                self.trouble = f"Ray is lost; connecting again fails: {bounded(error)}"
                _log.error("%s", self.trouble)
                self._leaving.wait(RETRY_SECONDS)
            else:
                self.trouble = None
                _log.warning("connected to Ray again")
        self._disconnect()

    def _connect(self) -> None:
        address = self._address
        if address is None:
            self._start_local()
            return
        if address == "auto":
            address = _find_cluster()
        _check_reachable(address)
        _log.info("joining the Ray cluster at %s", address)
        self._start_driver({"address": address}, {})

    def _start_local(self) -> None:
        """Start a local Ray. Try twice, because a busy machine may be too slow for Ray's own time limits."""
        _log.info("starting a local Ray")
        try:
            self._start_driver(*_local())
        except PoolUnavailable as error:
            if self._leaving.is_set():
                raise
            _log.warning("Ray did not start: %s; trying once more", error)
            self._disconnect()
            self._start_driver(*_local())

    def _start_driver(
        self, options: dict[str, Any], environment: dict[str, str | None], directory: str | None = None
    ) -> None:
        given = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
        self._driver = Driver({**options, **_QUIET}, {**given, **environment}, directory)
        if self._leaving.is_set():  # from now on `leave` kills the driver
            raise PoolUnavailable("the pool was shut down")
        self.head = self._driver.connect()
        self.connected.set()

    def _disconnect(self) -> None:
        """End the driver, if it has not ended yet."""
        self.connected.clear()
        driver, self._driver, self.head = self._driver, None, None
        if driver is not None:
            driver.kill()


def _local() -> tuple[dict[str, Any], dict[str, str | None], str]:
    """Return the arguments of `ray.init`, the environment and a new directory, for a local Ray."""
    directory = tempfile.mkdtemp(prefix="guided-")
    token = os.path.join(directory, "token")
    with open(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    options = {
        # "local" even if RAY_ADDRESS is set: a cluster is only joined if it was named.
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
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


def _check_reachable(address: str) -> None:
    """Fail within seconds, where Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        raise PoolUnavailable("name the cluster by its own address, HOST:6379")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_SECONDS).close()
