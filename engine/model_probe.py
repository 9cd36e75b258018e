"""The probe: a model is served if the engine's first tokens are those of transformers' own generation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from engine.attention import ATTENTION, PagedContext, UnsupportedModelError
from engine.kv_cache import KVCache, LayerShapes
from engine.model_config import refusal
from engine.model_head import heads_of
from engine.recurrent import RecurrentStates, StateLayout, StepStates, is_recurrent

_SAME = {torch.float32: 0.9999, torch.bfloat16: 0.99, torch.float16: 0.99}
"""Minimum correlation of the probe's logits with transformers'."""
_BLOCK_SIZE = 4
_PROMPTS = ([11, 22, 33, 44, 55], [7, 14, 21, 28, 35, 42, 49, 56, 63])
_TABLES = ([1, 3], [0, 2, 4])
"""Blocks of each prompt and a token after it."""


class _Recorder(KVCache):
    """Records the shapes of the layers, and stores nothing."""

    def __init__(self, states: RecurrentStates | None) -> None:
        self.layers: dict[int, LayerShapes] = {}
        self.block_size = self.gather_tokens = 1
        self.states = states

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self.layers:
            raise UnsupportedModelError(f"two attention modules of the model have layer index {layer}")
        self.layers[layer] = LayerShapes(key.shape[1], key.shape[2], value.shape[2])


def record_layers(model: Any, body: torch.nn.Module) -> tuple[dict[int, LayerShapes], StateLayout | None]:
    """Run a token without a cache, and return what the attention layers would store, by index, and the states of
    recurrent layers. The model may be without weights.

    Raises:
        UnsupportedModelError: its layers need what the engine does not have.
    """
    weight = model.get_output_embeddings().weight
    layout, states = None, None
    if is_recurrent(model.config.get_text_config(decoder=True)):
        parameters = inspect.signature(body.forward).parameters
        layout = StateLayout({}, "cache_params" if "cache_params" in parameters else "past_key_values")
        states = RecurrentStates(layout, 1, weight.device)
    recorder = _Recorder(states)
    context = PagedContext(np.ones((3, 1), np.int64), [(0, 1, 0, None)], state_slots=[0])
    try:
        with torch.inference_mode():
            context.run(body, recorder, weight.device)
    except AttributeError as error:
        if not isinstance(error.obj, StepStates):
            raise
        why = f"its layers need {error.name} of their cache, which has keys, values and recurrent states only"
        raise UnsupportedModelError(why) from error
    if states is not None and layout is not None:
        layout = replace(layout, shapes=states.shapes)
    if not recorder.layers and (layout is None or not layout.shapes):
        raise UnsupportedModelError("it does not call the attention backend")
    return dict(sorted(recorder.layers.items())), layout


def probe(model: Any, body: torch.nn.Module) -> tuple[dict[int, LayerShapes], StateLayout | None, torch.nn.Module]:
    """Prefill two prompts, one in two chunks, decode a token of each together, and compare the logits with those of
    transformers' own generation. No flag of a model says what this shows: that nothing mixes the sequences, and what
    follows the hidden states. Returns what the attention layers store, the states of recurrent layers, and the head.

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
        layers, layout = record_layers(model, body)
    except (UnsupportedModelError, TypeError) as error:
        raise refusal(name, str(error)) from error
    states = None if layout is None else RecurrentStates(layout, len(prompts), weight.device)
    cache = KVCache(layers, sum(map(len, _TABLES)), _BLOCK_SIZE, weight.dtype, weight.device, states)
    with torch.inference_mode():
        steps = _steps(prompts, firsts)
        if layout is not None:
            layout = replace(layout, resumes=_resumes(body, cache, prompts[1]))
            steps = _separate_steps(prompts, firsts, layout.resumes)
        hidden = torch.cat([step.run(body, cache, weight.device)[rows] for step, rows in steps])
        expected = torch.cat([output.logits[step] for step in range(2) for output in generated])
        for head in heads_of(model, hidden):
            if _alike(head(hidden).float(), expected.float(), _SAME[weight.dtype]):
                return layers, layout, head
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


def _separate_steps(
    prompts: list[list[int]], firsts: list[int], resumes: bool
) -> Iterator[tuple[PagedContext, list[int]]]:
    """Yield the same steps for a model with recurrent layers: one per chunk, and the decodes."""
    short, long = prompts
    of_short, of_long = _TABLES
    yield _chunk(short, 0, len(short), 0), [len(short) - 1]
    if resumes:
        yield _chunk(long, 0, 5, 1), []
        yield _chunk(long, 5, len(long), 1), [len(long) - 6]
    else:
        yield _chunk(long, 0, len(long), 1), [len(long) - 1]
    packed = _packed((firsts[:1], len(short), of_short), (firsts[1:], len(long), of_long))
    yield PagedContext(packed, [], np.array([[*of_short, 0], of_long]), state_slots=[0, 1]), [0, 1]


def _chunk(prompt: list[int], start: int, end: int, slot: int) -> PagedContext:
    """Make a step of a chunk of a prompt, with its states in a slot."""
    table = np.array([_TABLES[slot]]) if start else None
    packed = _packed((prompt[start:end], start, _TABLES[slot]))
    return PagedContext(packed, [(0, end - start, start, table)], state_slots=[slot])


def _resumes(body: torch.nn.Module, cache: KVCache, prompt: list[int]) -> bool:
    """Return whether the states before a second chunk change it. Those of Mamba 1 do not, beside its convolution's."""
    assert cache.states is not None
    kinds = {kind for kind, *_ in cache.states.shapes} - {"conv"}
    hidden: list[torch.Tensor] = []
    for cleared in (set[str](), kinds):
        _chunk(prompt, 0, 5, 1).run(body, cache, cache.device)
        cache.states.clear(cleared)
        hidden.append(_chunk(prompt, 5, len(prompt), 1).run(body, cache, cache.device))
    return not kinds or not torch.equal(*hidden)


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
