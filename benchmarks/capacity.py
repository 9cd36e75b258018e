"""How much does guided decoding need for a thousand to a hundred thousand concurrent sequences, and what breaks first?

    python -m benchmarks.capacity --quick

Measures masks and compilations of real schemas along real documents in this process: the computing time of every mask,
and the bytes that it takes in several encodings. Then simulates the steps of an engine with these masks, in the order
of the documents, and counts what a fleet of such engines needs. A sequence stays on its actor, and every row of a step
waits for the slowest actor (an engine goes on without late rows, so the exposed time is an upper bound).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paths import RESULTS
from benchmarks.report import machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import Backends
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary

_ROW_SECONDS = 14e-6
"""Time of the engine's thread for each row of a step (`benchmarks.step_overhead`: 3.7 ms for 256 rows)."""
_HEADER_BYTES = 64
"""Of a row on the wire, both ways: slot, versions, seconds, tokens."""
_EXPOSED_SHARE = 0.05
"""There are enough actors if masks prolong the mean step by no more than this."""
_CALLS_PER_SECOND = 1000.0
"""Calls of actors that one connection to Ray makes, at 1.0 ms each."""
_RAY_ACTORS = 10_000
"""Actors of a cluster in Ray's own scalability tests."""
_STEPS = 1000


@dataclass(frozen=True)
class Walk:
    """The masks of one document, in order."""

    compile_seconds: float
    seconds: NDArray[np.float64]
    sparse_bytes: NDArray[np.int64]
    """The mask as a list of its allowed or of its forbidden tokens, whichever is shorter; at most the whole row."""
    changed: NDArray[np.int64]
    """Words in which the mask differs from the one before it."""


def measure(backend: str, data: Path, count: int) -> tuple[list[Walk], int]:
    """Walk along documents; return the walks, and the bytes of a row."""
    tokens = Tokens.tekken()
    backends = Backends(Vocabulary.from_tekken(tokens.path))
    row = np.zeros(words(tokens.width), np.int32)
    before = row.copy()
    walks = []
    for document in documents(data, tokens, count, max_schema=1000):
        started = time.thread_time()
        try:
            matcher = backends[backend].compile(Constraint.json_schema(document.schema)).matcher()
        except GuidedError:  # this backend cannot enforce the schema
            continue
        compiled = time.thread_time() - started
        seconds, sparse, changed = [], [], []
        for token in document.tokens:
            started = time.thread_time()
            matcher.fill_bitmask(row)
            try:
                matcher.accept_tokens([token])
            except GuidedError:  # the backend is narrower than the document
                break
            seconds.append(time.thread_time() - started)
            allowed = int(np.bitwise_count(row).sum())
            sparse.append(min(4 * allowed, 4 * (tokens.width - allowed), row.nbytes))
            changed.append(np.count_nonzero(row != before))
            before = row.copy()
        if seconds:
            walks.append(Walk(compiled, np.array(seconds), np.array(sparse), np.array(changed)))
    return walks, row.nbytes


def exposed(walks: Sequence[Walk], rows: int, actors: int, forward: float, random: np.random.Generator) -> Any:
    """Simulate steps; return the time by which the slowest actor exceeds the forward pass, in seconds, of each step."""
    lengths = np.array([len(walk.seconds) for walk in walks])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    seconds = np.concatenate([walk.seconds for walk in walks])
    which = random.integers(len(walks), size=rows)
    position = random.integers(lengths[which])
    actor = np.arange(rows) % actors
    late = np.empty(_STEPS)
    for step in range(_STEPS):
        busy = np.bincount(actor, seconds[starts[which] + position], minlength=actors)
        late[step] = max(0.0, busy.max() - forward)
        position += 1
        over = position >= lengths[which]
        which[over] = random.integers(len(walks), size=np.count_nonzero(over))
        position[over] = 0
    return late


