"""Where Ray starts an actor. Imports no Ray: the driver's process passes the result on to Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guided.pools.options import LOCAL, NodePlacement

Nodes = Sequence[Mapping[str, Any]]
"""As `ray.nodes()` returns them."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How Ray places one actor."""

    placement: NodePlacement = LOCAL
    cpus: float = 0.0
    """CPUs that Ray reserves for it."""
    index: int = 0
    """Number of the mask actor. Actors are placed on the fitting nodes in turn."""

    @property
    def bundle(self) -> int:
        """The bundle of a placement group for the actor: after that of the engine."""
        return 1 + self.index

    def choose(self, nodes: Nodes, here: str) -> tuple[str | None, dict[str, Any]]:
        """Return the id of the node for the actor, and options of `ray.remote`. Without an id, Ray spreads the actors.

        Args:
            here: the id of this process's node.

        Raises:
            ValueError: no node of the cluster fits.
        """
        where = self.placement
        fitting = self.candidates(nodes, here)
        options: dict[str, Any] = {"num_cpus": self.cpus}
        if where.amount:
            return None, {**options, "resources": {where.name: where.amount}}
        # Ray places actors that take nothing anywhere, with its "SPREAD" strategy and with a soft affinity too (Ray
        # 2.60, measured). If the node is gone by now, the actor is not started, and the next one gets another node.
        if self.cpus and where.kind == "label":
            return None, {**options, "label_selector": {where.name: where.value}}
        if self.cpus and where.kind == "spread":
            return None, options
        return str(fitting[self.index % len(fitting)]["NodeID"]), options

    def candidates(self, nodes: Nodes, here: str) -> list[Mapping[str, Any]]:
        """Return the nodes on which there is room for the actor, whatever runs there now. Raises as `choose`."""
        where = self.placement
        alive = sorted((node for node in nodes if node["Alive"]), key=lambda node: str(node["NodeID"]))
        found = [node for node in alive if self._is_candidate(node, here)]
        if not found:
            raise ValueError(
                f"no node of the Ray cluster has the {where.kind} of placement {where.text!r}: {_offers(alive)}"
            )
        fitting = [node for node in found if node["Resources"].get("CPU", 0) >= self.cpus]
        if not fitting:
            most = max(node["Resources"].get("CPU", 0) for node in found)
            raise ValueError(
                f"an actor needs {self.cpus:g} CPUs on one node, and of the nodes of placement {where.text!r} none has "
                f"more than {most:g}: lower actor_cpus"
            )
        return fitting

    def _is_candidate(self, node: Mapping[str, Any], here: str) -> bool:
        where = self.placement
        if where.kind == "local":
            return bool(node["NodeID"] == here)
        if where.kind == "resource":
            available = node["Resources"].get(where.name, 0)
            return bool(available and available >= where.amount)
        return where.kind == "spread" or node.get("Labels", {}).get(where.name) == where.value


def check_room(actor: Scheduling, number: int, nodes: Nodes, here: str) -> None:
    """Check that the nodes of the cluster have room for a pool, whatever runs there now.

    Args:
        actor: how each of the `number` mask actors is placed.
        here: the id of this process's node.

    Raises:
        ValueError: they have not; says what there is, and which options lower what the pool takes.
    """
    where = actor.placement
    if where.kind == "group":  # it has been reserved already
        return
    found = actor.candidates(nodes, here)
    cpus = [node["Resources"].get("CPU", 0.0) for node in found]
    if actor.cpus and sum(each // actor.cpus for each in cpus) < number:
        raise ValueError(
            f"the pool reserves {actor.cpus:g} CPUs for each of {number} mask actors, and the nodes of placement "
            f"{where.text!r} have {sum(cpus):g}: lower num_actors or actor_cpus"
        )
    amounts = [node["Resources"].get(where.name, 0.0) for node in found]
    if where.amount and sum(each // where.amount for each in amounts) < number:
        raise ValueError(
            f"{number} mask actors take {where.amount:g} of {where.name} each, and the nodes have {sum(amounts):g}: "
            "lower num_actors, or the amount in placement"
        )


def _offers(nodes: Nodes) -> str:
    """Say which resources and labels there are, without those that Ray sets itself."""
    resources = {
        f"{name}:{amount:g}"
        for node in nodes
        for name, amount in node["Resources"].items()
        if name not in ("CPU", "GPU", "memory", "object_store_memory") and not name.startswith("node:")
    }
    labels = {
        f"{name}={value}"
        for node in nodes
        for name, value in node.get("Labels", {}).items()
        if not name.startswith("ray.io/node-id")
    }
    return (
        f"its {len(nodes)} nodes have {', '.join(sorted(resources | labels)) or 'no resources or labels of their own'}"
    )
