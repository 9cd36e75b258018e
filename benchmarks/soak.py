"""Measure the memory of each process under full load for a long time: `python -m benchmarks.soak`.

Clients keep `--concurrency` requests in flight: every kind of constraint on every backend, unconstrained requests,
streamed and not, several choices. The share `--fresh` of the constrained requests has a new constraint. `--warm-up`
must be long enough to fill the cache of compiled grammars, which is bounded in bytes. After it the RSS of each kind of
process must stay flat: the median of the last fifth of the samples is at most `--flat` per cent, or `FLOOR_MIB` MiB,
above the median of the first fifth. PSS is shown too, but it also changes when other processes map the same libraries.

The exit status is 1 if memory grew, an answer was a violation (see `benchmarks.chaos`), a good request failed, or the
engine died. Writes soak.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.chaos.checks import Judge
from benchmarks.chaos.load import Load, client_for, ended
from benchmarks.chaos.picture import memory_panel
from benchmarks.chaos.reference import reference_outputs
from benchmarks.chaos.server import Server, default_vocabulary, running_server
from benchmarks.chaos.traffic import Mix, Traffic
from benchmarks.chaos.watch import Watch, watching
from benchmarks.paths import RESULTS
from benchmarks.report import canvas, exit_with, fail, machine, print_table, write_json

FLOOR_MIB = 4.0
PARTS = 5
Sample = tuple[float, list[dict[str, Any]]]


@dataclass(frozen=True)
class Growth:
    """Memory per process of one kind, in MiB: medians after the warm-up and at the end."""

    process: str
    count: int
    pss: tuple[float, float]
    rss: tuple[float, float]

    @property
    def percent(self) -> float:
        return 100 * (self.rss[1] / self.rss[0] - 1)

    def is_flat(self, percent: float) -> bool:
        return self.percent <= percent or self.rss[1] - self.rss[0] <= FLOOR_MIB


def growths(samples: Sequence[Sample], warm: float) -> list[Growth]:
    """Return the growth of each kind of process that exists during the whole run.

    Args:
        samples: (time, rows of `Server.memory`).
        warm: time of the end of the warm-up.
    """
    after = [rows for at, rows in samples if at >= warm]
    part = max(1, len(after) // PARTS)
    found = []
    for process in dict.fromkeys(row["process"] for rows in after for row in rows):
        mine = [[row for row in rows if row["process"] == process] for rows in after]
        if not all((mine[0], mine[-1], any(mine[:part]), any(mine[-part:]))):
            continue
        sizes = {}
        for key in ("pss_mib", "rss_mib"):
            means = [statistics.fmean(row[key] for row in rows) for rows in mine if rows]
            sizes[key] = (statistics.median(means[:part]), statistics.median(means[-part:]))
        found.append(Growth(process, len(mine[-1]), sizes["pss_mib"], sizes["rss_mib"]))
    return found


async def run_load(server: Server, options: argparse.Namespace) -> tuple[Load, Watch, float, float]:
    """Run the load. Returns it, the samples, its start and its duration in seconds."""
    judge = Judge(default_vocabulary())
    watch = Watch(server)
    async with client_for(server.url, options.concurrency + 32) as http:
        judge.references = await reference_outputs(http, judge, options.limit)
        load = Load(http, judge, options.limit)
        look = asyncio.create_task(watching(watch, http))
        begun = time.monotonic()
        over = begun + options.minutes * 60
        progress = asyncio.create_task(_progress(load, watch, over))
        mix = Mix(fresh=options.fresh, stalling=0.0)
        await load.run(Traffic(options.seed, mix), options.concurrency, lambda: time.monotonic() < over)
        lasted = time.monotonic() - begun
        for task in (progress, look):
            task.cancel()
            await ended(task)
    return load, watch, begun, lasted


async def _progress(load: Load, watch: Watch, over: float) -> None:
    with tqdm(unit=" answers", disable=None) as bar:
        while True:
            await asyncio.sleep(1)
            bar.update(len(load.records) - bar.n)
            total = sum(row["pss_mib"] for row in watch.memory[-1][1]) if watch.memory else 0.0
            bar.set_description(f"{max(0.0, over - time.monotonic()):.0f} s left, {total:.0f} MiB")


def violations(load: Load, watch: Watch, found: Sequence[Growth], flat: float) -> list[str]:
    """Return the violations, one line each."""
    wrong = [record.describe() for record in load.violations()]
    wrong += [f"good {each.describe()}" for each in load.good if each.verdict.outcome in ("failed", "refused")]
    if watch.deaths:
        wrong.append("the engine or the server died")
    grown = [each for each in found if not each.is_flat(flat)]
    return wrong + [f"{each.process} grew from {each.rss[0]:.0f} to {each.rss[1]:.0f} MiB" for each in grown]


def plot(path: Path, title: str, begun: float, warm: float, samples: Sequence[Sample], found: Sequence[Growth]) -> None:
    figure, axes = canvas(2, width=5.5, height=4.2)
    memory_panel(axes[0], begun, samples)
    for growth in found:
        if growth.rss[0] < 10:
            continue
        mine = [(at, [row["rss_mib"] for row in rows if row["process"] == growth.process]) for at, rows in samples]
        points = [(at - begun, statistics.fmean(sizes) / growth.rss[0]) for at, sizes in mine if sizes]
        style = "--" if growth.process.startswith("Ray:") else "-"
        axes[1].plot(*zip(*points, strict=True), linewidth=1, linestyle=style, label=growth.process)
    axes[1].axvline(warm - begun, color="black", linewidth=0.8, linestyle=":")
    axes[1].set_ylabel("RSS per process, relative to the end of the warm-up")
    axes[1].legend(fontsize=6, frameon=False)
    for axis in axes:
        axis.set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, help="minutes; default: a third of the time")
    parser.add_argument("--fresh", type=float, default=0.3, help="share of constrained requests with a new constraint")
    parser.add_argument(
        "--flat", type=float, default=5.0, help="maximum growth per process after the warm-up, in per cent"
    )
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a request counts as hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a temporary file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.warm_up = options.minutes / 3 if options.warm_up is None else options.warm_up
    if not 0 <= options.warm_up < options.minutes:
        fail("--warm-up must be shorter than --minutes")
    return options


def main() -> None:
    options = parsed()
    started_on = machine()
    with running_server("--num-actors", str(options.actors), "--log-level", "warning", log=options.log) as server:
        load, watch, begun, lasted = asyncio.run(run_load(server, options))
    warm = begun + options.warm_up * 60
    found = growths(watch.memory, warm)
    wrong = violations(load, watch, found, options.flat)
    rows = [
        {
            "process": growth.process,
            "count": growth.count,
            "pss_warm": growth.pss[0],
            "pss_end": growth.pss[1],
            "percent": round(growth.percent, 2),
            "rss_warm": growth.rss[0],
            "rss_end": growth.rss[1],
        }
        for growth in found
    ]
    result = {
        "requests": len(load.records),
        "requests_per_second": round(len(load.records) / lasted, 2),
        "outcomes": dict(load.outcomes()),
        "memory": rows,
        "violations": wrong,
        "total_pss_mib": [
            [round(at - begun, 1), round(sum(row["pss_mib"] for row in sizes), 1)] for at, sizes in watch.memory
        ],
    }
    print(f"{result['requests']} requests, {result['requests_per_second']} per second: {result['outcomes']}\n")
    headings = {"process": "process", "count": "count", "rss_warm": "RSS MiB each, warm", "rss_end": "end"}
    print_table(rows, {**headings, "percent": "growth %", "pss_warm": "PSS MiB each, warm", "pss_end": "end"})
    write_json(options.out / "soak.json", vars(options), result, started_on)
    title = f"{options.minutes:g} minutes, {options.concurrency} at a time, {options.fresh:.0%} of constraints new"
    plot(options.out / "soak.png", title, begun, warm, watch.memory, found)
    print(f"wrote {options.out / 'soak.json'} and .png")
    exit_with(wrong)


if __name__ == "__main__":
    main()
