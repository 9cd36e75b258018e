"""A mask actor's memory, one thing after the other, in a process of its own without a cluster:
`python -m benchmarks.megabytes.worker VOCABULARY GRAMMARS SEQUENCES`, with files of `benchmarks.memory`: the
vocabulary, and one backend's grammars.

Does what `actors.mask_actor.MaskActor` does, in the same order, and writes a line of JSON after each part.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from benchmarks.megabytes.processes import own

__all__ = ["Tellings"]


class Tellings:
    """What was added since the last one, MiB.

    `anonymous`: what is needed, measured after the C library gave back what it can; `slack` is what it held beside
    that, altogether. `files`: code that others may share.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._last = {"anonymous": 0.0, "files": 0.0}
        self._trim = ctypes.CDLL(None).malloc_trim

    def skip(self) -> None:
        """What was added since the last one is nobody's business."""
        gc.collect()
        self._trim(0)
        self._last = own()

    def __call__(self, part: str, **more: Any) -> None:
        gc.collect()
        before = own()
        self._trim(0)
        now = own()
        added = {name: now[name] - self._last[name] for name in now}
        added["slack"] = before["anonymous"] - now["anonymous"]
        heavy = [name for name in ("torch", "transformers", "numpy", "ray") if name in sys.modules]
        self._answers.write(json.dumps({"part": part, **added, "loaded": heavy, **more}) + "\n")
        self._answers.flush()
        self._last = now


def main() -> None:
    vocabulary_file, grammars_file, sequences = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tell = Tellings()
    tell("Python")
    import ray  # noqa: F401

    tell("Ray's worker library")
    import actors.mask_actor  # noqa: F401
    from guided.backends.without_torch import leave_out_torch

    leave_out_torch()

    tell("our own modules, numpy, ZeroMQ")
    vocabulary = pickle.loads(vocabulary_file.read_bytes())
    tell("the vocabulary")
    from guided.worker import MaskWorker

    worker = MaskWorker(vocabulary)
    tell("what is permitted and stops")
    grammars = pickle.loads(grammars_file.read_bytes())
    tell.skip()
    _backend(worker, vocabulary, grammars, sequences, tell)


def _backend(worker: Any, vocabulary: Any, grammars: list[dict[str, Any]], sequences: int, tell: Tellings) -> None:
    import numpy as np

    from guided.backends import BACKENDS
    from guided.bitmask import words
    from guided.messages import StepRequest

    name = grammars[0]["backend"]
    adapter = BACKENDS[name].load()
    tell(f"{name}: library")
    backend = adapter(vocabulary)
    row = np.zeros((1, words(vocabulary.padded_vocab_size)), np.int32)
    # What is made for the vocabulary when it is first needed.
    first = grammars[0]
    worker.install("first", backend.load(first["constraint"], first["dumped"]))
    _fill(worker, 1, "first", [], row, opens=True)
    tell(f"{name}: tables of the vocabulary, a first grammar")
    for index, one in enumerate(grammars[1:]):
        worker.install(f"{name} {index}", backend.load(one["constraint"], one["dumped"]))
    weighed = sum(one["nbytes"] for one in grammars[1:])
    tell(f"{name}: grammars", count=len(grammars) - 1, weighed=weighed / 2**20)
    for number in range(sequences):
        at = number % (len(grammars) - 1)
        tokens = grammars[1 + at]["tokens"]
        _fill(worker, 100 + number, f"{name} {at}", tokens[: len(tokens) // 2], row, opens=True)
    tell(f"{name}: open sequences", count=sequences)
    for number in range(sequences):
        at = number % (len(grammars) - 1)
        _fill(worker, 100 + number, f"{name} {at}", grammars[1 + at]["tokens"], row, opens=False)
    tell(f"{name}: the same, at their ends", count=sequences)
    request = StepRequest(0, 0, [], [], [1, *range(100, 100 + sequences)])
    list(worker.handle(request, row))
    for key in ("first", *(f"{name} {index}" for index in range(len(grammars) - 1))):
        worker.uninstall(key)
    tell(f"{name}: given back when all are freed and uninstalled")


def _fill(worker: Any, sequence: int, key: str, tokens: list[int], row: Any, opens: bool) -> None:
    from guided.messages import FillRow, OpenSequence, RowStatus, StepRequest

    opening = [OpenSequence(sequence, key)] if opens else []
    fills = [FillRow(sequence, 0, 0, list(tokens))]
    for result in worker.handle(StepRequest(0, 0, fills, opening), row):
        if result.status != RowStatus.READY:
            if not tokens:
                raise SystemExit(f"{key}: {result.error}")
            # This backend wants the text written in another way: the sequence stays at its start.
            _fill(worker, sequence, key, [], row, opens=True)


if __name__ == "__main__":
    main()
