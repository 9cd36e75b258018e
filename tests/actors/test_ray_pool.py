"""The Ray pool beyond the contract: TCP, compile limits, the compile actor's death, shutting down."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
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
from guided.errors import CompileQueueFull, CompileTimeout, PoolUnavailable
from guided.pools.protocol import Grammar
from guided.sequence import GuidedSequence

WAIT = 120.0
_ids = count(1)
ENDLESS = Constraint.regex("(a|b)*a(a|b){20}")


@pytest.fixture(scope="module")
def pool(local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(
        BYTES, num_actors=1, transport="tcp", compile_limits=CompileLimits(processes=1, seconds=1.0), max_cache_bytes=0
    )
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def small_pool(local_ray: None) -> Iterator[RayPool]:
    """A pool with 13 MiB for grammars in use."""
    limits = CompileLimits(processes=1, wait_seconds=10.0)
    pool = RayPool(BYTES, num_actors=1, actor_memory_bytes=256 << 20, compile_limits=limits)
    yield pool
    pool.shutdown()


def masks(pool: RayPool, grammar: Grammar, *texts: str) -> list[str]:
    """The masks of new sequences after their outputs."""
    bitmask = np.zeros((len(texts), WORDS), np.int32)
    sequences = [GuidedSequence("request", next(_ids), tokens(text)) for text in texts]
    for sequence in sequences:
        pool.open(sequence, grammar)
    pool.submit(sequences)
    found = pool.collect(WAIT)
    assert not found.failed
    assert not found.late
    found.copy_to(bitmask)
    pool.free([sequence.sequence_id for sequence in sequences])
    return [allowed(row) for row in bitmask]


def test_masks_through_tcp_are_those_of_shared_memory(pool: RayPool) -> None:
    grammar = pool.compile(Constraint.regex("[a-c]+|xyz"), ("llguidance",)).result(WAIT)
    assert 0 < grammar.mask_seconds < grammar.compile_seconds
    assert masks(pool, grammar, *["", "a", "x", "xy", "xyz"] * 8) == ["abcx", ".abc", "y", "z", "."] * 8
    (worker,) = pool.status().workers
    assert worker.pid is not None
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "memfd:guided" not in maps, "it has not mapped the engine's memory"


def test_an_actor_gives_precedence_to_the_engine(pool: RayPool) -> None:
    (worker,) = pool.status().workers
    assert worker.pid is not None
    assert os.getsid(worker.pid) == worker.pid
    autogroup = Path(f"/proc/{worker.pid}/autogroup")
    if autogroup.exists() and (found := autogroup.read_text()):  # "/autogroup-7 nice 5"
        assert int(found.rpartition(" ")[2]) > 0


def test_an_actor_gives_masks_precedence_to_the_loading_of_grammars(pool: RayPool) -> None:
    pool.compile(Constraint.regex("loaded"), ("llguidance",)).result(WAIT)
    (worker,) = pool.status().workers
    assert worker.pid is not None
    found = []
    for thread in psutil.Process(worker.pid).threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.append(os.getpriority(os.PRIO_PROCESS, thread.id))
    assert max(found) > os.getpriority(os.PRIO_PROCESS, worker.pid)


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


def test_the_compile_actors_death_delays_and_fails_nothing(pool: RayPool) -> None:
    (child,) = pool.compile_pids()
    actor = psutil.Process(child).parent()
    assert actor is not None
    os.kill(actor.pid, signal.SIGKILL)
    grammar = pool.compile(Constraint.regex("after+"), ("llguidance",)).result(WAIT)
    assert masks(pool, grammar, "afte") == ["r"]


def test_an_unused_grammar_leaves_the_workers_and_comes_back(pool: RayPool) -> None:
    constraint = Constraint.regex("gone+")
    grammar = pool.compile(constraint, ("llguidance",)).result(WAIT)
    pool.release(grammar)
    again = pool.compile(constraint, ("llguidance",)).result(WAIT)
    assert again is not grammar
    assert masks(pool, again, "gon") == ["e"]


def test_after_shutdown_everything_says_so_and_nothing_is_left(
    local_ray: None, short_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", short_directory)
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
    assert {row: type(error) for row, error in pool.collect(WAIT).failed.items()} == dict.fromkeys(
        (0, 1), PoolUnavailable
    )
    assert not pool.status().healthy
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not list(Path(short_directory).iterdir())


def test_another_version_of_the_package_is_refused(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "package_version", lambda: "0.0.1")
    with pytest.raises(PoolUnavailable, match=r"has version .* of guided, and this process 0\.0\.1: install the same"):
        RayPool(BYTES, num_actors=1)


TWO_NODES = """
import os, socket, sys, tempfile, time
import numpy as np
import psutil
import ray
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from ray.cluster_utils import Cluster
from actors import RayPool
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.sequence import GuidedSequence

