"""The settings from vLLM's configuration: the pool and its options, and the model's vocabulary.

Options are set by `--additional-config '{"guided": {"pool": "ray", "num_actors": 4}}'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from guided.errors import InvalidRequest
from guided.integrations.vllm import pool_reports
from guided.pools.opening import DEFAULT_POOL, PoolOpener, find_pool
from guided.pools.protocol import MaskPool
from guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

MAX_REPLAYS = 2
"""Default of `max_replays`: vLLM has no finish reason for a request that ends because of another request's fault."""
STEP_WAIT = 0.2
"""Default of `step_wait`: seconds that a step waits for a mask. All rows of the batch wait as long."""


def pool_options(config: VllmConfig) -> dict[str, Any]:
    """Return the pool's name, as "pool", and its options. Raises `ValueError` if the pool does not take them."""
    options = {"pool": DEFAULT_POOL, **_given(config)}
    options.pop("step_wait", None)
    if options["pool"] == "ray":
        options.setdefault("max_replays", MAX_REPLAYS)
        if config.parallel_config.distributed_executor_backend == "ray":
            options.setdefault("address", "auto")  # the cluster that vLLM itself runs on
    if options.keys() - {"pool", "max_replays"}:
        _find(options)
    return options


def step_wait(config: VllmConfig) -> float:
    """Return the option `step_wait`: seconds that a step waits for a mask."""
    seconds = _given(config).get("step_wait", STEP_WAIT)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
        raise ValueError(f"step_wait is a number of seconds, 0 or more, not {seconds!r}")
    return float(seconds)


def pool_opener(config: VllmConfig, opens: bool = True) -> PoolOpener:
    """Return an opener for the pool of this configuration.

    Args:
        opens: open the pool now, and wait until it is open or has failed. vLLM accepts requests only after that: while
            requests wait, vLLM's processes poll and take two cores, and a local Ray that starts then can exceed its
            limit of 30 s.
    """
    opener = PoolOpener(partial(open_pool, config, pool_options(config)))
    if opens:
        opener.open().exception()  # waits; a failure is logged, and the next request tries again
    return opener


def open_pool(config: VllmConfig, options: Mapping[str, Any]) -> MaskPool:
    pool = _find(options)(model_vocabulary(config))
    pool_reports.start(pool)
    return pool


def model_vocabulary(config: VllmConfig) -> Vocabulary:
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    if tokenizer is None:
        raise InvalidRequest("guided requests need the tokenizer: start vLLM without --skip-tokenizer-init")
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)  # vLLM's class for Mistral models wraps it
    others = (model.try_get_generation_config() or {}).get("eos_token_id")
    stops = [tokenizer.eos_token_id, *(others if isinstance(others, list) else [others])]
    return Vocabulary.from_tokenizer(
        tokenizer, model.get_vocab_size(), list(dict.fromkeys(token for token in stops if token is not None))
    )


def _given(config: VllmConfig) -> dict[str, Any]:
    additional = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    return dict(additional.get("guided") or {})


def _find(options: Mapping[str, Any]) -> Callable[[Vocabulary], MaskPool]:
    return find_pool(options["pool"], {name: value for name, value in options.items() if name != "pool"})


def stop_token(params: SamplingParams) -> int:
    """Return a token at which vLLM ends the request."""
    if params.eos_token_id is not None:
        return int(params.eos_token_id)
    return int(next(iter(params.stop_token_ids or ()), 0))
