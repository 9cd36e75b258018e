"""The files of deploy/: valid for KubeRay, Ray's cluster launcher and Ray Serve, and
consistent with each other.

`schemas/` has the OpenAPI schemas of `RayCluster` and `RayService`, v1, of KubeRay
1.7.0 (Apache-2.0), without the descriptions.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from deploy.arguments import read_arguments
from engine.server.options import ServeOptions
from guided.pools.options import NodePlacement

DEPLOY = Path(__file__).parents[2] / "deploy"
RAY = Path(next(iter(importlib.util.find_spec("ray").submodule_search_locations)))  # type: ignore[union-attr, arg-type]


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def closed(schema: Any) -> Any:
    """Return a schema that rejects unknown fields, as the API server's strict
    validation does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(value) for name, value in schema.items()}
    keeps = (
        schema.get("x-kubernetes-preserve-unknown-fields")
        or "additionalProperties" in schema
    )
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not keeps
    ):
        schema["additionalProperties"] = False
    return schema


def errors(plural: str, manifest: Any) -> list[str]:
    packed = (Path(__file__).parent / "schemas" / f"{plural}.json.gz").read_bytes()
    schema = closed(json.loads(gzip.decompress(packed)))
    schema["properties"]["metadata"] = {"type": "object"}
    return [
        f"{error.json_path}: {error.message}"
        for error in Draft7Validator(schema).iter_errors(manifest)
    ]


SERVICE = load("kubernetes/rayservice/rayservice.yaml")
CLUSTER = load("kubernetes/raycluster/raycluster.yaml")
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
POLICY = load("kubernetes/base/networkpolicy.yaml")


@pytest.mark.parametrize(
    ("plural", "manifest"), [("rayservices", SERVICE), ("rayclusters", CLUSTER)]
)
def test_kuberay_accepts_the_manifest(plural: str, manifest: Any) -> None:
    assert errors(plural, manifest) == []
    assert SERVICE["spec"]["rayClusterConfig"] == CLUSTER["spec"]


# Ray's own fields
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.parametrize(
    "config", [SERVE, load("serve.yaml")], ids=["rayservice", "serve.yaml"]
)
def test_ray_serve_and_the_application_accept_the_serve_file(config: Any) -> None:
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(config).applications
    resources, options = read_arguments(application.args)
    assert resources["num_cpus"] > 0
    assert isinstance(options, ServeOptions)
    assert options.server.api_key is None


def test_the_cluster_has_room_for_what_the_service_asks_for() -> None:
    resources, options = read_arguments(SERVE["applications"][0]["args"])
    groups = {
        group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]
    }
    engines, masks = (
        {name: float(amount) for name, amount in groups[name]["resources"].items()}
        for name in ("engines", "masks")
    )
    assert resources["num_cpus"] <= engines["CPU"]
    assert resources["num_gpus"] <= engines["GPU"]
    placement = NodePlacement.parse(options.ray.placement)
    assert options.ray.num_actors is not None
    assert options.ray.num_actors * placement.amount <= masks[placement.name]
    assert options.ray.num_actors + 1 <= masks["CPU"], "and a CPU to spare"
    for group in groups.values():
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == group["resources"]["CPU"]
    grace = groups["engines"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.grace_seconds
    mounted = {
        mount["mountPath"]
        for mount in groups["engines"]["template"]["spec"]["containers"][0][
            "volumeMounts"
        ]
    }
    assert options.server.api_key_file is not None
    assert str(Path(options.server.api_key_file).parent) in mounted


def test_the_network_policy_opens_the_ports_that_are_used() -> None:
    within = next(
        rule
        for rule in POLICY["spec"]["ingress"]
        if any("podSelector" in peer for peer in rule["from"])
    )
    open_ports = {
        port
        for each in within["ports"]
        for port in range(each["port"], each.get("endPort", each["port"]) + 1)
    }
    assert SERVE["http_options"]["port"] in open_ports
    for group in (
        CLUSTER["spec"]["headGroupSpec"],
        *CLUSTER["spec"]["workerGroupSpecs"],
    ):
        started = {
            name: int(port)
            for name, port in group["rayStartParams"].items()
            if name.endswith("-port")
        }
        workers = range(
            started.pop("min-worker-port"), started.pop("max-worker-port") + 1
        )
        assert open_ports.issuperset(workers)
        assert started.pop("metrics-export-port") == 8080
        assert open_ports.issuperset(started.values())
        labels = group["template"]["metadata"]["labels"]
        assert POLICY["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_rays_cluster_launcher_accepts_its_file() -> None:
    schema = json.loads((RAY / "autoscaler" / "ray-schema.json").read_text())
    launcher = load("ray-cluster.yaml")
    Draft7Validator(schema).validate(launcher)
    assert launcher["head_node_type"] in launcher["available_node_types"]
    assert launcher["available_node_types"]["masks"]["resources"]["guided_mask"] > 0


def test_image_and_compose_take_files_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    sources = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert len(sources) >= 8
    for source in sources:
        assert (DEPLOY.parent / source).exists()
        assert f"!{source}" in ignored
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)
    extras = {
        extra
        for names in re.findall(r"EXTRAS=([\w,]+)", text)
        for extra in names.split(",")
    }
    assert extras == {"serve", "gpu"}
    for extra in extras:
        assert f"\n{extra} = [" in (DEPLOY.parent / "pyproject.toml").read_text()
    services = load("compose.yaml")["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
    ]
    assert all((DEPLOY / path).is_file() for path in mounted)
    assert services["guided"]["command"][:2] == ["guided", "serve"]
