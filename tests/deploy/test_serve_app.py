"""The Ray Serve application: `serve run` with the shipped configuration, on its own
cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from serving import sse, wait_until

KEY = "secret"
ROOT = Path(__file__).parents[2]

CLUSTER = """
import sys, ray
from ray._private.node import Node
for name in ("start_monitor", "start_log_monitor", "start_api_server"):  # nothing here uses them
    setattr(Node, name, lambda *_, **__: None)
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
         _temp_dir=sys.argv[1])
(node,) = ray.nodes()
metrics = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
print("address", ray.get_runtime_context().gcs_address, metrics, flush=True)
sys.stdin.read()
"""


STATUS = """
import sys, time, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
for _ in range(1200):
    (application,) = serve.status().applications.values()
    (deployment,) = application.deployments.values()
    if "Resources required for each replica" in deployment.message:
        break
    time.sleep(0.1)
print("status", deployment.replica_states, deployment.message)
"""


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A Ray cluster of its own, in a process of its own: its address, and the URL of
    its metrics."""
    temporary = str(tmp_path_factory.mktemp("r"))
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "GUIDED_API_KEY": KEY,
    }
    environment["RAY_worker_niceness"] = (
        "0"  # with Ray's 15 the replica starts in minutes beside other tests
    )
    for name in ("", "_PERIOD"):  # until the state of a replica that waits has a reason
        environment[f"RAY_SERVE_SLOW_STARTUP_WARNING{name}_S"] = "1"
    environment["RAY_metrics_report_interval_ms"] = "1000"
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER, temporary],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = next(
            (line for line in process.stdout if line.startswith("address ")), None
        )
        assert line is not None, "Ray didn't start"
        yield line.split()[1], line.split()[2]
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="module")
def url(
    ray_cluster: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """`serve run`, with the shipped configuration on a free port, until it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    assert (config["http_options"]["host"], config["http_options"]["port"]) == (
        "127.0.0.1",
        8000,
    )
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["num_actors"] = 1
    config["applications"][0]["deployments"][0]["num_replicas"] = (
        2  # there are CPUs for one
    )
    directory = tmp_path_factory.mktemp("serve")
    (directory / "serve.yaml").write_text(yaml.safe_dump(config))
    log = directory / "log"
    command = [
        Path(sys.executable).with_name("serve"),
        "run",
        "--address",
        ray_cluster[0],
        directory / "serve.yaml",
    ]
    # A local Ray asks for a token; with an explicit address, clients send theirs only
    # when told to.
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        try:
            return (
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
                == 200
            )
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, 150)
        yield f"http://127.0.0.1:{port}"
    finally:  # the application ends with its cluster
        process.kill()
        process.wait()


def test_a_replica_without_cpus_for_its_pool_waits(
    ray_cluster: tuple[str, str], url: str
) -> None:
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["pool"]["name"]) == ("ok", "ray")
    assert [actor["state"] for actor in health["pool"]["actors"]] == ["up"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", STATUS, ray_cluster[0]]
    said = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert "'RUNNING': 1" in said
    assert """[{"CPU": 1.0}, {"CPU": 0.25}]""" in said


def test_guided_streams_with_the_key_of_the_environment(url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "yes or no?"}],
        "choice": ["yes", "no"],
        "stream": True,
    }
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert (
            httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
            ).status_code
            == 401
        )
    authorized = {"authorization": f"Bearer {KEY}"}
    events = sse(
        httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=authorized, timeout=60
        ).text
    )
    assert events[-1] == "[DONE]"
    text = "".join(
        event["choices"][0]["delta"].get("content", "") for event in events[:-1]
    )
    assert text in ("yes", "no")
    assert (
        httpx.get(
            f"{url}/version", headers={"host": "evil.example"}, timeout=60
        ).status_code
        == 400
    )


def test_ray_exports_the_metrics_of_each_replica(
    url: str, ray_cluster: tuple[str, str]
) -> None:
    guided = {
        sample.name for sample in samples(httpx.get(f"{url}/metrics", timeout=60).text)
    }
    assert "guided_engine_steps_total" in guided

    exported: list[Sample] = []

    def are_exported() -> bool:
        text = httpx.get(ray_cluster[1], timeout=20).text
        exported[:] = [sample for sample in samples(text) if "guided" in sample.name]
        return {sample.name for sample in exported} >= {
            f"ray_{name}" for name in guided
        }

    wait_until(are_exported, 60)
    assert {
        (each.labels["deployment"], each.labels["application"]) for each in exported
    } == {("GuidedServer", "guided")}
    assert all(each.labels["replica"] for each in exported)


def samples(text: str) -> list[Sample]:
    found = (
        sample
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    )
    return [sample for sample in found if not sample.name.endswith("_created")]
