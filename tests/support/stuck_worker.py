"""A mask worker in its own process. It stops in the middle of writing a mask until it is told to continue."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from byte_vocabulary import BYTES, tokens
from numpy.typing import NDArray
from scripted_grammar import ScriptedGrammar, ScriptedMatcher

from actors.channel import WorkerEnd
from actors.steps.protocol import SegmentName, attach
from actors.steps.server import StepServer
from guided.backends import Backends
from guided.worker import MaskWorker

TEXTS = ["abc", "abd", "xyz"]


class StuckGrammar(ScriptedGrammar):
    """At position 1 it writes half a mask, creates the file `reached`, and writes on until the file `go_on` exists."""

    def __init__(self, sentences: Sequence[Sequence[int]], reached: Path, go_on: Path) -> None:
        super().__init__(sentences)
        self.reached = reached
        self.go_on = go_on

    def matcher(self) -> ScriptedMatcher:
        return _StuckMatcher(self, [])


class _StuckMatcher(ScriptedMatcher):
    grammar: StuckGrammar

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        if len(self.tokens) == 1:
            row[: len(row) // 2] = -1
            self.grammar.reached.touch()
            while not self.grammar.go_on.exists():
                row[0] = ~row[0]  # it is in the middle of writing
            row[:] = -1
        return super().fill_bitmask(row)


def serve(path: str, name: SegmentName, reached: str, go_on: str) -> None:
    """Serve the grammars "fast" and "stuck" as a mask actor does, without Ray."""
    table = attach(name)
    assert table is not None
    worker = MaskWorker(BYTES)
    sentences = [tokens(text) for text in TEXTS]
    worker.install("fast", ScriptedGrammar(sentences))
    worker.install("stuck", StuckGrammar(sentences, Path(reached), Path(go_on)))
    over = threading.Event()
    StepServer(worker, Backends(BYTES), WorkerEnd.connect(path), table, over.set).start()
    over.wait()
    os._exit(0)
