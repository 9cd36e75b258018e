"""The driver's process: connects to Ray, and starts and calls actors there as the
engine's process asks for it.

A driver ends when the raylet is lost; the engine's process then starts another one. A
driver ends with the engine's process, and a Ray that the driver has started ends with
the driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services, utils
from ray._raylet import PlacementGroupID
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.mask_actor import ANSWERS, ActorLocation, Lines, MaskActor, forward
from actors.processes import RETRY_SECONDS, TICK_SECONDS
from actors.protocol import connect
from guided.errors import PoolUnavailable, bounded
from guided.pools.options import NodePlacement

_ACTOR = ray.remote(
    num_cpus=0, max_restarts=0, max_concurrency=1, concurrency_groups={ANSWERS: 1}
)(MaskActor)
# The runtime environment of an actor that may be on another node. A result above this
# size would wait in the object store there until this process asks for it. By default
# it is 100 KB, and the masks of 64 rows are up to 1 MB.
_ELSEWHERE = {"env_vars": {"RAY_max_direct_call_object_size": str(16 << 20)}}
_JOIN_SECONDS = 12.0
"""Time limit for joining a cluster, once this process has loaded Ray."""


def main() -> None:
    """Serve the engine's process. Arguments: descriptor of a socket; directory of a
    local Ray, "" to join a cluster."""
    control = socket.socket(fileno=int(sys.argv[1]))
    directory = sys.argv[2]
    if directory:
        _remove_when_ended(directory)
    threading.Thread(target=_exit_with_engine, args=(control,), daemon=True).start()
    connections = _connections(control)
    first = next(connections)
    _, (options, sys.argv[0]) = first.recv()
    patience = threading.Timer(_JOIN_SECONDS, _give_up, (first,))
    try:
        if directory:
            _leave_out_processes()
        else:  # without a raylet, Ray would try for a minute and a half
            patience.start()
        ray.init(**options)
        patience.cancel()
        context = ray.get_runtime_context()
        threading.Thread(
            target=_exit_with_raylet, args=(str(context.get_node_id()),), daemon=True
        ).start()
    except Exception as error:
        first.send((None, _described(error)))
        return
    first.send((str(context.gcs_address), None))
    for connection in connections:
        threading.Thread(target=DriverSession(connection).serve, daemon=True).start()
    ray.shutdown()  # has no time limit: the engine's process kills this one


def _give_up(engine: Connection[Any, Any]) -> None:
    """Exit because the cluster does not answer."""
    engine.send(
        (
            None,
            PoolUnavailable("its GCS server, or this node's raylet, does not answer"),
        )
    )
    os._exit(1)


def _connections(control: socket.socket) -> Iterator[Connection[Any, Any]]:
    """Yield the connections that the engine's process opens, until it closes the
    driver."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        yield Connection(descriptors[0])


def _remove_when_ended(directory: str) -> None:
    """Have the directory of a local Ray removed once this process has ended, also if it
    is killed.

    By a process that is no descendant of the engine's: vLLM kills all of those.
    """
    reading, _ = os.pipe()  # this process never closes the other end
    # Ray's processes end with this one, but still write there for a moment.
    script = 'exec 3<&0; { read _ <&3; for pause in 1 3 5; do sleep $pause; rm -rf "$1"; done; } &'
    command = ["/bin/sh", "-c", script, "guided-cleanup", directory]
    null = subprocess.DEVNULL
    subprocess.run(
        command,
        stdin=reading,
        stdout=null,
        stderr=null,
        start_new_session=True,
        cwd="/",
        check=True,
    )
    os.close(reading)


def _exit_with_engine(control: socket.socket) -> None:
    """Exit once the engine's process has ended, with a local Ray. Waiting for Ray may
    take forever."""
    poller = select.poll()
    poller.register(control, 0)  # reports POLLHUP
    poller.poll()
    os._exit(1)


