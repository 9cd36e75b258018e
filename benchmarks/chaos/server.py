"""The server under test: a real `guided serve` process, its health, processes and memory."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from transformers import AutoTokenizer

from benchmarks.paths import ROOT
from benchmarks.processes import family, memory
from engine.default_model import checkpoint_path
from guided.vocabulary import Vocabulary

START_SECONDS = 300.0
STOP_SECONDS = 90.0


@dataclass
class Server:
    """A running `guided serve` process."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    """File with the output of the process."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def health(self) -> dict[str, Any]:
        """Return the body of GET /health with any status.

        Raises:
            httpx.HTTPError: the server doesn't answer.
        """
        answer: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10).json()
        return answer

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Return (kind, process) for the server and its descendants that still exist."""
        return family(self.process.pid, "server")

    def pids(self, *kinds: str) -> list[int]:
        """Return the ids of the processes of some kinds."""
        return [process.pid for kind, process in self.processes() if kind in kinds]

    def memory(self) -> list[dict[str, Any]]:
        """Return the memory of each process, as `benchmarks.processes.memory` does."""
        return memory(self.process.pid, "server")

    def tracebacks(self) -> int:
        """Count the tracebacks in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def last_lines(self, count: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def default_vocabulary() -> Vocabulary:
    """Return the vocabulary of the embedded model."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path(), local_files_only=True)
    return Vocabulary.from_tokenizer(tokenizer, padded_vocab_size=len(tokenizer))


@contextlib.contextmanager
def running_server(
    *arguments: str, log: Path | None = None, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """Run `guided serve` on a free port. At the end of the block all its processes are gone.

    Args:
        log: file for its output. None is a temporary file, which is kept if the exit status isn't 0.
        environment: additional environment variables.
        prefix: a command that executes the server's command, which follows it.

    Raises:
        SystemExit: the server doesn't start. The message has its last lines.
    """
    handle, name = tempfile.mkstemp(prefix="guided-serve-", suffix=".log")
    os.close(handle)
    path = log or Path(name)
    program = [sys.executable, "-c", "from engine.server.cli import main; main()"]
    command = [*prefix, *program, "serve", "--port", "0", *arguments]
    with path.open("wb") as output:
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, "", path)
    try:
        server.url = _address(server)
        yield server
    finally:
        processes = [each for _, each in server.processes()]
        if server.alive:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        for each in psutil.wait_procs(processes, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if process.wait(10) == 0:
            Path(name).unlink(missing_ok=True)


def _address(server: Server) -> str:
    deadline = time.monotonic() + START_SECONDS
    while server.alive and time.monotonic() < deadline:
        if found := re.search(r"^guided serves .* on (http://\S+)", server.log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise SystemExit("the server doesn't start:\n" + server.last_lines())
