"""Measure how masks scale with the number of actors, the batch and the vocabulary: `python -m benchmarks.scaling`.

Actors: masks per second of the Ray pool for 1, 2, 4, ... actors, at most one per core. Steps follow each other without
a forward pass. Batch and vocabulary: the step with a simulated forward pass (see benchmarks.step_overhead), for
vocabularies of 4,096 tokens (trained here on the data), 32,000 and 131,072 (mistral_common's). Rows follow real
instances of real schemas. Writes benchmarks/out/scaling.{json,png}.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.comparison import Candidate, Comparison
from benchmarks.paths import RESULTS
from benchmarks.peers.loop import Samples
from benchmarks.report import canvas, fail, machine, percentiles, print_table, write_json
from benchmarks.workload import DATA, Tokens, documents

BACKENDS = ("llguidance", "xgrammar", "outlines", "lm-format-enforcer")
MAX_SCHEMA = {"llguidance": 8000, "xgrammar": 1500, "outlines": 700, "lm-format-enforcer": 4000}
VOCABULARIES = ("4k", "32k", "131k")
SLOW = ("outlines", "lm-format-enforcer")


@contextmanager
def vocabulary(name: str, data: Path) -> Iterator[Tokens]:
    """Return one of `VOCABULARIES`. A trained one is in a temporary folder."""
    if name == "131k":
        yield Tokens.tekken()
    elif name == "32k":
        yield Tokens.sentencepiece()
    else:
        with tempfile.TemporaryDirectory(prefix="guided-") as folder:
            yield Tokens.trained(data, 4096, Path(folder) / "tokenizer.json")


def ours(label: str, actors: int) -> Candidate:
    return Candidate(label, "ray", frozenset(BACKENDS), options={"actors": actors, "compile_seconds": 2.0})


def by_actors(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure masks per second, for each backend and number of actors."""
    candidates = [ours(f"{count}", count) for count in options.actors]
    rows: list[dict[str, Any]] = []
    with (
        vocabulary("131k", options.data) as tokens,
        Comparison(candidates, tokens) as comparison,
        tqdm(unit=" steps", disable=None) as bar,
    ):
        for backend in options.backend:
            batch = options.slow_batch if backend in SLOW else options.batch
            drawn = documents(options.data, tokens, batch, max_schema=MAX_SCHEMA[backend])
            able, usable = comparison.load(backend, drawn)
            if not usable:
                continue
            bar.set_description(f"actors, {backend}")
            measurement = comparison.start(able, usable, batch, 0.0)
            found = measurement.run(options.steps // 4 if backend in SLOW else options.steps, options.rounds, bar)
            first: float | None = None
            for candidate in able:
                samples = found[candidate.label]
                # Without the kernel, which would run on a GPU.
                seconds = np.asarray(samples.step) - np.asarray(samples.kernel)
                rate = batch / float(seconds.mean())
                first = first or rate
                row = {"backend": backend, "batch": batch, "actors": int(candidate.label), "masks_per_second": rate}
                rows.append({**row, "times_one": rate / first, **spread(samples)})
    return rows


def by_batch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure steps with a forward pass, for each vocabulary and batch."""
    rows: list[dict[str, Any]] = []
    for name in options.vocabulary:
        with vocabulary(name, options.data) as tokens, Comparison([ours("ours", 2)], tokens) as comparison:
            drawn = documents(options.data, tokens, 128, max_schema=4000, lengths=(24, 600))
            able, usable = comparison.load("llguidance", drawn)
            with tqdm(unit=" steps", disable=None) as bar:
                for batch in options.batches:
                    bar.set_description(f"{name} tokens, batch {batch}")
                    measurement = comparison.start(able, usable, batch, options.forward_ms / 1e3)
                    samples = measurement.run(options.steps, 1, bar)["ours"]
                    row = {"vocabulary": name, "tokens": tokens.width, "batch": batch}
                    rows.append({**row, **spread(samples)})
    return rows


def spread(samples: Samples) -> dict[str, float]:
    row: dict[str, float] = {}
    for name in ("step", "exposed", "hidden", "kernel", "cpu"):
        row |= {f"{name}_{key}": value for key, value in percentiles(getattr(samples, name)).items()}
    return row


def plot(actors: list[dict[str, Any]], batches: list[dict[str, Any]], path: Path, forward_ms: float, cpus: int) -> None:
    figure, axes = canvas(2, width=6.0)
    for backend in dict.fromkeys(row["backend"] for row in actors):
        mine = [row for row in actors if row["backend"] == backend]
        axes[0].plot([row["actors"] for row in mine], [row["masks_per_second"] for row in mine], "o-", label=backend)
    axes[0].set(yscale="log", xlabel="actors", ylabel="masks/s", title=f"Ray pool, no forward pass, {cpus} CPUs")
    axes[0].set_xticks(sorted({row["actors"] for row in actors}))
    for name in dict.fromkeys(row["vocabulary"] for row in batches):
        mine = [row for row in batches if row["vocabulary"] == name]
        at = [row["batch"] for row in mine]
        (line,) = axes[1].plot(at, [row["exposed_p50"] for row in mine], "o-", label=f"{name}: exposed mask time")
        axes[1].plot(
            at, [row["kernel_p50"] for row in mine], ":", color=line.get_color(), label=f"{name}: kernel (CPU)"
        )
    axes[1].set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per step, p50")
    axes[1].set_title(f"llguidance, {forward_ms:g} ms forward pass, 2 actors", fontsize=10)
    axes[0].title.set_fontsize(10)
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = machine()["cpus"]
    default = [count for count in (1, 2, 4, 8) if count <= max(2, cores)]
    parser.add_argument("--actors", type=int, nargs="+", default=default)
    parser.add_argument("--backend", nargs="*", choices=BACKENDS, default=["llguidance", "xgrammar", *SLOW[1:]])
    parser.add_argument("--batch", type=int, default=64, help="of the measurement by actors")
    parser.add_argument("--slow-batch", type=int, default=32, help="the same for the slow backends")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--vocabulary", nargs="*", choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--forward-ms", type=float, default=15.0, help="duration of the simulated forward pass")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines of schemas with instances")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run a minute: llguidance, two batches, two vocabularies")
    options = parser.parse_args()
    if options.quick:
        options.backend, options.batches, options.vocabulary = ["llguidance"], [1, 16], ["4k", "131k"]
        options.batch, options.steps, options.rounds = 16, 20, 2
    if min([*options.actors, *options.batches, options.batch], default=1) < 1:
        fail("--actors, --batch and --batches must be at least 1")
    return options


def main() -> None:
    options = parsed()
    started_on = machine()
    actors = by_actors(options) if options.backend else []
    batches = by_batch(options)
    columns = {"backend": "backend", "batch": "batch", "actors": "actors", "masks_per_second": "masks/s"}
    print_table(actors, {**columns, "times_one": "relative to one", "step_p50": "step p50", "step_p99": "p99"})
    print()
    columns = {"vocabulary": "vocabulary", "batch": "batch", "step_p50": "step p50", "step_p99": "p99"}
    more = {"exposed_p50": "exposed p50", "exposed_p99": "p99", "hidden_p50": "hidden p50", "kernel_p50": "kernel p50"}
    print_table(batches, {**columns, **more, "cpu_p50": "CPU p50"})
    write_json(options.out / "scaling.json", vars(options), {"actors": actors, "batches": batches}, started_on)
    plot(actors, batches, options.out / "scaling.png", options.forward_ms, started_on["cpus"])
    print(f"wrote {options.out / 'scaling.json'} and .png")


if __name__ == "__main__":
    main()
