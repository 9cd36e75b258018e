"""What do mask actors on other nodes cost, by the delay of the network? Needs root: `python -m benchmarks.namespaces`.

Three Ray nodes run on this machine, each in a network, PID and mount namespace of its own: with its own /tmp and
/dev/shm, like a container. The engine is on the first, and mask actors on the first (`local`) or on the second and
third. The nodes are connected by TUN devices. This process forwards their packets, each after the same delay, so no
kernel module is needed (`tc netem` is missing in many containers). What that costs shows in the line without delay.

The rows are those of `benchmarks.step_overhead`: real documents, and a simulated forward pass. In the end the third
node disappears under load: its packets are dropped and its processes killed.
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

from benchmarks.comparison import Candidate, Comparison
from benchmarks.paths import RESULTS, ROOT
from benchmarks.peers.loop import Samples
from benchmarks.report import exit_with, fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents

_NODES = (1, 2, 3)
_PREFIX = f"guided{os.getpid() % 1000}n"
_HEAD = "10.77.0.1:6379"
_MTU = 65_000
_START_SECONDS = 600.0
_PATIENT = {"RAY_raylet_start_wait_time_s": "300"}
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_CONFIGURATIONS = {"local": (0.0,), "guided_mask": (0.0, 1.0, 10.0)}
"""Placement -> delays in milliseconds."""
_COLUMNS = {
    "placement": "actors",
    "delay_ms": "delay (ms)",
    "step_p50": "step p50",
    "exposed_p50": "exposed p50",
    "exposed_p99": "p99",
    "cpu_p50": "CPU p50",
    "bytes_per_step": "bytes per step",
    "steps": "steps",
}


class Network:
    """Forwards packets between the nodes, on a thread. Use it in a `with` block."""

    def __init__(self) -> None:
        self.delay = 0.0
        """Seconds, of each packet."""
        self.forwarded = 0
        """Bytes so far."""
        self.lost: set[int] = set()
        """Nodes that are cut off."""
        self._devices: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def __enter__(self) -> Network:
        for node in _NODES:
            name = _name(node)
            _run("ip", "netns", "add", name)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
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
            subprocess.run(["ip", "netns", "del", _name(node)], check=False)

    def _run(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        sources = {device: node for node, device in self._devices.items()}
        while not self._ended.is_set():
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for device in select.select(sources, (), (), left)[0]:
                packet = os.read(device, _MTU + 100)
                target = packet[19] if packet[0] >> 4 == 4 else 0
                if target in self._devices and not {target, sources[device]} & self.lost:
                    waiting.append((time.monotonic() + self.delay, self._devices[target], packet))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, device, packet = waiting.popleft()
                self.forwarded += os.write(device, packet)


class Node:
    """A Ray node in namespaces of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        address = f"--node-ip-address=10.77.0.{number} --num-cpus=1 --object-store-memory=100000000 --block"
        where = f"--head --port={_HEAD.rpartition(':')[2]} --include-dashboard=false" if number == 1 else ""
        where = where or f"--address={_HEAD} --resources='{{\"guided_mask\": 2}}'"
        ray = shlex.quote(str(Path(sys.executable).with_name("ray")))
        script = f"mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && exec {ray} start {where} {address}"
        isolated = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", _name(number), *isolated],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", **_PATIENT},
        )

    def wait_started(self) -> None:
        """Wait until Ray is up."""
        deadline = time.monotonic() + _START_SECONDS
        while b"Ray runtime started" not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                fail(f"node {self.number} did not start: {self.log().decode(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def log(self) -> bytes:
        self._log.seek(0)
        return self._log.read()

    @property
    def init(self) -> int:
        """Pid of the first process in the node's namespaces."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def end(self) -> None:
        """Kill all processes of the node."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def _name(node: int) -> str:
    return f"{_PREFIX}{node}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{shlex.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def python_within(node: Node) -> Iterator[str]:
    """Make an interpreter that runs in the namespaces of a node; return its path."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "python")
        enter = f"nsenter --target {node.init} --net --mount --pid --"
        inner = f'cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} "$@"'
        path.write_text(f'#!/bin/sh\nexec {enter} sh -c {shlex.quote(inner)} python "$@"\n')
        path.chmod(stat.S_IRWXU)
        yield str(path)


def candidate(python: str, placement: str, options: argparse.Namespace) -> Candidate:
    pool = {"address": _HEAD, "placement": placement, "actor_cpus": 0, "compile_cpus": 0, "max_replays": 1}
    pool |= {"pool_wait": 120.0}
    given = {"actors": options.actors, "compile_seconds": 10.0, "pool": pool}
    return Candidate(placement, "ray", frozenset({"llguidance"}), python, given)


class Engine:
    """An engine on the first node, which has compiled the documents. Use it in a `with` block."""

    def __init__(
        self, network: Network, python: str, placement: str, tokens: Tokens, options: argparse.Namespace
    ) -> None:
        self._network, self._placement, self._options = network, placement, options
        self._comparison = Comparison([candidate(python, placement, options)], tokens)
        self._drawn = documents(options.data, tokens, options.schemas, max_schema=8000)
        self._bar = tqdm(unit=" steps", disable=None)

    def __enter__(self) -> Engine:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._comparison)
            self._loaded = self._comparison.load("llguidance", self._drawn)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._network.delay = 0.0
        self._stack.close()
        self._bar.close()

    def run(self) -> Samples:
        """Run new rows for some steps."""
        measurement = self._comparison.start(*self._loaded, self._options.rows, self._options.forward_ms / 1e3)
        (samples,) = measurement.run(self._options.steps, 1, self._bar).values()
        return samples

    def measure(self, delay_ms: float) -> dict[str, Any]:
        """Measure one line of the table. Times are in milliseconds."""
        self._network.delay, before = delay_ms / 1e3, self._network.forwarded
        samples = self.run()
        forwarded = self._network.forwarded - before
        row: dict[str, Any] = {"placement": self._placement, "delay_ms": delay_ms, "steps": len(samples.step)}
        for name in ("step", "exposed", "cpu"):
            row |= {f"{name}_{key}": value for key, value in percentiles(getattr(samples, name)).items()}
        return {**row, "bytes_per_step": round(forwarded / len(samples.step)), "refused": samples.refused}

    def lose(self, node: Node) -> dict[str, Any]:
        """Have a node disappear while steps run. No row may be lost."""

        def disappear() -> None:
            self._network.lost.add(node.number)
            node.end()

        self._network.delay = 0.0
        timer = threading.Timer(2.0, disappear)
        timer.start()
        samples = self.run()
        timer.join()
        longest = sorted(samples.step)[-5:]
        return {
            "longest_steps_seconds": [round(each, 2) for each in longest],
            "steps": len(samples.step),
            "refused": samples.refused,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--forward-ms", type=float, default=15.0, help="duration of the simulated forward pass")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schemas", type=int, default=128)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    missing = [each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None]
    if os.geteuid() or missing:
        fail(f"needs root and {', '.join(missing) or 'its rights'}: namespaces and TUN devices are made")
    os.environ["RAY_AUTH_MODE"] = "disabled"  # of all processes: these nodes can be reached from nowhere else
    started_on, tokens = machine(), Tokens.tekken()
    with Network() as network, contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        for number in _NODES:
            nodes.append(Node(number))
            stack.callback(nodes[-1].end)
            nodes[-1].wait_started()
        python = stack.enter_context(python_within(nodes[0]))
        rows = []
        for placement, delays in _CONFIGURATIONS.items():
            with Engine(network, python, placement, tokens, options) as engine:
                rows += [engine.measure(delay) for delay in delays]
                if placement != "local":
                    print_table(rows, _COLUMNS)
                    lost = engine.lose(nodes[-1])
                    print(f"the third node disappeared: {lost}")
    write_json(options.out / "namespaces.json", vars(options), {"steps": rows, "lost_node": lost}, started_on)
    exit_with([f"the lost node cost rows: {lost['refused']}"] if lost["refused"] else [])


if __name__ == "__main__":
    main()
