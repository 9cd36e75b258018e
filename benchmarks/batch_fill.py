"""Filling many rows in one library call or row by row: `python -m benchmarks.batch_fill`.

Runs on one CPU, with one thread of the library. Every row follows a real document, and each step is filled in all call
styles, taking turns. Prints microseconds per row:

- `row`: one call of the library per row;
- `adapter`: `Matcher.fill_bitmask` per row, as the worker does it (error check included);
- `batch`: one call for all rows: `LLExecutor` or `BatchGrammarMatcher`;
- `batch+check`: the same, then the error check of each row;
- `batch_setup`: building the list of matchers for one call, as a worker has to when its rows change.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import xgrammar
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from benchmarks.report import percentiles, print_table
from benchmarks.workload import DATA, Tokens, documents
from guided.backends import BACKENDS
from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import words
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary

Style = Callable[[list[Any], NDArray[np.int32]], None]
_executor = llguidance.LLExecutor(1)
_batch = xgrammar.BatchGrammarMatcher(max_threads=1)


def _by_adapter(matchers: list[Any], table: NDArray[np.int32]) -> None:
    for matcher, row in zip(matchers, table, strict=True):
        matcher.fill_bitmask(row)


def _llguidance_rows(matchers: list[Any], table: NDArray[np.int32]) -> None:
    for matcher, row in zip(matchers, table, strict=True):
        matcher.native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _llguidance_batch(matchers: list[Any], table: NDArray[np.int32]) -> None:
    fill_next_token_bitmask_par(_executor, [(matcher.native, row) for row, matcher in enumerate(matchers)], table)


def _llguidance_batch_checked(matchers: list[Any], table: NDArray[np.int32]) -> None:
    _llguidance_batch(matchers, table)
    assert not any(matcher.native.is_error() for matcher in matchers)


def _llguidance_setup(matchers: list[Any], table: NDArray[np.int32]) -> None:
    [(matcher.native, row) for row, matcher in enumerate(matchers)]


def _xgrammar_rows(matchers: list[Any], table: NDArray[np.int32]) -> None:
    for matcher, row in zip(matchers, table, strict=True):
        matcher.native.fill_next_token_bitmask(row)


def _xgrammar_batch(matchers: list[Any], table: NDArray[np.int32]) -> None:
    _batch.batch_fill_next_token_bitmask([matcher.native for matcher in matchers], table)


def _xgrammar_setup(matchers: list[Any], table: NDArray[np.int32]) -> None:
    [matcher.native for matcher in matchers]


STYLES: dict[str, dict[str, Style]] = {
    "llguidance": {
        "row": _llguidance_rows,
        "adapter": _by_adapter,
        "batch": _llguidance_batch,
        "batch+check": _llguidance_batch_checked,
        "batch_setup": _llguidance_setup,
    },
    "xgrammar": {
        "row": _xgrammar_rows,
        "adapter": _by_adapter,
        "batch": _xgrammar_batch,
        "batch_setup": _xgrammar_setup,
    },
}


def measure(
    backend: str, grammars: list[tuple[CompiledGrammar, tuple[int, ...]]], rows: int, width: int, steps: int
) -> dict[str, dict[str, float]]:
    """Microseconds per row of each style, over `steps` steps after as many that are not counted."""
    table = np.zeros((rows, words(width)), dtype=np.int32)
    taken: dict[str, list[float]] = {style: [] for style in STYLES[backend]}
    started = [grammars[row % len(grammars)] for row in range(rows)]
    positions = [row * 7 % len(tokens) for row, (_, tokens) in enumerate(started)]
    matchers: list[Matcher] = [grammar.matcher() for grammar, _ in started]
    for row, (_, tokens) in enumerate(started):
        matchers[row].accept_tokens(tokens[: positions[row]])
    styles = list(STYLES[backend].items())
    for step in range(2 * steps):
        for turn in range(len(styles)):
            name, fill = styles[(step + turn) % len(styles)]
            before = time.perf_counter()
            fill(matchers, table)
            if step >= steps:
                taken[name].append((time.perf_counter() - before) / rows)
        for row, (grammar, tokens) in enumerate(started):
            if positions[row] == len(tokens):
                matchers[row], positions[row] = grammar.matcher(), 0
            else:
                matchers[row].accept_tokens([tokens[positions[row]]])
                positions[row] += 1
    return {name: percentiles(seconds, 1e6) for name, seconds in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_fill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backends", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 256, 512], help="rows per call")
    parser.add_argument("--documents", type=int, default=24, help="schemas, each with one document")
    parser.add_argument("--steps", type=int, default=100, help="measured steps; as many before are not counted")
    parser.add_argument("--cpu", type=int, help="the CPU to run on (default: the last one)")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if options.cpu is None else options.cpu})
    tokens = Tokens.tekken()
    vocabulary = Vocabulary.from_tekken(tokens.path)
    lines: list[dict[str, Any]] = []
    for backend in options.backends:
        adapter = BACKENDS[backend].load()(vocabulary)  # without the final check: the libraries' own calls are compared
        grammars: list[tuple[CompiledGrammar, tuple[int, ...]]] = []
        for document in documents(options.data, tokens, options.documents, max_schema=1000):
            try:
                grammar = adapter.compile(Constraint.json_schema(document.schema))
                grammar.matcher().accept_tokens(document.tokens)
            except Exception:  # refused, or narrower than the document
                continue
            grammars.append((grammar, document.tokens))
        for rows in options.rows:
            measured = measure(backend, grammars, rows, tokens.width, options.steps)
            for style, figures in measured.items():
                ratio = figures["p50"] / measured["adapter"]["p50"]
                lines.append({"backend": backend, "rows": rows, "style": style, **figures, "ratio": round(ratio, 2)})
    headings = {"style": "style", "p50": "us/row p50", "p99": "p99", "ratio": "p50 / adapter"}
    print_table(lines, {"backend": "backend", "rows": "rows", **headings})


if __name__ == "__main__":
    main()
