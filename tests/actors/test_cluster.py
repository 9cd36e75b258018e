"""The local Ray: what of it can be reached, and by which processes."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
AUTO = """
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
try:
    cluster = Cluster.join("auto")
    print("joined", cluster.driver()[1])
    cluster.leave()
except PoolUnavailable as error:
    print(error)
"""


def local_raylet() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
    return found


def test_nothing_of_it_listens_outside_of_this_machine(local_ray: None) -> None:
    processes = psutil.Process().children(recursive=True)
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_it_has_no_more_processes_than_needed(local_ray: None) -> None:
    """Those of Ray that nothing here uses are left out, which depends on names within Ray."""
    (driver,) = [each for each in psutil.Process().children() if "actors.driver.process" in each.cmdline()]
    names = [each.name() for each in driver.children(recursive=True)]
    assert sorted(name for name in names if not name.startswith("ray::")) == ["cat", "cat", "gcs_server", "raylet"]
    assert "ray::IDLE" not in names


def test_its_token_is_its_own_and_for_this_user_only(local_ray: None) -> None:
    environment = local_raylet().environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert "RAY_AUTH_TOKEN" not in environment
    assert "GUIDED_API_KEY" not in environment


def test_auto_does_not_join_it(local_ray: None) -> None:
    (address,) = [each.partition("=")[2] for each in local_raylet().cmdline() if each.startswith("--gcs-address=")]
    said = subprocess.run([sys.executable, "-c", AUTO], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert said.stdout.startswith(("cannot join", "joined"))
    assert address.rpartition(":")[2] not in said.stdout
