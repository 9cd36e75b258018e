"""ModelRunner: a scheduled batch into logits. All sequences of a step are one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention import PagedContext
from engine.block_manager import BlockManager
from engine.kv_cache import KVCache
from engine.model_loader import LoadedModel
from engine.sampling_metadata import SamplingMetadata
from engine.scheduler import ScheduledBatch

__all__ = ["ModelInput", "ModelRunner"]


@dataclass(slots=True)
class ModelInput:
    """One forward pass."""

    token_ids: torch.Tensor
    """int64 `[1, tokens]`: the prefills' tokens, then one of each decoding sequence."""
    positions: torch.Tensor
    """int64 `[1, tokens]`."""
    context: PagedContext


class ModelRunner:
    """Runs the model's body on a batch and its head on the rows that are sampled."""

    def __init__(self, model: LoadedModel, cache: KVCache, blocks: BlockManager) -> None:
        self._model = model
        self._cache = cache
        self._blocks = blocks

    def prepare_inputs(self, batch: ScheduledBatch) -> ModelInput:
        """Token ids, positions and slots of a batch. No Python loop over decoding sequences beyond reading them."""
        size, tables = self._cache.block_size, self._blocks.tables
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        prefills: list[tuple[int, int]] = []
        for prefill in batch.prefills:
            sequence = prefill.sequences[0]
            start = len(token_ids)
            token_ids += sequence.data.token_ids
            prefills.append((start, len(token_ids)))
            at = np.arange(sequence.length)
            positions.append(at)
            slots.append(tables[self._blocks.row(sequence.seq_id), at // size] * size + at % size)
        decodes = batch.decodes
        row_of = self._blocks.row
        token_ids += [sequence.last_token for sequence in decodes]
        lengths = np.array([sequence.length for sequence in decodes], dtype=np.int64)
        rows = np.array([row_of(sequence.seq_id) for sequence in decodes], dtype=np.int64)
        at = lengths - 1
        positions.append(at)
        slots.append(tables[rows, at // size] * size + at % size)
        width = int(at.max()) // size + 1 if decodes else 0
        context = PagedContext(
            self._cache,
            self._to_device(np.concatenate(slots)),
            prefills,
            self._to_device(tables[rows, :width]),
            self._to_device(lengths),
            size,
        )
        return ModelInput(
            self._to_device(np.array(token_ids, dtype=np.int64))[None],
            self._to_device(np.concatenate(positions))[None],
            context,
        )

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """The forward pass: hidden states `[tokens, hidden]`, in the order of `ModelInput.token_ids`."""
        inputs = self.prepare_inputs(batch)
        if batch.copies:
            self._cache.copy_blocks(batch.copies)
        output = self._model.body(
            input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False, paged=inputs.context
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def prepare_logits(self, hidden: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """The hidden states of the rows that are sampled, `[rows, hidden]`: one row a sequence."""
        return hidden if metadata.selected is None else hidden.index_select(0, metadata.selected)

    def compute_logits(self, hidden: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Logits of the sampled rows: float32 `[rows, padded_vocab_size]`."""
        logits: torch.Tensor = self._model.head(self.prepare_logits(hidden, metadata))
        return logits.float()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)
