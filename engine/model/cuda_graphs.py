"""CUDA graphs of decode steps: the kernels of a step are recorded once per number of
rows, and launched together.

A graph has the addresses of what it reads and writes. So its inputs and outputs stay
where they are, and so do the model and the KV cache.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from guided.errors import bounded

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
"""Hidden states `[rows, hidden]` and logits `[rows, vocab]`, in the model's dtype."""


class GraphCalls:
    """What the graphs of one `DecodeGraphs` need of CUDA. They share one memory pool,
    because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Any:
        """Run `run` eagerly, so that Triton compiles and cuBLAS allocates, and record
        its kernels: the graph."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            before = torch.cuda.current_stream()
            try:
                # Other threads call CUDA meanwhile.
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    run()
            except BaseException:
                # The end of a failed capture raises before torch restores the stream.
                torch.cuda.set_stream(before)
                # torch before 2.12 leaves the allocator in the pool
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(
                        torch.cuda.current_device(), self._pool
                    )
                raise
        return graph

    def replay(self, graph: Any) -> None:
        """Launch the kernels of a graph on the current stream."""
        graph.replay()

    def record(self) -> Any:
        """Return an event of the current stream."""
        return torch.cuda.current_stream(self._device).record_event()


def graph_calls(device: torch.device) -> GraphCalls | None:
    """Return the calls for a device, or None if it has no graphs."""
    if device.type == "cuda":
        return GraphCalls(device)
    return None


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that have a graph, the largest first."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted((size for size in sizes if size <= max_num_seqs), reverse=True)


class DecodeGraphs:
    """A graph per number of rows. A step with fewer rows is padded.

    Args:
        forward: runs the model on inputs, int64 `[height, rows]`, and block tables,
            int64 `[rows, max_blocks]`, both on the device, without waiting for the
            device.
        padding: the inputs of a row that pads a step, int64 `[height]`.
        max_blocks: the number of blocks of the longest sequence.
        sizes: the numbers of rows, the largest first.

    Raises:
        Exception: what the model's code raises where it waits for the device, or what
            the first capture raises. If a later one fails, the graphs before it are
            kept, and smaller steps are padded to them.
    """

    def __init__(
        self,
        calls: GraphCalls,
        forward: Callable[[Tensor, Tensor], Outputs],
        padding: Tensor,
        max_blocks: int,
        sizes: list[int],
        device: torch.device,
    ) -> None:
        self._calls = calls
        self._forward = forward
        self._padding = padding[:, None]
        self._tables = torch.zeros(
            sizes[0], max_blocks, dtype=torch.int64, device=device
        )
        """Block tables. What a step does not overwrite is of an earlier one: valid
        blocks, behind the end of each sequence."""
        pinned = partial(
            torch.empty,
            (len(padding) + max_blocks) * sizes[0],
            dtype=torch.int64,
            pin_memory=device.type == "cuda",
        )
        self._staging = deque((pinned(), calls.record()) for _ in range(2))
        """What is copied to the inputs and `_tables`, in turn, and an event after the
        last copy: a step is written while that of the step before it may still be
        copied."""
        self._outputs: Outputs = ()
        """Shared by all sizes: logits of each would take gigabytes."""
        self._graphs: dict[int, tuple[Any, Tensor]] = {}
        """Graphs and their inputs, by number of rows."""
        for size in tqdm(
            sizes, desc="capturing CUDA graphs", disable=len(sizes) == 1 or None
        ):
            inputs = self._padding.repeat(1, size).to(device)
            tables = self._tables[:size]
            self._outputs = self._outputs or forward(inputs, tables)
            try:
                self._graphs[size] = (
                    calls.capture(partial(self._record, inputs, tables)),
                    inputs,
                )
            except RuntimeError as error:
                if not self._graphs:
                    raise
                cause = error.__context__ or error
                logger.warning(
                    "there are no CUDA graphs below %d rows: %s",
                    min(self._graphs),
                    bounded(repr(cause)),
                )
                break

    def _record(self, inputs: Tensor, tables: Tensor) -> None:
        for kept, output in zip(
            self._outputs, self._forward(inputs, tables), strict=True
        ):
            kept[: len(output)].copy_(output)

    def run(
        self,
        columns: NDArray[np.int64],
        tables: NDArray[np.int64],
        tokens: Tensor | None = None,
    ) -> Outputs:
        """Run a decode step. Its outputs are overwritten by the next one.

        Args:
            columns: the inputs, int64 `[height, rows]`.
            tables: blocks of each row, int64 `[rows, up to max_blocks]`, padded with
                any valid block.
            tokens: int64 `[rows]`, on the device: replaces the first line of `columns`.
        """
        rows, width = tables.shape
        graph, inputs = self._graphs[min(size for size in self._graphs if size >= rows)]
        buffer, copied = self._staging.popleft()
        copied.synchronize()
        staged = buffer[: inputs.numel()].view(inputs.shape)
        staged[:, :rows] = torch.from_numpy(columns)
        staged[:, rows:] = self._padding
        inputs.copy_(staged, non_blocking=True)
        if tokens is not None:
            inputs[0, :rows] = tokens
        staged = buffer[inputs.numel() :][: rows * width].view(rows, width)
        staged.copy_(torch.from_numpy(tables))
        self._tables[:rows, :width].copy_(staged, non_blocking=True)
        self._staging.append((buffer, self._calls.record()))
        self._calls.replay(graph)
        return tuple(output[:rows] for output in self._outputs)
