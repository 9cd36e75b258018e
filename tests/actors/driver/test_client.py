"""The driver: actors that are started, called and ended through another process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from actors.cluster import Cluster
from actors.driver.client import ActorDied, ActorFailed, Driver

WAIT = 60.0
SAMPLE = "sample_actor:SampleActor"


@pytest.fixture(scope="module")
def driver(local_ray: None) -> Iterator[Driver]:
    cluster = Cluster.join()
    yield cluster.driver()[0]
    cluster.leave()


def test_calls_are_made_in_order_and_fail_as_the_actor_does(driver: Driver) -> None:
    actor = driver.create(SAMPLE, 0).result(WAIT)
    answers = [actor.call("tell", number) for number in range(1, 4)]
    assert [answer.result(WAIT) for answer in answers] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    with pytest.raises(ActorFailed, match="as it was told"):
        actor.call("fail").result(WAIT)
    with pytest.raises(ActorFailed, match="no_such_method"):
        actor.call("no_such_method").result(WAIT)
    ended = actor.call("end")
    with pytest.raises(ActorDied):
        ended.result(WAIT)
    with pytest.raises(ActorDied):
        actor.call("tell", 4).result(WAIT)


def test_an_actor_is_ended(driver: Driver) -> None:
    actor = driver.create(SAMPLE).result(WAIT)
    actor.end()
    with pytest.raises(ActorDied):
        actor.call("tell", 1).result(WAIT)


def test_an_actor_without_a_reference_is_ended(driver: Driver) -> None:
    actor = driver.create(SAMPLE).result(WAIT)
    process = psutil.Process(actor.call("pid").result(WAIT))
    del actor
    driver.ask("nodes").result(WAIT)
    process.wait(WAIT)


def test_nodes(driver: Driver) -> None:
    (node,) = driver.ask("nodes").result(WAIT)
    assert node["Alive"]


def test_an_actor_that_cannot_be_started(driver: Driver) -> None:
    with pytest.raises(ActorFailed, match="no_such_module"):
        driver.create("no_such_module:Actor").result(WAIT)


CONNECT = "import sys; from actors.driver.client import Driver; Driver({'address': sys.argv[1]}, {}).connect()"


def test_it_ends_with_the_engines_process_while_ray_does_not_answer() -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        silent.settimeout(WAIT)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", CONNECT, address]) as engine:
            connection, _ = silent.accept()
            (driver,) = psutil.Process(engine.pid).children()
            engine.kill()
        driver.wait(WAIT)
        connection.close()
