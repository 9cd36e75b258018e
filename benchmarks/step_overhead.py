"""What masks add to a decode step, ours beside the peers': `python -m benchmarks.step_overhead --vllm-python PATH`.

Every way of masking runs in a process of its own and they take turns; all decode the same rows. A row writes a real
instance of a real JSON Schema token by token (whatever the logits say), then the next one: masks are those of real
outputs. The forward pass is simulated: it takes a set time and no CPU, as one on a GPU would.

Per step: its time; the *exposed* mask time (ours: `prepare()` and what `apply()` waits; vLLM: the part of
`grammar_bitmask` that outlasts the forward pass, and `accept_tokens`; the processors for transformers: all that they do
but the kernel); the *hidden* one (mask work, in all processes, that the forward pass covered); the kernel, that is,
writing -inf, which is device work and runs on the CPU here; CPU time of the engine's process without the kernel.

"few schemas": the rows share four schemas, as an application's requests do, each with other values; else every row has
a schema of its own and no document comes twice. Writes benchmarks/results/step_overhead.{json,png}.
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

from benchmarks.contest import Contest, Entry, vllm_entry
from benchmarks.peers.loop import Samples
from benchmarks.peers.rows import Document
from benchmarks.report import RESULTS, canvas, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents, shared_documents

FAST, SLOW = ("llguidance", "xgrammar"), ("outlines", "lm-format-enforcer")
COUNTS = {"llguidance": 256, "xgrammar": 48, "outlines": 48, "lm-format-enforcer": 96}
"""Schemas drawn: what can be compiled, by every way of masking, in the time."""
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
    "steps": "steps",
}


def entries(options: argparse.Namespace) -> list[Entry]:
    """Who takes part."""
    every = frozenset((*FAST, *SLOW))
    ray_options = {"actors": options.actors, "compile_seconds": options.compile_seconds}
    found = [
        Entry("unguided", "unguided", every),
        Entry("ours, Ray pool", "ray", every, options=ray_options),
        Entry("ours, inline", "inline", every, in_process=True),
        vllm_entry(options.vllm_python),
        Entry("xgrammar's processor", "xgrammar", frozenset({"xgrammar"}), in_process=True),
        Entry(
            "lm-format-enforcer's processor", "lm-format-enforcer", frozenset({"lm-format-enforcer"}), in_process=True
        ),
        outlines_entry(),
    ]
    wanted = set(options.backend)
    return [entry for entry in found if entry is not None and (entry.backends & wanted)]


def outlines_entry() -> Entry | None:
    """outlines-core's guides and kernels, where its kernel can be compiled."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("outlines-core's own kernel is left out: torch compiles it with a C++ compiler, and there is none")
        return None
    return Entry("outlines-core's guides", "outlines", frozenset({"outlines"}), in_process=True)


def figures(samples: Samples, batch: int, forward: float) -> dict[str, Any]:
    """One row of the table: milliseconds, unless it says otherwise."""
    row: dict[str, Any] = {}
    for name in ("step", "exposed", "outside", "hidden", "kernel", "cpu"):
        row |= {f"{name}_{key}": value for key, value in percentiles(getattr(samples, name)).items()}
    row["exposed_share_p50"] = round(row["exposed_p50"] / forward / 10, 3)
    row["exposed_share_p99"] = round(row["exposed_p99"] / forward / 10, 3)
    row["tokens_per_second"] = round(batch / float(np.mean(samples.step)), 1)
    without_kernel = float(np.mean(samples.step)) - float(np.mean(samples.kernel))
    row["tokens_per_second_without_kernel"] = round(batch / without_kernel, 1)
    row["steps"] = len(samples.step)
    row["refused"] = samples.refused
    return row


def measure(
    contest: Contest,
    backend: str,
    schemas: str,
    batches: Sequence[int],
    drawn: Sequence[Document],
    options: argparse.Namespace,
    bar: tqdm[Any],
) -> list[dict[str, Any]]:
    """All ways at all batch sizes, with one backend."""
    able, usable = contest.load(backend, drawn)
    rows: list[dict[str, Any]] = []
    if not usable:
        bar.write(f"{backend}: none of {len(drawn)} schemas can be done by all of {[entry.label for entry in able]}")
        return rows
    for batch in batches:
        bar.set_description(f"{backend}, {schemas}, batch {batch}")
        steps = options.steps if backend in FAST else max(1, int(options.steps * options.slow_share))
        race = contest.race(able, usable, batch, options.forward_ms / 1e3)
        for label, samples in race.run(steps, options.rounds, bar, seconds=options.seconds).items():
            entry = next(one for one in able if one.label == label)
            place = {"backend": backend, "schemas": schemas, "batch": batch, "way": label}
            more = {"in_process": entry.in_process, "documents": len(usable)}
            rows.append({**place, **figures(samples, batch, options.forward_ms / 1e3), **more})
    return rows


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours on the Ray pool against each in-process way, on the same rows."""
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
    """A line a group of bars, from the top down: names stay readable however many there are."""
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
    parser.add_argument("--forward-ms", type=float, default=15.0, help="what the simulated forward pass takes")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each way")
    parser.add_argument("--slow-share", type=float, default=0.3, help="of the steps, for the slow backends")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="for one way's steps at one place: a very slow one does fewer"
    )
    parser.add_argument("--rounds", type=int, default=4, help="turns that the ways take")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--compile-seconds", type=float, default=2.0, help="schemas that take longer are left out")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM (docs/benchmarks.md)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="step_overhead", help="of the files")
    parser.add_argument("--quick", action="store_true", help="a minute: few steps, small batches, fewer schemas")
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
    with Contest(entries(options), tokens) as contest, tqdm(unit=" steps", disable=None) as bar:
        for backend in options.backend:
            batches = options.batch if backend in FAST else options.slow_batch
            rows += measure(contest, backend, "each its own", batches, drawn[backend], options, bar)
            if backend in SLOW:
                names = [document.name for document in drawn[backend]][: 4 * SHARED_SCHEMAS]
                shared = few(contest, backend, names, options, tokens)
                rows += measure(contest, backend, "few schemas", batches, shared, options, bar)
    print_table(rows, COLUMNS)
    comparison = compare(rows)
    print("\nours on the Ray pool, as a multiple of the same rows masked in process")
    print_table(comparison, {key: key for key in comparison[0]} if comparison else {})
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    setting["data"] = options.data.name
    write_json(
        options.out / f"{options.name}.json", setting, {"steps": rows, "ours_to_in_process": comparison}, started_on
    )
    title = f"{tokens.width} tokens, {options.forward_ms:g} ms forward pass, {options.actors} actors"
    plot(rows, options.out / f"{options.name}.png", f"{title}, {started_on['cpus']} CPUs")
    print(f"wrote {options.out / options.name}.json and .png")


def few(
    contest: Contest, backend: str, names: Sequence[str], options: argparse.Namespace, tokens: Tokens
) -> list[Document]:
    """Many instances of the first schemas that everybody can do."""
    candidates = shared_documents(options.data, tokens, names, 1)
    _, usable = contest.load(backend, candidates)
    chosen = [document.name.rpartition("#")[0] for document in usable][:SHARED_SCHEMAS]
    return shared_documents(options.data, tokens, chosen, SHARED_EACH)


if __name__ == "__main__":
    main()
