"""Mask actors without torch: the libraries' masks are the same, and one that can't do without it has the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import byte_vocabulary
from byte_vocabulary import BYTES
from compile_processes import compile_pids

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


def loaded(prelude: str = "") -> str:
    """Which of the heavy ones a process has in the end that computed masks."""
    script = textwrap.dedent(_MASKS).format(prelude=prelude)
    path = os.pathsep.join((str(Path(byte_vocabulary.__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_masks_need_neither_torch_nor_transformers() -> None:
    assert loaded() == ""


def test_a_process_with_torch_keeps_it() -> None:
    assert loaded("import torch") == "torch transformers"


def test_a_library_that_needs_more_has_the_real_ones() -> None:
    without_attributes = "del without_torch._Placeholder.__getattr__"
    assert loaded(without_attributes) == "torch transformers"


def test_neither_an_actor_nor_a_compile_process_has_it(local_ray: None) -> None:
    pool = RayPool(BYTES, num_actors=1)
    try:
        for number, name in enumerate(BACKENDS):
            sequence = GuidedSequence("request", number, [])
            pool.open(sequence, pool.compile(Constraint.choice(["ac", "bc"]), (name,)).result(120))
            pool.submit([sequence])
            assert not pool.collect().failed
        (actor,) = [worker.pid for worker in pool.status().workers]
        for pid in (actor, *compile_pids()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "xgrammar" in maps
    finally:
        pool.shutdown()
