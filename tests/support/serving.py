"""Run a real `guided serve` process, and read its streams."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class ServerProcess:
    """A `guided serve` process and its log."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10).json()
        return answer

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, 0 without one."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(
            map(
                float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            )
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the process and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """Run `guided serve` on a free port until the block ends.

    `GUIDED_PYTHON` is the server's interpreter, if it is not that of the tests.
    """
    python = os.environ.get("GUIDED_PYTHON", sys.executable)
    command = [
        python,
        "-c",
        "from engine.server.cli import main; main()",
        "serve",
        "--port",
        "0",
        *arguments,
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
    )
    server = ServerProcess(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.log.append(line)
            found = re.search(r"^guided serves .* on (http://\S+)", line)
            if found:
                server.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(180), "it doesn't start: " + "".join(server.log)
        assert server.url, "it ended: " + "".join(server.log)
        yield server
    finally:
        server.stop()
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def sse(text: str) -> list[Any]:
    """Parse the events of a stream. "[DONE]" stays a string."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def named_events(text: str) -> list[dict[str, Any]]:
    """Parse the events of a stream in which each has its type as its name."""
    events = []
    for written in text.removesuffix("\n\n").split("\n\n"):
        kind, data = written.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Poll until the condition is true, with a tenth of a CPU. Fails the test after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.thread_time()
        if condition():
            return
        assert time.monotonic() < deadline, "it didn't happen"
        time.sleep(max(0.005, 9 * (time.thread_time() - began)))
