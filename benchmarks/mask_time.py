"""Measure the cost of a mask in a worker, and the adapter's share of it: `python -m
benchmarks.mask_time`.

Rows follow real documents on one CPU. At each step every row accepts its last token and
fills its next mask, in turns:

- `adapter`: `Matcher.accept_tokens` and `Matcher.fill_bitmask`;
- `worker`: `MaskWorker.fill`, as an actor calls it.

With `--checked`, the schemas have a keyword that is only checked, and each token is
validated.

Prints microseconds per row, and the ratio of worker to adapter. Writes
mask_time.{json,png}.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.peers.rows import Document
from benchmarks.workload import Tokens, documents
from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.masks.compilation import compile_with
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

COLUMNS = {
    "backend": "backend",
    "rows": "rows",
    "way": "way",
    "row_mean": "us per row",
    "row_p50": "p50",
    "row_p99": "p99",
    "ratio": "to adapter",
}


def compiled(
    drawn: Sequence[Document], backends: Backends, backend: str, *, checked: bool
) -> list[tuple[CompiledGrammar, Document]]:
    """Return the documents that a backend accepts, with their grammars. `checked`: only
    with a checked keyword."""
    found = []
    for document in drawn:
        try:
            grammar = compile_with(
                backends, Constraint.json_schema(document.schema), backend
            ).grammar
            grammar.matcher().accept_tokens(document.tokens)
        except GuidedError:  # refused, or narrower than the document
            continue
        if not checked or grammar.checked:
            found.append((grammar, document))
    return found or report.fail(f"{backend} compiles none of the documents")


def measure(
    rows: Sequence[tuple[CompiledGrammar, Document]], vocabulary: Vocabulary
) -> dict[str, list[float]]:
    """Return the seconds per row of each step and way, until the shortest document
    ends."""
    table = np.zeros((len(rows), words(vocabulary.padded_vocab_size)), dtype=np.int32)
    matchers = [grammar.matcher() for grammar, _ in rows]
    worker = MaskWorker(vocabulary)
    for row, (grammar, _) in enumerate(rows):
        worker.open(row, grammar, final=0)
    taken: dict[str, list[float]] = {"adapter": [], "worker": []}
    for step in range(min(len(document.tokens) for _, document in rows)):
        new = [document.tokens[max(0, step - 1) : step] for _, document in rows]
        for way in ("adapter", "worker") if step % 2 else ("worker", "adapter"):
            started = time.perf_counter()
            for row, mask in enumerate(table):
                if way == "worker":
                    worker.fill(row, new[row], mask)
                else:
                    matchers[row].accept_tokens(new[row])
                    matchers[row].fill_bitmask(mask)
            taken[way].append((time.perf_counter() - started) / len(rows))
    return taken


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument("--backend", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument(
        "--rows",
        type=int,
        default=64,
        help="rows, each with its own schema if there are as many",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="use only schemas with a keyword that is checked",
    )
    options = parser.parse_args()
    repeat = 2 if options.quick else 10
    started_on = report.machine()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokens = Tokens.tekken()
    backends = Backends(Vocabulary.from_tekken(tokens.path))
    if options.checked:
        drawn = documents(tokens, 10**6, max_schema=20_000)
    else:
        drawn = documents(tokens, options.rows, max_schema=1000)
    lines: list[dict[str, Any]] = []
    for backend in options.backend:
        found = compiled(drawn, backends, backend, checked=options.checked)
        rows = [found[row % len(found)] for row in range(options.rows)]
        runs = [measure(rows, backends.vocabulary) for _ in range(repeat)]
        taken = {
            way: [seconds for run in runs for seconds in run[way]] for way in runs[0]
        }
        for way, seconds in taken.items():
            spread = {
                f"row_{key}": value
                for key, value in report.percentiles(seconds, 1e6).items()
            }
            ratio = round(float(np.mean(seconds) / np.mean(taken["adapter"])), 2)
            lines.append(
                {
                    "backend": backend,
                    "rows": options.rows,
                    "way": way,
                    **spread,
                    "ratio": ratio,
                }
            )
    report.print_table(lines, COLUMNS)
    ratios = [
        f"{line['backend']} {line['ratio']}"
        for line in lines
        if line["way"] == "worker"
    ]
    print(f"mask, worker to adapter, {options.rows} rows: {' / '.join(ratios)}")
    report.write_json(options.out / "mask_time.json", vars(options), lines, started_on)
    title = f"{options.rows} rows of real documents, one CPU"
    report.plot(
        options.out / "mask_time.png",
        title,
        lines,
        ("backend",),
        {"row_p50": "a mask, µs per row"},
    )


if __name__ == "__main__":
    main()
