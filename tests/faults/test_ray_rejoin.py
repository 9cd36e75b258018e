"""A cluster that is lost and joined again. The engine is in its own process, and alive
at the end."""

from __future__ import annotations

from ray_clusters import run

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
    address = head.stdout.readline().strip()
    pool = RayPool(BYTES, num_actors=1, address=address, pool_wait=3.0, actor_cpus=0.25).started()
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


def test_a_cluster_is_joined_again_after_its_restart_and_after_the_drivers_end() -> (
    None
):
    said = run(REJOIN)
    assert said.splitlines()[-1] == "done", said
