"""Measure masks of actors on other nodes, by the delay of the network. Needs root:
`python -m benchmarks.namespaces`.

Three Ray nodes run on this machine, each in its own network, PID and mount namespace,
with its own /tmp and /dev/shm, like a container. The engine is on the first, the mask
actors are on the second and third. TUN devices connect the nodes. This process forwards
their packets, each after the same delay, so that no kernel module is needed (`tc netem`
is missing in many containers). The line without delay shows the cost of this.

Rows, forward pass and figures are those of `benchmarks.step_overhead`. At the end the
third node disappears under load: its packets are dropped and its processes killed. Exit
status 1 if a row is lost. Writes namespaces.{json,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import report
from benchmarks.comparison import Candidate, started
from benchmarks.step_overhead import MAX_SCHEMA, figures
from benchmarks.workload import Tokens, documents

COLUMNS = {
    "way": "network",
    "rows": "rows",
    "step_p50": "step p50",
    "exposed_p50": "exposed p50",
    "exposed_p99": "p99",
    "cpu_p50": "CPU p50",
    "longest_step_seconds": "longest step, s",
}
_NODES = (1, 2, 3)
_PREFIX = f"guided{os.getpid() % 1000}n"
_HEAD = "10.77.0.1:6379"
_MTU = 65_000
_START_SECONDS = 300.0
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


class Network:
    """Forwards packets between the nodes, on a thread. Use it in a `with` block."""

    def __init__(self) -> None:
        self.delay = 0.0
        """Delay of each packet, in seconds."""
        self.lost: set[int] = set()
        """Nodes without a connection."""
        self._devices: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def __enter__(self) -> Network:
        for node in _NODES:
            name = f"{_PREFIX}{node}"
            _run("ip", "netns", "add", name)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(
                device,
                _TUNSETIFF,
                struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER),
            )
            self._devices[node] = device
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{node}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "mtu", str(_MTU), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for node, device in self._devices.items():
            os.close(device)
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}{node}"], check=False)

    def _run(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        sources = {device: node for node, device in self._devices.items()}
        while not self._ended.is_set():
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for device in select.select(sources, (), (), left)[0]:
                packet = os.read(device, _MTU + 100)
                target = packet[19] if packet[0] >> 4 == 4 else 0
                if (
                    target in self._devices
                    and not {target, sources[device]} & self.lost
                ):
                    waiting.append(
                        (time.monotonic() + self.delay, self._devices[target], packet)
                    )
            while waiting and waiting[0][0] <= time.monotonic():
                _, device, packet = waiting.popleft()
                os.write(device, packet)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        report.fail(f"{shlex.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def ray_node(number: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Ray node in its own namespaces until the block ends. All its processes end
    with the yielded process."""
    address = f"--node-ip-address=10.77.0.{number} --num-cpus=1 --object-store-memory=100000000 --block"
    where = f"--address={_HEAD} --resources='{{\"guided_mask\": 2}}'"
    where = (
        f"--head --port={_HEAD.rpartition(':')[2]} --include-dashboard=false"
        if number == 1
        else where
    )
    ray = shlex.quote(str(Path(sys.executable).with_name("ray")))
    script = f"mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && exec {ray} start {where} {address}"
    isolated = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        script,
    )
    variables = {
        "PYTHONPATH": str(report.ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "300",
    }
    with tempfile.TemporaryFile() as log:
        command = ["ip", "netns", "exec", f"{_PREFIX}{number}", *isolated]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **variables}
        )
        deadline, text = time.monotonic() + _START_SECONDS, b""
        try:
            while b"Ray runtime started" not in text:
                if process.poll() is not None or time.monotonic() > deadline:
                    report.fail(
                        f"node {number} did not start: {text.decode(errors='replace')[-2000:]}"
                    )
                time.sleep(0.2)
                text = os.pread(log.fileno(), 1 << 20, 0)
            yield process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def python_within(node: subprocess.Popen[bytes]) -> Iterator[str]:
    """Make an interpreter that runs in the namespaces of a node; return its path."""
    init = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "python")
        inner = f'cd {shlex.quote(str(report.ROOT))} && exec {shlex.quote(sys.executable)} "$@"'
        enter = f"nsenter --target {init} --net --mount --pid -- sh -c {shlex.quote(inner)} python"
        path.write_text(f'#!/bin/sh\nexec {enter} "$@"\n')
        path.chmod(stat.S_IRWXU)
        yield str(path)


def measure(
    network: Network,
    python: str,
    third: subprocess.Popen[bytes],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return the figures by delay, and of the run in which the third node
    disappears."""
    pool = {
        "address": _HEAD,
        "placement": "guided_mask",
        "actor_cpus": 0,
        "max_replays": 1,
    }
    given = {"actors": 2, "compile_seconds": 10.0, "pool": {**pool, "pool_wait": 120.0}}
    tokens = Tokens.tekken()
    drawn = documents(tokens, options.schemas, max_schema=MAX_SCHEMA["llguidance"])
    rows: list[dict[str, Any]] = []

    def disappear() -> None:
        network.lost.add(3)
        third.kill()

    with (
        started([Candidate("other nodes", "ray", python, given)], tokens) as comparison,
        tqdm(unit=" steps", disable=None) as bar,
    ):
        usable = comparison.load("llguidance", drawn)
        for delay in [*options.delay, None]:
            network.delay = (delay or 0.0) / 1e3
            timer = threading.Timer(2.0, disappear)
            if delay is None:
                timer.start()
            (samples,) = comparison.run(
                usable, options.rows, options.steps, 1, bar
            ).values()
            way = "a node is lost" if delay is None else f"{delay:g} ms delay"
            rows.append(
                {"way": way, "rows": options.rows, **figures(samples, options.rows)}
            )
            rows[-1]["longest_step_seconds"] = round(max(samples.step), 2)
        network.delay = 0.0
    return rows


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--delay",
        type=float,
        nargs="+",
        default=[0.0, 1.0, 10.0],
        help="network delays, ms",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schemas", type=int, default=96)
    options = parser.parse_args()
    if options.quick:
        options.delay, options.schemas, options.rows = [0.0], 16, 8
    missing = [
        each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None
    ]
    if os.geteuid() or missing:
        report.fail(
            f"needs root and {', '.join(missing) or 'its rights'}: namespaces and TUN devices are made"
        )
    os.environ["RAY_AUTH_MODE"] = (
        "disabled"  # of all processes: no other machine reaches these nodes
    )
    started_on = report.machine()
    with Network() as network, contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(ray_node(number)) for number in _NODES]
        python = stack.enter_context(python_within(nodes[0]))
        rows = measure(network, python, nodes[-1], options)
    report.print_table(rows, COLUMNS)
    report.write_json(options.out / "namespaces.json", vars(options), rows, started_on)
    panels = {"exposed_p50": "exposed mask time of a step, ms"}
    report.plot(
        options.out / "namespaces.png",
        "masks from two other nodes",
        rows,
        ("rows",),
        panels,
    )
    report.exit_with(
        [f"the lost node cost rows: {rows[-1]['refused']}"]
        if rows[-1]["refused"]
        else []
    )


if __name__ == "__main__":
    main()
