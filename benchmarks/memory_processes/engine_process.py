"""Measure the memory of an engine process and its pool part by part, as a child process of `benchmarks.memory`.

The arguments are VOCABULARY, GRAMMARS and ACTORS. With `default` for the vocabulary it starts the server's engine with
the embedded model. Writes a line of JSON after each part, one with all processes while they are idle, and one with all
processes and segments while sequences are open.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.memory_processes.mask_actor import PartReporter
from benchmarks.processes import memory, segments

ROWS = 64
SETTLE_SECONDS = 2.0


def main() -> None:
    which, grammars_file, actors = sys.argv[1], sys.argv[2], int(sys.argv[3])
    report = PartReporter()
    report("Python")
    if which == "default":
        pool = _engine(actors, report).pool
    else:
        vocabulary = pickle.loads(Path(which).read_bytes())
        report("the vocabulary, our modules for it")
        from actors import RayPool

        report("Ray and our other modules")
        pool = RayPool(vocabulary, num_actors=actors)
        report("the pool")
    _wait_until_warm(pool)
    report("idle", processes=memory(os.getpid(), "engine"), segments=segments())
    _open(pool, [one for one in pickle.loads(Path(grammars_file).read_bytes()) if one["backend"] == "llguidance"])
    report("open", processes=memory(os.getpid(), "engine"), segments=segments(), rows=ROWS)
    pool.shutdown()


def _engine(actors: int, report: PartReporter) -> Any:
    import torch  # noqa: F401

    report("torch")
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    report("transformers")
    import engine.server.process  # noqa: F401
    from actors import RayPool
    from engine import AsyncLLM, EngineConfig
    from engine.default_model import checkpoint_path
    from engine.model_loader import load_model

    report("our own modules, FastAPI")
    model = load_model(str(checkpoint_path()))
    report("the model and its vocabulary")
    pool = RayPool(model.vocabulary, num_actors=actors)
    report("the pool")
    running = AsyncLLM(model, pool, EngineConfig())
    report("the engine, its KV cache reserved")
    return running


def _wait_until_warm(pool: Any) -> None:
    """Wait until the compile processes exist and memory no longer grows."""
    while not pool.compile_pids():
        time.sleep(0.5)
    time.sleep(SETTLE_SECONDS)


def _open(pool: Any, grammars: list[dict[str, Any]]) -> None:
    """Open `ROWS` sequences, each in the middle of its text."""
    from guided.sequence import GuidedSequence

    known = [(pool.compile(one["constraint"], ["llguidance"]).result(120), one["tokens"]) for one in grammars]
    sequences = []
    for number in range(ROWS):
        grammar, tokens = known[number % len(known)]
        sequences.append(GuidedSequence(str(number), number, tokens[: len(tokens) // 2]))
        pool.open(sequences[-1], grammar)
    pool.submit(sequences)
    found = pool.collect(60.0)
    if found.late or found.failed:
        raise SystemExit(
            f"{len(found.late)} masks are late, {len(found.failed)} failed: {list(found.failed.items())[:3]}"
        )


if __name__ == "__main__":
    main()
