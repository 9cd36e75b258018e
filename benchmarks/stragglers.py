"""Measure what one row with slow masks does to the other rows: `python -m
benchmarks.stragglers --vllm-python PATH`.

Each mask of one row takes 200 ms longer: it sleeps ("sleep"), or it waits in C and
keeps the interpreter lock ("hold"). All engines get the same delay
(`benchmarks.injected_faults`). Each of the other rows has its own schema, or all have
one schema, whose matchers share a lexer in llguidance.

The result is the inter-token latency of the *other* rows, compared with a run of the
same rows in which no row is slow, and the latency of the slow row. Rows, forward pass
and turns are those of `benchmarks.step_overhead`. The pool of actors runs with the
engine's deadline for masks, and without. Writes stragglers.{json,png}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import report
from benchmarks.comparison import Candidate, Comparison, started, vllm_candidate
from benchmarks.injected_faults import SLOW_SECONDS
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.workload import WORDS, Tokens, documents, shared_documents

CASES = ("sleep", "hold")
COLUMNS = {
    "case": "case",
    "schemas": "schemas",
    "way": "way",
    "without_p50": "without p50",
    "without_p99": "p99",
    "itl_p50": "with p50",
    "itl_p99": "p99",
    "ratio_p50": "ratio p50",
    "ratio_p99": "ratio p99",
    "slow_row_p50": "slow row p50",
    "again_percent": "% computed again",
    "abandoned": "abandoned",
}


def candidates(options: argparse.Namespace) -> list[Candidate]:
    given = {"actors": options.actors, "compile_seconds": 5.0}
    vllm = vllm_candidate(options.vllm_python)
    return [
        Candidate("Ray pool, deadline", "ray", options={**given, "deadline": True}),
        Candidate("Ray pool, no deadline", "ray", options=given),
        Candidate("inline", "inline"),
        *([vllm] if vllm is not None else []),
    ]


def slow_documents(name: str, tokens: Tokens) -> list[Document]:
    """Return long documents with a property of this name, which may be the mark of a
    fault."""
    properties = {name: {"type": "array", "items": {"type": "string"}, "minItems": 40}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
    }
    text = json.dumps({name: [WORDS[index % len(WORDS)] for index in range(60)]})
    return [Document(name, json.dumps(schema), tuple(tokens.encode(text)))]


def measure(
    comparison: Comparison,
    case: str,
    others: Sequence[Document],
    tokens: Tokens,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measure every way of masking without the slow row, then with it."""
    pinned = {
        slow: slow_documents(f"injected_{case}" if slow else "ordinary", tokens)
        for slow in (False, True)
    }
    usable = comparison.load("llguidance", [*others, *pinned[False], *pinned[True]])
    quick = [document for document in usable if document in others]
    if len(usable) - len(quick) < len(pinned) or not quick:
        report.fail(
            "only the slow schema compiles in every way of masking, or it does not"
        )
    found: dict[bool, dict[str, Samples]] = {}
    with tqdm(unit=" steps", disable=None) as bar:
        for slow in (False, True):
            bar.set_description(f"{case}, {'with' if slow else 'without'}")
            found[slow] = comparison.run(
                quick,
                options.batch,
                options.steps,
                options.rounds,
                bar,
                seconds=options.seconds,
                pinned=pinned[slow],
            )
    ways = [one.label for one in comparison.candidates]
    return [
        {"case": case, "way": way, **figures(found[False][way], found[True][way])}
        for way in ways
    ]


def figures(without: Samples, with_: Samples) -> dict[str, Any]:
    row: dict[str, Any] = {
        f"without_{key}": value
        for key, value in report.percentiles(without.latency).items()
    }
    row |= {
        f"itl_{key}": value for key, value in report.percentiles(with_.latency).items()
    }
    row |= {
        f"slow_row_{key}": value
        for key, value in report.percentiles(with_.slow_latency).items()
    }
    for at in ("p50", "p99"):
        row[f"ratio_{at}"] = round(row[f"itl_{at}"] / row[f"without_{at}"], 3)
    row["again_percent"] = round(
        100 * sum(with_.again) / (len(with_.latency) + len(with_.slow_latency)), 2
    )
    row["refused"] = without.refused + with_.refused
    # documents with a next token that a mask forbade: normally none
    row["abandoned"] = len(row["refused"])
    row["tokens"] = {
        "without": len(without.latency),
        "with": len(with_.latency),
        "slow row": len(with_.slow_latency),
    }
    return row


def parsed() -> argparse.Namespace:
    parser = report.start(__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--steps",
        type=int,
        default=320,
        help="measured steps per way, within the time limit",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="time limit per way and run, in seconds",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="number of turns per way of masking"
    )
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument(
        "--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)"
    )
    options = parser.parse_args()
    if options.quick:
        options.batch, options.steps, options.rounds = 8, 64, 1
    return options


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    started_on = report.machine()
    own = documents(tokens, 2 * options.batch, max_schema=2000)
    one = shared_documents(tokens, 2 * options.batch)
    rows: list[dict[str, Any]] = []
    with started(candidates(options), tokens) as comparison:
        for case in options.case:
            for schemas, others in {"each its own": own, "one schema": one}.items():
                rows += [
                    {**row, "schemas": schemas}
                    for row in measure(comparison, case, others, tokens, options)
                ]
    report.print_table(rows, COLUMNS)
    print(f"inter-token latency of the other {options.batch - 1} rows, milliseconds")
    report.write_json(options.out / "stragglers.json", vars(options), rows, started_on)
    title = f"one slow row ({SLOW_SECONDS * 1e3:g} ms per mask) among {options.batch}, {started_on['cpus']} CPUs"
    panels = {"ratio_p50": "ITL of the other rows, with / without the slow row"}
    report.plot(
        options.out / "stragglers.png", title, rows, ("case", "schemas"), panels
    )


if __name__ == "__main__":
    main()
