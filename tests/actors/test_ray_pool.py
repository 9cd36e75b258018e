"""The Ray pool beyond the contract: what of it can be reached, other nodes, shutting down."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from byte_vocabulary import BYTES
from driven_pool import compile_pids
from ray_clusters import environment, run

from actors import RayPool, processes
from actors.cluster import Cluster
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.pools.options import NodePlacement
from guided.sequence import GuidedSequence

WAIT = 120.0
LOCAL = (NodePlacement.parse("local"), 0.0)
ENDLESS = Constraint.regex("(a|b)*a(a|b){20}")


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(BYTES, num_actors=1, max_cache_bytes=0)
    yield pool
    pool.shutdown()


# the local Ray


def local_raylet() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
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
    """Those of Ray that nothing here uses are left out, which depends on names within Ray."""
    (driver,) = [each for each in psutil.Process().children() if "actors.driver_process" in each.cmdline()]
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


JOIN = """
import sys
from actors.cluster import Cluster
from guided.errors import PoolUnavailable
try:
    cluster = Cluster.join(sys.argv[1])
    print("joined", cluster.head)
    cluster.leave()
except PoolUnavailable as error:
    print(error)
"""


def test_auto_does_not_join_it(local_ray: None) -> None:
    (address,) = [each.partition("=")[2] for each in local_raylet().cmdline() if each.startswith("--gcs-address=")]
    said = run(JOIN, "auto")
    assert said.startswith(("cannot join", "joined"))
    assert address.rpartition(":")[2] not in said


@pytest.mark.parametrize(("address", "reason"), [("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "HOST:6379")])
def test_an_address_that_doesnt_do_is_refused_with_the_reason(address: str, reason: str) -> None:
    said = run(JOIN, address)
    assert address in said
    assert reason in said


CONNECT = "import sys; from actors.cluster import Driver; Driver({'address': sys.argv[1]}, {}).connect()"


def test_the_driver_ends_with_the_engine_while_ray_is_silent() -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        silent.settimeout(WAIT)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", CONNECT, address], env=environment()) as engine:
            connection, _ = silent.accept()
            (driver,) = psutil.Process(engine.pid).children()
            engine.kill()
        driver.wait(WAIT)
        connection.close()


# actors


def test_an_actor_ends_with_its_session(local_ray: None) -> None:
    cluster, arguments = Cluster.join(), (*LOCAL, 0, BYTES, 1 << 30, False)
    with contextlib.closing(cluster.session(threading.Event())) as session:
        pid = session.ask("start", "create", *arguments).pid
        with pytest.raises(PoolUnavailable, match="no_such_method"):
            session.ask("answer", "call", "no_such_method")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).wait(WAIT) is None
    stopping = threading.Event()
    stopping.set()
    with contextlib.closing(cluster.session(stopping)) as session, pytest.raises(PoolUnavailable, match="shut down"):
        session.ask("start", "create", *arguments)
    cluster.leave()


def test_an_actor_gives_precedence_to_the_engine(pool: RayPool) -> None:
    (worker,) = pool.status().workers
    assert worker.pid is not None
    assert os.getsid(worker.pid) == worker.pid
    autogroup = Path(f"/proc/{worker.pid}/autogroup")
    if autogroup.exists() and (found := autogroup.read_text()):  # "/autogroup-7 nice 5"
        assert int(found.rpartition(" ")[2]) > 0


def test_after_shutdown_everything_says_so_and_nothing_is_left(local_ray: None) -> None:
    others = {each.pid for each in psutil.Process().children()}  # among them the fork server of the other tests' pool
    pool = RayPool(BYTES, num_actors=1)
    grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(WAIT)
    sequence = GuidedSequence("request", 1, [])
    pool.open(sequence, grammar)
    pids = {*compile_pids(), *[worker.pid for worker in pool.status().workers if worker.pid]}
    slow = pool.compile(ENDLESS, ("outlines",))
    processes = [each for each in map(psutil.Process, pids) if each.ppid() not in others]
    pool.shutdown()
    pool.shutdown()
    for refused in (slow, pool.compile(Constraint.regex("b+"), ("llguidance",))):
        assert isinstance(refused.exception(WAIT), PoolUnavailable)
    late = GuidedSequence("request", 2, [])
    pool.open(late, grammar)
    pool.submit([sequence, late])
    assert {row: type(error) for row, error in pool.collect().failed.items()} == dict.fromkeys((0, 1), PoolUnavailable)
    assert not pool.status().healthy
    _, alive = psutil.wait_procs(processes, timeout=WAIT)
    assert not alive


def test_another_version_of_the_package_is_refused(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "package_version", lambda: "0.0.1")
    with pytest.raises(PoolUnavailable, match=r"has version .* of guided, and this process 0\.0\.1: install the same"):
        RayPool(BYTES, num_actors=1)


TWO_NODES = """
import tempfile, time
import numpy as np
import psutil
import ray
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from driven_pool import copy_masks, until
from ray_clusters import cluster_in
from actors import RayPool, ray_pool
from engine.server.commands import doctor
from engine.server.options import ServeOptions
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
from guided.sequence import GuidedSequence

