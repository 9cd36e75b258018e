"""Measure what a mask costs in a worker, and how much of it is the adapter's: `python -m benchmarks.mask_time`.

Rows follow real documents on one CPU. At each step every row accepts its last token and fills its next mask, in turns:

- `adapter`: `Matcher.accept_tokens` and `Matcher.fill_bitmask`;
- `worker`: `MaskWorker.fill`, as an actor calls it.

Prints microseconds per row, and the ratio of worker to adapter. Writes mask_time.{json,png}.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import Backends
from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import words
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.vocabulary import Vocabulary
from guided.worker import MaskWorker

COLUMNS = {
    "backend": "backend",
    "rows": "rows",
    "way": "way",
    "row_mean": "us per row",
    "row_p50": "p50",
    "row_p99": "p99",
    "ratio": "to adapter",
}
Started = Sequence[tuple[str, CompiledGrammar, tuple[int, ...]]]
"""Name, grammar and tokens of each row."""
Fill = Callable[[int, Sequence[int], NDArray[np.int32]], Any]
"""Accepts the tokens of a row, and fills its mask."""


def compiled(options: argparse.Namespace, backends: Backends, tokens: Tokens, backend: str) -> Started:
    """Return the documents that a backend accepts, with their grammars."""
    found = []
    for document in documents(options.data, tokens, options.documents, max_schema=1000):
        try:
            grammar = compile_with(backends, Constraint.json_schema(document.schema), backend).grammar
            grammar.matcher().accept_tokens(document.tokens)
        except GuidedError:  # refused, or narrower than the document
            continue
        found.append((document.name, grammar, document.tokens))
    if not found:
        report.fail(f"{backend} compiles none of the documents")
    return found


def adapter(rows: Started) -> Fill:
    """Return the adapter's way."""
    matchers: list[Matcher] = [grammar.matcher() for _, grammar, _ in rows]

    def fill(row: int, new: Sequence[int], mask: NDArray[np.int32]) -> None:
        matchers[row].accept_tokens(new)
        matchers[row].fill_bitmask(mask)

    return fill


def worker(rows: Started, vocabulary: Vocabulary) -> Fill:
    """Return the worker's way."""
    owner = MaskWorker(vocabulary)
    for row, (name, grammar, _) in enumerate(rows):
        owner.install(name, grammar)
        owner.open(row, name)
    return owner.fill


def measure(rows: Started, vocabulary: Vocabulary) -> dict[str, list[float]]:
    """Return the seconds per row of each step and way, until the shortest document ends."""
    table = np.zeros((len(rows), words(vocabulary.padded_vocab_size)), dtype=np.int32)
    ways: dict[str, Fill] = {"adapter": adapter(rows), "worker": worker(rows, vocabulary)}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(min(len(tokens) for _, _, tokens in rows)):
        new = [tokens[step - 1 : step] if step else () for _, _, tokens in rows]
        for way, fill in list(ways.items())[:: 1 if step % 2 else -1]:
            started = time.perf_counter()
            for row, mask in enumerate(table):
                fill(row, new[row], mask)
            taken[way].append((time.perf_counter() - started) / len(rows))
    return taken


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument("--backend", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--documents", type=int, default=64, help="schemas, each with one document")
    parser.add_argument("--repeat", type=int, default=10, help="runs of all rows from their beginnings")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    options = parser.parse_args()
    if options.quick:
        options.documents, options.repeat = 8, 2
    started_on = report.machine()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokens = Tokens.tekken()
    backends = Backends(Vocabulary.from_tekken(tokens.path))
    lines: list[dict[str, Any]] = []
    for backend in options.backend:
        found = compiled(options, backends, tokens, backend)
        rows = [found[row % len(found)] for row in range(options.rows)]
        taken: dict[str, list[float]] = {}
        for _ in range(options.repeat):
            for way, seconds in measure(rows, backends.vocabulary).items():
                taken.setdefault(way, []).extend(seconds)
        for way, seconds in taken.items():
            spread = {f"row_{key}": value for key, value in report.percentiles(seconds, 1e6).items()}
            ratio = round(float(np.mean(seconds) / np.mean(taken["adapter"])), 2)
            lines.append({"backend": backend, "rows": options.rows, "way": way, **spread, "ratio": ratio})
    report.print_table(lines, COLUMNS)
    report.write_json(options.out / "mask_time.json", vars(options), lines, started_on)
    title = f"{options.rows} rows of real documents, one CPU"
    report.plot(options.out / "mask_time.png", title, lines, ("backend",), {"row_p50": "a mask, µs per row"})


if __name__ == "__main__":
    main()
