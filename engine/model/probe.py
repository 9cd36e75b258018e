"""The probe: a model is served if the engine's first tokens are those of transformers'
own generation."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from engine.memory.kv_cache import KVCache, LayerShapes
from engine.memory.recurrent import (
    RecurrentStates,
    StateLayout,
    StepStates,
    is_recurrent,
)
from engine.model.attention import (
    ATTENTION,
    FlattenedRow,
    PagedContext,
    UnsupportedModelError,
)
from engine.model.config import refusal
from engine.model.gathered_attention import Prefill
from engine.model.head import Head, heads_of
from guided.errors import bounded

logger = logging.getLogger(__name__)

_SAME = {torch.float32: 0.9999, torch.bfloat16: 0.99, torch.float16: 0.99}
"""Minimum correlation of the probe's logits with transformers'."""
_BLOCK = 16
"""Tokens of a block. Each sequence of the probe has one, of its number."""
_PROMPTS = ([11, 22, 33, 44, 55], [7, 14, 21, 28, 35, 42, 49, 56, 63])
_CHUNK = 4
"""Tokens of the first chunk of the second prompt."""

Span = tuple[list[int], int, int]
"""Tokens of a sequence, the position of the first, and the sequence's number."""


class _Recorder(KVCache):
    """Records the shapes of the layers, and stores nothing."""

    def __init__(self, weight: Tensor, states: RecurrentStates | None) -> None:
        super().__init__({}, 1, 1, weight.dtype, weight.device, states)
        self.gathers = True
        self.layers: dict[int, LayerShapes] = {}

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        if layer in self.layers:
            raise UnsupportedModelError(
                f"two attention modules of the model have layer index {layer}"
            )
        self.layers[layer] = LayerShapes(key.shape[1], key.shape[2], value.shape[2])


