"""A real `guided serve`: its end, its environment, its hosts."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from serving import serving

SUPPORT = str(Path(__file__).parents[2] / "support")


def test_sigterm_ends_a_server_with_threads_that_hang() -> None:
    """Requests that hang in admission fill the event loop's executor: shutdown does not need it."""
    hanging = ("--logits-processors", "sample_processors:HangsAtAdmission")
    body = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"hang": True}}
    with serving("--pool", "inline", "--grace-seconds", "1", *hanging, PYTHONPATH=SUPPORT) as server:

        def post() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        clients = [threading.Thread(target=post) for _ in range(40)]
        for each in clients:
            each.start()
        time.sleep(1)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        assert time.monotonic() - started < 25
        for each in clients:
            each.join()
    assert "most recent call first" in "".join(server.log), "the stacks of what hangs"


def test_the_api_key_is_in_no_child_and_hosts_are_checked() -> None:
    with serving("--num-actors", "1", "--backend", "llguidance", GUIDED_API_KEY="one,two") as server:
        key = {"authorization": "Bearer two"}
        ask = {"prompt": "a", "choice": ["b"]}
        assert httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).status_code == 401
        assert httpx.post(f"{server.url}/v1/completions", json=ask, headers=key, timeout=60).status_code == 200
        assert server.metric("guided_request_failures_total") == 1
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) > 3
        for child in children:
            with suppress(psutil.NoSuchProcess):
                assert "GUIDED_API_KEY" not in child.environ(), child.cmdline()
        port = server.url.rpartition(":")[2]
        assert httpx.get(f"http://localhost:{port}/version").status_code == 200
        rebound = httpx.get(f"{server.url}/version", headers={"host": f"evil.example:{port}"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (400, "host_not_allowed")
