"""engine: a vLLM-style engine that hosts guided decoding, on transformers' modeling
code.

Names are imported when they are first used, so that `guided --help` doesn't wait for
torch and transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM as AsyncLLM
    from engine.base_llm import AsyncEngineArgs as AsyncEngineArgs
    from engine.config import EngineConfig as EngineConfig
    from engine.llm import LLM as LLM
    from engine.llm_engine import LLMEngine as LLMEngine
    from engine.outputs import CompletionOutput as CompletionOutput
    from engine.outputs import RequestOutput as RequestOutput
    from engine.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "llm",
    "AsyncEngineArgs": "base_llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "LLMEngine": "llm_engine",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"engine.{_HOMES[name]}"), name)
