"""The Ray pool beyond the contract: other nodes, compile limits, shutting down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
from byte_vocabulary import BYTES, WORDS, allowed, tokens

from actors import CompileLimits, RayPool
from actors.supervision import supervisor
from guided.constraint import Constraint
from guided.errors import CompileTimeout, PoolUnavailable
from guided.pools.protocol import Grammar
from guided.sequence import GuidedSequence

WAIT = 120.0
_ids = count(1)
ENDLESS = Constraint.regex("(a|b)*a(a|b){20}")


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(BYTES, num_actors=1, compile_limits=CompileLimits(processes=1, seconds=1.0), max_cache_bytes=0)
    yield pool
    pool.shutdown()


def masks(pool: RayPool, grammar: Grammar, *texts: str) -> list[str]:
    """The masks of new sequences after their outputs."""
    bitmask = np.zeros((len(texts), WORDS), np.int32)
    sequences = [GuidedSequence("request", next(_ids), tokens(text)) for text in texts]
    for sequence in sequences:
        pool.open(sequence, grammar)
    pool.submit(sequences)
    found = pool.collect()
    assert not found.failed
    assert not found.late
    found.copy_to(bitmask)
    pool.free([sequence.sequence_id for sequence in sequences])
    return [allowed(row) for row in bitmask]


def test_an_actor_gives_precedence_to_the_engine(pool: RayPool) -> None:
    (worker,) = pool.status().workers
    assert worker.pid is not None
    assert os.getsid(worker.pid) == worker.pid
    autogroup = Path(f"/proc/{worker.pid}/autogroup")
    if autogroup.exists() and (found := autogroup.read_text()):  # "/autogroup-7 nice 5"
        assert int(found.rpartition(" ")[2]) > 0


def test_a_compilation_that_takes_too_long_is_ended_and_not_remembered(pool: RayPool) -> None:
    before = pool.compile_pids()
    with pytest.raises(CompileTimeout):
        pool.compile(ENDLESS, ("outlines",)).result(WAIT)
    again = pool.compile(ENDLESS, ("outlines",))
    assert pool.status().compiling == 1
    with pytest.raises(CompileTimeout):
        again.result(WAIT)
    pool.compile(Constraint.regex("a+"), ("llguidance",)).result(WAIT)
    assert not set(before) & set(pool.compile_pids())
    assert pool.status().compiling == 0


def test_an_unused_grammar_leaves_the_workers_and_comes_back(pool: RayPool) -> None:
    constraint = Constraint.regex("gone+")
    grammar = pool.compile(constraint, ("llguidance",)).result(WAIT)
    pool.release(grammar)
    again = pool.compile(constraint, ("llguidance",)).result(WAIT)
    assert again is not grammar
    assert masks(pool, again, "gon") == ["e"]


def test_after_shutdown_everything_says_so_and_nothing_is_left(local_ray: None) -> None:
    pool = RayPool(BYTES, num_actors=1)
    grammar = pool.compile(Constraint.regex("a+"), ("llguidance",)).result(WAIT)
    sequence = GuidedSequence("request", next(_ids), [])
    pool.open(sequence, grammar)
    pids = [*pool.compile_pids(), *[worker.pid for worker in pool.status().workers if worker.pid]]
    slow = pool.compile(ENDLESS, ("outlines",))
    processes = [psutil.Process(pid) for pid in pids]
    pool.shutdown()
    pool.shutdown()
    assert isinstance(slow.exception(WAIT), PoolUnavailable)
    assert isinstance(pool.compile(ENDLESS, ("outlines",)).exception(WAIT), PoolUnavailable)
    late = GuidedSequence("request", next(_ids), [])
    pool.open(late, grammar)
    pool.submit([sequence, late])
    assert {row: type(error) for row, error in pool.collect().failed.items()} == dict.fromkeys((0, 1), PoolUnavailable)
    assert not pool.status().healthy
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_another_version_of_the_package_is_refused(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "package_version", lambda: "0.0.1")
    with pytest.raises(PoolUnavailable, match=r"has version .* of guided, and this process 0\.0\.1: install the same"):
        RayPool(BYTES, num_actors=1)


TWO_NODES = """
import os, sys, tempfile, time
import numpy as np
import psutil
import ray
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from driven_pool import until
from ray.cluster_utils import Cluster
from actors import RayPool, ray_pool
from engine.server.commands import doctor
from engine.server.options import ServeOptions
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
from guided.sequence import GuidedSequence