with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
    os.makedirs(os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True)  # Ray writes there
    quiet = {"num_cpus": 1, "include_dashboard": False, "temp_dir": directory}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    other = cluster.add_node(num_cpus=1, resources={"guided_mask": 2}, labels={"pool": "masks"})
    pool = RayPool(BYTES, num_actors=2, address=cluster.address, placement="spread", actor_cpus=0.25, compile_cpus=0.25)
    assert len({psutil.Process(worker.pid).ppid() for worker in pool.status().workers}) == 2, "one of each raylet"
    grammar = pool.compile(Constraint.regex("ab+"), ("llguidance",)).result(60)
    sequences = [GuidedSequence("request", each, tokens("a")) for each in range(4)]
    for sequence in sequences:
        pool.open(sequence, grammar)
    bitmask = np.zeros((4, WORDS), np.int32)
    pool.submit(sequences)
    pool.collect(60).copy_to(bitmask)
    print([allowed(row) for row in bitmask])
    pool.shutdown()

    reserved = dict(num_actors=2, address=cluster.address, actor_cpus=0.25, compile_cpus=0.25)
    for placement in ("guided_mask", "pool=masks"):
        pool = RayPool(BYTES, placement=placement, **reserved)
        print(placement, {worker.node_id for worker in pool.status().workers} == {other.node_id})
        pool.shutdown()
    taken = socket.create_server(("0.0.0.0", 0))
    port = taken.getsockname()[1]
    elsewhere = {"placement": "guided_mask", "num_actors": 1, "channel_ports": str(port)}
    for wrong in (elsewhere, {"placement": "nonesuch"}, {"actor_cpus": 8}):
        started = time.monotonic()
        try:
            RayPool(BYTES, **{**reserved, **wrong})
        except PoolUnavailable as error:
            print(error, "after seconds" if time.monotonic() - started < 30 else "too late")
    assert not ray.is_initialized()
    cluster.shutdown()
"""


def test_a_cluster_of_two_nodes_is_joined_and_its_other_node_reached_through_tcp() -> None:
    here = Path(__file__).parents
    environment = {**os.environ, "PYTHONPATH": f"{here[2]}{os.pathsep}{here[1] / 'support'}"}
    said = subprocess.run(
        [sys.executable, "-c", TWO_NODES], stdout=subprocess.PIPE, text=True, check=True, timeout=280, env=environment
    )
    lines = said.stdout.splitlines()
    assert lines[-6] == "['b', 'b', 'b', 'b']"
    assert lines[-5:-3] == ["guided_mask True", "pool=masks True"]
    assert re.search(r"ports \d+ to \d+ are taken on \S+: widen channel_ports after seconds$", lines[-3])
    assert "its 2 nodes have guided_mask:2, pool=masks after seconds" in lines[-2]
    assert "an actor needs 8 CPUs on one node, and of the nodes of placement 'local' none has more than 1" in lines[-1]


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


def large(number: int) -> Constraint:
    """A constraint with a grammar of 5 MB."""
    return Constraint.json_schema({"enum": [f"{number} {each:050}" for each in range(4_000)]})


def test_grammars_wait_for_memory_that_others_use(small_pool: RayPool) -> None:
    futures = [small_pool.compile(large(number), ("llguidance",)) for number in range(6)]
    first = futures[0].result(WAIT)
    assert not futures[-1].done()
    small_pool.release(first)
    for future in futures[1:]:  # each that is given back lets another one in
        small_pool.release(future.result(WAIT))


def test_without_memory_the_wait_is_limited(small_pool: RayPool) -> None:
    futures = [small_pool.compile(large(number), ("llguidance",)) for number in range(6, 12)]
    futures[0].result(WAIT)
    with pytest.raises(CompileQueueFull, match="memory"):
        futures[-1].result(WAIT)
