"""Keyword arguments of the Python interface. An unknown one is refused, with what works instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from guided.errors import InvalidRequest

_CONSTRAINTS = "give json_schema, json_object, regex, choice or grammar"
_NOT_SUPPORTED: dict[str, str] = {
    "guided_decoding": _CONSTRAINTS,
    "structured_outputs": _CONSTRAINTS,
    "guided_json": "give json_schema",
    "guided_regex": "give regex",
    "guided_choice": "give choice",
    "guided_grammar": "give grammar",
    "logits_processors": "give them to LLM(logits_processors=...), and their arguments as extra_args",
    "beam_width": "give use_beam_search=True and best_of",
    "detokenize": "text is always there",
    "gpu_memory_utilization": "give kv_cache_bytes",
    "swap_space": "preempted sequences are computed again",
    **dict.fromkeys(
        ("dtype", "device", "tokenizer", "revision", "tensor_parallel_size"),
        "give it with the name of a model, which is then loaded that way",
    ),
    "pipeline_parallel_size": "give tensor_parallel_size",
    "quantization": "the checkpoint's own dtype is used",
    "trust_remote_code": "only models of transformers itself are served",
    **dict.fromkeys(
        ("speculative_config", "num_speculative_tokens"),
        "draft tokens are not supported: serve with vLLM and guided (docs/vllm.md)",
    ),
    "prefix_pos": "beginnings are found again by themselves (enable_prefix_caching)",
    "lora_request": "LoRA adapters are not supported: merge them into the checkpoint",
    "enable_lora": "LoRA adapters are not supported: merge them into the checkpoint",
    "multi_modal_data": "prompts are text or token ids",
}
"""By keyword of vLLM: what to do instead."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "detokenize": (True,),
    "enable_lora": (False,),
}
"""Values without an effect, besides None."""


def without_neutral(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without those of vLLM that have no effect here."""
    return {
        name: value
        for name, value in given.items()
        if name not in _NOT_SUPPORTED or not (value is None or value in _NEUTRAL.get(name, ()))
    }


def refuse_unknown(of: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keywords that are not known, and say what works instead. `param` of the error is the keyword."""
    for name in given:
        if name in known:
            continue
        why = _NOT_SUPPORTED.get(name)
        if why is None:
            close = difflib.get_close_matches(name, known, 1)
            if close:
                why = f"did you mean {close[0]}?"
            else:
                why = f"known are {', '.join(sorted(known))}"
        raise InvalidRequest(f"{of} has no {name}: {why}", param=name)
