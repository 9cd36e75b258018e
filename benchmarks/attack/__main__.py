"""Attack the real server beside a good client: `python -m benchmarks.attack`.

Each case is one attack on a default `guided serve` from outside: by bodies, by connections, on its processes. `--list`
shows them, with the row of the table in issue 11 ("held": an attack that the server withstood). Meanwhile a witness at
another address (127.0.0.2) sends small requests, with and without constraints, whose outputs are checked, and asks for
`/health` every 50 ms, each time on a new connection.

The limits of a case: at most 500 MB of memory above idle (all processes of the server, without shared memory), at most
250 ms until an answer of /health, the 99th percentile of the good requests' times at most 3 times that of the seconds
before the attack, no good request fails, nothing dies or hangs, every answer is one of the documented ones, and
everything is given back within 10 s: memory, file descriptors, requests, processes. A case that stops or kills processes
is not held to the third, and good requests may fail there with an error that says that they may be sent again.

A watchdog kills a server that takes 6 GB. A server that died, or did not give everything back, is started again before
the next case. The exit status is 1 if a case fails. Writes attack.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.attack import bodies, connections, processes  # noqa: F401  registers the cases
from benchmarks.attack.case import ALL, Case, Setup, Target
from benchmarks.attack.measure import FATAL_MB, MemoryWatch, held, kill, not_given_back
from benchmarks.attack.witness import Seen, Witness
from benchmarks.chaos.load import Record, client_for
from benchmarks.chaos.server import Server, running_server
from benchmarks.report import RESULTS, exit_with, machine, percentiles, print_table, write_json

MEMORY_MB, STALL_MS, RATIO = 500.0, 250.0, 3.0
BACK_SECONDS = 10.0
WARM_UP_SECONDS = 4.0
EXCUSED = ("worker_died", "pool_unavailable", "shutting_down")
"""Errors of good requests that a case that restarts processes may cause. They say that the request may be sent again."""


@dataclass(frozen=True)
class Period:
    """What the witness saw before or during an attack."""

    good: list[Record]
    stall: float
    """Longest time of a probe, in seconds."""

    @classmethod
    def of(cls, seen: Seen, begin: float, end: float) -> Period:
        """Take what overlaps an interval."""
        good = [each for each in seen.records if each.ended > begin and each.began < end]
        return cls(
            good, max((each.took for each in seen.probes if begin < each.at + each.took and each.at < end), default=0)
        )

    @property
    def seconds(self) -> list[float]:
        return [each.ended - each.began for each in self.good]

    @property
    def p99(self) -> float:
        return float(np.percentile(self.seconds or [np.nan], 99))


@dataclass(frozen=True)
class Result:
    """What one case did to the server."""

    case: Case
    target: Target
    seconds: float
    idle: float
    """MB of memory before the attack."""
    peak: float
    calm: Period
    attacked: Period
    killed: bool
    """Whether the watchdog killed the server."""
    alive: bool
    kept: list[str]

    @property
    def violations(self) -> list[tuple[str, str]]:
        """Return (what, description) of each broken limit."""
        found = [("answers", each) for each in self.target.problems]
        if hung := self.target.answers["hung"]:
            found.append(("hung", f"{hung} requests without an answer"))
        if self.killed:
            found.append(("memory", f"killed by the watchdog at {FATAL_MB:.0f} MB"))
        if self.peak - self.idle > MEMORY_MB:
            found.append(("memory", f"{self.peak - self.idle:.0f} MB above idle"))
        if self.case.ends_server:
            return found
        if not self.alive:
            return [*found, ("dead", "the server has died")]
        if self.attacked.stall * 1e3 > STALL_MS:
            found.append(("stall", f"/health took {self.attacked.stall * 1e3:.0f} ms"))
        if self.ratio > RATIO and not self.case.restarts:
            found.append(("slow", f"good p99 is {self.ratio:.1f} times that of calm seconds"))
        excused = EXCUSED if self.case.restarts else ()
        lost = [
            each for each in self.attacked.good if each.verdict.outcome != "valid" and each.verdict.cause not in excused
        ]
        if lost:
            found.append(("good", f"{len(lost)} good requests failed, the first: {lost[0].describe()[:200]}"))
        return found + [("kept", each) for each in self.kept]

    @property
    def ratio(self) -> float:
        """99th percentile of the good requests' times, divided by that of the calm seconds."""
        return self.attacked.p99 / self.calm.p99

    @property
    def is_reusable(self) -> bool:
        """Whether the next case may have the same server."""
        return self.alive and not self.kept and not self.target.answers["hung"]

    @property
    def verdict(self) -> str:
        return ", ".join(dict.fromkeys(what for what, _ in self.violations)) or "ok"

    def summary(self) -> dict[str, Any]:
        """Return the row of the table and of the JSON file."""
        return {
            "case": self.case.name,
            "row": self.case.row,
            "what": self.case.what,
            "seconds": round(self.seconds, 1),
            "answers": dict(self.target.answers.most_common()),
            "memory_idle_mb": round(self.idle),
            "memory_mb": round(self.peak - self.idle),
            "stall_calm_ms": round(self.calm.stall * 1e3),
            "stall_ms": round(self.attacked.stall * 1e3),
            "good": len(self.attacked.good),
            "good_calm_ms": percentiles(self.calm.seconds),
            "good_ms": percentiles(self.attacked.seconds),
            "good_ratio": round(self.ratio, 2),
            "notes": self.target.notes,
            "violations": [f"{what}: {text}" for what, text in self.violations],
            "verdict": self.verdict,
        }


