"""Masks from rank 0 to all ranks, through a real process group (Gloo)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

RANK = """
import os
import sys
from datetime import timedelta
import numpy as np
import torch.distributed
from guided.integrations.vllm.tensor_parallel import Ranks

rank, directory = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", f"file://{directory}/store", rank=rank, world_size=2, timeout=timedelta(minutes=4)
)
ranks = Ranks(torch.distributed.group.WORLD, 0)
assert ranks.computes == (rank == 0)
for step in range(3):
    bitmask = np.full((step + 1, 5), 7 * step if ranks.computes else -1, np.int32)
    ranks.share(bitmask)
    np.save(f"{directory}/{rank}-{step}.npy", bitmask)
torch.distributed.barrier()
os._exit(0)  # not through Gloo's own end: where the other rank is gone first, it may abort
"""


def test_all_ranks_have_what_the_first_one_computed(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    for step in range(3):
        expected = np.full((step + 1, 5), 7 * step, np.int32)
        for number in range(2):
            assert np.array_equal(np.load(tmp_path / f"{number}-{step}.npy"), expected)
