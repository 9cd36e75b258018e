"""A real `guided serve`: its environment, its hosts."""

from __future__ import annotations

from contextlib import suppress

import httpx
import psutil
from serving import serving


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
