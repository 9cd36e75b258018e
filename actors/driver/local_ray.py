"""A local Ray of few processes: the GCS server, the raylet and the actors. Runs in the driver's process.

`ray.init` also starts an autoscaler monitor, a log monitor, a dashboard and two agents of the raylet: five processes of
Python, 300 MB, and several seconds until the first actor starts. Nothing here uses them, and Ray has no option to leave
them out. The raylet needs its agents as processes, so each is replaced by a shell that waits for the raylet's end.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import node, ray_constants, services, utils

# An agent writes the ports that it listens on to files, and ends with the raylet. The raylet aborts if it finds an
# incomplete file. -1 stands for none, as in Ray's own agents where the libraries of the dashboard are missing. The
# second agent is only asked to prepare runtime environments, which the actors of a local Ray do not have.
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


_RAYLET_SECONDS = 60.0
"""Maximum time until the raylet has registered. Ray waits for 30 s, too short for a machine with a load of 15."""


class _SmallNode(node.Node):  # type: ignore[misc]
    def start_monitor(self) -> None:
        pass

    def start_log_monitor(self) -> None:
        pass

    def start_api_server(self, **_: object) -> None:
        pass


def start(options: dict[str, Any]) -> None:
    """Start a local Ray without the processes that are not needed, and connect to it.

    It replaces functions of Ray (2.60). If a later version has other names for them, it starts all of its processes.

    Args:
        options: arguments of `ray.init`.
    """
    get_node = services.get_node
    python_command = services._build_python_executable_command_memory_profileable

    def command(component: str, *arguments: Any, **more: Any) -> list[str]:
        ports = _AGENT_PORTS.get(component)
        if ports is None:
            return list(python_command(component, *arguments, **more))
        return ["/bin/sh", "-c", _AGENT % ports]

    def wait_for_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + _RAYLET_SECONDS
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # not registered yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    node.Node = _SmallNode
    services.get_node = wait_for_node
    services._build_python_executable_command_memory_profileable = command
    # This process would load the dashboard's libraries, to find out whether they are installed.
    utils.get_dashboard_dependency_error = lambda: ImportError("the dashboard is not used")
    ray.init(**options)
