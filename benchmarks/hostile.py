"""Send hostile inputs to the HTTP server beside steady good traffic: `python -m benchmarks.hostile`.

Every input of `--data` is sent with "auto" and with every backend that supports its kind, `--at-a-time` of them, in
blocks with calm periods between them. (See `benchmarks/chaos/hostile_inputs.py`. Use only a file that you trust: some
payloads are Python expressions.) Good clients send streamed requests during the whole run, with and without
constraints, on every backend. Reported are: the decision on each input beside the expected one, and the time that it
took; good requests that failed; the time between two chunks of the good streams (ITL) in calm and in hostile periods;
restarts of actors and engines.

The exit status is 1 after a violation: a decision differs from the expected one (a rejection because the backend can't
enforce the input is always correct), takes longer than `--budget` plus `--slack` seconds, or is an internal error; a
good request fails (without replays: for another reason than the death of an actor); the 99th percentile of the ITL is
more than `--ratio` times that of the calm periods; or an engine dies. Writes hostile.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.chaos import hostile_inputs
from benchmarks.chaos.checks import Judge
from benchmarks.chaos.client import Answer, ask
from benchmarks.chaos.decisions import Case, decided, describe, problem
from benchmarks.chaos.load import Load, client_for, ended
from benchmarks.chaos.reference import reference_outputs
from benchmarks.chaos.server import Server, default_vocabulary, running_server
from benchmarks.chaos.traffic import Mix, Request, Traffic
from benchmarks.chaos.watch import Watch, watching
from benchmarks.paths import RESULTS
from benchmarks.report import canvas, exit_with, fail, machine, percentiles, print_table, write_json
from guided.backends import AUTO, BACKENDS

COLUMNS = (AUTO, *BACKENDS)
GOOD = Mix(streamed=1.0, several=0.0, leaving=0.0, stalling=0.0)


@dataclass
class Side:
    """The run against one server."""

    max_replays: int
    cases: list[Case]
    load: Load
    watch: Watch
    calm_gaps: list[float] = field(default_factory=list)
    """Seconds between two chunks of a good stream in calm periods."""
    hostile_gaps: list[float] = field(default_factory=list)
    tracebacks: int = 0

    @property
    def restarts(self) -> int:
        """Number of mask actor restarts."""
        return sum(actor["restarts"] for actor in self.watch.actors())

    @property
    def ratio(self) -> float:
        """99th percentile of the gaps in hostile periods, divided by that of the calm ones."""
        calm, hostile = (np.percentile(gaps or [np.nan], 99) for gaps in (self.calm_gaps, self.hostile_gaps))
        return float(hostile / calm)


class Clock:
    """The periods with hostile requests in flight."""

    def __init__(self) -> None:
        self._spans: list[list[float]] = []

    def begin(self) -> None:
        self._spans.append([time.monotonic(), float("inf")])

    def end(self) -> None:
        self._spans[-1][1] = time.monotonic()

    def divide(self, gaps: Iterable[tuple[float, float]], side: Side) -> None:
        """Add each (start, end) to the calm or hostile gaps of `side`, or to neither if it overlaps an edge."""
        for before, after in gaps:
            if any(start <= before and after <= end for start, end in self._spans):
                side.hostile_gaps.append(after - before)
            elif all(after < start or before > end for start, end in self._spans):
                side.calm_gaps.append(after - before)


async def run_cases(server: Server, options: argparse.Namespace, cases: Sequence[Case], replays: int) -> Side:
    """Send all cases to a running server, beside good traffic."""
    judge = Judge(default_vocabulary())
    gaps: list[tuple[float, float]] = []

    def note_gaps(request: Request, answer: Answer) -> None:
        gaps.extend(itertools.pairwise(answer.arrivals))

    async with client_for(server.url, options.good + options.at_a_time + 32) as http:
        judge.references = await reference_outputs(http, judge, options.limit)
        load = Load(http, judge, options.limit, on_answer=note_gaps)
        watch, clock, over = Watch(server), Clock(), asyncio.Event()
        side = Side(replays, [], load, watch)
        look = asyncio.create_task(watching(watch, http))
        good = asyncio.create_task(load.run(Traffic(options.seed, GOOD), options.good, lambda: not over.is_set()))
        slots = asyncio.Semaphore(options.at_a_time)

        async def settle(case: Case, bar: Any) -> None:
            async with slots:
                answers = [await ask(http, request, options.limit) for request in case.requests]
                side.cases.append(case.answered(answers))
                bar.update()

        await asyncio.sleep(2 * options.calm)
        with tqdm(total=len(cases), unit=" inputs", disable=None) as bar:
            for start in range(0, len(cases), options.block):
                clock.begin()
                await asyncio.gather(*(settle(case, bar) for case in cases[start : start + options.block]))
                clock.end()
                await asyncio.sleep(options.calm)
        over.set()
        await good
        look.cancel()
        await ended(look)
    clock.divide(gaps, side)
    side.tracebacks = server.tracebacks()
    return side


def violations(side: Side, options: argparse.Namespace) -> list[str]:
    """Return the violations, one line each."""
    limit = options.budget + options.slack
    found = [f"{case.name}: {wrong}" for case in side.cases if (wrong := problem(case, limit)) is not None]
    found += [record.describe() for record in side.load.violations()]
    excused = {"worker_died"} if side.max_replays == 0 and side.restarts else set()
    lost = [each for each in side.load.good if each.verdict.outcome in ("failed", "refused")]
    found += [f"good {each.describe()}" for each in lost if each.verdict.cause not in excused]
    if side.watch.deaths:
        found.append("the engine or the server died")
    if side.ratio > options.ratio:
        found.append(f"the ITL's 99th percentile is {side.ratio:.2f} times the calm one")
    return [f"max_replays {side.max_replays}: {line}" for line in found]


def summary(side: Side) -> dict[str, Any]:
    good = side.load.good
    rows: dict[str, dict[str, Any]] = {}
    for case in side.cases:
        entry = case.entry
        listed = {"input": entry.id, "kind": entry.kind, "listed": entry.expected, "bounded": entry.bounded}
        row = rows.setdefault(entry.id, {**listed, "decided": {}, "seconds": {}})
        row["decided"][case.backend] = decided(case)
        row["seconds"][case.backend] = round(case.slowest, 3)
    return {
        "max_replays": side.max_replays,
        "inputs": len({case.entry.id for case in side.cases}),
        "cases": len(side.cases),
        "decided": dict(Counter(decided(case) for case in side.cases)),
        "slowest_seconds": round(max(case.slowest for case in side.cases), 3),
        "good": len(good),
        "good_by_outcome": dict(Counter(each.verdict.outcome for each in good)),
        "good_lost_by_cause": dict(side.load.causes(good)),
        "itl_calm_ms": percentiles(side.calm_gaps),
        "itl_hostile_ms": percentiles(side.hostile_gaps),
        "itl_p99_ratio": round(side.ratio, 3),
        "actor_restarts": side.restarts,
        "engine_restarts": side.watch.deaths,
        "tracebacks_in_the_log": side.tracebacks,
        "rows": list(rows.values()),
    }


def show(side: Side, result: dict[str, Any], limit: float) -> None:
    """Print the tables."""
    by_input: dict[str, dict[str, Any]] = {}
    for case in sorted(side.cases, key=lambda case: case.order):
        listed = f"{case.entry.expected}{' or not' if case.entry.bounded else ''}"
        row = by_input.setdefault(case.entry.id, {"input": case.entry.id, "kind": case.entry.kind, "listed": listed})
        row[case.backend] = describe(case) + ("" if problem(case, limit) is None else " (!)")
    print(f"\nmax_replays {side.max_replays}; seconds until the decision; (!): violation\n")
    print_table(
        by_input.values(), {"input": "input", "kind": "kind", "listed": "listed", **{name: name for name in COLUMNS}}
    )
    print()
    kept: tuple[str, ...] = (
        "cases",
        "decided",
        "slowest_seconds",
        "good",
        "good_by_outcome",
        "good_lost_by_cause",
        "itl_calm_ms",
    )
    kept += ("itl_hostile_ms", "itl_p99_ratio", "actor_restarts", "engine_restarts", "tracebacks_in_the_log")
    print_table(
        [{"what": name.replace("_", " "), "value": str(result[name])} for name in kept], {"what": "what", "value": ""}
    )


def plot(sides: Sequence[Side], path: Path, title: str, limit: float) -> None:
    figure, axes = canvas(2, width=5.5, height=4.2)
    colors = {"accepted": "tab:green", "rejected": "tab:blue", "can't": "tab:gray", "timeout": "tab:orange"}
    cases = sides[0].cases
    for index, backend in enumerate(COLUMNS):
        for name, color in {**colors, "other": "red"}.items():
            mine = [case for case in cases if case.backend == backend]
            mine = [case for case in mine if (decided(case) if decided(case) in colors else "other") == name]
            at = index + np.linspace(-0.3, 0.3, max(1, len(mine)))[: len(mine)]
            seconds = [max(1e-3, case.slowest) for case in mine]
            axes[0].scatter(at, seconds, s=10, color=color, label=name if index == 0 else None)
    axes[0].axhline(limit, color="black", linewidth=0.8, linestyle="--")
    axes[0].set_yscale("log")
    axes[0].set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=8)
    axes[0].set_title("seconds until the decision", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    for side in sides:
        for name, gaps in (("calm", side.calm_gaps), ("hostile period", side.hostile_gaps)):
            label = f"{name}, max_replays {side.max_replays}"
            axes[1].plot(np.sort(gaps) * 1e3, np.linspace(0, 1, len(gaps)), linewidth=1.2, label=label)
    axes[1].set_xscale("log")
    axes[1].set_yscale("logit")
    axes[1].set_ylim(0.01, 0.9995)
    axes[1].axhline(0.99, color="black", linewidth=0.8, linestyle="--")
    axes[1].set_xlabel("ms")
    axes[1].set_title("cumulative share of the good streams' gaps", fontsize=9)
    axes[1].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return every input with every backend that supports its kind."""
    found: list[Case] = []
    for entry in hostile_inputs.read(options.data):
        if options.only and entry.id not in options.only:
            continue
        for backend in hostile_inputs.backends_of(entry):
            if backend in options.backend:
                requests = hostile_inputs.requests(entry, backend, options.flood)
                found.append(Case(len(found), entry, backend, requests))
    for case in found:
        for request in case.requests:
            assert request.content  # encodes it now, before the measurement
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=hostile_inputs.DATA)
    parser.add_argument("--max-replays", type=int, nargs="+", default=[0, 2], help="one run per value")
    parser.add_argument("--backend", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--only", nargs="+", help="ids of inputs")
    parser.add_argument("--at-a-time", type=int, default=1, help="hostile inputs in flight")
    parser.add_argument("--flood", type=int, default=1000, help="maximum requests of an input that is a stream of them")
    parser.add_argument("--good", type=int, default=16, help="good requests in flight")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--block", type=int, default=40, help="inputs between two calm periods")
    parser.add_argument("--calm", type=float, default=6.0, help="seconds of calm after each block")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for a compilation")
    parser.add_argument("--slack", type=float, default=3.0, help="seconds for everything else before the decision")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a request counts as hung")
    parser.add_argument("--ratio", type=float, default=1.5, help="maximum ratio of the ITL's 99th percentiles")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a temporary file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.data.exists():
        fail(f"there is no file {options.data.name}: --data takes a JSON file of hostile inputs")
    return options


def main() -> None:
    options = parsed()
    started_on = machine()
    sides, wrong = [], []
    with hostile_inputs.deep():
        for replays in options.max_replays:
            cases = cases_of(options)
            arguments = ["--num-actors", str(options.actors), "--log-level", "warning"]
            arguments += ["--max-replays", str(replays)] if replays else []
            with running_server(*arguments, log=options.log) as server:
                sides.append(asyncio.run(run_cases(server, options, cases, replays)))
            wrong += violations(sides[-1], options)
    results = [summary(side) for side in sides]
    for side, result in zip(sides, results, strict=True):
        show(side, result, options.budget + options.slack)
    write_json(options.out / "hostile.json", vars(options), {"runs": results, "violations": wrong}, started_on)
    title = f"{results[0]['inputs']} hostile inputs, {options.at_a_time} at a time, beside {options.good} good streams"
    plot(sides, options.out / "hostile.png", title, options.budget + options.slack)
    print(f"wrote {options.out / 'hostile.json'} and .png")
    exit_with(wrong)


if __name__ == "__main__":
    main()
