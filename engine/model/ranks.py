"""Ranks: the processes of tensor parallelism. transformers splits the layers of a model
over them.

The engine's process is rank 0: it alone has sequences, masks and sampling. It sends
each step to the other ranks (`serve`), and all run it together. torch.distributed adds
their parts up. The ranks are child processes, not Ray actors: they end with the engine,
and a closed socket tells that one has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from engine.config import LoadOptions
from engine.model.attention import PagedContext
from guided.errors import InternalError, bounded


class CacheSize(NamedTuple):
    """Allocate a KV cache, in place of the last one, and set torch's threads."""

    num_blocks: int
    block_size: int
    max_seqs: int
    threads: int


class Selection(NamedTuple):
    """Select rows of the last hidden states, None: all. Hidden states that sequences
    have kept follow them."""

    rows: list[int] | None
    kept: list[NDArray[np.float32]]

    def of(self, hidden: Tensor) -> Tensor:
        """Return what is selected, `[rows, hidden]`."""
        if self.rows is not None:
            hidden = hidden.index_select(
                0,
                torch.tensor(self.rows, dtype=torch.int64).to(
                    hidden.device, non_blocking=True
                ),
            )
        if self.kept:
            hidden = torch.cat(
                [hidden, torch.from_numpy(np.stack(self.kept)).to(hidden)]
            )
        return hidden


def run_steps(steps: list[PagedContext], model: Any, cache: Any) -> Tensor:
    """Run the forward passes of a step on this process's part of the model: hidden
    states `[tokens, hidden]`."""
    hidden = [step.run(model.body, cache, model.device) for step in steps]
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat(hidden)


class Ranks:
    """Starts the other ranks, and joins them as rank 0. One instance per process at a
    time."""

    def __init__(
        self,
        model: str,
        options: LoadOptions,
        max_model_len: int | None,
        device_type: str,
    ) -> None:
        self.size = size = options.tensor_parallel_size
        if distributed.is_initialized():
            raise ValueError(
                "torch.distributed is in use in this process: shut the other model down first"
            )
        if device_type == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(
                f"tensor_parallel_size is {size}; this machine has {torch.cuda.device_count()} GPUs"
            )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            store = open_store(0, size, is_master=True)
            for rank in range(1, size):
                self._start(
                    rank, store.port, model, options, max_model_len, device_type
                )
            for connection in self._connections:
                connection.recv()  # its imports are done
            join(store, 0, size, device_type)
        except Exception as error:
            raise self.ended(error) from error

    def _start(self, *setup: object) -> None:
        ours, theirs = Pipe()
        imports = "from engine.model.loader import load_part; from engine.model.ranks import serve"
        command = [
            sys.executable,
            "-c",
            f"{imports}; serve({theirs.fileno()}, load_part)",
        ]
        self._connections.append(ours)
        with theirs:  # a session of its own: Ctrl-C is for the engine
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._processes.append(process)
        ours.send(setup)

    @contextlib.contextmanager
    def running(self, message: object) -> Iterator[None]:
        """Have the other ranks do what rank 0 does in this context. After an error of a
        rank, no step follows."""
        try:
            for connection in self._connections:
                connection.send(message)
            yield
        except Exception as error:
            raise self.ended(error) from error

    def ended(self, error: Exception) -> InternalError:
        """End all ranks, because of an error in rank 0 or a rank that has ended.
        Returns the error to raise."""
        codes = {
            rank: _exit_code(process)
            for rank, process in enumerate(self._processes, start=1)
        }
        self.close()
        for rank, code in codes.items():
            if code is not None:
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                else:
                    how = f"has ended with status {code}"
                return InternalError(f"rank {rank} of tensor parallelism {how}")
        return InternalError(
            f"a step of tensor parallelism has failed: {type(error).__name__}: {bounded(error)}"
        )

    def close(self) -> None:
        """End the other ranks, and leave the process group. Idempotent."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._processes and distributed.is_initialized():
            distributed.destroy_process_group()
        self._processes = []
        self._connections = []


@torch.inference_mode()
def serve(
    descriptor: int, load_part: Callable[[str, LoadOptions, int | None], Any]
) -> None:
    """Run one rank other than 0, until the engine closes the socket `descriptor`, or
    until the first error, which the other ranks notice in their next collective
    operation. The messages are the rank's setup, then `CacheSize`s, lists of
    `PagedContext`s, `Selection`s, and None to run the head on what was selected
    last."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionResetError):
        rank, port, name, options, max_model_len, device_type = connection.recv()
        # transformers takes the GPU of this number
        os.environ["LOCAL_RANK"] = str(rank)
        connection.send(None)
        size = options.tensor_parallel_size
        join(open_store(port, size), rank, size, device_type)
        model = load_part(name, options, max_model_len)
        cache = model.new_cache(1, 1, 1)
        hidden = selected = torch.empty(0)
        while True:
            message = connection.recv()
            if isinstance(message, list):
                hidden = run_steps(message, model, cache)
            elif isinstance(message, CacheSize):
                torch.set_num_threads(message.threads)
                cache = model.new_cache(
                    message.num_blocks, message.block_size, message.max_seqs
                )
            elif isinstance(message, Selection):
                selected = message.of(hidden)
            else:
                model.head(selected)
    distributed.destroy_process_group()


def open_store(port: int, size: int, *, is_master: bool = False) -> Any:
    """Open the store by which the ranks find each other. Port 0: any."""
    store = distributed.TCPStore  # type: ignore[attr-defined]
    return store("127.0.0.1", port, size, is_master, wait_for_workers=False)


def join(store: Any, rank: int, size: int, device_type: str) -> None:
    """Join the process group that transformers splits models over."""
    if device_type == "cuda":
        backend = "nccl"
    else:
        backend = "gloo"
    # loading takes minutes. A rank that has ended is noticed at once.
    timeout = timedelta(minutes=10)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout
    )


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    # its sockets are closed a little before it has ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1.0)
    return None
