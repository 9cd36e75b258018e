"""Attack the real server beside a good client: `python -m benchmarks.attack`.

Each case is one attack on a default `guided serve` from outside: by bodies, by connections, on its processes. `--list`
shows them, with a number for its kind ("held": an attack that earlier versions withstood). Meanwhile a witness at
another address (127.0.0.2) sends small requests, with and without constraints, whose outputs are checked, and asks for
`/health` every 50 ms, each time on a new connection.

The limits of a case: at most 500 MB of memory above idle (all processes of the server, without shared memory), at most
250 ms until an answer of /health, the 99th percentile of the good requests' times at most 3 times that of the seconds
before the attack, no good request fails, nothing dies or hangs, every answer is one of the documented ones, and
everything is given back within 10 s: memory, file descriptors, requests, processes. In a case that stops or kills
processes good requests may be slower, and may fail with an error that says that they may be sent again.

A watchdog kills a server that takes 6 GB. A server that died, or did not give everything back, is started again before
the next case. The exit status is 1 if a case fails. Writes attack.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.attack import bodies, connections, fields, processes  # noqa: F401  registers the cases
from benchmarks.attack.case import ALL, Case, Setup, Target
from benchmarks.attack.measure import FATAL_MB, MemoryWatch, held, kill, not_given_back
from benchmarks.attack.witness import Seen, Witness, warm_up
from benchmarks.chaos.load import Record, client_for
from benchmarks.chaos.server import Server, running_server
from benchmarks.paths import RESULTS
from benchmarks.report import exit_with, machine, percentiles, print_table, write_json

MEMORY_MB, STALL_MS, RATIO = 500.0, 250.0, 3.0
BACK_SECONDS = 10.0
EXCUSED = ("worker_died", "pool_unavailable", "shutting_down")
"""Errors of good requests that a case that restarts processes may cause: the client may send the request again."""


@dataclass(frozen=True)
class Period:
    """What the witness saw before or during an attack."""

    good: list[Record]
    stall: float
    """Longest time of a probe, in ms."""
    unanswered: int
    """Probes without an answer."""
    times: dict[str, float]
    """Percentiles of the good requests' times, in ms."""

    @classmethod
    def of(cls, seen: Seen, includes: Callable[[float, float], bool]) -> Period:
        """Take the requests and probes of which `includes(begin, end)` is true."""
        good = [each for each in seen.records if includes(each.began, each.ended)]
        probes = [each for each in seen.probes if includes(each.at, each.at + each.took)]
        stall = 1e3 * max((each.took for each in probes), default=0.0)
        unanswered = sum(not each.answered for each in probes)
        return cls(good, stall, unanswered, percentiles([each.ended - each.began for each in good]))


