"""The probe: a model is served if the engine's first tokens are those of transformers' own generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from engine.attention import ATTENTION, PagedContext, UnsupportedModelError
from engine.kv_cache import KVCache, LayerShapes
from engine.model_config import refusal
from engine.model_head import heads_of

_SAME = {torch.float32: 0.9999, torch.bfloat16: 0.99, torch.float16: 0.99}
"""Minimum correlation of the probe's logits with transformers'."""
_BLOCK_SIZE = 4
_PROMPTS = ([11, 22, 33, 44, 55], [7, 14, 21, 28, 35, 42, 49, 56, 63])
_TABLES = ([1, 3], [0, 2, 4])
"""Blocks of each prompt and a token after it."""


class _Recorder(KVCache):
    """Records the shapes of the layers, and stores nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShapes] = {}
        self.block_size = self.gather_tokens = 1

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self.layers:
            raise UnsupportedModelError(f"two attention modules of the model have layer index {layer}")
        self.layers[layer] = LayerShapes(key.shape[1], key.shape[2], value.shape[2])


def record_layers(model: Any, body: torch.nn.Module) -> dict[int, LayerShapes]:
    """Run a token without a cache, and return what the layers would store, by index. The model may be without weights.

    Raises:
        UnsupportedModelError: its attention needs what the engine does not have, or is another one.
    """
    recorder = _Recorder()
    weight = model.get_output_embeddings().weight
    context = PagedContext(np.ones((3, 1), np.int64), [(0, 1, 0, None)])
    with torch.inference_mode():
        context.run(body, recorder, weight.device)
    if not recorder.layers:
        raise UnsupportedModelError("it does not call the attention backend")
    return dict(sorted(recorder.layers.items()))


def probe(model: Any, body: torch.nn.Module) -> tuple[dict[int, LayerShapes], torch.nn.Module]:
    """Prefill two prompts, one in two chunks, decode a token of each together, and compare the logits with those of
    transformers' own generation. No flag of a model says what this shows: that nothing mixes the sequences, and what
    follows the hidden states. Returns what the layers store, and the head.

    Raises:
        UnsupportedModelError: the model cannot be served.
    """
    name = type(model).__name__
    weight = model.get_output_embeddings().weight
    size = model.config.get_text_config(decoder=True).vocab_size
    prompts = [[token % size for token in prompt] for prompt in _PROMPTS]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        generated = [_generate(model, torch.tensor([prompt], device=weight.device)) for prompt in prompts]
    firsts = [int(output.sequences[0, -2]) for output in generated]
    model.set_attn_implementation(ATTENTION)
    try:
        layers = record_layers(model, body)
    except (UnsupportedModelError, TypeError) as error:
        raise refusal(name, str(error)) from error
    cache = KVCache(layers, sum(map(len, _TABLES)), _BLOCK_SIZE, weight.dtype, weight.device)
    with torch.inference_mode():
        hidden = torch.cat([step.run(body, cache, weight.device)[rows] for step, rows in _steps(prompts, firsts)])
        expected = torch.cat([output.logits[step] for step in range(2) for output in generated])
        for head in heads_of(model, hidden):
            if _alike(head(hidden).float(), expected.float(), _SAME[weight.dtype]):
                return layers, head
    raise refusal(name, "its logits with paged attention differ from transformers' own")


def _generate(model: Any, prompt: torch.Tensor) -> Any:
    """Generate two tokens greedily, by transformers alone."""
    config = GenerationConfig(
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)


def _steps(prompts: list[list[int]], firsts: list[int]) -> Iterator[tuple[PagedContext, list[int]]]:
    """Yield the steps of the probe, each with the rows of its hidden states that predict a token."""
    short, long = prompts
    of_short, of_long = _TABLES
    yield PagedContext(_packed((short, 0, of_short), (long[:5], 0, of_long)), [(0, 5, 0, None), (5, 10, 0, None)]), [4]
    yield PagedContext(_packed((long[5:], 5, of_long)), [(0, 4, 5, np.array([of_long]))]), [3]
    packed = _packed((firsts[:1], len(short), of_short), (firsts[1:], len(long), of_long))
    yield PagedContext(packed, [], np.array([[*of_short, 0], of_long])), [0, 1]


def _packed(*spans: tuple[list[int], int, list[int]]) -> NDArray[np.int64]:
    """Return `PagedContext.packed` of spans: tokens, the position of the first, and the sequence's blocks."""
    parts = []
    for tokens, start, table in spans:
        positions = np.arange(start, start + len(tokens))
        slots = np.array(table)[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        parts.append(np.stack([tokens, positions, slots]))
    return np.concatenate(parts, axis=1)


def _alike(ours: torch.Tensor, theirs: torch.Tensor, least: float) -> bool:
    if ours.shape != theirs.shape or not torch.allclose(ours.std(), theirs.std(), rtol=0.05):
        return False
    pairs = torch.stack([ours.flatten(), theirs.flatten()])
    return bool(torch.corrcoef(pairs.double())[0, 1] >= least)
