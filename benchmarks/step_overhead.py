"""Measure what token masks add to a decode step: `python -m benchmarks.step_overhead --vllm-python PATH`.

Each way of masking runs in its own process, and the processes take turns. All decode the same rows: a row writes a real
instance of a real JSON Schema token by token, whatever the logits say, and then the next one. So the masks are those of
real outputs. The forward pass is simulated: it takes a fixed time and no CPU, like a forward pass on a GPU.

Measured per step:

- its time;
- the *exposed* mask time. Ours: `prepare()`, and the time that `apply()` waits. vLLM: the part of `grammar_bitmask`
  that outlasts the forward pass, and `accept_tokens`. The processors for transformers: everything except the kernel;
- the *hidden* mask time: mask work in all processes that ran during the forward pass;
- the kernel, which writes -inf. It is device work, and runs on the CPU here;
- the CPU time of the engine's process, without the kernel.

With "few schemas" the rows share four schemas, each row with other values, as the requests of an application do.
Otherwise every row has its own schema, and no document is used twice. Writes
benchmarks/out/step_overhead.{json,png}.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.comparison import Candidate, Comparison, vllm_candidate
from benchmarks.paths import RESULTS
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.report import canvas, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents, shared_documents

FAST, SLOW = ("llguidance", "xgrammar"), ("outlines", "lm-format-enforcer")
COUNTS = {"llguidance": 256, "xgrammar": 48, "outlines": 48, "lm-format-enforcer": 96}
"""Number of schemas drawn per backend: as many as every way of masking can compile in reasonable time."""
MAX_SCHEMA = {"llguidance": 8000, "xgrammar": 2000, "outlines": 700, "lm-format-enforcer": 8000}
SHARED_SCHEMAS, SHARED_EACH = 4, 40
COLUMNS = {
    "backend": "backend",
    "schemas": "schemas",
    "batch": "batch",
    "way": "way",
    "step_p50": "step p50",
    "step_p99": "p99",
    "exposed_p50": "exposed p50",
    "exposed_p99": "p99",
    "exposed_share_p50": "% of forward",
    "hidden_p50": "hidden p50",
    "kernel_p50": "kernel p50",
    "cpu_p50": "CPU p50",
    "tokens_per_second": "tokens/s",
    "again_percent": "% computed again",
    "steps": "steps",
}


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return the ways of masking to compare."""
    every = frozenset((*FAST, *SLOW))
    ray_options = {"actors": options.actors, "compile_seconds": options.compile_seconds, "deadline": options.deadline}
    found = [
        Candidate("unguided", "unguided", every),
        Candidate("ours, Ray pool", "ray", every, options=ray_options),
        earlier_version(options, ray_options),
        Candidate("ours, inline", "inline", every, in_process=True),
        vllm_candidate(options.vllm_python),
        Candidate("xgrammar's processor", "xgrammar", frozenset({"xgrammar"}), in_process=True),
        Candidate(
            "lm-format-enforcer's processor", "lm-format-enforcer", frozenset({"lm-format-enforcer"}), in_process=True
        ),
        outlines_candidate(),
    ]
    backends = set(options.backend)
    return [candidate for candidate in found if candidate is not None and (candidate.backends & backends)]


def earlier_version(options: argparse.Namespace, ray_options: dict[str, Any]) -> Candidate | None:
    """Return the Ray pool of an earlier version, if one is given."""
    if options.before is None:
        return None
    every = frozenset((*FAST, *SLOW))
    return Candidate("before, Ray pool", "ray", every, options=ray_options, root=options.before.resolve())


