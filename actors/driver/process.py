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
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.driver.client import ActorDied, ActorFailed, ObjectLost
from actors.driver.messages import Alive, Call, Close, Connect, Connected, Create, Drop, Put, Reference, Reply
from guided.errors import bounded

_ALIVE_SECONDS = 1.0
_SHUTDOWN_SECONDS = 15.0


def main() -> None:
    """Serve the engine's process, over the socket with the descriptor in `sys.argv[1]`."""
    engine: Connection[Any, Any] = Connection(int(sys.argv[1]))
    connect: Connect = engine.recv()
    sys.argv[0] = connect.program
    is_connected = threading.Event()
    threading.Thread(target=_exit_with_engine, args=(engine, is_connected), daemon=True).start()
    try:
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
    """The actors and objects of the engine's process."""

    def __init__(self, engine: Connection[Any, Any]) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        self._objects: dict[int, Any] = {}

    def serve(self) -> None:
        """Handle requests until one of them is to close.

        Raises:
            EOFError, OSError: the engine's process has ended.
        """
        threading.Thread(target=self._send_alive, name="alive", daemon=True).start()
        while not isinstance(request := self._engine.recv(), Close):
            self._handle(request)

    def _handle(self, request: Call | Create | Put | Drop) -> None:
        match request:
            case Call():
                self._answer(request.number, lambda: self._call(request))
            case Create():  # blocks as long as Ray's head is gone
                self._in_thread(lambda: self._answer(request.number, lambda: self._create(request)))
            case Put():
                self._objects[request.number] = ray.put(request.value)
            case Drop():
                self._objects.pop(request.number, None)
                actor = self._actors.pop(request.number, None)
                if actor is not None:
                    self._in_thread(lambda: ray.kill(actor))

    def _create(self, request: Create) -> None:
        node, options = request.scheduling.choose(ray.nodes(), str(ray.get_runtime_context().get_node_id()))
        strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)
        actor_class = _actor_class(request.actor_class).options(scheduling_strategy=strategy, **options)
        self._actors[request.number] = actor_class.remote(*self._resolve(request.arguments))

    def _call(self, request: Call) -> Future[Any]:
        if request.actor not in self._actors:
            raise RayActorError
        method = getattr(self._actors[request.actor], request.method)
        if request.kept is None:
            result = method.remote(*self._resolve(request.arguments))
        else:
            result, kept = method.options(num_returns=2).remote(*self._resolve(request.arguments))
            self._objects[request.kept] = kept
        future: Future[Any] = result.future()
        return future

    def _resolve(self, arguments: tuple[Any, ...]) -> list[Any]:
        return [self._objects[each.number] if isinstance(each, Reference) else each for each in arguments]

    def _answer(self, number: int, action: Callable[[], Future[Any] | None]) -> None:
        """Call `action`, and reply with its result, or with that of the future that it returns."""
        try:
            future = action()
        except Exception as error:
            self._send(_failed(number, error))
            return
        if future is None:
            self._send(Reply(number))
        else:
            future.add_done_callback(lambda done: self._send(_reply(number, done)))

    def _send(self, message: Reply | Alive) -> None:
        with self._lock, contextlib.suppress(OSError):  # the engine's process has ended: `serve` raises
            self._engine.send(message)

    def _send_alive(self) -> None:
        while True:
            self._send(Alive())
            time.sleep(_ALIVE_SECONDS)

    def _in_thread(self, call: Callable[[], object]) -> None:
        threading.Thread(target=call, daemon=True).start()


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
    lost = ObjectLost if isinstance(cause, ObjectLostError) else ActorFailed
    return Reply(number, error=(ActorDied if isinstance(error, RayActorError) else lost)(bounded(cause)))


if __name__ == "__main__":
    main()
