"""What the server's processes hold: memory, descriptors, requests, and processes. Memory is in MB."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.chaos.server import Server
from benchmarks.processes import COMPILE_PROCESS, FORK_SERVER

MB = 1e6
FATAL_MB = 6000.0
"""The watch kills a server that takes more, so that the machine survives."""
LEAST_FREE_MB = 2000.0
SAMPLE_SECONDS = 0.04
FAMILY_SECONDS = 0.5
DESCRIPTORS, MEMORY_MB = 16, 250.0
"""What a server may hold more than before the attack: connections of Ray, and memory that the allocator keeps."""
_IN_FLIGHT = re.compile(
    r"^guided_(?:num_requests_(?:running|waiting|waiting_for_grammar)|mask_open_sequences)(?:{.*})? ([\d.e+]+)$", re.M
)
_VARYING = (COMPILE_PROCESS, "Ray: starting worker", "Ray: IDLE")


class MemoryWatch(threading.Thread):
    """Samples the memory of the server's processes, and kills them beyond `FATAL_MB`."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self.peak = 0.0
        self.killed = False
        self._server = server
        self._over = threading.Event()

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        processes, looked = self._server.processes(), time.monotonic()
        while not self._over.wait(SAMPLE_SECONDS):
            if time.monotonic() - looked > FAMILY_SECONDS:
                processes, looked = self._server.processes(), time.monotonic()
            now = _own_memory(processes)
            self.peak = max(self.peak, now)
            if now > FATAL_MB or psutil.virtual_memory().available / MB < LEAST_FREE_MB:
                self.killed = True
                kill(self._server)
                return


def _own_memory(processes: Sequence[tuple[str, psutil.Process]]) -> float:
    """Return the memory of processes that they share with no others. Takes some milliseconds."""
    total = 0.0
    for kind, process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if kind in (COMPILE_PROCESS, FORK_SERVER):  # forks share pages that are no shared memory
                total += process.memory_full_info().pss
            else:
                info = process.memory_info()
                total += info.rss - info.shared
    return total / MB


def kill(server: Server) -> None:
    """Kill the server and its processes."""
    for _, process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@dataclass(frozen=True)
class Held:
    """What the server holds at one time."""

    memory: float
    descriptors: int
    requests: int
    """Running and waiting requests, and open sequences."""
    processes: Counter[str]
    """Kind -> number."""
    troubles: list[str]
    """What /health says."""


def held(server: Server) -> Held:
    """Return what the server holds now.

    Raises:
        httpx.HTTPError: the server doesn't answer.
        psutil.NoSuchProcess: it is gone.
    """
    processes = server.processes()
    metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
    health = server.health()
    pool = health["pool"]
    parts = [(f"backend {each['name']}", each["state"]) for each in pool["backends"]]
    parts += [(f"actor {each['index']}", each["state"]) for each in pool["actors"]]
    troubles = [f"{name} is {state}" for name, state in parts if state != "up"]
    troubles += filter(None, (health["reason"], pool["trouble"]))
    return Held(
        _own_memory(processes),
        psutil.Process(server.process.pid).num_fds(),
        round(sum(map(float, _IN_FLIGHT.findall(metrics)))),
        Counter(kind for kind, _ in processes if not kind.startswith(_VARYING)),
        troubles,
    )


def kept(before: Held, after: Held) -> list[str]:
    """Return what wasn't given back, one line each."""
    found = []
    if after.memory > before.memory + MEMORY_MB:
        found.append(f"{after.memory - before.memory:.0f} MB of memory")
    if after.descriptors > before.descriptors + DESCRIPTORS:
        found.append(f"{after.descriptors - before.descriptors} file descriptors")
    if after.requests > 0:
        found.append(f"{after.requests} requests or sequences")
    if more := after.processes - before.processes:
        found.append(f"processes: {dict(more)}")
    if fewer := before.processes - after.processes:
        found.append(f"without processes: {dict(fewer)}")
    return found + after.troubles


def not_given_back(server: Server, before: Held, seconds: float) -> list[str]:
    """Wait until the server holds what it held before. Returns the differences that are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = kept(before, held(server))
        except (httpx.HTTPError, psutil.NoSuchProcess, ValueError, KeyError) as error:
            found = [f"/health or /metrics does not answer ({type(error).__name__})"]
        if not found or not server.alive or time.monotonic() > deadline:
            return found
        time.sleep(0.5)
