"""The engine is killed with SIGKILL: its processes and files are gone seconds later."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from driven_pool import until
from ray_clusters import environment
from serving import serving

SECONDS = 30.0
"""Generous for a loaded machine. docs/failure-model.md has the time on a quiet one."""


def family_of(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, except the cleanup processes, which must outlive it."""
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if "guided-cleanup" not in process.cmdline()]


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped."""
    found: set[str] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found.update(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
    return found


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    try:
        assert not alive, [process.cmdline() for process in alive]
    finally:
        for process in alive:
            process.kill()


def test_a_server_killed_in_mid_stream(short_directory: str) -> None:
    with serving("--num-actors", "2", TMPDIR=short_directory) as server:
        family = family_of(server.process.pid)
        names = " ".join(process.name() for process in family)
        assert names.count("ray::MaskActor") == 2
        assert os.listdir(short_directory)
        files = shared_files(family)
        body = {"prompt": "a", "max_tokens": 1900, "stream": True, "regex": "[a-z ]{1800,}"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        server.process.wait(SECONDS)
        assert_all_end(family)
        until(lambda: not os.listdir(short_directory), SECONDS)
        assert not [file for file in files if os.path.exists(file)]
        host, port = server.url.removeprefix("http://").split(":")
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection((host, int(port)), timeout=5)


ENGINE = """
import sys, time
import psutil
from byte_vocabulary import BYTES
from compile_processes import compile_pids
from actors import RayPool
from guided.constraint import Constraint
from guided.sequence import GuidedSequence

pool = RayPool(BYTES, num_actors=2, address=sys.argv[1], placement="spread", actor_cpus=0.25)
grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(60)
sequences = [GuidedSequence("request", each, []) for each in (1, 2)]
for sequence in sequences:
    pool.open(sequence, grammar)
pool.submit(sequences)
assert sum(len(part.rows) for part in pool.collect(60).ready) == 2
workers = [psutil.Process(worker.pid) for worker in pool.status().workers]
assert len({worker.ppid() for worker in workers}) == 2, "each raylet has started one"
print(*[worker.pid for worker in workers], *compile_pids(), flush=True)
time.sleep(600)
"""


def test_an_engine_that_had_joined_a_cluster(short_directory: str) -> None:
    """The actors are on the engine's node and on another one. The cluster itself stays."""
    start: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "ray_clusters", short_directory, "2"]
    cluster = subprocess.Popen(command, **start, env=environment(TMPDIR=short_directory))
    engine: subprocess.Popen[Any] | None = None
    try:
        address = cluster.stdout.readline().strip()
        assert address
        scratch = Path(short_directory, "e")
        scratch.mkdir()
        command = [sys.executable, "-c", ENGINE, address]
        engine = subprocess.Popen(command, **start, env=environment(TMPDIR=str(scratch)))
        pids = engine.stdout.readline().split()
        family = [psutil.Process(int(pid)) for pid in pids]
        assert len(family) >= 3
        family += family_of(engine.pid)
        engine.kill()
        engine.wait(SECONDS)
        assert_all_end(family)
        assert not list(scratch.glob("guided-*")), "only a local Ray has files"
        raylets = [each for each in psutil.Process(cluster.pid).children(recursive=True) if each.name() == "raylet"]
        assert len(raylets) == 2
    finally:
        if engine is not None:
            engine.kill()
            engine.communicate()
        cluster.communicate(timeout=SECONDS)
