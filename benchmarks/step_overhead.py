"""Measure what token masks add to a decode step: `python -m benchmarks.step_overhead
--vllm-python PATH`.

Each way of masking runs in its own process, and the processes take turns. All decode
the same rows: a row writes a real instance of a real JSON Schema token by token,
whatever the logits say, and then the next instance, so that the masks are those of real
outputs. Every row has its own schema, and no document is used twice. The forward pass
is simulated: it takes a fixed time and no CPU, like a forward pass on a GPU.

Measured per step:

- its time;
- the *exposed* mask time. In this project: `prepare()`, and the time that `apply()`
  waits. In vLLM: the part of `grammar_bitmask` that outlasts the forward pass, and
  `accept_tokens`;
- the *hidden* mask time: mask work in all processes during the forward pass;
- the kernel, which writes -inf. It is device work, and runs on the CPU here;
- the CPU time of the engine's process, without the kernel.

Writes step_overhead.{json,png}.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import report
from benchmarks.comparison import (
    FORWARD_SECONDS,
    Candidate,
    Comparison,
    started,
    vllm_candidate,
)
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.workload import Tokens, documents

COUNTS = {"llguidance": 256, "xgrammar": 48}
"""Number of schemas per backend: all ways of masking can compile them in reasonable
time."""
MAX_SCHEMA = {"llguidance": 8000, "xgrammar": 2000}
COLUMNS = {
    "backend": "backend",
    "batch": "batch",
    "way": "way",
    "step_p50": "step p50",
    "step_p99": "p99",
    "exposed_p50": "exposed p50",
    "exposed_p99": "p99",
    "hidden_p50": "hidden p50",
    "kernel_p50": "kernel p50",
    "cpu_p50": "CPU p50",
    "tokens_per_second": "tokens/s",
    "steps": "steps",
}


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return the ways of masking to compare."""
    found = [Candidate("unguided", "unguided")]
    for actors in options.actors:
        given = {"actors": actors, "compile_seconds": 5.0}
        label = f"Ray pool, {actors} actor{'s' if actors > 1 else ''}"
        found.append(Candidate(label, "ray", options=given))
        if options.before is not None:
            found.append(
                Candidate(
                    f"before, {label}",
                    "ray",
                    options=given,
                    root=options.before.resolve(),
                )
            )
    vllm = vllm_candidate(options.vllm_python)
    return [
        *found,
        Candidate("inline", "inline"),
        *([vllm] if vllm is not None else []),
    ]


def figures(samples: Samples, batch: int) -> dict[str, Any]:
    """Return the figures of one way of masking. Times are in milliseconds."""
    row: dict[str, Any] = {}
    for name in ("step", "exposed", "hidden", "kernel", "cpu"):
        row |= {
            f"{name}_{key}": value
            for key, value in report.percentiles(getattr(samples, name)).items()
        }
    row["tokens_per_second"] = round(batch / float(np.mean(samples.step)), 1)
    return {**row, "steps": len(samples.step), "refused": samples.refused}


def measure(
    comparison: Comparison,
    backend: str,
    drawn: Sequence[Document],
    options: argparse.Namespace,
    bar: tqdm[Any],
) -> list[dict[str, Any]]:
    """Measure all ways of masking at all batch sizes with one backend."""
    usable = comparison.load(backend, drawn)
    rows = []
    for batch in options.batch:
        bar.set_description(f"{backend}, batch {batch}")
        found = comparison.run(
            usable, batch, options.steps, options.rounds, bar, seconds=options.seconds
        )
        for label, samples in found.items():
            place = {
                "backend": backend,
                "batch": batch,
                "way": label,
                "documents": len(usable),
            }
            rows.append({**place, **figures(samples, batch)})
    return rows


def parsed() -> argparse.Namespace:
    parser = report.start(__doc__)
    parser.add_argument("--backend", nargs="+", choices=[*COUNTS], default=[*COUNTS])
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 256, 1024], help="numbers of rows"
    )
    parser.add_argument(
        "--actors",
        type=int,
        nargs="+",
        default=[1, 2],
        help="mask actors, one process per number",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="measured steps per way of masking"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="number of turns per way of masking"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="time limit per way and batch, in seconds",
    )
    parser.add_argument(
        "--before",
        type=Path,
        help="a checkout of an earlier version, measured in the same run",
    )
    parser.add_argument(
        "--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)"
    )
    options = parser.parse_args()
    if options.quick:
        options.batch, options.actors, options.steps = [8], [1], 20
    return options


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    scale = 3 if options.quick else 1
    drawn = {
        backend: documents(
            tokens, COUNTS[backend] // scale, max_schema=MAX_SCHEMA[backend]
        )
        for backend in options.backend
    }
    started_on = report.machine()
    rows: list[dict[str, Any]] = []
    with (
        started(candidates(options), tokens) as comparison,
        tqdm(unit=" steps", disable=None) as bar,
    ):
        for backend in options.backend:
            rows += measure(comparison, backend, drawn[backend], options, bar)
    report.print_table(rows, COLUMNS)
    report.write_json(
        options.out / "step_overhead.json", vars(options), rows, started_on
    )
    panels = {
        "exposed_p50": "exposed mask time of a step, ms",
        "cpu_p50": "CPU time of the engine's process, ms",
        "tokens_per_second": "tokens/s",
    }
    shown = [row for row in rows if row["way"] != "unguided"]
    title = f"{tokens.width} tokens, {FORWARD_SECONDS * 1e3:g} ms forward pass, {started_on['cpus']} CPUs"
    report.plot(
        options.out / "step_overhead.png", title, shown, ("backend", "batch"), panels
    )


if __name__ == "__main__":
    main()
