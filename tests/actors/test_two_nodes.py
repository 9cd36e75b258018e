"""The Ray pool in a cluster of two nodes, which is shared: what is joined stays, a node
is lost last."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from driven_pool import assert_all_end, family_of
from ray_clusters import environment, run

SECONDS = 60.0


class TwoNodes:
    """A cluster in a process of its own. Its second node has the resource `guided_mask`
    and the label `pool=masks`."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.process = start("-m", "ray_clusters", directory, "2", TMPDIR=directory)
        self.address = self.process.stdout.readline().strip()
        assert self.address, "Ray did not start"

    def raylets(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in family if each.name() == "raylet"]


def start(*arguments: str, **more: str) -> Any:
    """Start Python with pipes."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stdin": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen(
        [sys.executable, *arguments], **pipes, env=environment(**more)
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    directory = tempfile.mkdtemp(prefix="g", dir="/tmp")  # paths of sockets are limited
    cluster = TwoNodes(directory)
    yield cluster
    cluster.process.communicate(timeout=SECONDS)
    shutil.rmtree(directory, ignore_errors=True)


USED = """
import contextlib, sys, threading, time
import numpy as np
import psutil
import ray
from byte_vocabulary import BYTES, WORDS, allowed, tokens
from driven_pool import copy_masks, until
from actors import RayPool, ray_pool
from actors.cluster import Cluster
from actors.protocol import Channel
from engine.server.commands import doctor
from engine.server.options import ServeOptions
from guided.constraint import Constraint
from guided.errors import PoolUnavailable
from guided.pools.options import RayPoolOptions
from guided.sequence import GuidedSequence

address = sys.argv[1]
joined = Cluster.join(address)  # the pools share this connection

def open_pool(**options):
    pool = RayPool(BYTES, address=address, **options).started()
    until(lambda: all(worker.state == "up" for worker in pool.status().workers), 120)
    return pool

pool = open_pool(num_actors=2, placement="spread", actor_cpus=0)
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

nodes = {}
with contextlib.ExitStack() as stack:
    for placement in ("guided_mask", "pool=masks", "local"):
        session = stack.enter_context(contextlib.closing(joined.session(threading.Event())))
        where = joined.reserved(RayPoolOptions(placement=placement, actor_cpus=0.2, num_actors=1))
        channel = stack.enter_context(contextlib.closing(Channel()))
        arguments = (0, (channel.name, 8, WORDS), BYTES, 1 << 30, False, ())
        nodes[placement] = session.ask("start", "create", *where, *arguments).node_id
print(nodes["guided_mask"] == nodes["pool=masks"] != nodes["local"])

for wrong in ({"placement": "nonesuch"}, {"num_actors": 5}):
    started = time.monotonic()
    try:
        RayPool(BYTES, address=address, **{"num_actors": 2, "actor_cpus": 0.4, **wrong}).started()
    except PoolUnavailable as error:
        print(error, "after seconds" if time.monotonic() - started < 30 else "too late")
assert not ray.is_initialized()
given = RayPoolOptions(address=address)
finding = next(each for each in doctor.examine(ServeOptions(ray=given)) if each.subject == "Ray")
print(finding.level, finding.text)

# There is room for the actors of both pools, but not before that of the first one has ended.
first = open_pool(num_actors=1, placement="local", actor_cpus=0.4)
ray_pool.CALL_SECONDS = 1.0
second = RayPool(BYTES, address=address, num_actors=2, actor_cpus=0.4).started()
print([worker.state for worker in second.status().workers].count("up"), "of 2 actors are up")
first.shutdown()
until(lambda: all(worker.state == "up" for worker in second.status().workers), 120)
second.shutdown()
joined.leave()
"""


def test_a_cluster_of_two_nodes_is_joined_and_used(cluster: TwoNodes) -> None:
    lines = run(USED, cluster.address).splitlines()
    assert lines[0] == "['b', 'b', 'b', 'b']"
    assert lines[1] == "True", "the resource and the label are those of the other node"
    assert (
        "no node of the Ray cluster has the resource of placement 'nonesuch' after seconds"
        in lines[2]
    )
    assert (
        "reserves 0.4 CPU for each of 5 mask actors, and the nodes of placement 'local' have 1 CPU"
        in lines[3]
    )
    assert (
        "lower num_actors, actor_cpus or the amount in placement after seconds"
        in lines[3]
    )
    # guided doctor
    assert lines[4].startswith("error the pool reserves 1 CPU for each of 2")
    assert lines[5:] == ["1 of 2 actors are up"]


ENGINE = """
import sys, time
from byte_vocabulary import BYTES
from actors import RayPool

pool = RayPool(BYTES, num_actors=2, address=sys.argv[1], placement="spread", actor_cpus=0.25).started()
while not all(worker.pid for worker in pool.status().workers):
    time.sleep(0.1)
print(*[worker.pid for worker in pool.status().workers], flush=True)
time.sleep(600)
"""


def test_with_a_killed_engine_its_actors_end_and_the_cluster_stays(
    cluster: TwoNodes,
) -> None:
    """The actors are on the engine's node and on another one."""
    scratch = cluster.directory / "e"
    scratch.mkdir()
    engine = start("-c", ENGINE, cluster.address, TMPDIR=str(scratch))
    try:
        actors = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
        assert len({actor.ppid() for actor in actors}) == 2, (
            "each raylet has started one"
        )
        family = [*actors, *family_of(engine.pid)]
        engine.kill()
        engine.wait(SECONDS)
        assert_all_end(family, SECONDS)
        assert not list(scratch.glob("guided-*")), "only a local Ray has files"
        assert len(cluster.raylets()) == 2
    finally:
        engine.kill()
        engine.communicate()


LOST_NODE = """
import sys
from byte_vocabulary import BYTES, tokens
from actors import RayPool
from guided.constraint import Constraint
from guided.sequence import GuidedSequence

options = {"placement": "guided_mask", "actor_cpus": 0.25, "max_replays": 1, "pool_wait": 120}
pool = RayPool(BYTES, num_actors=1, address=sys.argv[1], **options).started()
grammar = pool.compile(Constraint.regex("[a-z]{1500}"), ("outlines",)).result(60)
output = tokens("a")
sequence = GuidedSequence("request", 1, output)
pool.open(sequence, grammar)
pool.submit([sequence])
assert pool.collect().ready
print("open", flush=True)
sys.stdin.readline()
output += tokens("b")
pool.submit([sequence])
found = pool.collect()
print(found.failed, found.late, "done", flush=True)
pool.shutdown()
"""


def test_with_replays_a_lost_node_costs_no_row(cluster: TwoNodes) -> None:
    engine = start("-c", LOST_NODE, cluster.address)
    assert engine.stdout.readline() == "open\n"
    cluster.process.stdin.write("lose\n")
    cluster.process.stdin.flush()
    assert cluster.process.stdout.readline() == "done\n"
    output, _ = engine.communicate("go on\n", timeout=240)
    assert output == "{} [] done\n"
