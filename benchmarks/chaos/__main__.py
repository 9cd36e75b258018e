"""Inject random faults into the real server under load: `python -m benchmarks.chaos`.

Clients keep `--concurrency` requests in flight: every kind of constraint on every backend, unconstrained requests,
streamed and not, several choices, new constraints. Some clients disconnect or stop reading.

Every `--every` seconds an actor fails: a mask actor is killed (SIGKILL) or frozen (SIGSTOP), or the compile actor is
killed, which is as likely as one of the mask actors. Halfway between there is another fault: a mask actor stops for 0.1
to 2 s, a compile process is killed, or the server gets a constraint that needs too much memory to compile or never
ends, or an input from the file of hostile inputs (`--data`).

Every answer is checked. An output satisfies its constraint, or is a legal beginning of such a text. An unconstrained
greedy output equals the output without faults. An error is a declared one and says correctly whether to retry. A
request that takes longer than `--limit` is hung.

The exit status is 1 after a violation: an invalid, different, undeclared or hung answer, a dead engine, a server that
doesn't recover, and with `--max-replays` a good request (not hostile, and its client stayed) without a valid answer.
Writes chaos.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.chaos import hostile_inputs
from benchmarks.chaos.checks import Judge
from benchmarks.chaos.faults import COMPILE_ACTOR_FAULT, FAULTS, MASK_ACTOR_FAULTS, Scene, inject, thaw
from benchmarks.chaos.load import Load, client_for, ended, until
from benchmarks.chaos.picture import timeline
from benchmarks.chaos.reference import reference_outputs
from benchmarks.chaos.report import Run, print_run, summary, violations
from benchmarks.chaos.server import Server, default_vocabulary, running_server
from benchmarks.chaos.traffic import Request, Traffic
from benchmarks.chaos.watch import Watch, watching
from benchmarks.paths import RESULTS
from benchmarks.report import exit_with, fail, machine, write_json

CALM_REQUESTS = 100
CLIENTS_NICENESS = 5
"""The clients share the machine with the server. Restarted actors must not wait for them."""
RECOVERY_SECONDS = 120.0


async def inject_faults(scene: Scene, options: argparse.Namespace, until_: float) -> None:
    """Inject faults until the time is over, alternately into an actor and of another kind."""
    masks = [name for name in options.faults if name in MASK_ACTOR_FAULTS]
    shares = dict.fromkeys(masks, options.actors / max(1, len(masks)))
    if COMPILE_ACTOR_FAULT in options.faults:
        shares[COMPILE_ACTOR_FAULT] = 1.0
    others = {name: 1.0 for name in options.faults if name not in shares and (name != "hostile" or scene.hostile)}
    due, turn = time.monotonic() + options.every / 2, 0
    tasks: set[asyncio.Task[bool]] = set()
    while due < until_:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        kinds = (shares, others)[turn % 2]
        if kinds:
            (fault,) = scene.source.choices(list(kinds), list(kinds.values()))
            task = asyncio.create_task(inject(scene, fault))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        due, turn = due + options.every / 2, turn + 1
    await asyncio.gather(*tasks)


async def run_test(server: Server, options: argparse.Namespace) -> Run:
    """Run the whole test against a running server."""
    judge = Judge(default_vocabulary())
    watch = Watch(server)
    async with client_for(server.url, options.concurrency + 64) as http:
        print("recording reference outputs without faults …", flush=True)
        judge.references = await reference_outputs(http, judge, options.limit)
        load = Load(http, judge, options.limit)
        look = asyncio.create_task(watching(watch, http))
        await until(lambda: bool(watch.memory), 30)
        begun = time.monotonic()
        over = begun + options.minutes * 60
        hostile = _hostile_requests(options)

        async def send(request: Request) -> None:
            await load.send(request)

        scene = Scene(server, watch, random.Random(options.seed), send, hostile)
        traffic = Traffic(options.seed)
        progress = asyncio.create_task(_progress(load, scene, over))
        busy = load.run(traffic, options.concurrency, lambda: time.monotonic() < over and watch.deaths == 0)
        await asyncio.gather(busy, inject_faults(scene, options, over))
        lasted = time.monotonic() - begun
        recovered = await until(lambda: _is_whole(scene, options.actors), RECOVERY_SECONDS)
        thaw(scene)
        calm = Load(http, judge, options.limit)
        await calm.all_of([_staying(traffic.request(-number)) for number in range(1, CALM_REQUESTS + 1)], 16)
        for task in (progress, look):
            task.cancel()
            await ended(task)
    watch.memory.append((time.monotonic(), server.memory()))
    return Run(begun, lasted, load, calm, scene.events, watch, recovered, server.tracebacks())


def _is_whole(scene: Scene, actors: int) -> bool:
    """Return whether all mask actors are up and none of them is a frozen process."""
    up = [actor for actor in scene.watch.actors() if actor["state"] == "up"]
    return len(up) == actors and not scene.stopped & {actor["pid"] for actor in up}


def _staying(request: Request) -> Request:
    """Return the same request with a client that stays."""
    return Request(request.number, request.path, request.body, request.example, request.backend)


def _hostile_requests(options: argparse.Namespace) -> list[Request]:
    if not options.data.exists():
        print(f"hostile inputs are left out: there is no file {options.data.name} (--data)")
        return []
    entries = hostile_inputs.read(options.data)
    pairs = [(entry, backend) for entry in entries for backend in hostile_inputs.backends_of(entry)]
    return [request for pair in pairs for request in hostile_inputs.requests(*pair, most=8)]


async def _progress(load: Load, scene: Scene, over: float) -> None:
    with tqdm(unit=" answers", disable=None) as bar:
        while True:
            await asyncio.sleep(1)
            bar.update(len(load.records) - bar.n)
            left = max(0.0, over - time.monotonic())
            bar.set_description(f"{left:.0f} s left, {len(scene.events)} faults, {len(load.violations())} violations")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between faults of mask actors")
    parser.add_argument(
        "--max-replays", type=int, help="passed to `guided serve`; every good request must then get a valid answer"
    )
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a request is hung")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument(
        "--data", type=Path, default=hostile_inputs.DATA, help="hostile inputs; use only a file that you trust"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a temporary file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run one minute, 64 requests at a time")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.concurrency = 1.0, 64
    if options.every <= 0 or options.minutes <= 0:
        fail("--every and --minutes must be greater than 0")
    return options


def main() -> None:
    options = parsed()
    started_on = machine()
    arguments = ["--num-actors", str(options.actors), "--log-level", "warning"]
    if options.max_replays is not None:
        arguments += ["--max-replays", str(options.max_replays)]
    with running_server(*arguments, log=options.log) as server, hostile_inputs.deep():
        os.nice(CLIENTS_NICENESS)
        run = asyncio.run(run_test(server, options))
    wrong = violations(run, every_good=bool(options.max_replays))
    result: dict[str, Any] = summary(run)
    print_run(run, result)
    write_json(options.out / "chaos.json", vars(options), {**result, "violations": wrong}, started_on)
    faults = f"{len(run.events)} faults, an actor killed or frozen every {options.every:g} s"
    title = f"{options.concurrency} requests at a time, {options.actors} mask actors, {faults}"
    timeline(options.out / "chaos.png", title, run.begun, run.load.records, run.events, run.watch)
    print(f"wrote {options.out / 'chaos.json'} and .png")
    exit_with(wrong)


if __name__ == "__main__":
    main()