with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
    os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)  # Ray writes there
    quiet = {"num_cpus": 1, "include_dashboard": False, "temp_dir": directory}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    other = cluster.add_node(num_cpus=1, resources={"guided_mask": 2}, labels={"pool": "masks"})
    pool = RayPool(BYTES, num_actors=2, address=cluster.address, placement="spread", actor_cpus=0.25)
    assert len({psutil.Process(worker.pid).ppid() for worker in pool.status().workers}) == 2, "one of each raylet"
    grammar = pool.compile(Constraint.regex("ab+"), ("llguidance",)).result(60)
    sequences = [GuidedSequence("request", each, tokens("a")) for each in range(4)]
    for sequence in sequences:
        pool.open(sequence, grammar)
    bitmask = np.zeros((4, WORDS), np.int32)
    pool.submit(sequences)
    pool.collect().copy_to(bitmask)
    print([allowed(row) for row in bitmask])
    pool.shutdown()

    reserved = dict(num_actors=2, address=cluster.address, actor_cpus=0.4)
    for placement in ("guided_mask", "pool=masks"):
        pool = RayPool(BYTES, placement=placement, **reserved)
        print(placement, {worker.node_id for worker in pool.status().workers} == {other.node_id})
        pool.shutdown()
    many = {"placement": "guided_mask", "num_actors": 3, "actor_cpus": 0.25}
    for wrong in ({"placement": "nonesuch"}, {"actor_cpus": 8}, {"num_actors": 5}, many):
        started = time.monotonic()
        try:
            RayPool(BYTES, **{**reserved, **wrong})
        except PoolUnavailable as error:
            print(error, "after seconds" if time.monotonic() - started < 30 else "too late")
    assert not ray.is_initialized()
    (finding,) = doctor._ray(ServeOptions(ray=RayPoolOptions(address=cluster.address)))
    print(finding.level, finding.text)

    # There is room for the other pool's three actors, but not before the first one has ended.
    ray_pool._OTHERS_SECONDS = 1.0
    first = RayPool(BYTES, **{**reserved, "num_actors": 1})
    pool = RayPool(BYTES, **reserved)
    print([worker.state for worker in pool.status().workers].count("up"), "of 2 actors are up")
    first.shutdown()
    until(lambda: all(worker.state == "up" for worker in pool.status().workers), 120)
    pool.shutdown()
    cluster.shutdown()
"""


def test_a_cluster_of_two_nodes_is_joined_and_its_other_node_used() -> None:
    here = Path(__file__).parents
    environment = {**os.environ, "PYTHONPATH": f"{here[2]}{os.pathsep}{here[1] / 'support'}"}
    said = subprocess.run(
        [sys.executable, "-c", TWO_NODES], stdout=subprocess.PIPE, text=True, check=True, timeout=280, env=environment
    )
    lines = said.stdout.splitlines()
    assert lines[0] == "['b', 'b', 'b', 'b']"
    assert lines[1:3] == ["guided_mask True", "pool=masks True"]
    assert "its 2 nodes have guided_mask:2, pool=masks after seconds" in lines[3]
    assert "an actor needs 8 CPUs on one node, and of the nodes of placement 'local' none has more than 1" in lines[4]
    assert "reserves 0.4 CPUs for each of 5 mask actors, and the nodes of placement 'local' have 1:" in lines[5]
    assert "lower num_actors or actor_cpus after seconds" in lines[5]
    assert "3 mask actors take 1 of guided_mask each, and the nodes have 2: lower num_actors, or" in lines[6]
    assert "error the pool reserves 1 CPUs for each of 2" in lines[7]  # guided doctor
    assert lines[8:] == ["1 of 2 actors are up"]


@pytest.mark.parametrize(("address", "reason"), [("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "HOST:6379")])
def test_an_address_that_doesnt_do_is_refused_with_the_reason(address: str, reason: str) -> None:
    """In a process of its own: this one may be in a cluster already."""
    code = (
        "from actors.cluster import Cluster\n"
        "from guided.errors import PoolUnavailable\n"
        "try:\n"
        f"    Cluster.join({address!r})\n"
        "except PoolUnavailable as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert address in said.stdout
    assert reason in said.stdout
