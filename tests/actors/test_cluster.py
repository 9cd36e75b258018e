"""The local Ray: what of it can be reached, and by which processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
JOIN = """
import sys
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
try:
    cluster = Cluster.join(sys.argv[1])
    print("joined", cluster.driver()[1])
    cluster.leave()
except PoolUnavailable as error:
    print(error)
"""


def local_raylet() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
    return found


def address_of(raylet: psutil.Process) -> str:
    (address,) = [each.partition("=")[2] for each in raylet.cmdline() if each.startswith("--gcs-address=")]
    return address


def join(address: str, **environment: str) -> str:
    """Join a cluster in a process of its own. Returns what comes of it."""
    command = [sys.executable, "-c", JOIN, address]
    given = {**os.environ, **environment}
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=given, timeout=90
    ).stdout


def test_nothing_of_it_listens_outside_of_this_machine(local_ray: None) -> None:
    processes = psutil.Process().children(recursive=True)
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_its_token_is_its_own_and_for_this_user_only(local_ray: None) -> None:
    environment = local_raylet().environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert "RAY_AUTH_TOKEN" not in environment
    assert "GUIDED_API_KEY" not in environment


def test_auto_does_not_join_it(local_ray: None) -> None:
    said = join("auto")
    assert said.startswith(("no Ray cluster", "cannot join", "joined", "several"))
    assert address_of(local_raylet()).rpartition(":")[2] not in said


@pytest.mark.parametrize("environment", [{"RAY_AUTH_TOKEN": "b" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_a_wrong_token_is_one_clear_error(local_ray: None, environment: dict[str, str]) -> None:
    address = address_of(local_raylet())
    said = join(address, **{"RAY_AUTH_MODE": "token", **environment})
    assert said.startswith(f"cannot join the Ray cluster at {address}: ")
    assert "token" in said