@dataclass(frozen=True)
class Result:
    """What one case did to the server."""

    case: Case
    target: Target
    seconds: float
    memory: float
    """MB above idle."""
    calm: Period
    attacked: Period
    killed: bool
    """Whether the watchdog killed the server."""
    alive: bool
    kept: list[str]

    @property
    def ratio(self) -> float:
        """99th percentile of the good requests' times, divided by that of the calm seconds."""
        return round(self.attacked.times.get("p99", np.nan) / self.calm.times.get("p99", np.nan), 2)

    @property
    def violations(self) -> list[tuple[str, str]]:
        """Return (verdict, description) of each broken limit."""
        case, answers = self.case, self.target.answers
        broken = sum(count for answer, count in answers.items() if answer.endswith("Error"))
        wrong = [each for each in self.attacked.good if each.verdict.outcome != "valid"]
        lost = [each for each in wrong if not (case.restarts and each.verdict.cause in EXCUSED)]
        found = [("answers", each) for each in dict.fromkeys(self.target.problems)]
        limits: list[tuple[str, object, str]] = [
            ("hung", answers["hung"], f"{answers['hung']} requests without an answer"),
            ("memory", self.killed, f"killed by the watchdog at {FATAL_MB:.0f} MB"),
            ("memory", self.memory > MEMORY_MB, f"{self.memory:.0f} MB above idle"),
        ]
        if not case.ends_server:
            limits += [
                ("dead", not self.alive, "the server has died"),
                ("answers", broken and self.alive, f"{broken} connections ended without an answer"),
                ("stall", self.attacked.stall > STALL_MS, f"/health took {self.attacked.stall:.0f} ms"),
                ("stall", self.attacked.unanswered, f"{self.attacked.unanswered} probes of /health failed"),
                ("slow", self.ratio > RATIO and not case.restarts, f"good p99 is {self.ratio} times the calm one"),
                ("good", lost, f"{len(lost)} failed" + "".join(f", {each.describe()[:150]}" for each in lost[:1])),
            ]
        return found + [(what, text) for what, truth, text in limits if truth] + [("kept", each) for each in self.kept]

    @property
    def verdict(self) -> str:
        return ", ".join(dict.fromkeys(what for what, _ in self.violations)) or "ok"

    def lines(self) -> list[str]:
        """Return notes and what broke a limit, for people."""
        return [f"    {line}" for line in (*self.target.notes, *(f"{what}: {text}" for what, text in self.violations))]

    def summary(self) -> dict[str, Any]:
        """Return the row of the table and of the JSON file."""
        return {
            "case": self.case.name,
            "row": self.case.row,
            "what": self.case.what,
            "seconds": round(self.seconds, 1),
            "answers": dict(self.target.answers.most_common()),
            "memory_mb": max(0, round(self.memory)),
            "stall_calm_ms": round(self.calm.stall),
            "stall_ms": round(self.attacked.stall),
            "probes_failed": self.attacked.unanswered,
            "good": len(self.attacked.good),
            "good_calm_ms": self.calm.times,
            "good_ms": self.attacked.times,
            "good_ratio": self.ratio,
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
    seen = await asyncio.to_thread(witness.stop)
    gone = case.ends_server or not server.alive
    left = [] if gone else await asyncio.to_thread(not_given_back, server, before, BACK_SECONDS)
    watch.end()
    calm_period = Period.of(seen, lambda _, until: until < begin)
    attacked = Period.of(seen, lambda since, until: since < end and until >= begin)
    memory = watch.peak - before.memory
    return Result(case, target, end - begin, memory, calm_period, attacked, watch.killed, server.alive, left)


class Servers:
    """The running server, which cases with the same setup share."""

    def __init__(self, log: Path | None) -> None:
        self._stack = contextlib.ExitStack()
        self._log = log
        self._setup: Setup | None = None
        self._server: Server | None = None

    def take(self, setup: Setup) -> Server:
        """Return a running server. Raises `SystemExit` if it does not start."""
        if self._server is None or self._setup != setup or not self._server.alive:
            self.drop()
            environment = {} if setup.key is None else {"GUIDED_API_KEY": setup.key}
            arguments = ("--log-level", "warning", *setup.arguments)
            running = running_server(*arguments, log=self._log, environment=environment, prefix=setup.prefix)
            self._server, self._setup = self._stack.enter_context(running), setup
            asyncio.run(warm_up(self._server.url, setup.key))
        return self._server

    def drop(self) -> None:
        """End the server at once: it may be hung."""
        if self._server is not None:
            kill(self._server)
        self._server = None
        self._stack.close()


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> tuple[list[Result], dict[str, str]]:
    """Run cases. Returns the results, and why cases were not run."""
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
                    server = servers.take(case.setup)
                except SystemExit as error:  # with the last lines of its log
                    skipped[case.name] = str(error).strip().splitlines()[-1][:200]
                    continue
                result = asyncio.run(run_case(case, server, witness, options.calm))
                results.append(result)
                tqdm.write("\n".join([f"{case.name}: {result.verdict}", *result.lines()]))
                if not server.alive or result.kept or result.target.answers["hung"]:
                    servers.drop()
    finally:
        servers.drop()
        witness.close()
    return results, skipped


def show(results: Sequence[Result], skipped: dict[str, str]) -> None:
    """Print the table, and the cases that were not run."""
    rows = []
    for result in results:
        answers = ", ".join(f"{answer}: {count}" for answer, count in result.target.answers.most_common())
        times = {"calm": result.calm.times.get("p99"), "p99": result.attacked.times.get("p99")}
        rows.append({**result.summary(), **times, "answers": answers[:60]})
    headings = {"case": "case", "row": "row", "answers": "answers", "memory_mb": "MB", "stall_calm_ms": "stall calm"}
    headings |= {"stall_ms": "stall ms", "calm": "good p99 calm", "p99": "good p99", "verdict": "verdict"}
    print_table(rows, headings)
    print()
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
