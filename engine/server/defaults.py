"""Sampling defaults from a model's `generation_config.json`."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

__all__ = ["sampling_defaults"]

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: str) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the checkpoint sets. `do_sample: false` means temperature 0.

    Args:
        model: a local directory or a hub name.
    """
    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:
        return {}
    if config.do_sample is False:
        return {"temperature": 0.0}
    return {name: value for name in _FIELDS if (value := getattr(config, name, None)) is not None}
