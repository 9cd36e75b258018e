"""Loss of Ray's own processes and of an actor's node: what continues, what ends, and that nothing hangs.

Each case is an engine in its own process, which must be alive at the end and exit by itself.
"""

from __future__ import annotations

from ray_clusters import run

LOSS = """
import asyncio, sys, time
import httpx, psutil
from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.server.app import create_app
from engine.server.options import ServerSettings

engine = AsyncLLM(
    str(checkpoint_path()), "ray", EngineConfig(max_num_seqs=8), pool_options={"num_actors": 2, "pool_wait": 120.0}
)
LONG = "[a-z ]{500,}"

async def until(true):
    deadline = time.monotonic() + 120
    while not await true():
        assert time.monotonic() < deadline, "the condition stayed false"
        await asyncio.sleep(0.1)

async def main():
    app = create_app(engine, ServerSettings(model_name="m"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t", timeout=240) as client:
        async def ask(**more):
            body = {"prompt": "a", "max_tokens": 60, "temperature": 0, **more}
            answer = await client.post("/v1/completions", json=body)
            return answer.status_code, answer.json()
        async def works(**constraint):
            status, answer = await ask(**constraint)
            assert status == 200, answer
        async def health():
            return (await client.get("/health")).json()
        async def in_trouble():
            return (await health())["pool"]["trouble"] is not None
        async def well():
            pool = (await health())["pool"]
            return pool["trouble"] is None and all(actor["state"] == "up" for actor in pool["actors"])

        async def all_ended():  # until then, a request may be opened on an actor that ends a moment later
            return not any(map(psutil.pid_exists, pids))
        def kill(name):
            killed = [each for each in psutil.Process().children(recursive=True) if each.name().startswith(name)]
            assert killed, name
            for each in killed:
                each.kill()
        await works(regex="[0-9]{4}")
        free = asyncio.create_task(ask(max_tokens=500, ignore_eos=True))
        bound = asyncio.create_task(ask(max_tokens=500, regex=LONG))
        await asyncio.sleep(0.5)
        pids = [actor["pid"] for actor in (await health())["pool"]["actors"]]
        kill("raylet")
        await until(in_trouble)
        await until(all_ended)
        print("the raylet is gone:", (await health())["pool"]["trouble"], flush=True)
        # What needs a new actor waits for Ray, which is started again.
        await asyncio.gather(works(regex="[0-9]{4}"), works(regex="[x-z]{4}"))
        assert (await free)[0] == 200
        status, answer = await bound
        assert status == 200 or answer["error"]["code"] == "worker_died", answer
        await until(well)

        pids = [actor["pid"] for actor in (await health())["pool"]["actors"]]
        kill("gcs_server")
        await works(regex="[0-9]{4}")  # steps do not use Ray
        await until(in_trouble)
        await until(all_ended)
        await asyncio.gather(works(regex="[0-9]{4}"), works(regex="[g-i]{4}"))
        await until(well)

asyncio.run(main())
assert "ray" not in sys.modules, "Ray would end this process"
engine.shutdown()
left = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
assert not left, left
print("done", flush=True)
"""

REJOIN = """
import subprocess, sys, tempfile, time
import psutil
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, until
from faulty_backend import NAME, faulty
from actors import RayPool
from guided.errors import PoolUnavailable, WorkerDied

with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
    command = [sys.executable, "-m", "ray_clusters", directory, "1"]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pool = RayPool(BYTES, num_actors=1, address=head.stdout.readline().strip(), pool_wait=3.0, actor_cpus=0.25)
    driven = DrivenPool(pool)
    (lost,) = driven.open("sound length=1000")
    driven.go_on([lost], 2)
    for line in "down", "up":
        head.stdin.write(line + "\\n")
        head.stdin.flush()
        assert head.stdout.readline()
        if line == "down":
            until(lambda: pool.status().trouble is not None, 120)
            print("trouble:", pool.status().trouble, flush=True)
    until(lambda: driven.step([lost], deadline=0.1) is not None and lost in driven.errors)
    assert type(driven.errors[lost]) is WorkerDied
    well = lambda: pool.status().trouble is None and driven.all_up()
    until(well, 120)
    driven.go_on(driven.open("sound length=1000", number=4), 2)  # compiled before the restart
    driven.go_on(driven.open("sound", number=4), 2)
    (driver,) = [each for each in psutil.Process().children() if "actors.driver_process" in each.cmdline()]
    driver.kill()
    until(lambda: pool.status().trouble is not None)
    until(well, 120)
    driven.go_on(driven.open("sound", number=4), 2)
    pool.shutdown()
    head.stdin.close()
    assert head.wait(60) == 0
    print("done", flush=True)
"""


def test_rays_own_processes_gone() -> None:
    said = run(LOSS)
    assert said.splitlines()[-1] == "done", said


LOST_NODE = """
import tempfile
from byte_vocabulary import BYTES, tokens
from ray_clusters import cluster_in
from actors import RayPool
from guided.constraint import Constraint
from guided.sequence import GuidedSequence

with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as directory:
    cluster = cluster_in(directory)
    for_masks = {"num_cpus": 1, "resources": {"guided_mask": 1}}
    lost = cluster.add_node(**for_masks)
    given = {"placement": "guided_mask", "actor_cpus": 0.25, "max_replays": 1, "pool_wait": 120}
    pool = RayPool(BYTES, num_actors=1, address=cluster.address, **given)
    grammar = pool.compile(Constraint.regex("[a-z]{1500}"), ("outlines",)).result(60)
    output = tokens("a")
    sequence = GuidedSequence("request", 1, output)
    pool.open(sequence, grammar)
    pool.submit([sequence])
    assert pool.collect().ready
    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(**for_masks)
    output += tokens("b")
    pool.submit([sequence])
    found = pool.collect()
    print(found.failed, found.late, "done")
    pool.shutdown()
    cluster.shutdown()
"""


def test_a_cluster_is_joined_again_after_its_restart_and_after_the_drivers_end() -> None:
    said = run(REJOIN)
    assert said.splitlines()[-1] == "done", said


def test_with_replays_a_lost_node_costs_no_row() -> None:
    assert run(LOST_NODE).splitlines()[-1] == "{} [] done"