async def run_case(case: Case, server: Server, witness: Witness, calm: float) -> Result:
    """Run one case against a running server."""
    before = held(server)
    watch = MemoryWatch(server)
    async with client_for(server.url, 2_000) as http:
        target = Target(server, http)
        witness.start(server.url, case.setup.key)
        started = time.monotonic()
        await asyncio.sleep(calm)
        watch.start()
        begin = time.monotonic()
        try:
            async with asyncio.timeout(case.seconds):
                await case.attack(target)
        except TimeoutError:
            target.answers["hung"] += 1
        except Exception as error:  # the server may be gone
            target.expect(not server.alive, f"{type(error).__name__}: {str(error)[:200]}")
        end = time.monotonic()
        await asyncio.sleep(0.5)  # what the last request has started is part of the attack
    seen = await asyncio.to_thread(witness.stop)
    left = [] if case.ends_server else await asyncio.to_thread(not_given_back, server, before, BACK_SECONDS)
    watch.end()
    periods = Period.of(seen, started, begin), Period.of(seen, begin, end + 0.5)
    return Result(case, target, end - begin, before.memory, watch.peak, *periods, watch.killed, server.alive, left)


class Servers:
    """The running server, which cases with the same setup share."""

    def __init__(self, log: Path | None) -> None:
        self._stack = contextlib.ExitStack()
        self._log = log
        self._setup: Setup | None = None
        self._server: Server | None = None

    def take(self, case: Case, witness: Witness) -> Server:
        """Return a running server for a case."""
        if self._server is None or self._setup != case.setup or not self._server.alive:
            self.drop()
            environment = {} if case.setup.key is None else {"GUIDED_API_KEY": case.setup.key}
            running = running_server(
                *("--log-level", "warning", *case.setup.arguments),
                log=self._log,
                environment=environment,
                prefix=case.setup.prefix,
            )
            self._server, self._setup = self._stack.enter_context(running), case.setup
            witness.start(self._server.url, case.setup.key)
            time.sleep(WARM_UP_SECONDS)
            witness.stop()
        return self._server

    def drop(self) -> None:
        """End the server at once: it may be hung."""
        if self._server is not None:
            kill(self._server)
        self._server = None
        self._stack.close()


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> tuple[list[Result], dict[str, str]]:
    """Run cases. Returns the results, and the reasons of those that can't run here."""
    results: list[Result] = []
    skipped: dict[str, str] = {}
    witness, servers = Witness(), Servers(options.log)
    try:
        with tqdm(cases, unit=" cases", disable=None) as bar:
            for case in bar:
                bar.set_description(case.name)
                if reason := case.unable():
                    skipped[case.name] = reason
                    continue
                try:
                    server = servers.take(case, witness)
                except SystemExit as error:  # does not start in such surroundings
                    skipped[case.name] = str(error).strip().splitlines()[-1][:200]
                    servers.drop()
                    continue
                results.append(asyncio.run(run_case(case, server, witness, options.calm)))
                if case.ends_server or not results[-1].is_reusable:
                    servers.drop()
    finally:
        servers.drop()
        witness.close()
    return results, skipped


def show(results: Sequence[Result], skipped: dict[str, str]) -> None:
    """Print the table, and below it what broke a limit."""
    rows = []
    for result in results:
        row = result.summary()
        answers = ", ".join(f"{count} × {answer}" for answer, count in row["answers"].items())
        row.update(answers=answers[:60], calm=row["good_calm_ms"].get("p99"), p99=row["good_ms"].get("p99"))
        rows.append(row)
    headings = {
        "case": "case",
        "row": "row",
        "answers": "answers",
        "memory_mb": "MB above idle",
        "stall_ms": "stall ms",
    }
    print_table(rows, {**headings, "calm": "good p99 calm", "p99": "good p99 ms", "verdict": "verdict"})
    print()
    for result in results:
        for line in (*result.target.notes, *(f"! {what}: {text}" for what, text in result.violations)):
            print(f"{result.case.name}: {line}")
    for name, reason in skipped.items():
        print(f"{name}: not run: {reason}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in ALL]
    parser.add_argument("--case", nargs="+", choices=names, metavar="NAME", default=names, help="see --list")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument("--quick", action="store_true", help="leave out cases that take more than 20 s")
    parser.add_argument("--calm", type=float, default=4.0, help="seconds before each attack")
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a temporary file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    cases = [case for case in ALL if case.name in options.case and not (options.quick and case.slow)]
    cases.sort(key=lambda case: str(case.setup))  # cases with the same server follow each other
    if options.list:
        print_table([vars(case) for case in cases], {"row": "row", "name": "case", "what": "attack"})
        return
    started_on = machine()
    results, skipped = run_all(cases, options)
    show(results, skipped)
    summaries = [result.summary() for result in results]
    write_json(options.out / "attack.json", vars(options), {"cases": summaries, "not_run": skipped}, started_on)
    print(f"wrote {options.out / 'attack.json'}")
    exit_with([f"{result.case.name}: {result.verdict}" for result in results if result.violations])


if __name__ == "__main__":
    main()
