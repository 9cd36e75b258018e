"""Mask actors start without what they do not need. Without torch, the libraries' masks
are the same."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from byte_vocabulary import BYTES
from driven_pool import compile_pids
from ray_clusters import run

from actors import RayPool
from guided.backends import BACKENDS
from guided.constraint import Constraint
from guided.sequence import GuidedSequence

_MASKS = """
    import sys
    import numpy as np
    from guided.backends import without_torch
    {prelude}
    without_torch.leave_out_torch()
    from byte_vocabulary import BYTES, WORDS, allowed
    from guided.backends import Backends
    from guided.constraint import Constraint

    backends, wanted = Backends(BYTES), Constraint.choice(["ac", "bc"])
    for name in ("xgrammar", "lm-format-enforcer"):
        row = np.zeros(WORDS, np.int32)
        backends[name].load(wanted, backends[name].compile(wanted).dump()).matcher().fill_bitmask(row)
        assert allowed(row) == "ab", name
    print(*sorted(name for name in ("torch", "transformers") if sys.modules.get(name) is not None))
"""

_START = """
    import sys
    import actors.mask_actor
    from byte_vocabulary import BYTES
    from guided.backends import Backends

    Backends(BYTES)["llguidance"]
    print(*sorted({"interegular", "jsonschema_rs", "referencing", "regex"}.intersection(sys.modules)))
"""


@pytest.mark.parametrize(
    ("prelude", "loaded"),
    [
        ("", ""),
        ("import torch", "torch transformers"),
        (
            "del without_torch._Placeholder.__getattr__",
            "torch transformers",
        ),  # a library that needs more
    ],
)
def test_masks_need_neither_torch_nor_transformers(prelude: str, loaded: str) -> None:
    assert run(textwrap.dedent(_MASKS).format(prelude=prelude)).strip() == loaded


def test_a_mask_actor_starts_without_readers_of_schemas() -> None:
    assert run(textwrap.dedent(_START)).strip() == ""


def test_neither_an_actor_nor_a_compile_process_has_it(local_ray: None) -> None:
    pool = RayPool(BYTES, num_actors=1).started()
    try:
        for number, name in enumerate(BACKENDS):
            sequence = GuidedSequence("request", number, [])
            pool.open(
                sequence,
                pool.compile(Constraint.choice(["ac", "bc"]), (name,)).result(120),
            )
            pool.submit([sequence])
            assert not pool.collect().failed
        (actor,) = [worker.pid for worker in pool.status().workers]
        for pid in (actor, *compile_pids()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "xgrammar" in maps
    finally:
        pool.shutdown()
