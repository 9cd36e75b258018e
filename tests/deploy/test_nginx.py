"""`deploy/nginx.conf` with a real nginx: streams are not buffered, and each API key has
its own limits."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hosting import Hosted, hosted
from serving import wait_until

from engine.model.loader import LoadedModel

NGINX, OPENSSL = (
    shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"),
    shutil.which("openssl"),
)
CONFIG = Path(__file__).parents[2] / "deploy/nginx.conf"
pytestmark = pytest.mark.skipif(
    not (NGINX and OPENSSL), reason="there is no nginx: apt-get install nginx openssl"
)


@pytest.fixture(scope="module")
def server(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model) as server:
        yield server


@pytest.fixture(scope="module")
def connect(
    server: Hosted, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], httpx.Client]]:
    """Opens a client of an nginx with our configuration, but for ports and paths.

    Each thread needs a client of its own: httpcore changes the TLS context of a client
    at each new connection.
    """
    assert NGINX is not None
    folder = tmp_path_factory.mktemp("nginx")
    key, certificate, configuration = (
        folder / "key.pem",
        folder / "cert.pem",
        folder / "nginx.conf",
    )
    request = (
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    )
    files = (
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    )
    subprocess.run([str(OPENSSL), *request, *files], check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    for ours, others in (
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("/etc/nginx/tls/", f"{folder}/"),
        ("127.0.0.1:8000", server.url.removeprefix("http://")),
        ("/run/nginx-guided.pid", f"{folder}/nginx.pid"),
    ):
        assert ours in text
        text = text.replace(ours, others)
    configuration.write_text(text)
    command = [
        NGINX,
        "-p",
        str(folder),
        "-c",
        str(configuration),
        "-e",
        str(folder / "error.log"),
    ]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen([*command, "-g", "daemon off;"])

    def answers() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers)
        yield lambda: httpx.Client(
            base_url=f"https://localhost:{port}",
            verify=ssl.create_default_context(cafile=str(certificate)),
            timeout=60,
        )
    finally:
        process.terminate()
        process.wait(20)


def test_the_events_of_a_stream_come_at_once(
    server: Hosted, connect: Callable[[], httpx.Client]
) -> None:
    server.pool.delay = lambda sequence, position: 1_000_000 if position >= 5 else 0
    body = {"prompt": "a", "regex": "[a-z]{9}", "max_tokens": 20, "stream": True}
    headers = {"authorization": "Bearer a"}
    with (
        connect() as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        assert answer.status_code == 200
        assert next(lines).startswith("data: "), "while the next mask is still missing"
        server.pool.delay = lambda sequence, position: 0
        assert "data: [DONE]" in list(lines)
    server.wait_empty()


FLOOD, BURST, RATE = 96, 40, 10
"""Requests at once, and what the configuration lets wait, and through in a second."""


def test_each_key_has_its_own_rate(connect: Callable[[], httpx.Client]) -> None:
    def ask(key: str, path: str = "/version") -> httpx.Response:
        with connect() as client:
            return client.get(path, headers={"authorization": f"Bearer {key}"})

    began = time.monotonic()
    with ThreadPoolExecutor(FLOOD) as threads:
        flood = list(threads.map(ask, ["flood"] * FLOOD))
        seconds = time.monotonic() - began
        other = ask("other")
    refused = [answer for answer in flood if answer.status_code == 429]
    assert FLOOD - len(refused) <= 1 + BURST + RATE * seconds
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert refused[0].headers["retry-after"] == "1"
    assert other.status_code == 200
    assert ask("other", "/metrics").status_code == 404
