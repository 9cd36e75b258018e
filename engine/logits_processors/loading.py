"""Load an engine's custom logits processors and post-processor from entry points, names
and classes."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.logits_processors.interface import (
    LogitsProcessor,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    is_revised,
)
from guided.errors import bounded
from guided.pools.protocol import MaskPool
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import LogitPostProcessor
from guided.processors.post_processors import PostProcessors
from guided.processors.rfc_5423 import RFC5423Adapter, is_literal

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel  # slow: transformers

GROUP = "vllm.logits_processors"
"""The group of entry points that every engine loads unless `logits_processor_plugins`
is False."""


def describe(
    model: LoadedModel, config: EngineConfig, max_model_len: int
) -> VllmConfig:
    """Describe an engine to its logits processors and post-processors."""
    return VllmConfig(
        ModelConfig(
            model.name,
            max_model_len,
            model.vocabulary.padded_vocab_size,
            model.dtype,
            model.config,
        ),
        SchedulerConfig(
            config.max_num_seqs, config.tokens_per_step(model.device.type == "cpu")
        ),
        model.tokenizer,
    )


def load_classes(config: EngineConfig) -> list[type[LogitsProcessor]]:
    """Return the classes of installed packages, sorted by the names of their entry
    points, then the classes of the options.

    Raises:
        ValueError: a class cannot be imported, or is not a logits processor. The
            message names it.
    """
    if config.logits_processor_plugins:
        points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    else:
        points = []
    return [*map(_load_plugin, points), *map(_load, config.logits_processors)]


def load_post_processor(
    given: LogitPostProcessor | type | str, config: VllmConfig
) -> LogitPostProcessor:
    """Return an application's post-processor, which is created from a class or
    `module:Class`.

    Args:
        given: a `LogitPostProcessor`, or a class that is written literally as in RFC
            5423.

    Raises:
        ValueError: `given` cannot be imported or created, or is neither of the two. The
            message names it.
    """
    loaded: Any = (
        import_named("post-processor", given) if isinstance(given, str) else given
    )
    if inspect.isclass(loaded):
        kind = loaded
    else:
        kind = type(loaded)
    name = kind.__name__
    if not issubclass(kind, LogitPostProcessor) and not is_literal(kind):
        raise ValueError(
            f"{name} is not a subclass of guided.LogitPostProcessor (give an object, or module:Class)"
        )
    try:
        if loaded is kind:
            required = [
                param
                for param in inspect.signature(kind).parameters.values()
                if param.default is param.empty
            ]
            takes_config = any(param.kind < param.VAR_POSITIONAL for param in required)
            if takes_config:
                loaded = kind(config)
            else:
                loaded = kind()
        if is_literal(kind):
            loaded = RFC5423Adapter(loaded, config)
    except Exception as error:
        raise ValueError(
            f"the post-processor {name} can't be made: {bounded(repr(error))}"
        ) from error
    processor: LogitPostProcessor = loaded
    _check_methods(processor)
    return processor


def _check_methods(processor: LogitPostProcessor) -> None:
    """Raise a `ValueError` if the engine can't call a method of a post-processor."""
    for method, base in inspect.getmembers(LogitPostProcessor, inspect.isfunction):
        override = getattr(processor, method)
        signature = inspect.signature(base)
        arguments = list(signature.parameters)[1:]
        try:
            inspect.signature(override).bind(*arguments)
            is_callable = not inspect.iscoroutinefunction(override)
        except TypeError:
            is_callable = False
        if not is_callable:
            raise ValueError(
                f"the post-processor {processor.name} needs the method {method}{signature}"
            )


def bundle(
    pool: MaskPool | None, processor: LogitPostProcessor | None
) -> PostProcessors:
    """Return the post-processors of an engine, which contains their exceptions: the
    standard one, if there is a pool, then an application's."""
    if isinstance(processor, PostProcessors):
        return processor
    members: list[LogitPostProcessor] = []
    if pool is not None and not isinstance(processor, GuidedProcessor):
        members.append(GuidedProcessor(pool))
    if processor is not None:
        members.append(processor)
    return PostProcessors(*members)


def import_named(what: str, name: str | EntryPoint) -> Any:
    """Import the object `module:Class`. The `ValueError` of a failed import names the
    object, and `what` it is."""
    try:
        if isinstance(name, str):
            if not all(name.partition(":")):
                raise ValueError("give it as module:Class")
            name = EntryPoint(name, name, GROUP)
        return name.load()
    except Exception as error:
        value = bounded(getattr(name, "value", name))
        raise ValueError(
            f"the {what} {value} can't be loaded: {bounded(repr(error))}"
        ) from error


def _load_plugin(point: EntryPoint) -> type[LogitsProcessor]:
    try:
        return _load(point)
    except ValueError as error:
        raise ValueError(
            f"{error} (entry point {bounded(point.name)} of {GROUP}; to load no entry points: "
            "--no-logits-processor-plugins, in Python logits_processor_plugins=False)"
        ) from error


def _load(given: EntryPoint | str | type) -> type[LogitsProcessor]:
    loaded: Any = (
        given if isinstance(given, type) else import_named("logits processor", given)
    )
    if not isinstance(loaded, type) or not issubclass(loaded, LogitsProcessor):
        name = bounded(getattr(given, "value", given))
        raise ValueError(
            f"{name} is not a subclass of engine.logits_processors.LogitsProcessor"
        )
    missing = {*loaded.__abstractmethods__} | (
        {"remove_request"} - {*dir(loaded)} if is_revised(loaded) else set()
    )
    if missing:
        raise ValueError(
            f"the logits processor {loaded.__name__} needs the method {' and '.join(sorted(missing))}"
        )
    return loaded
