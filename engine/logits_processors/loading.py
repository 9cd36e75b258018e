"""Load an engine's custom logits processors and its post-processor: from entry points, names, classes, at the start."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.logits_processors.interface import LogitsProcessor, ModelConfig, SchedulerConfig, VllmConfig, is_revised
from guided.errors import bounded
from guided.post_processor import LogitPostProcessor

if TYPE_CHECKING:
    from engine.model_loader import LoadedModel  # slow: transformers

GROUP = "vllm.logits_processors"
"""Entry points of this group are loaded into every engine, unless `logits_processor_plugins` is False."""


def describe(model: LoadedModel, config: EngineConfig, max_model_len: int) -> VllmConfig:
    """Describe an engine to its logits processors and post-processors."""
    return VllmConfig(
        ModelConfig(model.name, max_model_len, model.vocabulary.padded_vocab_size, model.dtype, model.config),
        SchedulerConfig(config.max_num_seqs, config.tokens_per_step(model.device.type == "cpu")),
        model.tokenizer,
    )


def load_classes(config: EngineConfig) -> list[type[LogitsProcessor]]:
    """Return the classes of installed packages, sorted by the names of their entry points, then those of the options.
    The `ValueError` of one that cannot be imported, or is no logits processor, names it."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name) if config.logits_processor_plugins else []
    return [*map(_load_plugin, points), *map(_load, config.logits_processors)]


def load_post_processor(given: LogitPostProcessor | type | str, config: VllmConfig) -> LogitPostProcessor:
    """Return an application's own post-processor (RFC 5423): itself, or made from its class or `module:Class`. The
    `ValueError` of one that cannot be imported or made, or is no `LogitPostProcessor`, names it."""
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


def import_named(what: str, name: str | EntryPoint) -> Any:
    """Import what `module:Class` names. The `ValueError` of one that cannot be imported names it, and `what` it is."""
    try:
        if isinstance(name, str):
            if not all(name.partition(":")):
                raise ValueError("give it as module:Class")
            name = EntryPoint(name, name, GROUP)
        return name.load()
    except Exception as error:
        value = bounded(getattr(name, "value", name))
        raise ValueError(f"the {what} {value} can't be loaded: {bounded(repr(error))}") from error


def _load_plugin(point: EntryPoint) -> type[LogitsProcessor]:
    try:
        return _load(point)
    except ValueError as error:
        raise ValueError(
            f"{error} (entry point {bounded(point.name)} of {GROUP}; to load no entry points: "
            "--no-logits-processor-plugins, in Python logits_processor_plugins=False)"
        ) from error


def _load(one: EntryPoint | str | type) -> type[LogitsProcessor]:
    found: Any = one if isinstance(one, type) else import_named("logits processor", one)
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        name = bounded(getattr(one, "value", one))
        raise ValueError(f"{name} is not a subclass of engine.logits_processors.LogitsProcessor")
    missing = {*found.__abstractmethods__} | ({"remove_request"} - {*dir(found)} if is_revised(found) else set())
    if missing:
        raise ValueError(f"the logits processor {found.__name__} needs the method {' and '.join(sorted(missing))}")
    return found
