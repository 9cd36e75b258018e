"""Probe a model with recurrent layers: what states it has, and whether it computes with ours what transformers does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.attention import ATTENTION, PagedContext, Prefill, UnsupportedModelError
from engine.kv_cache import KVCache, LayerShapes
from engine.model_head import heads_of
from engine.recurrent import RecurrentStates, StateLayout, StepStates

_BLOCK = 16
"""One block holds a prompt of the probe."""
_PREFILLED = 8
"""Tokens of the first chunk."""


def probe_recurrent(
    model: Any, recorder: Any, alike: Callable[[torch.Tensor, torch.Tensor], bool]
) -> tuple[dict[int, LayerShapes], StateLayout, torch.nn.Module]:
    """Run a prefill, a second chunk and two decodes together, and compare the logits with those of transformers' own
    cached decode. `recorder` is a `KVCache` that records the shapes of layers, and `alike` compares logits.

    Returns the layers with keys and values, the layout of the states, and the head that makes the model's logits.
    """
    name = type(model).__name__
    weight = model.get_output_embeddings().weight
    size = model.config.get_text_config(decoder=True).vocab_size
    long, short = (np.arange(1, 1 + count) * factor % size for count, factor in ((13, 7), (6, 11)))
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        theirs = torch.cat([_cached_decode(model, tokens) for tokens in (long, short)])
        model.set_attn_implementation(ATTENTION)
        try:
            layers, layout = _record(model, recorder, long)
        except AttributeError as error:
            if not isinstance(error.obj, StepStates):
                raise
            why = f"its layers need {error.name} of their cache, which has only keys, values and recurrent states"
            raise UnsupportedModelError(f"{name} can't be served: {why}") from error
        if not layout.shapes:
            raise UnsupportedModelError(f"{name} can't be served: its recurrent layers keep their states elsewhere")
        states = RecurrentStates(layout, 2, weight.device)
        cache = KVCache(layers, 2, _BLOCK, weight.dtype, weight.device, states)
        hidden = _decode_together(model, cache, long, short, layout.resumes)
        for head in heads_of(model, hidden):
            if alike(head(hidden).float(), theirs):
                return layers, layout, head
    raise UnsupportedModelError(f"{name} can't be served: its logits with our cache differ from those with its own")


def _argument(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def _cached_decode(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """Return transformers' logits, float32 `[tokens, vocab]`, of a prefill and a decode of the last token."""
    name = _argument(model)
    logits: list[torch.Tensor] = []
    cache = None
    for start, end in ((0, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        ids = torch.from_numpy(tokens[start:end])[None].to(model.device)
        others: dict[str, Any] = {name: cache}
        if name != "cache_params":
            others["position_ids"] = torch.arange(start, end, device=model.device)[None]
        output = model(input_ids=ids, use_cache=True, **others)
        cache = getattr(output, name)
        logits.append(output.logits[0])
    return torch.cat(logits).float()


def _record(model: Any, recorder: Any, tokens: np.ndarray) -> tuple[dict[int, LayerShapes], StateLayout]:
    """Find out the shapes of keys, values and states, and whether a second chunk takes the states of the first."""
    argument = _argument(model)
    states = RecurrentStates(StateLayout({}, argument), 1, model.device)
    recorder.states = states
    _run(model, recorder, tokens[:_PREFILLED], 0, [0])
    layers = dict(sorted(recorder.layers.items()))
    kinds = {kind for kind, *_ in states.shapes}
    layout = StateLayout(states.shapes, argument)
    chunks: list[torch.Tensor] = []
    for kept in (kinds, {"conv"}):  # Mamba 1 takes those of its convolution only
        dtype = model.get_output_embeddings().weight.dtype
        cache = KVCache(layers, 1, _BLOCK, dtype, model.device, RecurrentStates(layout, 1, model.device))
        _run(model, cache, tokens[:_PREFILLED], 0, [0])
        assert cache.states is not None
        cache.states.clear(kinds - kept)
        chunks.append(_run(model, cache, tokens[_PREFILLED:], _PREFILLED, [0]))
    resumes = kinds <= {"conv"} or not torch.equal(*chunks)
    return layers, StateLayout(states.shapes, argument, resumes)


def _decode_together(model: Any, cache: KVCache, long: np.ndarray, short: np.ndarray, resumes: bool) -> torch.Tensor:
    """Return our hidden states `[tokens, hidden]` of the two prompts, in their order."""
    prefilled = _PREFILLED if resumes else len(long) - 1
    parts = [_run(model, cache, long[:prefilled], 0, [0])]
    if resumes:
        parts.append(_run(model, cache, long[prefilled:-1], prefilled, [0]))
    other = _run(model, cache, short[:-1], 0, [1])
    positions = [len(long) - 1, len(short) - 1]
    packed = np.array([[long[-1], short[-1]], positions, [positions[0], _BLOCK + positions[1]]])
    tables = np.array([[0], [1]])
    decodes = PagedContext(packed, [], tables, state_slots=[0, 1]).run(model.base_model, cache, model.device)
    return torch.cat([*parts, decodes[:1], other, decodes[1:]])


def _run(model: Any, cache: KVCache, tokens: np.ndarray, start: int, slots: Sequence[int]) -> torch.Tensor:
    """Compute a chunk of the sequence in one slot."""
    positions = np.arange(start, start + len(tokens))
    packed = np.stack([tokens, positions, slots[0] * _BLOCK + positions])
    prefills: list[Prefill] = [(0, len(tokens), start, np.array([slots]) if start else None)]
    return PagedContext(packed, prefills, state_slots=slots).run(model.base_model, cache, model.device)