class Probe:
    """Runs short sequences through the part of a model that the engine runs.

    Args:
        model: of transformers, which generates text.
        body: the language model in it, without its head.
    """

    def __init__(self, model: Any, body: torch.nn.Module) -> None:
        self.layers: dict[int, LayerShapes] = {}
        """What attention layers store of a token."""
        self.layout: StateLayout | None = None
        """What recurrent layers store of a sequence."""
        self._model = model
        self._body = body
        self._weight = model.get_output_embeddings().weight
        config = model.config.get_text_config(decoder=True)
        self._prompts = [
            [token % config.vocab_size for token in prompt] for prompt in _PROMPTS
        ]
        if is_recurrent(config):
            parameters = inspect.signature(model.forward).parameters
            self.layout = StateLayout(
                {},
                "cache_params" if "cache_params" in parameters else "past_key_values",
            )

    def record(self) -> None:
        """Find out what the layers store. The model may be without weights, on the
        device "meta".

        Raises:
            UnsupportedModelError: its attention or its cache needs what the engine does
                not have.
        """
        recorder = _Recorder(self._weight, self._new_states())
        self._model.set_attn_implementation(ATTENTION)
        try:
            self._prefill(recorder, (self._prompts[0], 0, 0))
        except AttributeError as error:
            if not isinstance(error.obj, StepStates | FlattenedRow):
                raise
            why = f"its layers need {error.name} of their cache, which has only keys, values and recurrent states"
            raise self._refusal(why) from error
        except (UnsupportedModelError, TypeError) as error:
            raise self._refusal(str(error)) from error
        self.layers = dict(sorted(recorder.layers.items()))
        if self.layout is not None and recorder.states is not None:
            self.layout = StateLayout(recorder.states.shapes, self.layout.argument)
        if not self.layers and (self.layout is None or not self.layout.shapes):
            raise self._refusal("it does not call the attention backend")

    def find_head(self) -> Head:
        """Prefill two prompts, one in two chunks, decode a token of each together, and
        compare the logits with those of transformers' own generation. No flag of a
        model says what this shows: that nothing mixes the sequences, and what follows
        the hidden states.

        Raises:
            UnsupportedModelError: the logits differ.
        """
        self._model.set_attn_implementation("eager")
        generated = [self._generate(prompt) for prompt in self._prompts]
        self._model.set_attn_implementation(ATTENTION)
        self._firsts = [int(output.sequences[0, -2]) for output in generated]
        self._expected = torch.cat(
            [output.logits[step] for step in range(2) for output in generated]
        ).float()
        hidden = self._compute()
        for head in heads_of(self._model, hidden):
            if self._agrees(head(hidden)):
                return head
        raise self._refusal(
            "its logits with paged attention differ from transformers' own"
        )

    def optimise(
        self,
        head: Head,
        change: Callable[[], None],
        undo: Callable[[], None],
        name: str,
    ) -> None:
        """Change the model's kernels. If the logits are no longer those of
        transformers' own generation, or `change` raises, `undo` it with a warning, in
        which the kernels are called `name`."""
        try:
            change()
            if self._agrees(self.run(head)):
                return
            why = "the logits would differ"
        except Exception as error:
            why = bounded(repr(error))
        undo()
        logger.warning("the model runs without %s: %s", name, why)

    def run(self, head: Head) -> Tensor:
        """Compute the logits of the probe's tokens: `[4, padded_vocab_size]`."""
        return head(self._compute())

    def _agrees(self, logits: Tensor) -> bool:
        return _alike(logits.float(), self._expected, _SAME[self._weight.dtype])

    def _compute(self) -> Tensor:
        """Compute the hidden states of which `find_head` compares the logits."""
        short, long = self._prompts
        begin = (long[:_CHUNK], 0, 1)
        end = (long[_CHUNK:], _CHUNK, 1)
        other = (short, 0, 0)
        steps: list[tuple[Span, ...]] = [(begin, other), (end,)]
        if self.layout is not None:
            resumes = self._resumes(begin, end)
            self.layout = StateLayout(self.layout.shapes, self.layout.argument, resumes)
            if resumes:
                steps = [(other,), (begin,), (end,)]
            else:
                steps = [(other,), ((long, 0, 1),)]
        cache = self._new_cache()
        last = [self._prefill(cache, *spans)[-1:] for spans in steps]
        tokens: list[Span] = [
            ([self._firsts[row]], len(prompt), row)
            for row, prompt in enumerate(self._prompts)
        ]
        decodes = PagedContext(
            _packed(tokens), [], np.array([[0], [1]]), state_slots=[0, 1]
        )
        return torch.cat(
            [last[0], last[-1], decodes.run(self._body, cache, self._weight.device)]
        )

    def _resumes(self, begin: Span, end: Span) -> bool:
        """Return whether a second chunk takes the states of the first. Mamba 1 takes
        those of its convolution only."""
        outputs: list[Tensor] = []
        for forgets in (False, True):
            cache = self._new_cache()
            self._prefill(cache, begin)
            if forgets and cache.states is not None:
                for (kind, *_), tensor in cache.states.tensors.items():
                    tensor.mul_(kind == "conv")
            outputs.append(self._prefill(cache, end))
        has_others = self.layout is not None and any(
            kind != "conv" for kind, *_ in self.layout.shapes
        )
        return not (has_others and torch.equal(*outputs))

    def _prefill(self, cache: KVCache, *spans: Span) -> Tensor:
        """Compute spans of sequences: hidden states `[tokens, hidden]`."""
        prefills: list[Prefill] = []
        total = 0
        for tokens, start, _ in spans:
            total += len(tokens)
            prefills.append((total - len(tokens), total, start))
        rows = [row for *_, row in spans]
        step = PagedContext(
            _packed(spans), prefills, np.array(rows)[:, None], state_slots=rows
        )
        return step.run(self._body, cache, self._weight.device)

    def _new_states(self) -> RecurrentStates | None:
        if self.layout is None:
            return None
        return RecurrentStates(self.layout, len(_PROMPTS), self._weight.device)

    def _new_cache(self) -> KVCache:
        place = self._weight.dtype, self._weight.device
        return KVCache(self.layers, len(_PROMPTS), _BLOCK, *place, self._new_states())

    def _generate(self, prompt: list[int]) -> Any:
        """Generate two tokens greedily, by transformers alone."""
        ids = torch.tensor([prompt], device=self._weight.device)
        config = GenerationConfig(
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )

    def _refusal(self, why: str) -> UnsupportedModelError:
        return refusal(type(self._model).__name__, why)


def _packed(spans: Iterable[Span]) -> NDArray[np.int64]:
    """Return `PagedContext.packed` of spans."""
    parts = []
    for tokens, start, row in spans:
        positions = np.arange(start, start + len(tokens))
        parts.append(np.stack([tokens, positions, row * _BLOCK + positions]))
    return np.concatenate(parts, axis=1)


def _alike(ours: Tensor, theirs: Tensor, least: float) -> bool:
    if ours.shape != theirs.shape or not torch.allclose(
        ours.std(), theirs.std(), rtol=0.05
    ):
        return False
    pairs = torch.stack([ours.flatten(), theirs.flatten()])
    return bool(torch.corrcoef(pairs.double())[0, 1] >= least)
