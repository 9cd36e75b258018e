"""BaseLLM: a model, its mask pool and an engine as one object."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch

from engine.config import EngineConfig, LoadOptions
from engine.keywords import accept
from engine.llm_engine import LLMEngine
from engine.logits_processors.loading import describe, load_post_processor
from engine.model.loader import LoadedModel, load_model
from guided.pools.inline import InlinePool
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import MaskPool
from guided.processors.logit_post_processor import LogitPostProcessor
from guided.processors.pinned_masks import Pin, pin_masks
from guided.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

PoolChoice = Literal["inline", "ray"]
PoolOptions = RayPoolOptions | Mapping[str, Any] | None


class BaseLLM:
    """An engine with its model and its mask pool. `LLM` and `AsyncLLM` are subclasses.

    Args:
        model: a local directory, a hub name, or a model that is already loaded.
        pool: where masks are computed. `ray`: in Ray actors. `inline`: in this process,
            without isolation. None: in Ray actors that start with the first constrained
            request, which then waits some 5 s; or in this process if Ray is not
            installed. A `MaskPool` is used unchanged, and not shut down.
        config: limits and sizes of the engine.
        pool_options: options of a pool that `pool` names: a `RayPoolOptions` or a
            mapping of its fields. An inline pool reads only `max_cache_bytes`.
        processor: an additional post-processor (RFC 5423): a `LogitPostProcessor`, its
            class, or `module:Class`. The class is called with a `VllmConfig` if it
            takes an argument.
        options: fields of `LoadOptions`, and fields of `EngineConfig` that replace
            those of `config`.

    Raises:
        InvalidRequest: an option is unknown. The message says what works instead.
        OSError, ValueError: the model is missing or cannot be served, or an option is
            out of range.
        PoolUnavailable: the pool cannot be started.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        pool: PoolChoice | MaskPool | None = None,
        config: EngineConfig | None = None,
        *,
        pool_options: PoolOptions = None,
        processor: LogitPostProcessor | type | str | None = None,
        **options: Any,
    ) -> None:
        loading = set[str]()
        if isinstance(model, str):
            loading = {field.name for field in fields(LoadOptions)}
        configurable = {field.name for field in fields(EngineConfig)}
        options = accept(type(self).__name__, options, loading | configurable)
        given = {name: options.pop(name) for name in configurable & options.keys()}
        config = replace(config or EngineConfig(), **given)
        self._own_pool: MaskPool | None = None
        self._own_ranks = None
        if isinstance(model, str):
            self.model = load_model(
                model, max_model_len=config.max_model_len, **options
            )
            self._own_ranks = self.model.ranks
        else:
            self.model = model
        try:
            self.max_model_len = self.model.context_length(config.max_model_len)
            num_parameters = sum(
                parameter.numel() for parameter in self.model.body.parameters()
            )
            if self.model.device.type == "cpu" and num_parameters < 50_000_000:
                # for small models, a second thread costs more than it gains
                torch.set_num_threads(1)
            if pool is None or isinstance(pool, str):
                pin = partial(
                    pin_masks, lines=2 * config.max_num_seqs, device=self.model.device
                )
                pool = self._own_pool = open_pool(
                    pool, self.model.vocabulary, pool_options, pin
                )
            self.pool: MaskPool = pool
            if processor is not None:
                processor = load_post_processor(
                    processor, describe(self.model, config, self.max_model_len)
                )
            self.engine = LLMEngine(self.model, config, self.pool, processor)
        except BaseException:  # for example a logits processor that cannot be loaded
            BaseLLM.shutdown(self)
            raise
        self.tokenizer = self.model.tokenizer
        self._start()

    def _start(self) -> None:
        """Start the parts that a subclass adds to the engine."""

    def shutdown(self) -> None:
        """Shut down the pool and the processes of tensor parallelism if this object has
        started them. Idempotent."""
        if self._own_pool is not None:
            self._own_pool.shutdown()
        if self._own_ranks is not None:
            self._own_ranks.close()


class AsyncEngineArgs:
    """vLLM's object of arguments for `AsyncLLM.from_engine_args`: a model, and any
    keywords of `AsyncLLM`."""

    def __init__(self, model: str | LoadedModel, **options: Any) -> None:
        self.model = model
        self.options = options


def default_pool() -> PoolChoice:
    """Return the default pool: Ray actors if Ray is installed, else this process."""
    if find_spec("ray") is not None:
        return "ray"
    advice = "pip install '.[ray]' in a checkout of guided"
    logger.warning(
        "Ray is not installed: masks are computed in this process, without isolation (%s)",
        advice,
    )
    return "inline"


def open_pool(
    choice: PoolChoice | None,
    vocabulary: Vocabulary,
    options: PoolOptions,
    pin: Pin | None = None,
) -> MaskPool:
    """Open a mask pool. The caller shuts it down. `pin`: see `RayPool`.

    Args:
        choice: None is the default pool, which starts with the first constraint if it
            is that of Ray actors.
    """
    if not isinstance(options, RayPoolOptions):
        options = RayPoolOptions(**(options or {}))
    name = choice or default_pool()
    if name == "inline":
        return InlinePool(
            vocabulary, max_cache_bytes=options.max_cache_bytes, forced_tokens=True
        )
    if name != "ray":
        raise ValueError(f"pool is {name!r}; it must be inline, ray, or a MaskPool")
    if find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'")
    from actors import RayPool  # Ray is optional

    pool = RayPool(vocabulary, options, pin, forced_tokens=True)
    if choice is not None:
        try:
            pool.started()
        except BaseException:
            pool.shutdown()
            raise
    return pool
