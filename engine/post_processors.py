"""Load an application's own post-processor, which works beside the standard one (vLLM's RFC 5423)."""

from __future__ import annotations

import inspect
from typing import Any

from engine.logits_processors.interface import VllmConfig
from engine.logits_processors.loading import import_named
from guided.errors import bounded
from guided.post_processor import LogitPostProcessor


def load_post_processor(given: LogitPostProcessor | type | str, config: VllmConfig) -> LogitPostProcessor:
    """Return a post-processor: itself, or made from its class or `module:Class`.

    Raises:
        ValueError: it cannot be imported or made, or is no `LogitPostProcessor`. It is named.
    """
    found: Any = import_named("post-processor", given) if isinstance(given, str) else given
    name = getattr(found, "__name__", type(found).__name__)
    try:
        if inspect.isclass(found) and issubclass(found, LogitPostProcessor):
            make: Any = found
            required = [one for one in inspect.signature(make).parameters.values() if one.default is one.empty]
            found = make(config) if any(one.kind < one.VAR_POSITIONAL for one in required) else make()
    except Exception as error:
        raise ValueError(f"the post-processor {name} can't be made: {bounded(repr(error))}") from error
    if not isinstance(found, LogitPostProcessor):
        raise ValueError(f"{name} is not a subclass of guided.LogitPostProcessor (give an object, or module:Class)")
    return found
