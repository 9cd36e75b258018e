"""Arguments of the Ray Serve application, derived from the options of `guided serve`.
Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict, create_model

from engine.server.options import OPTIONS, ServeOptions
from guided.pools.options import NodePlacement

RESOURCES = {"num_cpus": 1.0, "num_gpus": 0.0}
"""Resources that Ray reserves for a replica by default. A replica sees only the GPUs
that it reserves."""

_fields: dict[str, Any] = {
    name: (float, default) for name, default in RESOURCES.items()
}
_fields |= {
    option.name: (option.type, option.default)
    for option in OPTIONS
    if not option.process_only
}
Arguments = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **_fields)
"""`args` in the configuration, or `name=value` on the command line: the options of
`guided serve`, and `RESOURCES`.

Options for which Ray Serve has its own settings (host, port, ray_address, and those of
connections) are left out. So is `api_key`, because Ray keeps the arguments and shows
them in its dashboard.
"""


_LEAST_CPUS = 0.001
"""Ray refuses a bundle that reserves nothing."""


def placement_group(
    resources: Mapping[str, float], options: ServeOptions
) -> dict[str, Any]:
    """Return the settings of a deployment that reserve a replica and its pool in one
    placement group.

    Without a group, two replicas could each get some of the CPUs of their pools, and
    none would start. The bundles are in the order of `actors.driver_process`: replica,
    mask actors.
    """
    if options.pool == "inline":
        return {}
    where = NodePlacement.parse(options.ray.placement)
    replica = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    if options.ray.actor_cpus is None:
        actor_cpus = 1.0
    else:
        actor_cpus = options.ray.actor_cpus
    mask_actor = {
        "CPU": actor_cpus,
        **({where.name: where.amount} if where.amount else {}),
    }
    bundles = [replica, *[mask_actor] * options.ray.actors]
    settings: dict[str, Any] = {
        "placement_group_bundles": [_not_empty(each) for each in bundles],
        "placement_group_strategy": {"local": "STRICT_PACK", "spread": "SPREAD"}.get(
            where.kind, "PACK"
        ),
    }
    if where.kind == "label":
        selector = {where.name: where.value}
        settings["placement_group_bundle_label_selector"] = [
            {},
            *[selector] * (len(bundles) - 1),
        ]
    return settings


def _not_empty(bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in bundle.items() if amount} or {
        "CPU": _LEAST_CPUS
    }


def read_arguments(given: Mapping[str, Any]) -> tuple[dict[str, float], ServeOptions]:
    """Return the resources and the options of a replica.

    Raises:
        ValueError: an argument is unknown or out of range, or the device does not match
            the reserved GPUs.
    """
    arguments = Arguments.model_validate(given).model_dump()
    resources = {name: arguments.pop(name) for name in RESOURCES}
    options = ServeOptions.from_flat(arguments)
    device = options.load.device
    if resources["num_gpus"] and device == "cpu":
        raise ValueError(
            "num_gpus reserves GPUs, and device is 'cpu': leave one of them out"
        )
    if not resources["num_gpus"] and device.startswith("cuda"):
        raise ValueError(
            f"device is {device!r}, and num_gpus is 0: a replica sees only the GPUs that it reserves"
        )
    # without a GPU the replica fails, and does not use the CPU instead
    if resources["num_gpus"] and device == "auto":
        options = replace(options, load=replace(options.load, device="cuda"))
    return resources, options
