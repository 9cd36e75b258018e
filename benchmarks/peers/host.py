"""Run one way of masking, as a child process of `benchmarks.comparison`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.child_process import serve
from benchmarks.peers.loop import Run, Samples, SleepingForward, Way
from benchmarks.peers.rows import Document


def way_of(name: str, options: dict[str, Any]) -> Way:
    """Return a way of masking: "unguided", "inline", "ray" or "vllm"."""
    if name == "unguided":
        return Way()
    if name == "vllm":
        from benchmarks.peers.vllm_manager import VLLMManager

        return VLLMManager(options["vocabulary"])
    from benchmarks.peers.ours import Guided
    from guided.vocabulary import Vocabulary

    vocabulary = Vocabulary.from_tekken(options["vocabulary"])
    if name == "inline":
        from guided.pools.inline import InlinePool

        return Guided(
            InlinePool(vocabulary, max_cache_bytes=4 << 30), has_deadline=False
        )
    from actors import CompileLimits, RayPool

    limits = CompileLimits(seconds=options["compile_seconds"])
    pool = RayPool(
        vocabulary,
        num_actors=options["actors"],
        compile_limits=limits,
        max_cache_bytes=4 << 30,
        **options.get("pool", {}),
    ).started()
    return Guided(pool, options.get("deadline", False))


class Host:
    """A way of masking and its run. Each method is a message."""

    def __init__(self) -> None:
        self._way = Way()
        self._options: dict[str, Any] = {}
        self._run: Run | None = None

    def start(self, way: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._options = options
        self._way = way_of(way, options)

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        return self._way.load(backend, documents)

    def begin(
        self,
        batch: int,
        documents: Sequence[Document],
        pinned: Sequence[Document],
        forward_seconds: float,
    ) -> None:
        self._way.begin()
        forward = SleepingForward(batch, self._options["width"], forward_seconds)
        self._run = Run(
            self._way, documents, batch, self._options["stop"], forward, pinned
        )

    def run(self, steps: int, seconds: float | None) -> Samples:
        assert self._run is not None
        return self._run.steps(steps, seconds)

    def end(self) -> None:
        assert self._run is not None
        self._run.close()
        self._run = None


if __name__ == "__main__":
    serve(Host())
