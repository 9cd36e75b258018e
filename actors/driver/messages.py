"""Messages between the engine's process and the driver. Pickled, over a socket pair that only these two have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.driver.scheduling import Scheduling


@dataclass(frozen=True, slots=True)
class Connect:
    """To the driver, first: how to connect to Ray."""

    options: dict[str, Any]
    """Arguments of `ray.init`."""
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
    """Start an actor. Replied to when Ray has accepted it."""

    number: int
    """Number of the reply, and then of the actor."""
    actor_class: str
    """`module:class`. Its `RAY_OPTIONS` are the arguments of `ray.remote`."""
    scheduling: Scheduling
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of an actor."""

    number: int
    """Number of the reply."""
    actor: int
    method: str
    arguments: tuple[Any, ...]
    kept: int | None
    """If set, the method returns two values. The second one stays in Ray, as this object."""


@dataclass(frozen=True, slots=True)
class Put:
    """Store an object in Ray."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget an object, or an actor, which Ray then ends."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """Disconnect from Ray, and end."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a stored object among the arguments of an actor."""

    number: int


@dataclass(frozen=True, slots=True)
class Reply:
    """From the driver: the result of a message."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """From the driver, every second."""


Request = Create | Call | Put | Drop | Close
