"""Read the configuration of a model, and refuse what cannot be served before its
weights are read or downloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.auto import get_hf_quantizer

from engine.memory.recurrent import RECURRENT_TYPES
from engine.model.attention import UnsupportedModelError
from engine.model.files import gguf_file, read_gguf_config
from guided.errors import bounded

LAYER_TYPES = RECURRENT_TYPES | {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "mamba",
    "mlp",
    "moe",
}
"""Types of layers, as a configuration names them, that the engine has a cache for."""
_OTHERWISE = "vLLM may serve it, with guided inside: docs/vllm.md"


def read_config(
    model: str, revision: str | None = None, max_model_len: int | None = None
) -> Any:
    """Read the configuration of a model, and check that the model can be served.

    Fails early if the hub cannot be reached. `max_model_len`, in tokens, chooses among
    factors of RoPE; None: the model's own. Raises as `load_model`.
    """
    path = gguf_file(model)
    if path is not None:
        config = read_gguf_config(path)
    elif Path(model).is_dir():
        config = _read(model, revision)
    else:
        config = _find_on_hub(model, revision)
    _check(config)
    _choose_factors(config.get_text_config(decoder=True), max_model_len)
    return config


def model_factory(config: Any) -> Any:
    """Return the class of transformers that loads the language model. None: there is
    none.

    The one that leaves encoders of images and sounds out comes first.
    """
    for factory in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in factory._model_mapping:
            return factory
    return None


def architecture(config: Any) -> str:
    """Return the name of the class that a checkpoint was saved from."""
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def refusal(name: str, why: str) -> UnsupportedModelError:
    """Return the error of a model that cannot be served."""
    return UnsupportedModelError(f"{name} can't be served: {why}. {_OTHERWISE}")


def _find_on_hub(model: str, revision: str | None) -> Any:
    try:
        if try_to_load_from_cache(model, "config.json", revision=revision) is None:
            # transformers would try for a minute
            HfApi().model_info(model, revision=revision, timeout=10)
    except Exception as error:  # the type depends on the HTTP library
        raise OSError(
            f"there is no local directory or GGUF file {model!r}, and no such model from the hub: {_line(error)}"
        ) from error
    return _read(model, revision)


def _read(model: str, revision: str | None) -> Any:
    """Read a configuration. Code of the checkpoint is not run, and transformers does
    not ask whether it should be."""
    try:
        return AutoConfig.from_pretrained(
            model, revision=revision, trust_remote_code=False
        )
    except ValueError as error:
        raise refusal(
            model, f"transformers has no code of its own for it ({_line(error)})"
        ) from error


def _line(error: Exception) -> str:
    return bounded(" ".join(str(error).split()))


def _check(config: Any) -> None:
    """Refuse what the configuration shows to be unsupported."""
    name = architecture(config)
    factory = model_factory(config)
    can_generate = getattr(getattr(transformers, name, None), "can_generate", None)
    text = config.get_text_config(decoder=True)
    others = ", ".join(
        sorted({*(getattr(text, "layer_types", None) or ())} - LAYER_TYPES)
    )
    if factory is None or getattr(config, "is_encoder_decoder", False):
        raise refusal(name, "it is not a causal language model of transformers")
    if can_generate is not None and not can_generate():
        raise refusal(name, "the checkpoint has no head that generates text")
    if not factory._model_mapping[type(config)]._can_set_attn_implementation():
        raise refusal(name, "its code does not support other attention backends")
    if others:
        raise refusal(name, f"it has {others} layers")
    _check_quantization(config, name)


def _check_quantization(config: Any, name: str) -> None:
    """Refuse quantized weights that transformers does not read, or not without another
    package."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = str(quantization.get("quant_method"))
    try:
        quantizer, *_ = get_hf_quantizer(copy.deepcopy(config), None, None, True, {})
    except (ImportError, RuntimeError, ValueError) as error:
        raise refusal(
            name, f"its weights are quantized ({method}): {_line(error)}"
        ) from error
    if quantizer is None:
        raise refusal(
            name,
            f"its weights are quantized ({method}), and transformers does not read such weights",
        )


def _choose_factors(text: Any, max_model_len: int | None) -> None:
    """Give longrope the same factors for all lengths: the long ones if sequences may
    exceed the original length.

    transformers chooses by the longest sequence of a batch, so that a sequence's output
    would depend on the others.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
            continue
        length = max_model_len or text.max_position_embeddings
        kept, other = (
            ("long", "short")
            if length > rope["original_max_position_embeddings"]
            else ("short", "long")
        )
        for name in ("factor", "mscale"):
            if f"{kept}_{name}" in rope:
                rope[f"{other}_{name}"] = rope[f"{kept}_{name}"]
