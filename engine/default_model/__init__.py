"""The embedded default model: a tiny Llama checkpoint.
`examples/default_model_training/` trains one like it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["checkpoint_path"]


def checkpoint_path() -> Path:
    """Return the directory of the embedded checkpoint, in Hugging Face layout."""
    return Path(__file__).parent / "checkpoint"
