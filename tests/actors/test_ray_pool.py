"""The Ray pool beyond the contract: what of it can be reached, shutting down."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from byte_vocabulary import BYTES, WORDS
from driven_pool import compile_pids
from ray_clusters import environment, run

from actors import RayPool
from actors.cluster import Cluster
from actors.protocol import Channel
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.pools.options import NodePlacement
from guided.sequence import GuidedSequence

WAIT = 120.0
LOCAL = (NodePlacement.parse("local"), 0.0, 1)
ENDLESS = Constraint.regex("(a|b)*a(a|b){20}")


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(BYTES, num_actors=1).started()
    yield pool
    pool.shutdown()


# the local Ray


def local_raylet() -> psutil.Process:
    (found,) = [
        each
        for each in psutil.Process().children(recursive=True)
        if each.name() == "raylet"
    ]
    return found


def test_nothing_of_it_listens_outside_of_this_machine(local_ray: None) -> None:
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}


def test_it_has_no_more_processes_than_needed(local_ray: None) -> None:
    """Those of Ray that nothing here uses are left out, which depends on names within
    Ray."""
    (driver,) = [
        each
        for each in psutil.Process().children()
        if "actors.driver_process" in each.cmdline()
    ]
    names = [each.name() for each in driver.children(recursive=True)]
    assert sorted(name for name in names if not name.startswith("ray::")) == [
        "cat",
        "cat",
        "gcs_server",
        "raylet",
    ]
    assert "ray::IDLE" not in names


def test_nothing_is_left_of_a_driver_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "subprocess.Popen", Mock(side_effect=BlockingIOError("no more processes"))
    )
    with pytest.raises(
        PoolUnavailable, match="cannot start a local Ray: no more processes"
    ):
        Cluster(None).session(threading.Event())
    assert not list(tmp_path.iterdir())


def test_its_token_is_its_own_and_for_this_user_only(local_ray: None) -> None:
    environment = local_raylet().environ()
    assert environment["RAY_AUTH_MODE"] == "token"
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert "RAY_AUTH_TOKEN" not in environment
    assert "GUIDED_API_KEY" not in environment


JOIN = """
import sys, threading
from actors.cluster import Cluster
from actors.protocol import Channel
from guided.errors import PoolUnavailable
try:
    cluster = Cluster.join(sys.argv[1])
    cluster.session(threading.Event())
    print("joined", cluster.head)
    cluster.leave()
except PoolUnavailable as error:
    print(error)
