"""Measure the memory of a mask actor part by part, without a cluster, as a child process of `benchmarks.memory`.

The arguments are VOCABULARY, GRAMMARS (files that `benchmarks.memory` writes: the vocabulary, and the grammars of one
backend) and SEQUENCES. Does the same as `actors.supervision.mask_actor.MaskActor`, in the same order, and writes a line
of JSON after each part.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import sys
from pathlib import Path
from typing import Any

from benchmarks.child_process import answer_writer
from benchmarks.processes import own_memory


class PartReporter:
    """Reports how much memory this process has gained since the last report, in MiB.

    `anonymous` is the process's own memory after the C library has returned free memory; `slack` is the free memory
    that the C library held, in total. `files` is code that other processes may share.
    """

    def __init__(self) -> None:
        self._write = answer_writer()
        self._last = {"anonymous": 0.0, "files": 0.0}
        self._trim = ctypes.CDLL(None).malloc_trim

    def skip(self) -> None:
        """Leave out what was gained since the last report."""
        gc.collect()
        self._trim(0)
        self._last = own_memory()

    def __call__(self, part: str, **more: Any) -> None:
        gc.collect()
        before = own_memory()
        self._trim(0)
        now = own_memory()
        added = {name: now[name] - self._last[name] for name in now}
        added["slack"] = before["anonymous"] - now["anonymous"]
        heavy = [name for name in ("torch", "transformers", "numpy", "ray") if sys.modules.get(name) is not None]
        self._write({"part": part, **added, "loaded": heavy, **more})
        self._last = now


def main() -> None:
    vocabulary_file, grammars_file, sequences = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    report = PartReporter()
    report("Python")
    import ray  # noqa: F401

    report("Ray's worker library")
    import actors.supervision.mask_actor  # noqa: F401
    from guided.backends.without_torch import leave_out_torch

    leave_out_torch()

    report("our own modules, numpy, ZeroMQ")
    vocabulary = pickle.loads(vocabulary_file.read_bytes())
    report("the vocabulary")
    from guided.worker import MaskWorker

    worker = MaskWorker(vocabulary)
    report("what is permitted and stops")
    grammars = pickle.loads(grammars_file.read_bytes())
    report.skip()
    _backend(worker, vocabulary, grammars, sequences, report)


def _backend(
    worker: Any, vocabulary: Any, grammars: list[dict[str, Any]], sequences: int, report: PartReporter
) -> None:
    import numpy as np

    from guided.backends import BACKENDS, Backends
    from guided.bitmask import words

    name = grammars[0]["backend"]
    BACKENDS[name].load()
    report(f"{name}: library")
    backend = Backends(vocabulary)[name]
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    # The first grammar also builds the tables of the vocabulary.
    first = grammars[0]
    worker.install("first", backend.load(first["constraint"], first["dumped"]))
    _open_at(worker, 0, "first", [], row)
    report(f"{name}: tables of the vocabulary, a first grammar")
    for index, one in enumerate(grammars[1:]):
        worker.install(f"{name} {index}", backend.load(one["constraint"], one["dumped"]))
    weighed = sum(one["nbytes"] for one in grammars[1:])
    report(f"{name}: grammars", count=len(grammars) - 1, weighed=weighed / 2**20)
    done: dict[int, int] = {}
    for slot in range(1, 1 + sequences):
        at = slot % (len(grammars) - 1)
        tokens = grammars[1 + at]["tokens"]
        done[slot] = _open_at(worker, slot, f"{name} {at}", tokens[: len(tokens) // 2], row)
    report(f"{name}: open sequences", count=sequences)
    for slot in range(1, 1 + sequences):
        at = slot % (len(grammars) - 1)
        if done[slot]:
            worker.fill(slot, grammars[1 + at]["tokens"][done[slot] :], row)
    report(f"{name}: the same, at their ends", count=sequences)
    worker.free(range(1 + sequences))
    for key in ("first", *(f"{name} {index}" for index in range(len(grammars) - 1))):
        worker.uninstall(key)
    report(f"{name}: given back when all are freed and uninstalled")


def _open_at(worker: Any, slot: int, key: str, tokens: list[int], row: Any) -> int:
    """Open a sequence and fill its mask after `tokens`; return the number of tokens.

    A backend that allows other white space than the text has leaves the sequence at its start: 0.
    """
    worker.open(slot, key, None, tokens)
    error = worker.fill(slot, [], row)
    if error is None:
        return len(tokens)
    if not tokens:
        raise SystemExit(f"{key}: {error}")
    return _open_at(worker, slot, key, [], row)


if __name__ == "__main__":
    main()