def outlines_candidate() -> Candidate | None:
    """Return outlines-core's guides and kernels if a C++ compiler can build the kernel, else None."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("outlines-core's own kernel is left out: building it needs a C++ compiler, and none was found")
        return None
    return Candidate("outlines-core's guides", "outlines", frozenset({"outlines"}), in_process=True)


def figures(samples: Samples, batch: int, forward: float) -> dict[str, Any]:
    """Return one row of the table. Times are in milliseconds."""
    row: dict[str, Any] = {}
    for name in ("step", "exposed", "outside", "hidden", "kernel", "cpu"):
        row |= {f"{name}_{key}": value for key, value in percentiles(getattr(samples, name)).items()}
    row["exposed_share_p50"] = round(row["exposed_p50"] / forward / 10, 3)
    row["exposed_share_p99"] = round(row["exposed_p99"] / forward / 10, 3)
    tokens = batch - sum(samples.late) / len(samples.step)
    row["tokens_per_second"] = round(tokens / float(np.mean(samples.step)), 1)
    without_kernel = float(np.mean(samples.step)) - float(np.mean(samples.kernel))
    row["tokens_per_second_without_kernel"] = round(tokens / without_kernel, 1)
    row["again_percent"] = round(100 * sum(samples.again) / len(samples.step) / tokens, 2)
    row["steps"] = len(samples.step)
    row["refused"] = samples.refused
    return row


def measure(
    comparison: Comparison,
    backend: str,
    schemas: str,
    batches: Sequence[int],
    drawn: Sequence[Document],
    options: argparse.Namespace,
    bar: tqdm[Any],
) -> list[dict[str, Any]]:
    """Measure all ways of masking at all batch sizes with one backend."""
    able, usable = comparison.load(backend, drawn)
    rows: list[dict[str, Any]] = []
    if not usable:
        bar.write(f"{backend}: no schema of {len(drawn)} works in all of {[one.label for one in able]}")
        return rows
    for batch in batches:
        bar.set_description(f"{backend}, {schemas}, batch {batch}")
        steps = options.steps if backend in FAST else max(1, int(options.steps * options.slow_share))
        measurement = comparison.start(able, usable, batch, options.forward_ms / 1e3)
        for label, samples in measurement.run(steps, options.rounds, bar, seconds=options.seconds).items():
            candidate = next(one for one in able if one.label == label)
            place = {"backend": backend, "schemas": schemas, "batch": batch, "way": label}
            more = {"in_process": candidate.in_process, "documents": len(usable)}
            rows.append({**place, **figures(samples, batch, options.forward_ms / 1e3), **more})
    return rows


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios of our Ray pool to each in-process way, on the same rows."""
    found: list[dict[str, Any]] = []
    for ours in rows:
        if ours["way"] != "ours, Ray pool":
            continue
        same = ("backend", "schemas", "batch")
        for other in rows:
            if other["in_process"] and all(other[key] == ours[key] for key in same):
                ratios = {
                    "exposed p50": ours["exposed_p50"] / max(other["exposed_p50"], 1e-6),
                    "exposed mean": ours["exposed_mean"] / max(other["exposed_mean"], 1e-6),
                    "CPU mean": ours["cpu_mean"] / max(other["cpu_mean"], 1e-6),
                    "tokens/s": ours["tokens_per_second"] / other["tokens_per_second"],
                    "tokens/s without kernel": ours["tokens_per_second_without_kernel"]
                    / other["tokens_per_second_without_kernel"],
                }
                place = {**{key: ours[key] for key in same}, "ours to": other["way"]}
                found.append({**place, **{name: round(value, 3) for name, value in ratios.items()}})
    return found


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw horizontal bars, one group per backend, schemas and batch, so that all names stay readable."""
    groups = list(dict.fromkeys((row["backend"], row["schemas"], row["batch"]) for row in rows))
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "unguided"]
    figure, axes = canvas(2, width=6.5, height=1.6 + 0.17 * sum(row["way"] != "unguided" for row in rows), sharey=True)
    for axis, (key, label) in zip(
        axes,
        (("exposed", "exposed mask time of a step, ms"), ("cpu", "CPU time of the engine's process, ms")),
        strict=True,
    ):
        top, middles = 0.0, []
        for group in groups:
            mine = {row["way"]: row for row in rows if (row["backend"], row["schemas"], row["batch"]) == group}
            there = [way for way in ways if way in mine]
            for place, way in enumerate(there):
                p50, p99 = (max(mine[way][f"{key}_{at}"], 1e-3) for at in ("p50", "p99"))
                color = f"C{ways.index(way)}"
                axis.barh(top + place, p50, 0.9, color=color)
                axis.plot([p99], [top + place], "|", color=color, markersize=7)
            middles.append(top + (len(there) - 1) / 2)
            top += len(there) + 0.8
        axis.set_xscale("log")
        least = min(max(row[f"{key}_p50"], 1e-3) for row in rows if row["way"] != "unguided")
        axis.set_xlim(left=10 ** math.floor(math.log10(least)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.margins(y=0.01)
        axis.set_xlabel(f"{label} (bar p50, dash p99)")
        axis.set_yticks(
            middles, [f"{backend}, {schemas}, {batch} rows" for backend, schemas, batch in groups], fontsize=8
        )
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", visible=True, alpha=0.3)
    axes[0].invert_yaxis()
    bars = [figure.axes[0].barh([0], [0], color=f"C{index}", label=way) for index, way in enumerate(ways)]
    figure.legend(handles=bars, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=[*FAST, *SLOW], default=[*FAST, *SLOW])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="for llguidance and xgrammar")
    parser.add_argument("--slow-batch", type=int, nargs="+", default=[32], help="for outlines and lm-format-enforcer")
    parser.add_argument("--forward-ms", type=float, default=15.0, help="duration of the simulated forward pass")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per way of masking")
    parser.add_argument("--slow-share", type=float, default=0.3, help="share of the steps that the slow backends run")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="time limit per way and setting: a slow way runs fewer steps"
    )
    parser.add_argument("--rounds", type=int, default=4, help="number of turns per way of masking")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument(
        "--deadline", action="store_true", help="our Ray pool continues without late rows, as the engine does"
    )
    parser.add_argument("--compile-seconds", type=float, default=2.0, help="a schema that takes longer is left out")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version, measured in the same run")
    parser.add_argument("--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="step_overhead", help="name of the result files")
    parser.add_argument("--quick", action="store_true", help="run a minute: few steps, small batches, fewer schemas")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.slow_batch, options.steps, options.rounds = [8], [4], 20, 2
    return options


def main() -> None:
    options = parsed()
    tokens = Tokens.tekken()
    scale = 8 if options.quick else 1
    drawn = {
        backend: documents(options.data, tokens, COUNTS[backend] // scale, max_schema=MAX_SCHEMA[backend])
        for backend in options.backend
    }
    started_on = machine()
    rows: list[dict[str, Any]] = []
    with Comparison(candidates(options), tokens) as comparison, tqdm(unit=" steps", disable=None) as bar:
        for backend in options.backend:
            batches = options.batch if backend in FAST else options.slow_batch
            rows += measure(comparison, backend, "each its own", batches, drawn[backend], options, bar)
            if backend in SLOW:
                names = [document.name for document in drawn[backend]][: 4 * SHARED_SCHEMAS]
                shared = few_schemas(comparison, backend, names, options, tokens)
                rows += measure(comparison, backend, "few schemas", batches, shared, options, bar)
    print_table(rows, COLUMNS)
    ratios = compare(rows)
    print("\nratio of our Ray pool to each in-process way, same rows")
    print_table(ratios, {key: key for key in ratios[0]} if ratios else {})
    results = {"steps": rows, "ours_to_in_process": ratios}
    write_json(options.out / f"{options.name}.json", vars(options), results, started_on)
    title = f"{tokens.width} tokens, {options.forward_ms:g} ms forward pass, {options.actors} actors"
    plot(rows, options.out / f"{options.name}.png", f"{title}, {started_on['cpus']} CPUs")
    print(f"wrote {options.out / options.name}.json and .png")


def few_schemas(
    comparison: Comparison, backend: str, names: Sequence[str], options: argparse.Namespace, tokens: Tokens
) -> list[Document]:
    """Return many instances of the first schemas that all ways of masking can compile."""
    candidates = shared_documents(options.data, tokens, names, 1)
    _, usable = comparison.load(backend, candidates)
    chosen = [document.name.rpartition("#")[0] for document in usable][:SHARED_SCHEMAS]
    return shared_documents(options.data, tokens, chosen, SHARED_EACH)


if __name__ == "__main__":
    main()
