"""ModelRunner: computes the logits of a scheduled batch. All sequences of a step are flattened in one row; a model with
recurrent layers (`engine/recurrent.py`) runs once per chunk of a prefill, and once for all decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Tokens

import numpy as np
import torch

from engine.attention import PagedContext, Prefill
from engine.batch import Batch, Chunk
from engine.block_manager import BlockManager
from engine.kv_cache import KVCache
from engine.model_loader import LoadedModel
from engine.ranks import CacheSize, Selection, run_steps
from engine.sequence import Sequence


def read_batch(batch: Batch, blocks: BlockManager, has_states: bool) -> list[PagedContext]:
    """Read the forward passes of a batch: one, or, with recurrent layers, one per chunk and one for the decodes."""
    if has_states:
        steps = [_read([chunk], [], blocks) for chunk in batch.prefills]
        if batch.decodes:
            steps.append(_read([], batch.decodes, blocks))
    else:
        steps = [_read(batch.prefills, batch.decodes, blocks)]
    steps[0].copies = batch.copies
    steps[0].state_copies, blocks.row_copies = blocks.row_copies, []
    return steps


def _read(chunks: Tokens[Chunk], decodes: Tokens[Sequence], blocks: BlockManager) -> PagedContext:
    """Read the tokens, blocks and slots of one forward pass."""
    size, tables, row_of = blocks.block_size, blocks.tables, blocks.rows
    num_prefilled = sum(chunk.end - chunk.start for chunk in chunks)
    packed = np.empty((3, num_prefilled + len(decodes)), dtype=np.int64)
    token_ids, positions, slots = packed
    prefills: list[Prefill] = []
    end = 0
    for chunk in chunks:
        start = end
        end += chunk.end - chunk.start
        first = chunk.sequences[0]
        row = row_of[first.seq_id]
        token_ids[start:end] = first.data.span(chunk.start, chunk.end)
        positions[start:end] = at = np.arange(chunk.start, chunk.end)
        slots[start:end] = tables[row, at // size] * size + at % size
        table = tables[row : row + 1, : -(-chunk.end // size)].copy() if chunk.start else None
        prefills.append((start, end, chunk.start, table))
    rows = [row_of[sequence.seq_id] for sequence in decodes]
    width = 0
    if decodes:
        token_ids[end:] = [sequence.last_token for sequence in decodes]
        positions[end:] = lengths = [sequence.length - 1 for sequence in decodes]
        block, offset = np.divmod(positions[end:], size)
        slots[end:] = tables[rows, block] * size + offset
        width = max(lengths) // size + 1
    slots_of_states = [row_of[sequence.seq_id] for chunk in chunks for sequence in chunk.sequences] + rows
    return PagedContext(packed, prefills, tables[rows, :width], state_slots=slots_of_states)


class ModelRunner:
    """Runs the model's body on a batch, and its head on the sampled rows. With tensor parallelism, on all ranks."""

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        self._model, self._block_size = model, block_size
        self.blocks: BlockManager
        self._cache: KVCache

    def start(self, blocks: BlockManager) -> None:
        """Allocate the KV cache. Call it before `execute`."""
        self.blocks = blocks
        self._allocate(blocks.num_blocks, len(blocks.tables))

    def _everywhere(self, message: object) -> contextlib.AbstractContextManager[None]:
        ranks = self._model.ranks
        return contextlib.nullcontext() if ranks is None else ranks.running(message)

    def _allocate(self, num_blocks: int, max_seqs: int) -> None:
        with self._everywhere(CacheSize(num_blocks, self._block_size, max_seqs, torch.get_num_threads())):
            self._cache = self._model.new_cache(num_blocks, self._block_size, max_seqs)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`, in the order of the input. Without a token to compute
        there is none, and the result is empty."""
        if not batch.computes:
            return torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        return self._execute(read_batch(batch, self.blocks, self._model.layout is not None))

    def _execute(self, steps: list[PagedContext]) -> torch.Tensor:
        with self._everywhere(steps):
            return run_steps(steps, self._model, self._cache)

    def select(self, hidden: torch.Tensor, rows: list[int] | None, kept: Tokens[Sequence] = ()) -> torch.Tensor:
        """Return these rows of the step's hidden states, or all, and the ones that sequences have kept: `[rows,
        hidden]`."""
        selection = Selection(rows, [sequence.hidden for sequence in kept])
        with self._everywhere(selection):
            return selection.of(hidden)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the logits of what `select` has returned: float32 `[rows, vocab]`."""
        with self._everywhere(None):
            logits: torch.Tensor = self._model.head(rows)
        return logits.float()

    @torch.inference_mode()
    def memory_for_cache(self, tokens: int, rows: int, max_model_len: int) -> int:
        """Run the largest step: `tokens` tokens of sequences of up to `max_model_len`, and `rows` sampled rows. Return
        the bytes of the GPU that the KV cache may take beside it."""
        device = self._model.device
        self._allocate(1, 1)
        layout = self._model.layout
        if layout is not None:  # one forward pass is for one sequence
            tokens = min(tokens, max_model_len) if layout.resumes else max_model_len
        starts = np.arange(0, tokens, max_model_len).tolist()
        prefills: list[Prefill] = [(start, min(tokens, start + max_model_len), 0, None) for start in starts]
        packed = np.zeros((3, tokens), np.int64)
        packed[1] = np.arange(tokens) % max_model_len
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        hidden = self._execute([PagedContext(packed, prefills, state_slots=[0])])
        self.compute_logits(self.select(hidden, [0] * rows)).softmax(-1).sort(-1)  # as for top_p
        del hidden
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        # A step may take more than the profiled one, and 3 % of the free memory stays unused.
        return int(free * 0.97 - peak * 1.1)
