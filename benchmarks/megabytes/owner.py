"""An engine process and its pool, one thing after the other: `python -m benchmarks.megabytes.owner VOCABULARY GRAMMARS
ACTORS`, or with `default` for the vocabulary: the server's engine with the embedded model.

Writes a line of JSON after each part, then one with all processes, idle, and one with all processes and the segments
while sequences are open.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.megabytes.processes import processes, segments
from benchmarks.megabytes.worker import Tellings

ROWS = 64
SETTLE_SECONDS = 2.0


def main() -> None:
    which, grammars_file, actors = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tell = Tellings()
    tell("Python")
    if which == "default":
        pool = _engine(actors, tell).pool
    else:
        vocabulary = pickle.loads(Path(which).read_bytes())
        tell("the vocabulary, our modules for it")
        from actors import RayPool

        tell("Ray and our other modules")
        pool = RayPool(vocabulary, actors)
        tell("the pool")
    _wait_until_warm(pool)
    tell("idle", processes=processes(os.getpid()), segments=segments())
    _open(pool, [one for one in pickle.loads(Path(grammars_file).read_bytes()) if one["backend"] == "llguidance"])
    tell("open", processes=processes(os.getpid()), segments=segments(), rows=ROWS)
    pool.shutdown()


def _engine(actors: int, tell: Tellings) -> Any:
    import torch  # noqa: F401

    tell("torch")
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    tell("transformers")
    import engine.server.process  # noqa: F401
    from engine import AsyncLLM, EngineConfig
    from engine.default_model import checkpoint_path
    from engine.model_loader import load_model

    tell("our own modules, FastAPI")
    import ray  # noqa: F401

    from actors import RayPool

    tell("Ray")
    model = load_model(str(checkpoint_path()))
    tell("the model and its vocabulary")
    pool = RayPool(model.vocabulary, actors)
    tell("the pool")
    running = AsyncLLM(model, pool, EngineConfig())
    tell("the engine, its KV cache reserved")
    return running


def _wait_until_warm(pool: Any) -> None:
    """The compile processes are there, and nothing grows any more."""
    while not pool.compile_pids():
        time.sleep(0.5)
    time.sleep(SETTLE_SECONDS)


def _open(pool: Any, grammars: list[dict[str, Any]]) -> None:
    """`ROWS` sequences in the middle of their texts."""
    from guided.pool import Fill

    known = [(pool.compile(one["constraint"], ["llguidance"]).result(120), one["tokens"]) for one in grammars]
    fills = []
    for number in range(ROWS):
        grammar, tokens = known[number % len(known)]
        pool.open(number, grammar)
        fills.append(Fill(number, 0, tokens[: len(tokens) // 2]))
    for _ in range(2):  # a segment has more rows than a step needs: the next step takes others
        pool.submit(fills)
        rows = pool.collect(None, 60.0)
        if any(row.state != "ready" for row in rows):
            raise SystemExit(json.dumps([str(row.error) for row in rows if row.state != "ready"][:3]))


if __name__ == "__main__":
    main()