def _exit_with_raylet(node_id: str) -> None:
    """Exit once this node's raylet has ended: then no actor can be started, and the
    actors here have ended too."""
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    while True:
        time.sleep(RETRY_SECONDS)
        try:
            socket.create_connection(
                (node["NodeManagerAddress"], node["NodeManagerPort"]), RETRY_SECONDS
            ).close()
        except ConnectionRefusedError:
            os._exit(1)
        except OSError:
            pass


class DriverSession:
    """Serves a connection of the engine's process: its public methods, by name. One may
    create an actor."""

    def __init__(self, engine: Connection[Any, Any]) -> None:
        self._engine = engine
        self._actor: Any = None

    def serve(self) -> None:
        """Handle a request, and wait until the engine's process closes the connection.
        Then end the actor."""
        with contextlib.suppress(EOFError, OSError):
            name, arguments = self._engine.recv()
            result = None
            error = None
            try:
                result = getattr(self, name)(*arguments)
            except Exception as raised:
                error = _described(raised)
            self._engine.send((result, error))
            self._engine.recv()
        if self._actor is not None:
            ray.kill(self._actor)

    def check_room(self, placement: NodePlacement, cpus: float, number: int) -> None:
        """See `Cluster.check_room`."""
        if placement.kind != "group":  # that has been reserved already
            check_room(
                placement,
                cpus,
                number,
                ray.nodes(),
                ray.get_runtime_context().get_node_id(),
            )

    def create(
        self,
        placement: NodePlacement,
        cpus: float,
        number: int,
        index: int,
        channel: tuple[str, int, int],
        *arguments: Any,
    ) -> ActorLocation:
        """Start actor `index` of `number`, and connect it to a step channel of the
        engine's process.

        Returns where it runs, when the engine can send the first step.
        """
        self.check_room(placement, cpus, number)
        self._actor = _ACTOR.options(**_ray_options(placement, cpus, index)).remote(
            *arguments
        )
        serves = self._actor.serve.remote(*channel)
        while not ray.wait([serves], timeout=TICK_SECONDS)[0]:
            if self._engine.poll(
                0
                # it waits for an answer, so it sends nothing: it has closed the connection
            ):
                raise EOFError
        location: ActorLocation = ray.get(serves)
        if not location.is_direct:
            _forward(self._actor, channel)
        return location


def _forward(actor: Any, channel: tuple[str, int, int]) -> None:
    """Connect an actor that cannot reach the engine's process."""
    collect = actor.collect.options(concurrency_group=ANSWERS).remote
    calls = deque([collect()])

    def lines() -> Lines:
        calls.append(collect())  # the actor goes on while lines are on their way
        return cast(Lines, ray.get(calls.popleft()))

    def load(grammar: Any) -> None:
        # In a list: Ray would hold back all later calls until an argument is there.
        actor.load.remote([ray.put(np.frombuffer(grammar, np.uint8))])

    forward(*connect(*channel), actor.deliver.remote, load, lines)


def _described(error: Exception) -> PoolUnavailable:
    """Return an error that the engine's process can unpickle."""
    if isinstance(error, PoolUnavailable):
        return error
    why: object = error
    if isinstance(error, RayTaskError):
        why = error.cause
    elif isinstance(error, RayActorError):
        # Its cause stands at the end of a traceback.
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = lines[-1].strip() if lines else error
    return PoolUnavailable(bounded(why))


def _ray_options(placement: NodePlacement, cpus: float, index: int) -> dict[str, Any]:
    """Return the options of `ray.remote` that place mask actor `index` of a pool."""
    if placement.kind == "local":
        strategy = NodeAffinitySchedulingStrategy(
            str(ray.get_runtime_context().get_node_id()), soft=False
        )
        return {"num_cpus": cpus, "scheduling_strategy": strategy}
    options = {
        "num_cpus": cpus,
        "scheduling_strategy": "SPREAD",
        "runtime_env": _ELSEWHERE,
    }
    if placement.kind == "group":  # its first bundle is that of the engine
        group = PlacementGroup(PlacementGroupID.from_hex(placement.value))
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=1 + index
        )
        return {**options, "scheduling_strategy": strategy}
    if placement.kind == "resource":
        return {**options, "resources": {placement.name: placement.amount}}
    # Ray (2.60) places actors that reserve nothing anywhere, whatever their strategy or
    # labels.
    options["num_cpus"] = cpus or 0.001
    if placement.kind == "label":
        return {**options, "label_selector": {placement.name: placement.value}}
    return options


