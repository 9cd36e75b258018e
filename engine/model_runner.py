"""ModelRunner: computes the logits of a scheduled batch. All sequences of a step are flattened in one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.attention import PagedContext, Prefill
from engine.block_manager import BlockManager
from engine.kv_cache import KVCache
from engine.model_loader import LoadedModel
from engine.scheduler import ScheduledBatch


class ModelRunner:
    """Runs the model's body on a batch, and its head on the sampled rows."""

    def __init__(self, model: LoadedModel, cache: KVCache, blocks: BlockManager) -> None:
        self._model = model
        self._cache = cache
        self._blocks = blocks

    def _prepare_inputs(self, batch: ScheduledBatch) -> dict[str, Any]:
        """Build the model's arguments: token ids and positions, int64 `[1, tokens]`, and the attention's context.

        The chunks' tokens come first, then one token of each decoding sequence. Token ids, positions and slots are
        one array, so that one transfer is enough.
        """
        size, tables, row_of = self._cache.block_size, self._blocks.tables, self._blocks.row
        decodes = batch.decodes
        num_prefilled = sum(chunk.end - chunk.start for chunk in batch.prefills)
        device = self._model.device
        packed = np.empty((3, num_prefilled + len(decodes)), dtype=np.int64)
        token_ids, positions, slots = packed
        prefills: list[Prefill] = []
        end = 0
        for chunk in batch.prefills:
            sequence, start = chunk.sequences[0], end
            end += chunk.end - chunk.start
            row = row_of(sequence.seq_id)
            token_ids[start:end] = sequence.data.span(chunk.start, chunk.end) + chunk.drafts
            positions[start:end] = at = np.arange(chunk.start, chunk.end)
            slots[start:end] = tables[row, at // size] * size + at % size
            table = None
            if chunk.start:
                table = torch.from_numpy(tables[row : row + 1, : -(-chunk.end // size)]).to(device, copy=True)
            prefills.append(Prefill(start, end, chunk.start, table))
        rows = [row_of(sequence.seq_id) for sequence in decodes]
        width = 0
        if decodes:
            token_ids[end:] = [sequence.last_token for sequence in decodes]
            positions[end:] = lengths = [sequence.length - 1 for sequence in decodes]
            block, offset = np.divmod(positions[end:], size)
            slots[end:] = tables[rows, block] * size + offset
            width = max(lengths) // size + 1
        tokens_at, positions_at, slots_at = torch.from_numpy(packed).to(device, non_blocking=True)
        tables_at = torch.from_numpy(tables[rows, :width]).to(device, non_blocking=True)
        context = PagedContext(self._cache, slots_at, prefills, tables_at, positions_at[end:] + 1, size)
        return {"input_ids": tokens_at[None], "position_ids": positions_at[None], "paged": context}

    def execute(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`, in the order of the input."""
        inputs = self._prepare_inputs(batch)
        if batch.copies:
            self._cache.copy_blocks(batch.copies)
        hidden: torch.Tensor = self._model.body(**inputs, use_cache=False).last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor, selected: torch.Tensor | None) -> torch.Tensor:
        """Compute the logits of the selected rows, or of all: float32 `[rows, padded_vocab_size]`."""
        if selected is not None:
            hidden = hidden.index_select(0, selected)
        logits: torch.Tensor = self._model.head(hidden)
        return logits.float()
