"""The embedded default model: a tiny Llama checkpoint, and the scripts that made it.

`checkpoint_path()` is all that serving needs; `corpus`, `tokenizer` and `train` are only for making it anew.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["checkpoint_path"]


def checkpoint_path() -> Path:
    """The directory of the embedded checkpoint, in Hugging Face layout."""
    return Path(__file__).parent / "checkpoint"
