"""Make lm-format-enforcer 0.11.3 importable beside transformers 5 and vLLM 0.32.

They have moved names that its integrations and vLLM's backend for it import. `fix_lm_format_enforcer_imports` puts
these names back at their old places.
"""

from __future__ import annotations

import importlib
import sys


def fix_lm_format_enforcer_imports(vllm: bool = False) -> None:
    """Restore the names. Call it before an integration is imported.

    Args:
        vllm: also for the integration with vLLM.
    """
    import transformers

    tokenization = importlib.import_module("transformers.tokenization_utils")
    if not hasattr(tokenization, "PreTrainedTokenizerBase"):
        tokenization.__dict__["PreTrainedTokenizerBase"] = transformers.PreTrainedTokenizerBase
    name = "vllm.transformers_utils.tokenizer"
    if vllm and name not in sys.modules:
        sys.modules[name] = importlib.import_module("vllm.tokenizers.mistral")