def check_room(
    placement: NodePlacement,
    cpus: float,
    number: int,
    nodes: list[dict[str, Any]],
    here: str,
) -> None:
    """See `Cluster.check_room`.

    Args:
        cpus: number of CPUs that Ray reserves for each of `number` actors.
        nodes: as `ray.nodes()` returns them.
        here: the id of this process's node.
    """
    fitting = [
        node["Resources"]
        for node in nodes
        if node["Alive"] and _fits(node, placement, here)
    ]
    if not fitting:
        raise PoolUnavailable(
            f"no node of the Ray cluster has the {placement.kind} of placement {placement.text!r}"
        )
    needs = {
        name: amount
        for name, amount in (("CPU", cpus), (placement.name, placement.amount))
        if amount
    }
    room = sum(
        min([node.get(name, 0) // needs[name] for name in needs], default=number)
        for node in fitting
    )
    if room < number:
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
        there = ", ".join(
            f"{sum(node.get(name, 0) for node in fitting):g} {name}" for name in needs
        )
        raise PoolUnavailable(
            f"the pool reserves {amounts} for each of {number} mask actors, and the nodes of placement "
            f"{placement.text!r} have {there}, enough for {room:g}: lower num_actors, actor_cpus or the amount in "
            "placement"
        )


def _fits(node: dict[str, Any], placement: NodePlacement, here: str) -> Any:
    match placement.kind:
        case "local":
            return node["NodeID"] == here
        case "resource":
            return node["Resources"].get(placement.name, 0) >= placement.amount
        case "label":
            return node["Labels"].get(placement.name) == placement.value
    return True


# a local Ray of few processes

# `ray.init` also starts an autoscaler monitor, a log monitor, a dashboard and two
# agents of the raylet: five processes of Python, 300 MB, and several seconds until the
# first actor starts. Nothing here uses them, and Ray has no option to leave them out.
# Each agent is replaced by a shell that waits for the raylet's end. An agent writes the
# ports that it listens on to files, -1 for none; the raylet aborts if it finds an
# incomplete file.
_AGENT = """
for argument; do
    case $argument in
    --node-id=*) node=${argument#*=} ;;
    --session-dir=*) session=${argument#*=} ;;
    esac
done
for name in %s; do
    file=$session/${name}_$node
    printf %%s -1 >"$file.new" && mv "$file.new" "$file"
done
exec cat
"""
_AGENT_PORTS = {
    ray_constants.PROCESS_TYPE_DASHBOARD_AGENT: "metrics_agent_port metrics_export_port dashboard_agent_listen_port",
    ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT: "runtime_env_agent_port",
}


def _leave_out_processes() -> None:
    """Have `ray.init` start the GCS server, the raylet and nothing else. It replaces
    functions of Ray (2.60)."""
    python_command = services._build_python_executable_command_memory_profileable

    def command(component: str, *arguments: Any, **more: Any) -> list[str]:
        ports = _AGENT_PORTS.get(component)
        if ports is None:
            return list(python_command(component, *arguments, **more))
        return ["/bin/sh", "-c", _AGENT % ports]

    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(ray_node.Node, name, lambda *_, **__: None)
    services._build_python_executable_command_memory_profileable = command
    # This process would load the dashboard's libraries, to find out whether they are
    # installed.
    utils.get_dashboard_dependency_error = lambda: ImportError(
        "the dashboard is not used"
    )


if __name__ == "__main__":
    main()
