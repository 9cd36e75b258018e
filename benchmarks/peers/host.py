"""Run one way of masking, as a child process of `benchmarks.comparison`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.child_process import answer_writer
from benchmarks.peers.loop import Forward, Run, SleepingForward, Slowness, Way
from benchmarks.peers.rows import Document, Rows


def _guided(pool: Any, options: dict[str, Any]) -> Way:
    from benchmarks.peers.ours import Guided

    return Guided(pool, options.get("deadline", False))


def _unguided(options: dict[str, Any]) -> Way:
    from benchmarks.peers.ours import Unguided

    return Unguided()


def _vocabulary(options: dict[str, Any]) -> Any:
    from guided.vocabulary import Vocabulary

    path = options["vocabulary"]
    if ".model" in path:
        return Vocabulary.from_sentencepiece(path)
    if path.endswith("tokenizer.json"):
        from tokenizers import Tokenizer

        return Vocabulary.from_tokenizer(Tokenizer.from_file(path), stop_token_ids=[options["stop"]])
    return Vocabulary.from_tekken(path)


def _inline(options: dict[str, Any]) -> Way:
    from guided.pools.inline import InlinePool

    return _guided(InlinePool(_vocabulary(options), max_cache_bytes=4 << 30), options)


def _ray(options: dict[str, Any]) -> Way:
    from actors import CompileLimits, RayPool

    limits = CompileLimits(seconds=options.get("compile_seconds", 10.0))
    actors = options.get("actors", 2)
    more = {"compile_limits": limits, "max_cache_bytes": 4 << 30, **options.get("pool", {})}
    pool = RayPool(_vocabulary(options), num_actors=actors, **more)
    return _guided(pool, options)


def _vllm(options: dict[str, Any]) -> Way:
    from benchmarks.peers.vllm_manager import VLLMManager

    return VLLMManager(options["vocabulary"])


def _xgrammar(options: dict[str, Any]) -> Way:
    from benchmarks.peers.xgrammar_processor import XGrammarProcessor

    return XGrammarProcessor(_vocabulary(options))


def _lm_format_enforcer(options: dict[str, Any]) -> Way:
    from benchmarks.peers.lm_format_enforcer_processor import LMFormatEnforcerProcessor

    return LMFormatEnforcerProcessor(_vocabulary(options))


def _outlines(options: dict[str, Any]) -> Way:
    from benchmarks.peers.outlines_processor import OutlinesProcessor

    return OutlinesProcessor(_vocabulary(options))


WAYS: dict[str, Callable[[dict[str, Any]], Way]] = {
    "unguided": _unguided,
    "inline": _inline,
    "ray": _ray,
    "vllm": _vllm,
    "xgrammar": _xgrammar,
    "lm-format-enforcer": _lm_format_enforcer,
    "outlines": _outlines,
}


class Host:
    """Execute the commands. Each method is one."""

    def __init__(self) -> None:
        self._way: Any = None
        self._options: dict[str, Any] = {}
        self._documents: dict[str, Document] = {}
        self._run: Run | None = None

    def start(self, way: str, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        self._options = options
        self._way = WAYS[way](options)
        return {"pid": os.getpid()}

    def load(self, backend: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
        self._documents = {one["name"]: Document.from_json(one) for one in documents}
        return {"refused": self._way.load(backend, list(self._documents.values()))}

    def begin(
        self, batch: int, documents: list[str], pinned: list[str], slow: dict[str, Any], forward_seconds: float
    ) -> dict[str, Any]:
        slowness = Slowness(**slow)
        self._way.begin(batch, slowness)
        named, stuck = ([self._documents[name] for name in names] for names in (documents, pinned))
        rows = Rows(named, batch, self._options["stop"], stuck)
        forward: Forward = SleepingForward(batch, self._options["width"], forward_seconds)
        self._run = Run(self._way, rows, forward, slowness)
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
