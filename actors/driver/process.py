"""The driver's process: connects to Ray, and starts and calls actors there as the engine's process asks for it.

A driver ends when the raylet is lost; the engine's process then starts another one. A driver ends with the
engine's process, and a Ray that the driver has started ends with the driver.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.channel import WorkerEnd
from actors.driver import local_ray
from actors.driver.client import ActorDied, ActorFailed, RayNode
from actors.driver.forwarder import Forwarder
from actors.driver.scheduling import Scheduling
from actors.processes import remove_later
from actors.steps.protocol import SegmentName, attach
from guided.errors import PoolUnavailable, bounded

_SHUTDOWN_SECONDS = 15.0
_PROBE_SECONDS = 1.0
# A result above this size would wait in the object store of the actor's node until this process asks for it. By default
# it is 100 KB. The masks of 64 rows are 200 KB: a step takes 8 instead of 11 ms, of 256 rows 25 instead of 40.
_ELSEWHERE = {"env_vars": {"RAY_max_direct_call_object_size": str(4 << 20)}}
"""The runtime environment of an actor that may be on another node."""


def main() -> None:
    """Serve the engine's process, over the socket with the descriptor in `sys.argv[1]`."""
    engine: Connection[Any, Any] = Connection(int(sys.argv[1]))
    options, is_small, directory, sys.argv[0] = engine.recv()
    is_connected = threading.Event()
    threading.Thread(target=_exit_with_engine, args=(engine, is_connected, directory), daemon=True).start()
    try:
        if is_small:
            local_ray.start(options)
        else:
            ray.init(**options)
        context = ray.get_runtime_context()
        node = RayNode(str(context.get_node_id()), str(context.gcs_address))
        threading.Thread(target=_exit_with_raylet, args=(node.node_id, directory), daemon=True).start()
    except Exception as error:
        engine.send((0, None, _described(error)))
        return
    is_connected.set()
    engine.send((0, node, None))
    try:
        Requests(engine).serve()
    except (EOFError, OSError):
        _exit(directory)
    limit = threading.Timer(_SHUTDOWN_SECONDS, _exit, [directory])  # `ray.shutdown` has no time limit
    limit.daemon = True
    limit.start()
    ray.shutdown()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _exit_with_engine(engine: Connection[Any, Any], is_connected: threading.Event, directory: str | None) -> None:
    """Exit if the engine's process ends while this process still waits for Ray, which may take forever."""
    engine.poll(None)  # until it is connected, the engine sends nothing: the connection has ended
    if not is_connected.is_set():
        _exit(directory)


def _exit_with_raylet(node_id: str, directory: str | None) -> None:
    """Exit once this node's raylet has ended: then no actor can be started, and the actors here have ended too."""
    (found,) = (each for each in ray.nodes() if each["NodeID"] == node_id)
    while True:
        time.sleep(_PROBE_SECONDS)
        try:
            socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            _exit(directory)
        except OSError:
            pass


def _exit(directory: str | None) -> None:
    """End this process, which ends the Ray that it has started; then the directory of that Ray is removed."""
    if directory is not None:
        remove_later(directory)
    os._exit(1)


class Requests:
    """The requests of the engine's process: the public methods, by name. The engine gives each actor a number."""

    def __init__(self, engine: Connection[Any, Any]) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}

    def serve(self) -> None:
        """Handle requests until one of them is `close`.

        Raises:
            EOFError, OSError: the engine's process has ended.
        """
        while True:
            number, name, arguments = self._engine.recv()
            if name == "close":
                return
            handle = (number, getattr(self, name), *arguments)
            if name == "call":  # in order
                self._answer(*handle)
            else:  # these block as long as Ray's head is gone
                threading.Thread(target=self._answer, args=handle, daemon=True).start()

    def create(self, number: int, actor_class: str, scheduling: Scheduling, arguments: tuple[Any, ...]) -> None:
        """Start an actor. Returns when Ray has accepted it."""
        defined = _actor_class(actor_class).options(**_ray_options(scheduling))
        self._actors[number] = defined.remote(*arguments)

    def call(self, number: int, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Call a method of an actor."""
        if number not in self._actors:
            raise RayActorError
        future: Future[Any] = getattr(self._actors[number], method).remote(*arguments).future()
        return future

    def forward(self, number: int, path: str, segment: SegmentName) -> None:
        """Forward the steps of an actor on another node. Returns when the engine can send the first one."""
        actor, table = self._actors[number], attach(segment)
        if table is None:
            raise PoolUnavailable("the memory of the engine's process cannot be mapped")
        end = WorkerEnd.connect(path)
        Forwarder(end, table, actor.deliver.remote, lambda: ray.get(actor.collect.remote())).start()

    def nodes(self) -> Any:
        """Return the nodes of the cluster, as `ray.nodes` describes them."""
        return ray.nodes()

    def end(self, number: int) -> None:
        """Have Ray end an actor."""
        if (actor := self._actors.pop(number, None)) is not None:
            ray.kill(actor)

    def _answer(self, number: int, action: Callable[..., Any], *arguments: Any) -> None:
        """Call `action`, and send its result. If that is a future: its result, once it has one."""
        try:
            result = action(*arguments)
        except Exception as error:
            self._send(number, None, _described(error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._send_done(number, done))
        else:
            self._send(number, result, None)

    def _send_done(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._send(number, done.result(), None)
        else:
            self._send(number, None, _described(error))

    def _send(self, number: int, result: Any, error: Exception | None) -> None:
        with self._lock, contextlib.suppress(OSError):  # the engine's process has ended: `serve` raises
            self._engine.send((number, result, error))


def _ray_options(scheduling: Scheduling) -> dict[str, Any]:
    """Return the options of `ray.remote` that place an actor."""
    if scheduling.placement.kind == "group":
        group = PlacementGroup(PlacementGroupID.from_hex(scheduling.placement.value))
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=scheduling.bundle)
        return {"num_cpus": scheduling.cpus, "scheduling_strategy": strategy, "runtime_env": _ELSEWHERE}
    here = str(ray.get_runtime_context().get_node_id())
    node, options = scheduling.choose(ray.nodes(), here)
    if node == here:
        return {**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)
    return {**options, "scheduling_strategy": strategy, "runtime_env": _ELSEWHERE}


@cache
def _actor_class(name: str) -> Any:
    """Define an actor class for Ray. Cached, because Ray keeps every definition."""
    actor_class = pkgutil.resolve_name(name)
    return ray.remote(num_cpus=0, **actor_class.RAY_OPTIONS)(actor_class)


def _described(error: BaseException) -> Exception:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return (ActorDied if isinstance(error, RayActorError) else ActorFailed)(bounded(cause))


if __name__ == "__main__":
    main()
