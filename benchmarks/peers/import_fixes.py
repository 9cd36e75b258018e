"""lm-format-enforcer 0.11.3 imports names from places that transformers 5 and vLLM 0.32 have moved them from, so that
neither its own integrations nor vLLM's backend of that name can be imported. Put back where it looks for them, they
work: it is measured as it would run."""

from __future__ import annotations

import importlib
import sys

__all__ = ["fix_lm_format_enforcer_imports"]


def fix_lm_format_enforcer_imports(vllm: bool = False) -> None:
    """Before its integration is imported.

    Args:
        vllm: its integration with vLLM.
    """
    import transformers

    tokenization = importlib.import_module("transformers.tokenization_utils")
    if not hasattr(tokenization, "PreTrainedTokenizerBase"):
        tokenization.__dict__["PreTrainedTokenizerBase"] = transformers.PreTrainedTokenizerBase
    name = "vllm.transformers_utils.tokenizer"
    if vllm and name not in sys.modules:
        sys.modules[name] = importlib.import_module("vllm.tokenizers.mistral")
