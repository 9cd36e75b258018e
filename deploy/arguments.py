"""Arguments of the Ray Serve application, derived from the options of `guided serve`. Imports no Ray."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, create_model

from engine.server.options import OPTIONS

RESOURCES = {"num_cpus": 1.0, "num_gpus": 0.0}
"""What Ray reserves for a replica, unless the arguments say otherwise. A replica sees no GPUs but those."""

_fields: dict[str, Any] = {name: (float, default) for name, default in RESOURCES.items()}
_fields |= {option.name: (option.type, option.default) for option in OPTIONS if not option.process_only}
Arguments = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **_fields)
"""`args` in the configuration, or `name=value` on the command line: the options of `guided serve`, and `RESOURCES`.

Options for which Ray Serve has its own settings are missing: host, port, log_level, grace_seconds, ray_address, and
those of connections.
"""
