"""Are all random outputs that end `stop` valid? `python -m benchmarks.random_outputs --count 20000`.

Random constraints (regexes, choices, grammars, schemas of all drafts; with `--schemas FILE`, the schemas of MaskBench)
are compiled with every backend and with "auto".
Outputs are sampled from the masks: uniformly, or with random biases and temperatures, as a model with any weights
could. An output that ends with a stop token is validated as a whole by code that does not use the service
(`benchmarks/random_constraints/validation.py`). No server is needed. The work is done in a process that is replaced
when it crashes or takes longer than `--limit` seconds for one constraint and backend.

Prints a line per backend and kind, and every violation: an invalid output, a row that fails, a crash of a library. The
exit status is 1 after a violation. `--seed` and the number of a case reproduce it: `--first N --cases 1`.
Ctrl-C ends the run early.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.chaos.server import default_vocabulary
from benchmarks.random_constraints.languages import Case
from benchmarks.random_constraints.schemas import schema_case
from benchmarks.random_constraints.walks import COLUMNS, Result, random_case, run_case
from benchmarks.report import exit_with, print_table
from guided.backends import Backends

_OUTCOMES = {
    "stop": "valid stop",
    "invalid": "INVALID stop",
    "not met": "constraint not met",
    "failed": "row failed",
    "cut": "cut",
    "refused": "refused",
    "error": "error",
    "crashed": "crashed",
    "timeout": "timeout",
}
_VIOLATIONS = ("invalid", "failed", "error", "crashed")
_ENDED = ("stop", "invalid")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--count", type=int, default=20_000, help="number of outputs that end with a stop token")
    parser.add_argument("--cases", type=int, default=10**9, help="maximum number of constraints")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--outputs", type=int, default=6, help="outputs per constraint and backend")
    parser.add_argument("--tokens", type=int, default=120, help="maximum length of an output")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for one constraint and backend")
    parser.add_argument("--schemas", type=Path, help="MaskBench's schemas (.jsonl.gz) instead of random constraints")
    parser.add_argument("--backend", choices=COLUMNS, action="append", help="default: all, and auto")
    options = parser.parse_args()
    counts: Counter[tuple[str, str, str]] = Counter()
    violations: list[str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        Runner(options) as runner,
        tqdm(total=options.count, unit=" outputs", disable=None) as bar,
    ):
        cases = Cases(options)
        for number in itertools.islice(cases.numbers, options.cases):
            case = cases[number]
            for backend in options.backend or COLUMNS:
                for result in runner.run(number, backend):
                    counts[backend, case.kind, result.outcome] += result.count
                    if result.outcome in _ENDED:
                        bar.update(result.count)
                    if result.outcome in _VIOLATIONS:
                        violations.append(f"case {number}, {backend}: {result.outcome}: {result.detail} {case.value!r}")
                        tqdm.write(violations[-1])
            if sum(number for (_, _, outcome), number in counts.items() if outcome in _ENDED) >= options.count:
                break  # a disabled bar does not count
    print_table(_rows(counts), {"backend": "backend", "kind": "kind", **_OUTCOMES})
    exit_with(violations)


def _rows(counts: Counter[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    for backend, kind in dict.fromkeys((backend, kind) for backend, kind, _ in sorted(counts)):
        yield {"backend": backend, "kind": kind, **{name: counts[backend, kind, name] for name in _OUTCOMES}}


class Cases:
    """The constraints by number: random ones, or those of a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._seed = options.seed
        self._schemas: list[Any] | None = None
        self.numbers: Iterable[int] = itertools.count(options.first)
        if options.schemas is not None:
            with gzip.open(options.schemas, "rt") as lines:
                self._schemas = [json.loads(line)["schema"] for line in lines]
            self.numbers = range(options.first, len(self._schemas))

    def __getitem__(self, number: int) -> Case:
        return random_case(self._seed, number) if self._schemas is None else schema_case(self._schemas[number])


class Runner:
    """A process that runs cases, replaced after a crash or a timeout."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Runner:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        self._pipe, inner = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(inner, self._options), daemon=True)
        self._process.start()
        inner.close()
        self._pipe.recv()  # ready

    def run(self, number: int, backend: str) -> list[Result]:
        """Run one case with one backend."""
        self._pipe.send((number, backend))
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._pipe.poll(self._options.limit):
                results: list[Result] = self._pipe.recv()
                return results
        self._process.join(0.5)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        self._start()
        return [Result("timeout") if code is None else Result("crashed", f"exit code {code}")]


def _serve(pipe: Connection, options: argparse.Namespace) -> None:
    backends, cases = Backends(default_vocabulary()), Cases(options)
    pipe.send("ready")
    while True:
        number, backend = pipe.recv()
        source = random.Random(f"{options.seed} {number} {backend}")
        pipe.send(run_case(backends, cases[number], backend, source, options.outputs, options.tokens))


if __name__ == "__main__":
    main()