def fleet(walks: Sequence[Walk], mask_bytes: int, sequences: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `sequences` concurrent sequences need, and how far each resource of an engine is used.

    Args:
        mask_bytes: mean of a mask on the wire.
    """
    random = np.random.default_rng(0)
    rows, forward = min(options.rows, sequences), options.forward_ms / 1e3
    mean = float(np.concatenate([walk.seconds for walk in walks]).mean())
    least = max(2, int(np.ceil(rows * mean / forward)))
    late, actors = exposed(walks, rows, least, forward, random), least
    while late.mean() > _EXPOSED_SHARE * forward and actors < 4 * least:
        actors += 1
        late = exposed(walks, rows, actors, forward, random)
    step = forward + float(late.mean()) + rows * _ROW_SECONDS
    engines = -(-sequences // rows)
    length = np.mean([len(walk.seconds) for walk in walks])
    grammars = rows / (length * step) * options.new_grammars
    compiling = grammars * float(np.mean([walk.compile_seconds for walk in walks]))
    cores = rows * mean / step
    on_the_wire = mask_bytes + _HEADER_BYTES
    used = {
        "engine thread": rows * _ROW_SECONDS / step,
        "cores of the engine's node": (cores + compiling + 2) / options.cores,
        "network of the engine, if masks are remote": rows * on_the_wire / step * 8 / (options.gbits * 1e9),
        "compile processes": compiling / options.compile_processes,
        "calls through Ray": grammars * actors / _CALLS_PER_SECOND,
        "actors in one Ray cluster": engines * (actors + 1) / _RAY_ACTORS,
    }
    return {
        "sequences": sequences,
        "engines": engines,
        "actors": engines * actors,
        "actors_per_engine": actors,
        "cores": engines * cores,
        "exposed_mean_ms": float(late.mean()) * 1e3,
        "exposed_p99_ms": float(np.percentile(late, 99)) * 1e3,
        "tokens_per_second": sequences / step,
        "gigabytes_per_second": sequences * on_the_wire / step / 1e9,
        "grammars_per_second": engines * grammars,
        "first": max(used, key=lambda name: used[name]),
        "used": max(used.values()),
        "all": {name: round(share, 3) for name, share in used.items()},
    }


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--rows", type=int, default=256, help="rows of one engine's step")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="forward pass of these rows")
    parser.add_argument(
        "--cores", type=int, default=16, help="cores of an engine's node that masks may use, and others"
    )
    parser.add_argument("--gbits", type=float, default=25.0, help="network of an engine's node")
    parser.add_argument("--compile-processes", type=int, default=8, help="of each engine")
    parser.add_argument(
        "--new-grammars", type=float, default=0.1, help="share of sequences with a grammar of their own"
    )
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--quick", action="store_true", help="30 documents")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = machine()
    walks, row_bytes = measure(options.backend, options.data, 30 if options.quick else options.documents)
    seconds = np.concatenate([walk.seconds for walk in walks])
    sparse = np.concatenate([walk.sparse_bytes for walk in walks])
    changed = np.concatenate([walk.changed for walk in walks])
    wire_bytes = round(8 * float(changed.mean()))  # position and word, as in `actors.steps.protocol.Filled`
    measured = {
        "schemas": len(walks),
        "masks": len(seconds),
        "mask_us": percentiles(seconds.tolist(), 1e6),
        "compile_ms": percentiles([walk.compile_seconds for walk in walks]),
        "row_bytes": row_bytes,
        "mean_bytes": {
            "whole rows": row_bytes,
            "changed rows, whole": round(float((changed > 0).mean()) * row_bytes),
            "sparse": round(float(sparse.mean())),
            "changed rows, sparse": round(float((sparse * (changed > 0)).mean())),
            "changed words": wire_bytes,
        },
    }
    print(*(f"{name}: {value}" for name, value in measured.items()), sep="\n")
    rows = [fleet(walks, wire_bytes, sequences, options) for sequences in options.sequences]
    print_table(
        rows,
        {
            "sequences": "sequences",
            "engines": "engines",
            "actors": "actors",
            "actors_per_engine": "per engine",
            "cores": "busy cores",
            "exposed_mean_ms": "exposed mean, ms",
            "exposed_p99_ms": "p99",
            "tokens_per_second": "tokens/s",
            "gigabytes_per_second": "GB/s if remote",
            "grammars_per_second": "new grammars/s",
            "first": "breaks first",
            "used": "used",
        },
    )
    setting = {name: value for name, value in vars(options).items() if name != "out"}
    write_json(options.out / "capacity.json", setting, {"measured": measured, "fleet": rows}, before)


if __name__ == "__main__":
    main()
