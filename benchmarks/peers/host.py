"""Run one way of masking, as a child process of `benchmarks.comparison`."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from typing import Any

import torch

from benchmarks.child_process import answer_writer
from benchmarks.peers.loop import Run, SleepingForward, Way
from benchmarks.peers.rows import Document, Rows


def way_of(name: str, options: dict[str, Any]) -> Way:
    """Return a way of masking: "unguided", "inline", "ray" or "vllm"."""
    if name == "vllm":
        from benchmarks.peers.vllm_manager import VLLMManager

        return VLLMManager(options["vocabulary"])
    from benchmarks.peers.ours import Guided, Unguided
    from guided.vocabulary import Vocabulary

    if name == "unguided":
        return Unguided()
    vocabulary = Vocabulary.from_tekken(options["vocabulary"])
    if name == "inline":
        from guided.pools.inline import InlinePool

        return Guided(InlinePool(vocabulary, max_cache_bytes=4 << 30), has_deadline=False)
    from actors import CompileLimits, RayPool

    limits = CompileLimits(seconds=options["compile_seconds"])
    pool = RayPool(
        vocabulary,
        num_actors=options["actors"],
        compile_limits=limits,
        max_cache_bytes=4 << 30,
        **options.get("pool", {}),
    )
    return Guided(pool, options.get("deadline", False))


class Host:
    """Execute the commands. Each method is one."""

    def __init__(self) -> None:
        self._way: Any = None
        self._options: dict[str, Any] = {}
        self._documents: dict[str, Document] = {}
        self._run: Run | None = None

    def start(self, way: str, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)
        self._options = options
        self._way = way_of(way, options)
        return {}

    def load(self, backend: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
        self._documents = {one["name"]: Document.from_json(one) for one in documents}
        return {"refused": self._way.load(backend, list(self._documents.values()))}

    def begin(self, batch: int, documents: list[str], pinned: list[str], forward_seconds: float) -> dict[str, Any]:
        named, slow = ([self._documents[name] for name in names] for names in (documents, pinned))
        self._way.begin()
        rows = Rows(named, batch, self._options["stop"], slow)
        self._run = Run(self._way, rows, SleepingForward(batch, self._options["width"], forward_seconds))
        return {}

    def run(self, steps: int, seconds: float | None) -> dict[str, Any]:
        assert self._run is not None
        return dataclasses.asdict(self._run.steps(steps, seconds))

    def end(self) -> dict[str, Any]:
        assert self._run is not None
        self._run.close()
        self._run = None
        return {}


def main() -> None:
    write = answer_writer()
    host = Host()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = getattr(host, name)(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answer)


if __name__ == "__main__":
    main()
