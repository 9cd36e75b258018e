"""The driver's process: connects to Ray, and starts and calls actors there as the engine's process asks for it.

Ray ends its driver when the raylet is lost. The engine's process then starts another driver. A driver ends with the
engine's process, and a Ray that the driver has started ends with the driver.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
import threading
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
from actors.driver.client import ActorDied, ActorFailed
from actors.driver.forwarder import Forwarder
from actors.driver.messages import Call, Close, Connect, Connected, Create, End, Forward, Nodes, Reply, Request
from actors.driver.scheduling import Scheduling
from actors.steps.protocol import attach
from guided.errors import PoolUnavailable, bounded

_SHUTDOWN_SECONDS = 15.0
# A result above this size would wait in the object store of the actor's node until this process asks for it. By default
# it is 100 KB. The masks of 64 rows are 200 KB: a step takes 8 instead of 11 ms, of 256 rows 25 instead of 40.
_ELSEWHERE = {"env_vars": {"RAY_max_direct_call_object_size": str(4 << 20)}}
"""The runtime environment of an actor that may be on another node."""


def main() -> None:
    """Serve the engine's process, over the socket with the descriptor in `sys.argv[1]`."""
    engine: Connection[Any, Any] = Connection(int(sys.argv[1]))
    connect: Connect = engine.recv()
    sys.argv[0] = connect.program
    is_connected = threading.Event()
    threading.Thread(target=_exit_with_engine, args=(engine, is_connected), daemon=True).start()
    try:
        if connect.is_small:
            local_ray.start(connect.options)
        else:
            ray.init(**connect.options)
        connected = _describe()
    except Exception as error:
        engine.send(_failed(0, error))
        return
    is_connected.set()
    engine.send(connected)
    try:
        _Actors(engine).serve()
    except (EOFError, OSError):
        os._exit(1)  # the engine's process was killed: its files are being removed
    limit = threading.Timer(_SHUTDOWN_SECONDS, os._exit, [1])  # `ray.shutdown` has no time limit
    limit.daemon = True
    limit.start()
    ray.shutdown()


def _exit_with_engine(engine: Connection[Any, Any], is_connected: threading.Event) -> None:
    """Exit if the engine's process ends while this process still waits for Ray, which may take forever."""
    engine.poll(None)  # until `Connected` the engine sends nothing: the connection has ended
    if not is_connected.is_set():
        os._exit(1)


def _describe() -> Connected:
    context = ray.get_runtime_context()
    node_id = str(context.get_node_id())
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    head, _, port = context.gcs_address.rpartition(":")
    raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
    return Connected(node_id, str(ray.util.get_node_ip_address()), raylet, (head.strip("[]"), int(port)))


class _Actors:
    """The actors of the engine's process."""

    def __init__(self, engine: Connection[Any, Any]) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}

    def serve(self) -> None:
        """Handle requests until one of them is to close.

        Raises:
            EOFError, OSError: the engine's process has ended.
        """
        while True:
            number, request = self._engine.recv()
            match request:
                case Close():
                    return
                case Call():  # in order
                    self._answer(number, self._call, request)
                case _:  # these block as long as Ray's head is gone
                    threading.Thread(
                        target=self._answer, args=(number, self._handle, number, request), daemon=True
                    ).start()

    def _handle(self, number: int, request: Request) -> Any:
        match request:
            case Create():
                actor_class = _actor_class(request.actor_class).options(**_ray_options(request.scheduling))
                self._actors[number] = actor_class.remote(*request.arguments)
            case Forward():
                self._forward(self._actors[request.actor], request)
            case Nodes():
                return ray.nodes()
            case End():
                if (actor := self._actors.pop(request.actor, None)) is not None:
                    ray.kill(actor)

    def _call(self, request: Call) -> Future[Any]:
        if request.actor not in self._actors:
            raise RayActorError
        future: Future[Any] = getattr(self._actors[request.actor], request.method).remote(*request.arguments).future()
        return future

    def _forward(self, actor: Any, request: Forward) -> None:
        table = attach(request.segment)
        if table is None:
            raise PoolUnavailable("the memory of the engine's process cannot be mapped")
        end = WorkerEnd.connect(request.path)
        Forwarder(end, table, actor.deliver.remote, lambda: ray.get(actor.collect.remote())).start()

    def _answer(self, number: int, action: Callable[..., Any], *arguments: Any) -> None:
        """Call `action`, and reply with its result. If that is a future: with its result, once it has one."""
        try:
            result = action(*arguments)
        except Exception as error:
            self._send(_failed(number, error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._send(_reply(number, done)))
        else:
            self._send(Reply(number, result))

    def _send(self, reply: Reply) -> None:
        with self._lock, contextlib.suppress(OSError):  # the engine's process has ended: `serve` raises
            self._engine.send(reply)


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


def _reply(number: int, done: Future[Any]) -> Reply:
    error = done.exception()
    return Reply(number, done.result()) if error is None else _failed(number, error)


def _failed(number: int, error: BaseException) -> Reply:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return Reply(number, error=(ActorDied if isinstance(error, RayActorError) else ActorFailed)(bounded(cause)))


if __name__ == "__main__":
    main()
