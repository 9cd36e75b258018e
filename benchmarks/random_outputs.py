"""Check that all random outputs that end `stop` are valid: `python -m
benchmarks.random_outputs --count 20000`.

Random constraints (regexes, choices, grammars, schemas of all drafts; with `--schemas
FILE`, the schemas of MaskBench) are compiled with every backend and with "auto".
Outputs are sampled from the masks: uniformly, or with random biases and temperatures,
as a model with any weights could. An output that ends with a stop token is validated as
a whole by code that does not use the service
(`benchmarks/random_constraints/validation.py`). No server is needed. A process does the
work, and is replaced when it crashes or takes longer than `--limit` seconds for one
constraint and backend.

With `--checked`, a model answers the schemas of ../shared/data/checked-dev.jsonl.gz,
with keywords that are checked: see `benchmarks/random_constraints/checked.py`.

Prints a line per backend and kind, and every violation: an invalid output, a row that
fails, a crash of a library. The exit status is 1 after a violation. `--seed` and the
number of a case reproduce it: `--first N --cases 1`. Ctrl-C ends the run early. Writes
random_outputs.{json,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import report
from benchmarks.random_constraints import checked
from benchmarks.random_constraints.languages import (
    Case,
    random_choice,
    random_grammar,
    random_regex,
)
from benchmarks.random_constraints.schemas import random_schema, schema_case
from benchmarks.workload import read_rows
from engine.default_model import checkpoint_path
from guided.backends import AUTO, BACKENDS, Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids, words
from guided.check.check import vocabulary_of
from guided.check.process import BackendProcess, set_time_limit
from guided.errors import (
    CompileTimeout,
    ConstraintNotMet,
    GuidedError,
    InvalidConstraint,
)
from guided.masks.compilation import compile_constraint
from guided.masks.worker import MaskWorker
from guided.vocabulary import Vocabulary

WAYS = (AUTO, *BACKENDS)
CHECKED = report.ROOT.parent / "shared/data/checked-dev.jsonl.gz"
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
COLUMNS = {"way": "backend", "kind": "kind", **_OUTCOMES}
_VIOLATIONS = ("invalid", "failed", "error", "crashed")
_ENDED = ("stop", "invalid")


@dataclass(frozen=True)
class Result:
    """The outcome of `count` outputs of a case."""

    outcome: str
    """`stop` (valid), `invalid`, `not met` (a checked keyword), `failed` (the row),
    `cut`, `refused`, `error`; `crashed`, `timeout` (the process)."""
    detail: str = ""
    count: int = 1


def random_case(seed: int, number: int) -> Case:
    """Return one of the random constraints of a seed."""
    source = random.Random(f"{seed} {number}")
    makers = (
        [random_schema] * 7 + [random_regex] * 3 + [random_grammar] + [random_choice]
    )
    return source.choice(makers)(source)


def run_case(
    backends: Backends,
    case: Case,
    backend: str,
    source: random.Random,
    outputs: int,
    tokens: int,
) -> list[Result]:
    """Compile a case with one backend (or "auto"), and sample `outputs` of at most
    `tokens` tokens."""
    try:
        constraint = case.constraint()
        compiled = compile_constraint(
            backends, constraint, candidates(constraint.kind, backend)
        )
    except InvalidConstraint as error:
        return [Result("refused", str(error))]
    except GuidedError as error:
        return [Result("error", f"{type(error).__name__}: {error}")]
    seen: Counter[Result] = Counter()
    for _ in range(outputs):
        try:
            text = sample(backends.vocabulary, compiled.grammar, source, tokens)
        except ConstraintNotMet as error:
            seen[Result("not met", f"{compiled.backend}: {error}")] += 1
            continue
        except GuidedError as error:
            seen[Result("failed", f"{compiled.backend}: {error}")] += 1
            continue
        problem = None if text is None else case.problem(text)
        if text is None:
            seen[Result("cut")] += 1
        elif problem is None:
            seen[Result("stop")] += 1
        else:
            seen[Result("invalid", f"{compiled.backend}: {text!r}: {problem}")] += 1
    return [
        Result(result.outcome, result.detail, count) for result, count in seen.items()
    ]


def sample(
    vocabulary: Vocabulary, grammar: CompiledGrammar, source: random.Random, limit: int
) -> str | None:
    """Return one random output; None if it has no end after `limit` tokens.

    Raises:
        GuidedError: the row failed.
    """
    worker = MaskWorker(vocabulary)
    worker.open(0, grammar, final=0)
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    logits, generator = (
        _logits(vocabulary, source),
        np.random.default_rng(source.getrandbits(32)),
    )
    tokens: list[int] = []
    new: list[int] = []
    for _ in range(limit):
        if (error := worker.fill(0, new, row)) is not None:
            raise error
        if 0 in worker.vetoed:
            del tokens[worker.vetoed[0].report().length :]
        allowed = allowed_ids(row)
        noise = generator.gumbel(size=len(allowed))
        token = int(allowed[np.argmax(logits[allowed] + noise)])
        if token in vocabulary.stop_token_ids:
            return vocabulary.decode(tokens).decode()
        new = [token]
        tokens += new
    return None


def _logits(vocabulary: Vocabulary, source: random.Random) -> NDArray[np.float64]:
    """Return the logits of a model without context, divided by a temperature. Some
    prefer ends and short tokens."""
    size = vocabulary.padded_vocab_size
    generator = np.random.default_rng(source.getrandbits(32))
    logits = generator.normal(size=size) * source.choice([0.0, 0.0, 0.5, 3.0])
    ends, blanks = source.choice([0.0, 1.0, 3.0, 6.0]), source.choice([-8.0, -3.0, 0.0])
    for token in vocabulary.text_token_ids:
        text = vocabulary.token_bytes[token]
        if text[:1] in (b'"', b"}", b"]"):
            logits[token] += ends
        if not text.strip():
            logits[token] += blanks
    for token in vocabulary.stop_token_ids:
        logits[token] += ends + 1.0
    return logits


def _judge(
    backends: Backends,
    options: argparse.Namespace,
    number: int,
    schema: Any,
    backend: str,
) -> list[Result]:
    """Run one case with one backend, in a process that is killed after `--limit`
    seconds."""
    set_time_limit(options.limit)
    case = random_case(options.seed, number) if schema is None else schema_case(schema)
    source = random.Random(f"{options.seed} {number} {backend}")
    return run_case(backends, case, backend, source, options.outputs, options.tokens)


def measure(
    options: argparse.Namespace, schemas: Sequence[Any]
) -> tuple[Counter[tuple[str, str, str]], list[str]]:
    """Return the counts by backend, kind and outcome; and the violations."""
    counts: Counter[tuple[str, str, str]] = Counter()
    violations: list[str] = []
    process, ended = BackendProcess(vocabulary_of(checkpoint_path())), 0
    numbers: Iterable[int] = (
        range(options.first, len(schemas))
        if schemas
        else itertools.count(options.first)
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        tqdm(total=options.count, unit=" outputs", disable=None) as bar,
    ):
        for number in itertools.islice(numbers, options.cases):
            schema = schemas[number] if schemas else None
            kind = "json_schema" if schemas else random_case(options.seed, number).kind
            for backend in options.backend or WAYS:
                try:
                    results = process.call(_judge, options, number, schema, backend)
                except GuidedError as error:
                    results = [
                        Result(
                            "timeout"
                            if isinstance(error, CompileTimeout)
                            else "crashed",
                            str(error),
                        )
                    ]
                for result in results:
                    counts[backend, kind, result.outcome] += result.count
                    if result.outcome in _ENDED:
                        ended += result.count
                        bar.update(result.count)
                    if result.outcome in _VIOLATIONS:
                        violations.append(
                            f"case {number}, {kind}, {backend}: {result.outcome}: {result.detail}"
                        )
                        tqdm.write(violations[-1])
            if ended >= options.count:
                break
    process.stop()
    return counts, violations


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument(
        "--count",
        type=int,
        default=5000,
        help="number of outputs that end with a stop token",
    )
    parser.add_argument(
        "--cases", type=int, default=10**9, help="maximum number of constraints"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--outputs", type=int, default=6, help="outputs per constraint and backend"
    )
    parser.add_argument(
        "--tokens", type=int, default=120, help="maximum length of an output"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=15.0,
        help="seconds for one constraint and backend",
    )
    parser.add_argument(
        "--schemas",
        type=Path,
        help="MaskBench's schemas (.jsonl.gz) instead of random constraints",
    )
    parser.add_argument(
        "--backend",
        choices=WAYS,
        action="append",
        help="backends (default: all, and auto)",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="answers of a model under keywords that are checked",
    )
    parser.add_argument(
        "--model", help="with --checked: the model (default: the embedded one)"
    )
    parser.add_argument("--way", default=AUTO, help="with --checked: the backend")
    parser.add_argument(
        "--verbose", action="store_true", help="with --checked: print every answer"
    )
    options = parser.parse_args()
    if options.checked:
        options.schemas = options.schemas or CHECKED
        checked.main(options)
    if options.quick:
        options.count = 200
    started_on = report.machine()
    schemas = (
        [row["schema"] for row in read_rows(options.schemas)] if options.schemas else []
    )
    counts, violations = measure(options, schemas)
    rows: list[dict[str, Any]] = []
    for backend, kind in dict.fromkeys(
        (backend, kind) for backend, kind, _ in sorted(counts)
    ):
        found = {name: counts[backend, kind, name] for name in _OUTCOMES}
        rows.append({"way": backend, "kind": kind, **found})
    report.print_table(rows, COLUMNS)
    results = {"outputs": rows, "violations": violations}
    report.write_json(
        options.out / "random_outputs.json", vars(options), results, started_on
    )
    title = f"random outputs of random constraints, seed {options.seed}, {len(violations)} violations"
    report.plot(
        options.out / "random_outputs.png",
        title,
        rows,
        ("kind",),
        {"stop": "valid outputs that end stop"},
    )
    report.exit_with(violations)


if __name__ == "__main__":
    main()