"""


def test_auto_does_not_join_it(local_ray: None) -> None:
    (address,) = [
        each.partition("=")[2]
        for each in local_raylet().cmdline()
        if each.startswith("--gcs-address=")
    ]
    said = run(JOIN, "auto")
    assert said.startswith(("cannot join", "joined"))
    assert address.rpartition(":")[2] not in said


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "HOST:6379")],
)
def test_an_address_that_doesnt_do_is_refused_with_the_reason(
    address: str, reason: str
) -> None:
    said = run(JOIN, address)
    assert address in said
    assert reason in said


def test_a_cluster_that_is_silent_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        said = run(JOIN, address)
    assert time.monotonic() - started < 30, "15 s on a quiet machine"
    assert (
        f"cannot join the Ray cluster at {address}: its GCS server, or this node's raylet, does not answer"
        in said
    )


CONNECT = """
import sys, threading
from actors.cluster import Driver
Driver(threading.Event(), {'address': sys.argv[1]}, {})
"""


def test_the_driver_ends_with_the_engine_while_ray_is_silent() -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        silent.settimeout(WAIT)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-c", CONNECT, address], env=environment()
        ) as engine:
            connection, _ = silent.accept()
            (driver,) = psutil.Process(engine.pid).children()
            engine.kill()
        driver.wait(WAIT)
        connection.close()


# actors


def test_an_actor_ends_with_its_session(local_ray: None) -> None:
    cluster, channel = Cluster.join(), Channel()
    arguments = (*LOCAL, 0, (channel.name, 8, WORDS), BYTES, 1 << 30, False, ())
    with contextlib.closing(cluster.session(threading.Event())) as session:
        pid = session.ask("start", "create", *arguments).pid
    channel.close()
    session = cluster.session(threading.Event())
    with (
        contextlib.closing(session),
        pytest.raises(PoolUnavailable, match="no_such_method"),
    ):
        session.ask("answer", "no_such_method")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).wait(WAIT) is None
    stopping = threading.Event()
    stopping.set()
    with (
        contextlib.closing(cluster.session(stopping)) as session,
        pytest.raises(PoolUnavailable, match="shut down"),
    ):
        session.ask("start", "create", *arguments)
    cluster.leave()


def test_an_actor_gives_precedence_to_the_engine(pool: RayPool) -> None:
    (worker,) = pool.status().workers
    assert worker.pid is not None
    assert os.getsid(worker.pid) == worker.pid
    autogroup = Path(f"/proc/{worker.pid}/autogroup")
    if autogroup.exists() and (found := autogroup.read_text()):  # "/autogroup-7 nice 5"
        assert int(found.rpartition(" ")[2]) > 0
        pool.compile(Constraint.regex("a"), ("llguidance",)).result(WAIT)
        (compiling, *_) = (
            Path(f"/proc/{pid}/autogroup").read_text() for pid in compile_pids()
        )
        assert int(compiling.rpartition(" ")[2]) > 0


def test_a_pool_starts_with_its_first_constraint(local_ray: None) -> None:
    pool = RayPool(BYTES, num_actors=1, pool_wait=0.0)
    assert pool.status().workers == []
    future = pool.compile(Constraint.regex("a+"), ("llguidance",))
    assert [worker.state for worker in pool.status().workers] == ["starting"]
    pool.open(GuidedSequence("request", 1, []), future.result(WAIT))
    pool.submit([GuidedSequence("request", 1, [])])
    assert not pool.collect(WAIT).failed, (
        "a sequence that waits for the start does not fail"
    )
    assert pool.status().healthy
    pool.shutdown()


def test_a_pool_that_cannot_start_refuses_constraints_with_the_reason() -> None:
    code = """
from byte_vocabulary import BYTES
from actors import RayPool
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.sequence import GuidedSequence

pool = RayPool(BYTES, address="127.0.0.1:1", num_actors=2)
grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(120)
sequence = GuidedSequence("request", 1, [])
pool.open(sequence, grammar)
pool.submit([sequence])
print(pool.collect().failed)
try:
    pool.started()
except PoolUnavailable as error:
    print(error)
print(pool.compile(Constraint.regex("a"), ("llguidance",)).exception())
pool.shutdown()
"""
    for said in run(code).splitlines():
        assert (
            "did not start: cannot join the Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused"
            in said
        )


def test_after_shutdown_everything_says_so_and_nothing_is_left(local_ray: None) -> None:
    # among them the fork server of the other tests' pool
    others = {each.pid for each in psutil.Process().children()}
    pinned: list[tuple[int, ...]] = []
    pool = RayPool(
        BYTES, num_actors=1, slots=5, pin=lambda masks: pinned.append(masks.shape)
    ).started()
    assert pinned == [(5, WORDS)], "before the actor is up"
    grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(WAIT)
    sequence = GuidedSequence("request", 1, [])
    pool.open(sequence, grammar)
    pids = {
        *compile_pids(),
        *[worker.pid for worker in pool.status().workers if worker.pid],
    }
    slow = pool.compile(ENDLESS, ("outlines",))
    processes = [
        each for each in map(psutil.Process, pids) if each.ppid() not in others
    ]
    pool.shutdown()
    pool.shutdown()
    for refused in (slow, pool.compile(Constraint.regex("b+"), ("llguidance",))):
        assert isinstance(refused.exception(WAIT), PoolUnavailable)
    late = GuidedSequence("request", 2, [])
    pool.open(late, grammar)
    pool.submit([sequence, late])
    assert {
        row: type(error) for row, error in pool.collect().failed.items()
    } == dict.fromkeys((0, 1), PoolUnavailable)
    assert not pool.status().healthy
    _, alive = psutil.wait_procs(processes, timeout=WAIT)
    assert not alive


def test_another_version_of_the_package_is_refused(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ray_pool.version", lambda _: "0.0.1")
    with pytest.raises(
        PoolUnavailable,
        match=r"has version .* of guided, and this process 0\.0\.1: install the same",
    ):
        RayPool(BYTES, num_actors=1).started()
