"""`guided serve` as a real process. Masks are inline for a faster start."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from serving import ServerProcess, serving, wait_until

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    hanging = ("--logits-processors", "sample_processors:HangsAtAdmission")
    with serving(
        "--pool", "inline", "--grace-seconds", "1", *hanging, PYTHONPATH=SUPPORT
    ) as server:
        yield server


def test_greeting_holds_lines_that_work(server: ServerProcess) -> None:
    """What it prints when it is up can be pasted into a shell."""
    greeting = "".join(server.log)
    [command] = re.findall(r"^  (curl .*\\\n.*)$", greeting, re.MULTILINE)
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert '"finish_reason":"stop"' in ran.stdout
    assert f"{server.url}/docs" in greeting


def test_sigterm_ends_a_server_with_threads_that_hang(server: ServerProcess) -> None:
    """The last one of this module: the server is gone after it."""

    def hang() -> None:
        body = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"hang": True}}
        with suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    clients = [threading.Thread(target=hang) for _ in range(40)]
    for each in clients:
        each.start()

    def is_stuck() -> bool:
        try:
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "a", "max_tokens": 1},
                timeout=2,
            )
        except httpx.TimeoutException:
            return True
        return False

    wait_until(is_stuck)
    server.stop(signal.SIGTERM)
    for each in clients:
        each.join()
    # the stacks of what hangs
    wait_until(lambda: "most recent call first" in "".join(server.log))
