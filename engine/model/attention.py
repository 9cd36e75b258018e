"""Paged attention for transformers' models: keys and values are stored in blocks, and
block tables find them.

transformers' modeling code calls the function through its `AttentionInterface`. All
sequences of a step are flattened in one row: chunks of prefills first, then one token
of each decoding one. (The layout is vLLM's, arXiv:2309.06180.) The step is a context
variable, because not every model passes its keywords on to its attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from engine.memory.kv_cache import KVCache
from engine.memory.recurrent import StepStates
from engine.model.gathered_attention import GatheredAttention, Prefill, Scores, Span

ATTENTION = "guided_paged"
"""The name of `paged_attention` as an `attn_implementation`."""

_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "is_causal",
        "use_cache",
        "output_attentions",
        "dropout",
    }
)
"""Keywords that models pass to attention functions and that this one can ignore."""
_NOT_PASSED = 0
_ALL = 1 << 30
"""More tokens than any sequence has."""


class UnsupportedModelError(ValueError):
    """The engine cannot serve this model. The message says why."""


class FlattenedRow:
    """Takes the place of transformers' `Cache`, for models that count the tokens before
    a step's themselves."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int | None = None) -> Tensor | int:
        """Return what a layer adds to the place of each token in the row to get its
        position in its sequence. Models ask without a layer: they know the
        positions."""
        if layer_idx is None:
            return 0
        return self._positions - torch.arange(
            len(self._positions), device=self._positions.device
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """Leave the keys and values to `paged_attention`."""
        return key_states, value_states


class StepTensors(NamedTuple):
    """What a forward pass reads, on the device. All are int64. A row that pads a decode
    step to a fixed size has position 0, the first slot of the cache's last block, and
    any blocks."""

    packed: Tensor
    """`[3, tokens]`: as `PagedContext.packed`."""
    starts: Tensor
    """`[sequences + 1]`: first token of each sequence, and number of tokens."""
    tables: Tensor
    """`[sequences, blocks]`: blocks of each sequence, padded with any valid block."""
    state_slots: Tensor
    """As `PagedContext.state_slots`."""


@dataclass
class PagedContext:
    """A step for the model: the chunks' tokens first, then one of each decoding
    sequence. With tensor parallelism each rank gets it."""

    packed: NDArray[np.int64]
    """int64 `[3, tokens]`: token ids, positions and slots. One array, so that one
    transfer is enough."""
    prefills: Sequence[Prefill]
    tables: NDArray[np.int64]
    """int64 `[prefills + decodes, blocks]`: blocks of the sequences, padded with any
    valid block."""
    copies: Sequence[tuple[int, int]] = ()
    """As `Batch.copies`."""
    state_slots: Sequence[int] = ()
    """Slots of the sequences, for a model with recurrent layers: of those of one chunk,
    or of all that decode."""
    state_copies: Sequence[tuple[int, int]] = ()
    """As `BlockManager.row_copies`."""
    states: StepStates | None = field(default=None, init=False)
    """The recurrent states of the forward pass, while it runs."""

    @property
    def num_decodes(self) -> int:
        """Number of decoding sequences."""
        return len(self.tables) - len(self.prefills)

    def run(
        self, body: torch.nn.Module, cache: KVCache, device: torch.device
    ) -> Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`, in the order of the
        input."""
        self.copy(cache)
        return self.forward(body, cache, self.send(device))

    def copy(self, cache: KVCache) -> None:
        """Copy the blocks and states that the forward pass writes, where they are
        shared."""
        if self.copies:
            cache.copy_blocks(self.copies)
        if cache.states is not None:
            cache.states.copy(self.state_copies)

    def send(self, device: torch.device) -> StepTensors:
        """Copy what the forward pass reads to the device."""
        total = self.packed.shape[1]
        starts = [start for start, *_ in self.prefills]
        starts += range(total - self.num_decodes, total + 1)
        parts = [
            self.packed,
            np.array(starts),
            self.tables,
            np.array(self.state_slots, np.int64),
        ]
        # One transfer is faster than four.
        sent = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(
            device, non_blocking=True
        )
        tensors = torch.split(sent, [part.size for part in parts])
        return StepTensors(
            *(
                tensor.view(part.shape)
                for tensor, part in zip(tensors, parts, strict=True)
            )
        )

    def forward(
        self, body: torch.nn.Module, cache: KVCache, tensors: StepTensors
    ) -> Tensor:
        """Run the forward pass on what is on the device: hidden states `[tokens,
        hidden]`. With a cache that does not gather, a CUDA graph can hold it: it waits
        for nothing, and reads nothing else of this object than the number of prefills
        and of decoding sequences."""
        tokens, positions, _ = tensors.packed
        self.move(cache, tensors)
        rows = 1
        name = "past_key_values"
        if cache.states is not None:
            rows = self.num_decodes or 1
            name = cache.states.argument
            is_new = any(before == 0 for *_, before in self.prefills)
            self.states = StepStates(cache.states, tensors.state_slots, rows, is_new)
        others: dict[str, Any] = {name: self.states or FlattenedRow(positions)}
        # Kernels of Triton, as Liger's, are launched on the current device.
        with torch.cuda.device_of(tokens), running(self):  # type: ignore[no-untyped-call]
            output = body(
                input_ids=tokens.view(rows, -1),
                position_ids=positions.view(rows, -1),
                use_cache=False,
                **others,
            )
        if self.states is not None:
            self.states.finish()
        # Mamba adds its layers up in float32.
        hidden: Tensor = output.last_hidden_state.flatten(0, 1).to(cache.dtype)
        return hidden

    def move(self, cache: KVCache, tensors: StepTensors) -> None:
        """Prepare the attention of the step."""
        self.cache = cache
        self.tensors = tensors
        if cache.gathers:
            lengths = np.asarray(
                self.packed[1, self.packed.shape[1] - self.num_decodes :] + 1
            )
            self.gathered = GatheredAttention(
                cache, tensors.tables, self.prefills, lengths
            )


_step: ContextVar[PagedContext] = ContextVar("step")


@contextmanager
def running(step: PagedContext) -> Iterator[None]:
    """Give the step to the attention of a model that runs in this context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Store this layer's keys and values, `[1, kv_heads, tokens, dim]`, and compute the
    attention of `query`, `[1, heads, tokens, dim]`: `[1, tokens, heads, dim]`, and None
    for its weights.

    Args:
        sliding_window: number of tokens that a token attends to, with itself. None:
            all. Without it, the configuration says what the layer attends to.
        softcap: bound of the scores, which a tanh keeps.
        s_aux: attention sinks `[heads]`: the score of a key without a value.
        attention_mask: None.
    """
    others["attention_mask"] = attention_mask
    unknown = sorted(
        name for name in others.keys() - _HARMLESS if others[name] is not None
    )
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which is not supported"
        )
    paged = _step.get()
    layer: int = module.layer_idx if paged.states is None else paged.states.layer  # type: ignore[assignment]
    rows = len(query)
    if rows > 1:  # one token of each decoding sequence, see `StepStates`
        query, key, value = (part.transpose(0, 2) for part in (query, key, value))
    if sliding_window == _NOT_PASSED:
        span = _span(module.config, layer)
    else:
        span = Span(sliding_window)
    scores = Scores(scaling, softcap, s_aux)
    cache = paged.cache
    tensors = paged.tensors
    cache.write(
        layer, tensors.packed[2], key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    if not cache.gathers:
        # not every installation has Triton
        from engine.model.paged_kernel import attend

        attended = attend(
            query[0].transpose(0, 1), cache.keys[layer], cache.values[layer], s_aux, tensors.packed[1], tensors.starts,
            tensors.tables, cache.block_size, scaling or query.shape[3] ** -0.5, softcap, span.length or _ALL,
            span.is_chunk,
        )  # fmt: skip
        return attended.view(rows, -1, *attended.shape[1:]), None
    attended = paged.gathered.attend(query, key, value, layer, scores, span)
    return attended.view(rows, -1, *attended.shape[2:]), None


def _span(config: Any, layer: int) -> Span:
    """Return what a layer attends to, by its configuration. Some models know it by
    their mask only."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        kind = layer_types[layer]
    else:
        kind = "sliding_attention"
    if kind == "chunked_attention":
        return Span(config.attention_chunk_size, is_chunk=True)
    return Span(
        getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    )


# There is no entry in `AttentionMaskInterface`: without one, transformers builds no
# mask, and does not search the positions for packed sequences, which costs as much as
# one layer's attention.
AttentionInterface.register(ATTENTION, paged_attention)
