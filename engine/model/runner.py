"""ModelRunner: computes the logits of a scheduled batch. All sequences of a step are
flattened in one row; a model with recurrent layers (`engine/memory/recurrent.py`) runs
once per chunk of a prefill, and once for all decodes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Sequence as Tokens
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.memory.block_manager import BlockManager
from engine.memory.kv_cache import KVCache
from engine.model.attention import PagedContext, StepTensors
from engine.model.cuda_graphs import DecodeGraphs, Outputs, graph_calls, graph_sizes
from engine.model.gathered_attention import Prefill
from engine.model.loader import LoadedModel
from engine.model.ranks import CacheSize, Selection, run_steps
from engine.step.prefills import Chunk
from engine.step.scheduler import Batch
from engine.step.sequence import Sequence
from guided.errors import bounded

logger = logging.getLogger(__name__)
_GRAPH_BYTES = 8 << 20
"""Memory of the driver for one graph. This is a guess until it is measured."""


def read_batch(
    batch: Batch, blocks: BlockManager, has_states: bool
) -> list[PagedContext]:
    """Read the forward passes of a batch: one, or, with recurrent layers, one per chunk
    and one for the decodes."""
    if has_states:
        steps = [_read([chunk], [], blocks) for chunk in batch.prefills]
        if batch.decodes:
            steps.append(_read([], batch.decodes, blocks))
    else:
        steps = [_read(batch.prefills, batch.decodes, blocks)]
    steps[0].copies = batch.copies
    steps[0].state_copies = blocks.row_copies
    blocks.row_copies = []
    return steps


def _read(
    chunks: list[Chunk], decodes: list[Sequence], blocks: BlockManager, ahead: int = 0
) -> PagedContext:
    """Read the tokens, blocks and slots of one forward pass. With `ahead`, the places
    of the decodes are those of tokens that so many tokens later are their last."""
    tokens: list[int] = []
    places: list[NDArray[np.int64]] = []
    prefills: list[Prefill] = []
    for chunk in chunks:
        start = len(tokens)
        tokens += chunk.sequences[0].span(chunk.start, chunk.end)
        places.append(np.arange(chunk.start, chunk.end))
        prefills.append((start, len(tokens), chunk.start))
    counts = [end - start for start, end, _ in prefills] + [1] * len(decodes)
    tokens += [sequence.last_token for sequence in decodes]
    places.append(
        np.array([sequence.length - 1 + ahead for sequence in decodes], np.int64)
    )
    positions = np.concatenate(places)
    block, offset = np.divmod(positions, blocks.block_size)
    decoding = [blocks.rows[sequence.seq_id] for sequence in decodes]
    rows = np.array(
        [blocks.rows[chunk.sequences[0].seq_id] for chunk in chunks] + decoding
    )
    slots = blocks.tables[rows.repeat(counts), block] * blocks.block_size + offset
    state_slots = [
        blocks.rows[sequence.seq_id] for chunk in chunks for sequence in chunk.sequences
    ] + decoding
    tables = blocks.tables[rows, : block.max() + 1]
    return PagedContext(
        np.stack([tokens, positions, slots]), prefills, tables, state_slots=state_slots
    )


class _NextStep(NamedTuple):
    """A decode step that was launched before its tokens were appended to its
    sequences."""

    states: dict[Sequence, tuple[int, int, int]]
    """For each sequence: its row, and its length and number of edits if it goes on with
    the token of the step."""
    outputs: Outputs

    def rows(self, decodes: list[Sequence]) -> list[int] | None:
        """Return the rows of these sequences. None: one goes on with another token."""
        rows: list[int] = []
        for sequence in decodes:
            row, *state = self.states.get(sequence, (0, 0, 0))
            if state != [sequence.length, sequence.edits]:
                return None
            rows.append(row)
        return rows


class ModelRunner:
    """Runs the model's body on a batch, and its head on the sampled rows. With tensor
    parallelism, on all ranks. On a GPU, steps that only decode are CUDA graphs, unless
    `enforce_eager` is set or the ranks are several."""

    def __init__(
        self, model: LoadedModel, block_size: int, enforce_eager: bool = False
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._is_eager = enforce_eager or model.ranks is not None
        self.blocks: BlockManager
        self._cache: KVCache
        self._graphs: DecodeGraphs | None = None
        self._replayed: Outputs | None = None
        """The outputs of the last step, if a graph has computed them."""
        self._next: _NextStep | None = None

    @torch.inference_mode()
    def start(self, blocks: BlockManager) -> None:
        """Allocate the KV cache, and capture the graphs of decode steps. Call it before
        `execute`."""
        self.blocks = blocks
        self._allocate(blocks.num_blocks, len(blocks.tables))
        self._capture(graph_sizes(len(blocks.tables)), *blocks.tables.shape)

    def _capture(self, sizes: list[int], max_seqs: int, max_blocks: int) -> None:
        """Capture decode steps of these numbers of rows. If the first cannot be
        captured, all steps stay eager."""
        if self._is_eager:
            return
        device = self._model.device
        calls = graph_calls(device)
        if calls is None:
            return
        padding = torch.tensor(
            [0, 0, self._cache.num_blocks * self._block_size, max_seqs]
        )
        try:
            self._graphs = DecodeGraphs(
                calls, self._decode, padding, max_blocks, sizes, device
            )
        except Exception as error:
            self._is_eager = True
            cause = error.__context__ or error  # the end of a failed capture fails too
            logger.warning(
                "CUDA graphs are off, so decoding is slower: a step cannot be captured: %s",
                bounded(repr(cause)),
            )

    def _decode(self, inputs: Tensor, tables: Tensor) -> Outputs:
        """Run the decode step of a graph. `inputs` are token ids, positions, slots of
        tokens and of states: int64 `[4, rows]`. `tables` are int64 `[rows, blocks]`."""
        starts = torch.arange(len(tables) + 1, device=inputs.device)
        step = PagedContext(inputs[:3], [], tables)  # type: ignore[arg-type]  # only their lengths count
        hidden = step.forward(
            self._model.body,
            self._cache,
            StepTensors(inputs[:3], starts, tables, inputs[3]),
        )
        return hidden, self._model.head(hidden)

    def _everywhere(self, message: object) -> contextlib.AbstractContextManager[None]:
        ranks = self._model.ranks
        if ranks is None:
            return contextlib.nullcontext()
        return ranks.running(message)

    def _allocate(self, num_blocks: int, max_seqs: int) -> None:
        with self._everywhere(
            CacheSize(num_blocks, self._block_size, max_seqs, torch.get_num_threads())
        ):
            self._cache = self._model.new_cache(num_blocks, self._block_size, max_seqs)

    def execute(self, batch: Batch) -> Tensor:
        """Run the forward pass: hidden states `[tokens, hidden]`, in the order of the
        input. Without a token to compute there is none, and the result is empty."""
        step = self._next
        self._next = None
        if not batch.computes:
            return torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        if step is not None and batch.decodes and not batch.copies:
            rows = step.rows(batch.decodes)
            if rows is not None:
                return self._take(step, rows, batch)
        return self._execute(
            read_batch(batch, self.blocks, self._model.layout is not None)
        )

    def _take(self, step: _NextStep, rows: list[int], batch: Batch) -> Tensor:
        """Take the rows of the batch's decodes from a step that was launched, and
        compute the prefills."""
        outputs = step.outputs
        if rows != list(range(len(step.states))):
            index = torch.tensor(rows).to(self._model.device, non_blocking=True)
            outputs = tuple(output.index_select(0, index) for output in outputs)
        if batch.prefills:
            return torch.cat(
                [self._execute([_read(batch.prefills, [], self.blocks)]), outputs[0]]
            )
        self._replayed = outputs
        return outputs[0]

    def launch_next(self, batch: Batch, tokens: Tensor) -> None:
        """Launch the decode step after this batch while the host does not know the
        tokens yet. `execute` takes its outputs for sequences that go on with these
        tokens.

        Does nothing without a graph, with recurrent layers (a state that has seen a
        token does not forget it), or if a block would have to be copied.

        Args:
            tokens: the sampled token of each row, int64 `[rows]`, on the device.
        """
        sequences = batch.sequences
        if self._graphs is None or self._model.layout is not None:
            return
        if all(
            sequence.length + 1 >= sequence.group.max_length for sequence in sequences
        ):
            return
        if self.blocks.extend(
            {sequence.seq_id: sequence.length for sequence in sequences}
        ):
            states = {
                sequence: (row, sequence.length + 1, sequence.edits)
                for row, sequence in enumerate(sequences)
            }
            batch.hidden = batch.hidden.clone()  # an edit may still sample a row again
            self._next = _NextStep(
                states, self._replay(_read([], sequences, self.blocks, ahead=1), tokens)
            )

    def _execute(self, steps: list[PagedContext]) -> Tensor:
        self._replayed = None
        first = steps[0]
        if self._graphs is not None and len(steps) == 1 and not first.prefills:
            first.copy(self._cache)
            self._replayed = self._replay(first)
            return self._replayed[0]
        with self._everywhere(steps):
            return run_steps(steps, self._model, self._cache)

    def _replay(self, step: PagedContext, tokens: Tensor | None = None) -> Outputs:
        assert self._graphs is not None
        columns = np.concatenate([step.packed, np.array([step.state_slots])])
        return self._graphs.run(columns, step.tables, tokens)

    def select(
        self, hidden: Tensor, rows: list[int] | None, kept: Tokens[Sequence] = ()
    ) -> Tensor:
        """Return these rows of the step's hidden states, or all, and the ones that
        sequences have kept: `[rows, hidden]`."""
        selection = Selection(rows, [sequence.hidden for sequence in kept])
        with self._everywhere(selection):
            return selection.of(hidden)

    def compute_logits(self, rows: Tensor) -> Tensor:
        """Compute the logits of what `select` has returned: float32 `[rows, vocab]`,
        for the caller to change."""
        if self._replayed is not None and rows is self._replayed[0]:
            return self._replayed[1].to(torch.float32, copy=True)
        with self._everywhere(None):
            logits: Tensor = self._model.head(rows)
        return logits.float()

    def available_memory(self, config: EngineConfig, max_model_len: int) -> int:
        """Return the bytes that the KV cache may take in this process. Without a GPU: a
        quarter of the free memory, at most 4 GiB, shared by all ranks."""
        if self._model.device.type == "cuda":
            return self.memory_for_cache(
                config.tokens_per_step(on_cpu=False), config.max_num_seqs, max_model_len
            )
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = min(free // 4, 4 << 30)
        if self._model.ranks is not None:
            memory //= self._model.ranks.size
        return memory

    @torch.inference_mode()
    def memory_for_cache(self, tokens: int, rows: int, max_model_len: int) -> int:
        """Run the largest step: `tokens` tokens of sequences of up to `max_model_len`,
        and `rows` sampled rows. Return the bytes of the GPU that the KV cache may take
        beside it and the graphs, of which the largest is captured."""
        device = self._model.device
        self._allocate(1, 1)
        free = _free_memory(device)
        self._capture([rows], 1, -(-max_model_len // self._block_size))
        graphs = max(0, free - _free_memory(device))
        if self._graphs is not None:
            graphs += len(graph_sizes(rows)) * _GRAPH_BYTES
            self._graphs = None
        gc.collect()
        layout = self._model.layout
        if layout is not None:  # one forward pass is for one sequence
            if layout.resumes:
                tokens = min(tokens, max_model_len)
            else:
                tokens = max_model_len
        starts = range(0, tokens, max_model_len)
        prefills = [(start, min(tokens, start + max_model_len), 0) for start in starts]
        tables = np.zeros(
            (len(starts), -(-max_model_len // self._block_size)), np.int64
        )
        packed = np.zeros((3, tokens), np.int64)
        packed[1] = np.arange(tokens) % max_model_len
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        hidden = self._execute(
            [PagedContext(packed, prefills, tables, state_slots=[0])]
        )
        # as for top_p
        self.compute_logits(self.select(hidden, [0] * rows)).softmax(-1).sort(-1)
        del hidden
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        free = _free_memory(device)
        # A step may take more than the profiled one, and 3 % of the free memory stays
        # unused.
        return int(free * 0.97 - peak * 1.1) - graphs


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, with those that torch holds and does not use."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
