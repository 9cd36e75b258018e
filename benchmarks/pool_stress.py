"""Stress the mask pool where grammars are brought to actors: `python -m
benchmarks.pool_stress`.

Each case prints its figures beside their targets: large grammars beside quick rows,
streams beside new schemas and beside processes that take all CPUs, frozen actors,
killed compile processes. On a machine with other load, times are upper bounds. The
benchmark needs a checkout with its tests, for the faulty grammar library. Writes
pool_stress.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.workload import DATA, read_rows, tekken

SUPPORT = report.ROOT / "tests" / "support"
GUIDED, UNGUIDED = 16, 8
_PATIENCE = 300.0
"""Time limit of a compilation, with the start of the compile processes on a busy
machine, in seconds."""
PLACES = ("import", "load", "fill:1", "idle")
Row = dict[str, Any]
_numbers = count()


def _support(name: str) -> Any:
    """Import a module of the tests."""
    return import_module(name)


def busy_loops(number: int) -> contextlib.ExitStack:
    """Start processes that take all CPUs, until the stack is closed."""
    stack = contextlib.ExitStack()
    for _ in range(number):
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(loop.wait)
        stack.callback(loop.kill)
    return stack


@contextlib.contextmanager
def driven(vocabulary: Any = None, **options: Any) -> Iterator[Any]:
    """Open a pool with two actors, driven by `DrivenPool`."""
    from actors import RayPool

    pool = RayPool(
        vocabulary or _support("byte_vocabulary").BYTES, num_actors=2, **options
    ).started()
    try:
        made = _support("driven_pool").DrivenPool(pool)
        while not made.all_up():
            time.sleep(0.1)
        yield made
    finally:
        pool.shutdown()


def kill_all(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in set(pids)]
    forks = [fork for process in processes for fork in process.children()]
    for process in processes:
        process.kill()
    psutil.wait_procs([*processes, *forks], timeout=10)


def kills(pool: Any) -> int:
    return sum(sum(worker.ends.values()) for worker in pool.status().workers)


def letters(made: Any, number: int) -> list[int]:
    """Open quick rows of a real library. They never end: a step takes the first allowed
    token, which is a space."""
    from guided.constraint import Constraint

    grammar = made.pool.compile(Constraint.regex("[a-z ]*é"), ("llguidance",)).result(
        _PATIENCE
    )
    rows: list[int] = made.open_with(grammar, number)
    return rows


def rows_beside(
    made: Any, sound: list[int], more: list[int], seconds: float = 60.0
) -> Row:
    """Run steps until the sequences `more` have a mask. Returns the figures of the
    other sequences."""
    gaps, sending, slow_rows = [], [0.0], set[int]()
    submit = made.pool.submit

    def timed(sequences: Any) -> None:
        began = time.thread_time()
        submit(sequences)
        sending.append(time.thread_time() - began)

    made.pool.submit = timed
    last = dict.fromkeys(sound, time.perf_counter())
    over = time.monotonic() + seconds

    def waits() -> bool:
        return not more or any(
            not made.tokens[each] and each not in made.errors for each in more
        )

    while waits() and time.monotonic() < over:
        ready = made.step([*sound, *more], deadline=0.005)
        now = time.perf_counter()
        for each in ready & set(sound):
            gaps.append(now - last[each])
            slow_rows |= {each} if gaps[-1] > 0.03 else set()
            last[each] = now
    made.pool.submit = submit
    return {
        "rows over 30 ms": len(slow_rows),
        "longest gap ms": round(1e3 * max(gaps, default=0.0), 1),
        "engine's CPU to submit a step ms": round(1e3 * max(sending), 2),
        "kills": kills(made.pool),
        "errors": len(made.errors),
    }


def with_before(made: Any, sound: list[int], open_more: Callable[[], list[int]]) -> Row:
    """Measure the rows `sound` for two seconds alone, then beside others, with the
    interpreter lock of the actors."""
    with tempfile.TemporaryDirectory() as directory:
        made.go_on(made.open(f"watch@load={directory}/lock", number=2))  # in each actor
        before = rows_beside(made, sound, [], seconds=2.0)
        found = rows_beside(made, sound, open_more())
        locks = [float(path.read_text()) for path in Path(directory).iterdir()]
    return {
        "alone": before,
        **found,
        "actors": len(locks),
        "longest hold of the lock ms": round(1e3 * max(locks), 1),
    }


def large(options: argparse.Namespace) -> Row:
    """A grammar of 64 MB, read without the lock, beside 8 quick rows."""
    with driven() as made:
        sound = made.open("sound length=100000", number=8)
        made.go_on(sound, 50)
        return with_before(made, sound, lambda: made.open("sound dump=64"))


def xgrammar(options: argparse.Namespace) -> Row:
    """A large grammar of xgrammar, with 131,072 tokens, beside 8 quick rows."""

    from guided.constraint import Constraint
    from guided.errors import GuidedError
    from guided.vocabulary import Vocabulary

    vocabulary = Vocabulary.from_tekken(tekken())
    with driven(vocabulary) as made:
        quick = letters(made, 8)
        made.go_on(quick, 50)
        for schema in schemas():
            with contextlib.suppress(GuidedError):
                grammar = made.pool.compile(
                    Constraint.json_schema(schema), ("xgrammar",)
                ).result(_PATIENCE)
                if not isinstance(grammar.dumped, bytes):
                    break
        size = os.fstat(grammar.dumped.fd).st_size
        return {
            "MB": round(size / 1e6, 1),
            **with_before(made, quick, lambda: made.open_with(grammar, 1)),
        }


def frozen(options: argparse.Namespace) -> Row:
    """An actor that is frozen while it imports, loads, fills, or is idle: the longest
    gap of its rows."""
    found = {}
    for place in PLACES:
        with tempfile.TemporaryDirectory() as directory:
            os.environ["FAULTY_IMPORT"] = mark = f"{directory}/import"  # for the actors
            with driven() as made:
                rows = letters(made, 6)
                made.go_on(rows, 5)
                if place == "idle":
                    _support("driven_pool").freeze(made.pid_of(rows[0]))
                elif place == "import":
                    Path(mark).touch()
                    rows += made.open("sound")
                else:
                    rows += made.open(f"freeze@{place}", f"once={directory}/frozen")
                began = time.monotonic()
                made.go_on(rows, 2)
                found[f"{place} s"] = round(time.monotonic() - began, 1)
                found[f"{place} errors"] = len(made.errors)
                found[f"{place} kills"] = kills(made.pool)
    return found


def starved(options: argparse.Namespace) -> Row:
    """8 busy loops beside schemas with half a second of CPU time to compile, and again
    on the actor."""
    found: Row = {"kills": 0, "errors": 0}
    with driven() as made, busy_loops(8):
        rows = made.open("sound length=100000", number=8)
        made.go_on(rows, 5)
        for _ in range(3):
            rows += made.open(f"burn@load=0.5 name={next(_numbers)}")
            made.go_on(rows, 2)
        found = {"kills": kills(made.pool), "errors": len(made.errors)}
    return found


def killed(options: argparse.Namespace) -> Row:
    """The next constraint after `kill -9` of the compile processes, and of their fork
    server."""
    from guided.constraint import Constraint

    compile_pids = _support("driven_pool").compile_pids

    def compiled() -> float:
        began = time.monotonic()
        made.pool.compile(
            Constraint.regex(f"x{next(_numbers)}"), ("llguidance",)
        ).result(_PATIENCE)
        return round(time.monotonic() - began, 2)

    with driven() as made:
        compiled()
        time.sleep(options.seconds / 2)  # the second fork server gets warm
        found = {"before s": compiled()}
        kill_all(compile_pids())
        found["processes s"] = compiled()
        kill_all([psutil.Process(pid).ppid() for pid in compile_pids()])
        found["fork server s"] = compiled()
        time.sleep(1)
        return {**found, "counted": made.pool.status().fork_server_ends}


def schemas() -> list[str]:
    return [json.dumps(row["schema"]) for row in read_rows(DATA)]


async def streams(engine: Any, seconds: float, burst: int, every_schema: bool) -> Row:
    """Run guided and unguided streams. After half of the time, send `burst` requests
    with new schemas at once.

    With `every_schema`, each guided stream has a different real schema, and every
    seventh stream uses xgrammar.
    """
    from engine.sampling_params import SamplingParams
    from guided.errors import GuidedError

    real, source = schemas() if every_schema else [], random.Random(1)
    longest, codes = {"guided": 0.0, "unguided": 0.0}, dict[str, int]()
    over = time.monotonic() + seconds

    async def one(kind: str, **params: Any) -> None:
        last = time.monotonic()
        started = False
        try:
            async for output in engine.generate(
                "Quick", SamplingParams(temperature=1.0, max_tokens=100, **params)
            ):
                now = time.monotonic()
                if started and kind:
                    longest[kind] = max(longest[kind], now - last)
                last, started = now, True
                if output.error is not None:
                    codes[output.error.code] = codes.get(output.error.code, 0) + 1
        except GuidedError as error:
            codes[error.code] = codes.get(error.code, 0) + 1

    async def repeated(kind: str) -> None:
        while time.monotonic() < over:
            params: Row = (
                {"ignore_eos": True}
                if kind == "unguided"
                else {"regex": "[a-z ]{100,}"}
            )
            if kind == "guided" and every_schema:
                params = {"json_schema": source.choice(real)}
                if source.random() < 1 / 7:
                    params["backend"] = "xgrammar"
            await one(kind, **params)

    async with asyncio.TaskGroup() as tasks:
        for kind, number in (("guided", GUIDED), ("unguided", UNGUIDED)):
            for _ in range(number):
                tasks.create_task(repeated(kind))
        await asyncio.sleep(seconds / 2)
        for index in range(burst):
            schema = {
                "type": "object",
                "properties": {f"p{index}": {"type": "integer"}},
                "required": [f"p{index}"],
            }
            tasks.create_task(one("", json_schema=json.dumps(schema)))
    status = engine.health().pool
    return {
        **{f"longest gap {kind} s": round(gap, 2) for kind, gap in longest.items()},
        "guided : unguided": round(
            longest["guided"] / max(longest["unguided"], 1e-9), 2
        ),
        "kills": sum(sum(worker.ends.values()) for worker in status.workers),
        "replays": status.replays,
        "errors": codes,
    }


def with_engine(**arguments: Any) -> Row:
    from engine.async_llm import AsyncLLM
    from engine.default_model import checkpoint_path

    engine = AsyncLLM(
        str(checkpoint_path()), "ray", pool_options={"num_actors": 2, "max_replays": 1}
    )
    try:
        return asyncio.run(streams(engine, **arguments))
    finally:
        engine.shutdown()


def burst(options: argparse.Namespace) -> Row:
    """200 new schemas at once beside running streams."""
    return with_engine(seconds=options.seconds, burst=200, every_schema=False)


def soak(options: argparse.Namespace) -> Row:
    """Streams with real schemas beside as many busy loops as cores."""
    with busy_loops(os.cpu_count() or 1):
        return with_engine(seconds=options.seconds, burst=0, every_schema=True)


def chaos(options: argparse.Namespace) -> Row:
    """`benchmarks.chaos`, for the time of the streams."""
    with tempfile.TemporaryDirectory() as directory:
        minutes = str(options.seconds / 60)
        command = [
            sys.executable,
            "-m",
            "benchmarks.chaos",
            "--minutes",
            minutes,
            "--every",
            "6",
            "--max-replays",
            "1",
        ]
        done = subprocess.run(
            [*command, "--out", directory], cwd=report.ROOT, check=False
        )
        return {"exit status": done.returncode}


CASES: dict[str, tuple[Callable[[argparse.Namespace], Row], str]] = {
    "large": (large, "0 rows over 30 ms, 0 kills, engine's CPU at most 1 ms"),
    "xgrammar": (xgrammar, "longest gap at most 100 ms, of the lock 70 ms"),
    "soak": (soak, "0 kills, replays and mask_timeout; guided : unguided at most 2"),
    "burst": (burst, "guided : unguided at most 1.5"),
    "frozen": (frozen, "at most 6 s each, no error"),
    "starved": (starved, "0 kills"),
    "killed": (killed, "at most 2 s, counted"),
    "chaos": (chaos, "exit status 0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of the soak, the burst and chaos (default: 20)",
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        report.fail(f"there is no case {', '.join(unknown)}")
    paths = [str(SUPPORT / "startup"), str(SUPPORT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*paths, str(report.ROOT), os.environ.get("PYTHONPATH", "")]
    )
    from guided.backends import BACKENDS

    faulty = _support("faulty_backend")
    BACKENDS[faulty.NAME] = faulty.ADAPTER
    rows = {}
    for name in options.cases or CASES:
        run, target = CASES[name]
        rows[name] = {**run(options), "target": target}
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
    found = {"machine": report.machine(), "seconds": options.seconds, "cases": rows}
    (options.out / "pool_stress.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
