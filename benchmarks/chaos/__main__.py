"""Inject random faults into the real server under load: `python -m benchmarks.chaos`.

Clients keep `--concurrency` requests in flight: every kind of constraint on every
backend, unconstrained requests, streamed and not, several choices, new constraints.
Some clients disconnect.

Every `--every` seconds a mask actor is killed (SIGKILL) or frozen (SIGSTOP). Halfway
between there is another fault: a mask actor stops for 0.1 to 2 s, a compile process is
killed, or the server gets a constraint that needs too much memory to compile or never
ends, or an input from the file of hostile inputs (`--data`).

Every answer is checked. An output that ends `stop` must satisfy its constraint. A
greedy output with a repeated constraint must equal the output without faults. An error
must be a declared one. A request that takes longer than two minutes counts as hung.

The exit status is 1 after a violation: an invalid, different, undeclared or hung
answer, a dead engine, a server that does not recover, and with `--max-replays` a good
request (not hostile, its client stayed) without a valid answer. Writes
chaos.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import httpx
from tqdm import tqdm

from benchmarks import report
from benchmarks.chaos import traffic
from benchmarks.chaos.faults import (
    ACTOR_FAULTS,
    DATA,
    OTHER_FAULTS,
    Scene,
    hostile_requests,
)
from benchmarks.chaos.load import Load, reference_outputs
from benchmarks.chaos.result import Run, Watch, summary, violations
from benchmarks.servers import Server, guided_server

CALM_REQUESTS = 100
CLIENTS_NICENESS = 5
"""The clients share the machine with the server. Restarted actors must not wait for
them."""
LIMIT_SECONDS = RECOVERY_SECONDS = 120.0


async def inject_faults(scene: Scene, every: float, over: float) -> None:
    """Inject faults until the time is over: in turn a fault of an actor and another
    fault."""
    due = time.monotonic() + every / 2
    async with asyncio.TaskGroup() as tasks:
        for kinds in itertools.cycle((ACTOR_FAULTS, OTHER_FAULTS)):
            if due >= over:
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(scene.inject(scene.source.choice(kinds)))
            due += every / 2


async def run_test(server: Server, options: argparse.Namespace) -> Run:
    """Run the whole test against a running server."""
    watch = Watch(server)
    # No idle connections: httpcore also closes one that expires while a request that
    # was given it has not begun. Then the request fails with `ReadError`.
    limits = httpx.Limits(
        max_connections=options.concurrency + 64, max_keepalive_connections=0
    )
    async with httpx.AsyncClient(
        base_url=server.url, timeout=None, limits=limits
    ) as http:
        print("recording the outputs without faults …", flush=True)
        references = await reference_outputs(http, LIMIT_SECONDS)
        before = server.pss_mib()
        bar = tqdm(unit=" answers", disable=None)
        load, calm = (Load(http, references, LIMIT_SECONDS, bar) for _ in range(2))
        look = asyncio.create_task(watch.run(http))
        begun = time.monotonic()
        over = begun + options.minutes * 60
        hostile = hostile_requests(options.data) if options.data.exists() else []
        scene = Scene(
            server, watch.actors, random.Random(options.seed), load.send, hostile
        )
        endless = (
            traffic.request(options.seed, number) for number in itertools.count()
        )
        busy = load.run(
            endless,
            options.concurrency,
            lambda: time.monotonic() < over and not watch.is_dead,
        )
        await asyncio.gather(busy, inject_faults(scene, options.every, over))
        lasted = time.monotonic() - begun
        recovered = await _is_whole_in_time(scene, options.actors)
        after = [
            traffic.request(options.seed, -number)
            for number in range(1, CALM_REQUESTS + 1)
        ]
        await calm.run([replace(each, leaves=False) for each in after], 16)
        bar.close()
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)
    return Run(
        begun,
        lasted,
        load,
        calm,
        scene.events,
        watch,
        recovered,
        (before, server.pss_mib()),
    )


async def _is_whole_in_time(scene: Scene, actors: int) -> bool:
    """Wait until all mask actors are up and none of them is a frozen process."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        up = [actor for actor in scene.actors() if actor["state"] == "up"]
        if len(up) == actors and not scene.stopped & {actor["pid"] for actor in up}:
            return True
        await asyncio.sleep(0.1)
    return False


def parsed() -> argparse.Namespace:
    parser = report.start(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument(
        "--every", type=float, default=6.0, help="seconds between faults of actors"
    )
    parser.add_argument(
        "--max-replays", type=int, default=2, help="passed to `guided serve`"
    )
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="hostile inputs; use only a file that you trust",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.minutes = 1.0
    if options.every <= 0 or options.minutes <= 0:
        report.fail("--every and --minutes must be greater than 0")
    if not options.data.exists():
        print(
            f"hostile inputs are left out: there is no file {options.data.name} (--data)"
        )
    return options


def main() -> None:
    options = parsed()
    started_on = report.machine()
    arguments = [
        "--num-actors",
        str(options.actors),
        "--max-replays",
        str(options.max_replays),
    ]
    with guided_server(*arguments) as server:
        os.nice(CLIENTS_NICENESS)
        run = asyncio.run(run_test(server, options))
    wrong, result = violations(run, every_good=options.max_replays > 0), summary(run)
    for name, value in result.items():
        print(f"{name.replace('_', ' '):24} {json.dumps(value)}")
    report.write_json(
        options.out / "chaos.json",
        vars(options),
        {**result, "violations": wrong},
        started_on,
    )
    title = f"{options.concurrency} requests at a time, {options.actors} mask actors, {len(run.events)} faults"
    loads = {"during the faults": run.load, "after them": run.calm}
    rows = [
        {"way": way, "outcome": outcome, "answers": count}
        for way, load in loads.items()
        for outcome, count in load.outcomes().items()
    ]
    report.plot(
        options.out / "chaos.png", title, rows, ("outcome",), {"answers": "answers"}
    )
    report.exit_with(wrong)


if __name__ == "__main__":
    main()
