"""Kill a replica of the Ray Serve application under load: `python -m benchmarks.replicas`.

`serve run` with two replicas, each with a mask pool that follows the load, on a Ray cluster of its own. Clients keep
`--concurrency` requests in flight: every kind of constraint, streamed and not. After a third of the time one replica is
killed. Every answer is checked as by `benchmarks.chaos`: it is valid, or a declared error. Then the same time with
constraints of slow masks only: the pools grow. In the end they shrink until they are as small as at the start.

Ray Serve's proxies have the middleware of deploy/proxy_errors.py, which declares the end of a replica.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import yaml

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.load import Load, client_for, until
from benchmarks.chaos.server import default_vocabulary
from benchmarks.chaos.traffic import Mix, Request, Traffic
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import fail, machine, write_json
from benchmarks.slow_backend import SECONDS_VARIABLE, slow_name

_START_SECONDS, _STOP_SECONDS = 300.0, 60.0
_CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
         _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "startup"), str(ROOT)]),
    SECONDS_VARIABLE: "0.005",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.proxy_errors:middlewares",
}


@contextlib.contextmanager
def cluster() -> Iterator[tuple[psutil.Process, str]]:
    """Start a Ray cluster; return its first process, and its address."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-c", _CLUSTER, directory]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(_STOP_SECONDS)


@contextlib.contextmanager
def application(address: str, options: argparse.Namespace) -> Iterator[str]:
    """Run the shipped Serve file with two replicas; return its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    config["http_options"]["port"] = port
    (given,) = config["applications"]
    given["args"] |= {"num_actors": 1, "max_actors": 4, "scale_down_seconds": 5.0, "max_replays": 1}
    given["deployments"][0]["num_replicas"] = 2
    with tempfile.TemporaryDirectory() as directory:
        path, log = Path(directory, "serve.yaml"), Path(directory, "log")
        path.write_text(yaml.safe_dump(config))
        serve = str(Path(sys.executable).with_name("serve"))
        with log.open("w") as output:
            process = subprocess.Popen(
                [serve, "run", "--address", address, str(path)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
            )
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    fail(f"the application does not start: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def named(ray: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes of the cluster with a name."""
    found = []
    for process in ray.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


class SlowMasks(Traffic):
    """Requests with masks that take 5 ms each, in which the actor only sleeps: one is too few, and more of them help
    without more cores."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Mix(plain=0.0, leaving=0.0, stalling=0.0))

    def request(self, number: int) -> Request:
        made = (super(SlowMasks, self).request(each) for each in itertools.count(1000 * number))
        drawn, backend = next(each for each in made if each.backend == "llguidance"), slow_name("sleep")
        return replace(drawn, number=number, backend=backend, body={**drawn.body, "backend": backend})


async def run(ray: psutil.Process, url: str, options: argparse.Namespace) -> dict[str, object]:
    """Kill a replica under load; then make masks slow, and wait until the pools are small again."""
    if not await until(lambda: len(named(ray, "ray::MaskActor")) == 2, _START_SECONDS):
        fail("the second replica does not start")
    judge = Judge(default_vocabulary())
    actors: list[int] = []

    def count() -> bool:
        actors.append(len(named(ray, "ray::MaskActor")))
        return actors[-1] <= 2

    async def phase(traffic: Traffic, killed: list[psutil.Process]) -> dict[str, object]:
        actors.clear()
        load, begun = Load(http, judge, options.limit), time.monotonic()
        load_of_clients = load.run(traffic, options.concurrency, lambda: time.monotonic() < begun + options.seconds)
        busy = asyncio.create_task(load_of_clients)
        while not busy.done():
            count()
            if killed and time.monotonic() > begun + options.seconds / 3:
                killed.pop().kill()
            await asyncio.sleep(1.0)
        await busy
        after = [each for each in load.records if each.began > begun + options.seconds * 2 / 3]
        return {
            "outcomes": dict(load.outcomes()),
            "errors": dict(load.causes(load.records)),
            "violations": dict(Counter(each.describe().partition(": ")[2] for each in load.violations())),
            "valid in the last third": f"{sum(each.verdict.outcome == 'valid' for each in after)} of {len(after)}",
            "mask actors, at most": max(actors),
        }

    async with client_for(url, options.concurrency) as http:
        first = Traffic(options.seed, Mix(leaving=0.0, stalling=0.0))
        killed = await phase(first, named(ray, ":ServeReplica:")[:1])
        slow = await phase(SlowMasks(options.seed), [])
        begun = time.monotonic()
        shrunk = await until(count, 120.0)
    slow["seconds until as few as at the start"] = round(time.monotonic() - begun) if shrunk else None
    return {"a replica is killed": killed, "slow masks": slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a request is hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    started_on = machine()
    with cluster() as (ray, address), application(address, options) as url:
        result = asyncio.run(run(ray, url, options))
    print(json.dumps(result, indent=1))
    write_json(options.out / "replicas.json", vars(options), result, started_on)


if __name__ == "__main__":
    main()
