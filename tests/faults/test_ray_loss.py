"""Loss of Ray's own processes: what continues, what ends, and that nothing hangs.

The engine is in its own process, which must be alive at the end and exit by itself.
"""

from __future__ import annotations

from ray_clusters import run

LOSS = """
import sys
from contextlib import suppress
import psutil
from byte_vocabulary import BYTES
from driven_pool import DrivenPool, gone, until
from actors import RayPool
from guided.errors import WorkerDied

pool = RayPool(BYTES, num_actors=1, pool_wait=120.0).started()
driven = DrivenPool(pool)
for name in "raylet", "gcs_server":
    lost, pids = driven.open("length=1000", number=4), driven.pids
    driven.go_on(lost)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a process may end beside this loop
            if process.name() == name:
                process.kill()
    if name == "gcs_server":
        driven.go_on(lost)  # steps do not use Ray
    until(lambda: pool.status().trouble is not None, 120)
    print(name, "is gone:", pool.status().trouble, flush=True)
    for pid in pids:
        gone(pid)
    new = driven.open("length=1000", number=4)  # they need an actor, and wait for Ray, which is started again
    driven.go_on([*lost, *new], 2)
    assert {each: type(error) for each, error in driven.errors.items()} == dict.fromkeys(lost, WorkerDied)
    until(lambda: pool.status().trouble is None, 120)
    driven.close()
assert "ray" not in sys.modules, "Ray would end this process"
pool.shutdown()
with suppress(psutil.NoSuchProcess):
    left = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    assert not left, left
print("done", flush=True)
"""


def test_rays_own_processes_gone() -> None:
    said = run(LOSS)
    assert said.splitlines()[-1] == "done", said
