"""Measure what one row with slow masks does to the other rows: `python -m benchmarks.stragglers --vllm-python PATH`.

Each mask of one row takes `--slow-ms` longer: it sleeps, or it computes in C and holds the GIL. Ours uses a test
backend for this, and the other engines get the same delay around their own matcher. The last case is a real one: a
string pattern from one of MaskBench's schemas that is slow in lm-format-enforcer, beside rows that are faster in it.

The result is the inter-token latency of the *other* rows, compared with a run of the same rows in which no row is slow,
and the latency of the slow row.

Each way of masking runs in its own process, and the processes take turns. Rows follow real instances of real schemas,
and the forward pass is simulated (see benchmarks.step_overhead). Ours runs with the engine's deadline for masks, and
without one. Writes benchmarks/out/stragglers.{json,png}.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.comparison import Candidate, Comparison, vllm_candidate
from benchmarks.paths import RESULTS
from benchmarks.peers.loop import Samples, Slowness
from benchmarks.peers.rows import Document
from benchmarks.report import canvas, fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents

CASES = ("sleep", "hold", "real")
FREE_STEPS, QUIET_STEPS = 16, 5
HARD_BACKEND = "lm-format-enforcer"
HARD_SCHEMA = {
    "type": "object",
    "properties": {"etag": {"type": "string", "pattern": r"^[\w\.:-]+$"}},
    "required": ["etag"],
    "additionalProperties": False,
}
"""From Github_medium---o82676 in MaskBench. lm-format-enforcer needs half a second per mask inside this string."""
HARD_WORDS = [
    "the-quick-brown-fox",
    "jumps_over:the-lazy-dog",
    "and_writes",
    "a-letter",
    "to.its.friend",
    "on-2026-03-14",
    "from:berlin",
]
COLUMNS = {
    "case": "case",
    "backend": "backend",
    "way": "way",
    "without_p50": "without p50",
    "without_p99": "p99",
    "with_p50": "with p50",
    "with_p99": "p99",
    "ratio_p50": "ratio p50",
    "ratio_p99": "ratio p99",
    "slow_row_p50": "slow row p50",
    "again_percent": "% computed again",
    "abandoned": "abandoned",
}


@dataclass(frozen=True)
class Case:
    name: str
    backend: str
    slow: Slowness
    pinned: Sequence[Document] = ()


def candidates(options: argparse.Namespace) -> list[Candidate]:
    every = frozenset({"llguidance", "xgrammar", "lm-format-enforcer"})
    actors = {"actors": options.actors, "compile_seconds": 5.0}
    found = [
        Candidate("ours", "ray", every, options={**actors, "deadline": True}),
        Candidate("ours, no deadline", "ray", every, options=actors),
    ]
    if options.ours:
        return found
    peers = [
        Candidate("ours, inline", "inline", every),
        vllm_candidate(options.vllm_python),
        Candidate("xgrammar's processor", "xgrammar", frozenset({"xgrammar"})),
        Candidate("lm-format-enforcer's processor", "lm-format-enforcer", frozenset({"lm-format-enforcer"})),
    ]
    return [*found, *(candidate for candidate in peers if candidate is not None)]


def hard_documents(tokens: Tokens) -> list[Document]:
    """Return different long instances of the hard schema."""
    random_ = random.Random(0)
    texts = [json.dumps({"etag": ".".join(random_.sample(HARD_WORDS, len(HARD_WORDS)))}) for _ in range(20)]
    schema = json.dumps(HARD_SCHEMA)
    return [Document(f"hard {index}", schema, tuple(tokens.encode(text))) for index, text in enumerate(texts)]


def measure(
    comparison: Comparison, case: Case, drawn: Sequence[Document], options: argparse.Namespace, bar: tqdm[Any]
) -> list[dict[str, Any]]:
    """Measure every way of masking without the straggler, then with it."""
    able, usable = comparison.load(case.backend, [*drawn, *case.pinned])
    names = {document.name for document in case.pinned}
    quick = [document for document in usable if document.name not in names]
    if len(usable) - len(quick) < len(names) or not quick:
        lacking = ", ".join(names - {document.name for document in usable}) or "any of the schemas"
        bar.write(f"{case.name}, {case.backend}: left out, because not every way compiles {lacking} in time")
        return []
    found: dict[bool, dict[str, Samples]] = {}
    # The first row is the slow one in both runs. Only its slowness differs.
    quiet = Slowness(1, "none", 0.0)
    for slow in (False, True):
        bar.set_description(f"{case.name}, {case.backend}, {'with' if slow else 'without'}")
        pinned = case.pinned if slow else ()
        forward = options.forward_ms / 1e3
        measurement = comparison.start(able, quick, options.batch, forward, case.slow if slow else quiet, pinned)
        # A way that waits for the slow row shows it within few steps. The others run for longer.
        steps = {one.label: options.steps * _step_factor(one, slow) for one in able}
        found[slow] = measurement.run(steps, options.rounds, bar, seconds=options.seconds)
    return [figures(case, one, found[False][one.label], found[True][one.label]) for one in able]


def _step_factor(candidate: Candidate, slow: bool) -> int:
    if candidate.options.get("deadline"):
        return FREE_STEPS
    return 1 if slow else QUIET_STEPS


def figures(case: Case, candidate: Candidate, without: Samples, with_: Samples) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "backend": case.backend, "way": candidate.label}
    row |= {f"without_{key}": value for key, value in percentiles(without.latency).items()}
    row |= {f"with_{key}": value for key, value in percentiles(with_.latency).items()}
    row |= {f"slow_row_{key}": value for key, value in percentiles(with_.slow_latency).items()}
    for at in ("p50", "p99"):
        row[f"ratio_{at}"] = round(row[f"with_{at}"] / row[f"without_{at}"], 3)
    row["again_percent"] = round(100 * sum(with_.again) / (len(with_.latency) + len(with_.slow_latency)), 2)
    row["refused"] = without.refused + with_.refused
    row["abandoned"] = len(row["refused"])  # documents whose next token a mask forbade: none, if all is well
    row["tokens"] = {"without": len(without.latency), "with": len(with_.latency), "slow row": len(with_.slow_latency)}
    return row


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    cases = list(dict.fromkeys((row["case"], row["backend"]) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = canvas(1, width=max(8.0, 2.4 * len(cases)), height=4.6)
    width = 0.8 / len(ways)
    for index, way in enumerate(ways):
        mine = {(row["case"], row["backend"]): row["ratio_p99"] for row in rows if row["way"] == way}
        at = [place + (index - (len(ways) - 1) / 2) * width for place, case in enumerate(cases) if case in mine]
        bars = axes[0].bar(at, [mine[case] for case in cases if case in mine], width * 0.92, label=way)
        axes[0].bar_label(bars, fmt="%.3g", fontsize=7)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_yscale("log")
    axes[0].set_xticks(range(len(cases)), [f"{case}\n{backend}" for case, backend in cases], fontsize=8)
    axes[0].set_ylabel("ITL p99 of the other rows, with / without straggler")
    axes[0].set_title(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    backends = ("llguidance", "xgrammar")
    parser.add_argument("--backend", nargs="+", choices=backends, default=["llguidance"], help="of the other rows")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--slow-ms", type=float, default=200.0, help="extra time per mask of the slow row")
    parser.add_argument("--forward-ms", type=float, default=15.0, help="duration of the simulated forward pass")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help=f"measured steps per way that waits for the slow row; ours runs {FREE_STEPS} times as many",
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="time limit per way and case: a slow way runs fewer steps"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of turns per way of masking")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--ours", action="store_true", help="measure only ours")
    parser.add_argument("--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run about a minute: batch 8, few steps")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.steps, options.rounds = 8, 12, 1
    return options


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    started_on = machine()
    seconds = options.slow_ms / 1e3
    fast = documents(options.data, tokens, 2 * options.batch, max_schema=2000)
    cases = [
        Case(kind, backend, Slowness(1, kind, seconds))
        for kind in ("sleep", "hold")
        if kind in options.case
        for backend in options.backend
    ]
    if "real" in options.case:
        hard = hard_documents(tokens)
        cases.append(Case("real", HARD_BACKEND, Slowness(1, "none", 0.0), hard))
    rows: list[dict[str, Any]] = []
    with (
        Comparison(candidates(options), tokens, slow_seconds=seconds) as comparison,
        tqdm(unit=" steps", disable=None) as bar,
    ):
        for case in cases:
            rows += measure(comparison, case, fast, options, bar)
    if not rows:
        fail("nothing was measured: no schema of the data compiles in every way of masking")
    print_table(rows, COLUMNS)
    print(f"inter-token latency of the other {options.batch - 1} rows, milliseconds")
    write_json(options.out / "stragglers.json", vars(options), rows, started_on)
    title = (
        f"one slow row ({options.slow_ms:g} ms per mask) among {options.batch}, {options.forward_ms:g} ms forward pass"
    )
    plot(rows, options.out / "stragglers.png", f"{title}, {started_on['cpus']} CPUs")
    print(f"wrote {options.out / 'stragglers.json'} and .png")


if __name__ == "__main__":
    main()
