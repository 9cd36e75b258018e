"""Configuration of the pool, from vLLM's: `--additional-config '{"guided": {...}}'`, and the model's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from guided.errors import InvalidRequest
from guided.integrations.vllm import metrics
from guided.pools.opening import DEFAULT_POOL, LazyPool, find_pool
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_REPLAYS = 2
"""Default of `max_replays`: vLLM has no finish reason for a request that ends because of another request's fault."""
STEP_WAIT = 0.2
"""Default of `step_wait`: seconds that a step waits for a mask. All rows of the batch wait as long."""


def lazy_pool(config: VllmConfig) -> LazyPool:
    """Return the pool of this configuration. It is opened when it is needed.

    Raises:
        InvalidRequest: vLLM was started without a tokenizer.
        PoolUnavailable: there is no such pool, or its dependencies are not installed.
        ValueError: the pool does not take these options.
    """
    options = {"pool": DEFAULT_POOL, **_given(config)}
    options.pop("step_wait", None)
    if options["pool"] == "ray":
        options.setdefault("max_replays", MAX_REPLAYS)
        if config.parallel_config.distributed_executor_backend == "ray":
            options.setdefault("address", "auto")  # the cluster that vLLM itself runs on
    make = find_pool(options.pop("pool"), options)
    vocabulary = model_vocabulary(config)
    return LazyPool(vocabulary, lambda: metrics.reported(make(vocabulary)))


def step_wait(config: VllmConfig) -> float:
    """Return the option `step_wait`: seconds that a step waits for a mask."""
    seconds = _given(config).get("step_wait", STEP_WAIT)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
        raise ValueError(f"step_wait is a number of seconds, 0 or more, not {seconds!r}")
    return float(seconds)


def model_vocabulary(config: VllmConfig) -> Vocabulary:
    """Return the vocabulary of the model's tokenizer, with all tokens that end an output."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise InvalidRequest("guided's structured outputs need the tokenizer: start vLLM without --skip-tokenizer-init")
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)  # vLLM's class for Mistral models wraps it
    others = (model.try_get_generation_config() or {}).get("eos_token_id")
    stops = [tokenizer.eos_token_id, *(others if isinstance(others, list) else [others])]
    return Vocabulary.from_tokenizer(
        tokenizer, model.get_vocab_size(), list(dict.fromkeys(token for token in stops if token is not None))
    )


def _given(config: VllmConfig) -> dict[str, Any]:
    additional = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    return dict(additional.get("guided") or {})
