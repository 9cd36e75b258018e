"""Load an engine's custom logits processors: entry points, qualified names, classes. Once, at the start."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.logits_processors.interface import (
    LogitsProcessor,
    ModelConfig,
    RevisedLogitsProcessor,
    SchedulerConfig,
    VllmConfig,
)
from engine.logits_processors.processors import LogitsProcessors, ProcessorClass
from guided.errors import bounded

if TYPE_CHECKING:
    from engine.model_loader import LoadedModel  # slow: transformers

GROUP = "guided.logits_processors"
"""Entry points of this group are loaded into every engine. vLLM's own group is not read."""


def processors_of(model: LoadedModel, config: EngineConfig, max_model_len: int) -> LogitsProcessors:
    """Load and create an engine's logits processors. The `ValueError` of one that cannot be created names it."""
    description = VllmConfig(
        ModelConfig(model.name, max_model_len, model.vocabulary.padded_vocab_size, model.dtype, model.config),
        SchedulerConfig(config.max_num_seqs, config.tokens_per_step(model.device.type == "cpu")),
        model.tokenizer,
        frozenset(model.vocabulary.stop_token_ids),
    )
    return LogitsProcessors(description, model.device, load_classes(config.logits_processors))


def load_classes(given: Sequence[str | type]) -> list[ProcessorClass]:
    """Return the classes of all entry points of `GROUP`, sorted by name, then the given ones.

    The `ValueError` of a name that cannot be imported, or is no logits processor, names it.
    """
    installed = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return [_load(one) for one in (*installed, *given)]


def _load(one: EntryPoint | str | type) -> ProcessorClass:
    found: Any = one
    if isinstance(one, str):
        if not all(one.partition(":")):
            raise ValueError(f"{bounded(one)!r} is not a logits processor: give it as module:Class")
        one = EntryPoint(one, one, GROUP)
    if isinstance(one, EntryPoint):
        try:
            found = one.load()
        except Exception as error:
            raise ValueError(
                f"the logits processor {bounded(one.value)} can't be loaded: {bounded(repr(error))}"
            ) from error
    if isinstance(found, type) and issubclass(found, LogitsProcessor | RevisedLogitsProcessor):
        return found
    raise ValueError(
        f"{bounded(getattr(one, 'value', one))} is not a subclass of engine.logits_processors.LogitsProcessor "
        "(or RevisedLogitsProcessor)"
    )
