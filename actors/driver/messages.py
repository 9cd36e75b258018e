"""Messages between the engine's process and the driver. Pickled, over a socket pair that only these two have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.driver.scheduling import Scheduling
from actors.steps.protocol import SegmentName


@dataclass(frozen=True, slots=True)
class Connect:
    """To the driver, first: how to connect to Ray."""

    options: dict[str, Any]
    """Arguments of `ray.init`."""
    is_small: bool
    """Start a local Ray, without the processes of Ray that are not needed."""
    program: str
    """`sys.argv[0]` of the engine's process. Its directory is on the path of Ray's workers."""


@dataclass(frozen=True, slots=True)
class Connected:
    """From the driver, first: it has connected to Ray."""

    node_id: str
    """Ray's id of this machine's node."""
    host: str
    """The address of this node for other nodes."""
    raylet: tuple[str, int]
    head: tuple[str, int]
    """`raylet` and `head` are the addresses of the processes of Ray that are needed to start an actor."""


@dataclass(frozen=True, slots=True)
class Create:
    """Start an actor. Replied to when Ray has accepted it. The reply's number is then the actor's."""

    actor_class: str
    """`module:class`. Its `RAY_OPTIONS` are the arguments of `ray.remote`."""
    scheduling: Scheduling
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of an actor. Replied to with its result."""

    actor: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward the steps of an actor on another node. Replied to when the engine can send the first one."""

    actor: int
    """It has the methods `deliver` and `collect` of `RemoteSteps`."""
    path: str
    """Of the channel."""
    segment: SegmentName


@dataclass(frozen=True, slots=True)
class Nodes:
    """Replied to with the result of `ray.nodes`."""


@dataclass(frozen=True, slots=True)
class End:
    """Have Ray end an actor."""

    actor: int


@dataclass(frozen=True, slots=True)
class Close:
    """Disconnect from Ray, and end. Not replied to."""


@dataclass(frozen=True, slots=True)
class Reply:
    """From the driver."""

    number: int
    value: Any = None
    error: Exception | None = None


Request = Create | Call | Forward | Nodes | End | Close
"""To the driver, as a pair: the number of the reply, and the request."""
