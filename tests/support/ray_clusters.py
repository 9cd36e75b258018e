"""Clusters of Ray on this machine, and programs in processes of their own: a process
may join one cluster only.

As a program it runs a cluster in the directory `sys.argv[1]` with `sys.argv[2]` nodes,
and prints its address. A line of its input replaces the second node (`lose`), ends the
cluster (`down`), or starts it again with its address (`up`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MASKS: dict[str, Any] = {
    "num_cpus": 1,
    "resources": {"guided_mask": 2},
    "labels": {"pool": "masks"},
}
"""Every node but the first."""
PATHS = [
    str(ROOT),
    str(ROOT / "tests" / "support" / "startup"),
    str(ROOT / "tests" / "support"),
]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program that knows the modules of this folder and the
    faulty backend."""
    ray = {
        "RAY_raylet_start_wait_time_s": "120",  # for a busy machine
        "RAY_health_check_period_ms": "500",  # until a node is lost
        # what replaces an agent reads its own pipe
        "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    }
    return {
        **os.environ,
        **ray,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(PATHS),
        **more,
    }


def run(code: str, *arguments: str) -> str:
    """Run Python code in a process of its own. Returns what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=280, env=environment()
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def cluster_in(directory: str, **head: Any) -> Any:
    """Start a cluster of one node with one CPU.

    It has few processes, as the pool's own Ray: with all, each node takes ten seconds
    of CPU time to start.
    """
    from ray._private.ray_constants import PROCESS_TYPE_RUNTIME_ENV_AGENT
    from ray.cluster_utils import Cluster

    from actors import driver_process

    # actors on other nodes have an environment
    driver_process._AGENT_PORTS.pop(PROCESS_TYPE_RUNTIME_ENV_AGENT, None)
    driver_process._leave_out_processes()
    # Ray writes there
    os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)
    quiet = {"num_cpus": 1, "include_dashboard": False, "temp_dir": directory}
    return Cluster(initialize_head=True, head_node_args={**quiet, **head})


def main() -> None:
    head: dict[str, Any] = {}
    cluster = start(head)
    for line in sys.stdin:
        if line == "lose\n":
            cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)
            cluster.add_node(**MASKS)
        elif line == "down\n":
            cluster.shutdown()
        elif line == "up\n":
            cluster = start(head)
        print("done", flush=True)
    cluster.shutdown()


def start(head: dict[str, Any]) -> Any:
    """Start the cluster of this program, and print its address. It gets the same
    address again."""
    cluster = cluster_in(sys.argv[1], **head)
    for _ in range(1, int(sys.argv[2])):
        cluster.add_node(**MASKS)
    head["gcs_server_port"] = int(cluster.address.rpartition(":")[2])
    print(cluster.address, flush=True)
    return cluster


if __name__ == "__main__":
    main()
