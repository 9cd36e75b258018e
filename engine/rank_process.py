"""One rank of tensor parallelism, other than rank 0. `Ranks` runs `python -m engine.rank_process FD`.

FD is a socket. The messages are a `RankSetup`, then `CacheSize`s, `PagedContext`s, and rows of the last hidden states
to run the head on (None: all). The process ends when the socket is closed, or on the first error, which the other ranks
notice in their next collective operation.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import torch
from torch import distributed

from engine.attention import PagedContext
from engine.model_loader import load_part
from engine.ranks import CacheSize, RankSetup, join, open_store


@torch.inference_mode()
def _serve(connection: Connection) -> None:
    setup: RankSetup = connection.recv()
    rank, port, name, options, device_type = setup
    os.environ["LOCAL_RANK"] = str(rank)  # transformers takes the GPU of this number
    connection.send(None)
    size = options.tensor_parallel_size
    join(open_store(port, size), rank, size, device_type)
    model = load_part(name, options)
    cache, hidden = model.new_cache(1, 1), torch.empty(0)
    while True:
        message = connection.recv()
        if isinstance(message, PagedContext):
            hidden = message.run(model.body, cache, model.device)
        elif isinstance(message, CacheSize):
            torch.set_num_threads(message.threads)
            cache = model.new_cache(message.num_blocks, message.block_size)
        else:
            model.head(hidden if message is None else hidden[message])


def main() -> None:
    """Serve until the engine closes the socket."""
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionResetError):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