with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
    cluster = cluster_in(directory)
    other = cluster.add_node(num_cpus=1, resources={"guided_mask": 2}, labels={"pool": "masks"})
    pool = RayPool(BYTES, num_actors=2, address=cluster.address, placement="spread", actor_cpus=0)
    until(lambda: all(worker.state == "up" for worker in pool.status().workers), 120)
    assert len({psutil.Process(worker.pid).ppid() for worker in pool.status().workers}) == 2, "one of each raylet"
    grammar = pool.compile(Constraint.regex("ab+"), ("llguidance",)).result(60)
    sequences = [GuidedSequence("request", each, tokens("a")) for each in range(4)]
    for sequence in sequences:
        pool.open(sequence, grammar)
    bitmask = np.zeros((4, WORDS), np.int32)
    pool.submit(sequences)
    copy_masks(pool.collect(), bitmask)
    print([allowed(row) for row in bitmask])
    pool.shutdown()

    reserved = dict(num_actors=2, address=cluster.address, actor_cpus=0.4)
    for placement, cpus in (("guided_mask", 0.4), ("pool=masks", 0.4), ("pool=masks", 0)):
        pool = RayPool(BYTES, placement=placement, **{**reserved, "actor_cpus": cpus})
        until(lambda: all(worker.state == "up" for worker in pool.status().workers), 120)
        print(placement, {worker.node_id for worker in pool.status().workers} == {other.node_id})
        pool.shutdown()
    for wrong in ({"placement": "nonesuch"}, {"num_actors": 5}):
        started = time.monotonic()
        try:
            RayPool(BYTES, **{**reserved, **wrong})
        except PoolUnavailable as error:
            print(error, "after seconds" if time.monotonic() - started < 30 else "too late")
    assert not ray.is_initialized()
    given = RayPoolOptions(address=cluster.address)
    finding = next(each for each in doctor.examine(ServeOptions(ray=given)) if each.subject == "Ray")
    print(finding.level, finding.text)

    # There is room for the other pool's three actors, but not before the first one has ended.
    ray_pool.CALL_SECONDS = 1.0
    first = RayPool(BYTES, **{**reserved, "num_actors": 1})
    pool = RayPool(BYTES, **reserved)
    print([worker.state for worker in pool.status().workers].count("up"), "of 2 actors are up")
    first.shutdown()
    until(lambda: all(worker.state == "up" for worker in pool.status().workers), 120)
    pool.shutdown()
    cluster.shutdown()
"""


def test_a_cluster_of_two_nodes_is_joined_and_used() -> None:
    lines = run(TWO_NODES).splitlines()
    assert lines[0] == "['b', 'b', 'b', 'b']"
    assert lines[1:4] == ["guided_mask True", "pool=masks True", "pool=masks True"]
    assert "no node of the Ray cluster has the resource of placement 'nonesuch' after seconds" in lines[4]
    assert "reserves 0.4 CPU for each of 5 mask actors, and the nodes of placement 'local' have 1 CPU" in lines[5]
    assert "lower num_actors, actor_cpus or the amount in placement after seconds" in lines[5]
    assert lines[6].startswith("error the pool reserves 1 CPU for each of 2")  # guided doctor
    assert lines[7:] == ["1 of 2 actors are up"]
