"""Keyword arguments of the Python interface. An unknown one is refused, with what works
instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from guided.errors import InvalidRequest

_CONSTRAINTS = "give json_schema, json_object, regex, choice or grammar"
_LOADED = "give it with the name of a model, which is then loaded that way"
_DRAFTS = "draft tokens are not supported: serve with vLLM and guided (docs/vllm.md)"
_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_REFUSED: dict[str, tuple[object, ...]] = {
    "guided_decoding": (_CONSTRAINTS,),
    "structured_outputs": (_CONSTRAINTS,),
    "guided_json": ("give json_schema",),
    "guided_regex": ("give regex",),
    "guided_choice": ("give choice",),
    "guided_grammar": ("give grammar",),
    "logits_processors": (
        "give them to LLM(logits_processors=...), and their arguments as extra_args",
    ),
    "beam_width": ("give use_beam_search=True and best_of",),
    "detokenize": ("text is always there", True),
    "gpu_memory_utilization": ("give kv_cache_bytes",),
    "swap_space": ("preempted sequences are computed again",),
    "dtype": (_LOADED,),
    "device": (_LOADED,),
    "tokenizer": (_LOADED,),
    "revision": (_LOADED,),
    "tensor_parallel_size": (_LOADED, 1),
    "pipeline_parallel_size": ("give tensor_parallel_size", 1),
    "quantization": ("the checkpoint's own dtype is used",),
    "trust_remote_code": ("only models of transformers itself are served", False),
    "speculative_config": (_DRAFTS,),
    "num_speculative_tokens": (_DRAFTS,),
    "prefix_pos": ("beginnings are found again by themselves (enable_prefix_caching)",),
    "lora_request": (_LORA,),
    "enable_lora": (_LORA, False),
    "multi_modal_data": ("prompts are text or token ids",),
}
"""Keyword of vLLM: what to do instead, and values without an effect, beside None."""


def accept(of: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the keywords, without those of vLLM that have no effect here. Unknown ones
    are refused."""
    accepted = dict(given)
    for name, value in given.items():
        if name in _REFUSED and (value is None or value in _REFUSED[name][1:]):
            del accepted[name]
    refuse_unknown(of, accepted, known)
    return accepted


def refuse_unknown(of: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keywords that are not known, and say what works instead. `param` of the
    error is the keyword."""
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, 1)
        if name in _REFUSED:
            why = _REFUSED[name][0]
        elif close:
            why = f"did you mean {close[0]}?"
        else:
            why = f"known are {', '.join(sorted(known))}"
        raise InvalidRequest(f"{of} has no {name}: {why}", param=name)
