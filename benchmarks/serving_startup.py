"""Measure the time that `make serve` takes, the memory of each process, and tokens/s with and without guidance.

    python -m benchmarks.serving_startup                # the server of this environment with the embedded model
    python -m benchmarks.serving_startup --fresh DIR    # clone the repository into DIR (new) and `make serve` there
    python -m benchmarks.serving_startup --pool inline --concurrency 1 32

Memory is that of the idle server before and after the load. RSS counts shared pages in each process, PSS divides them
among the processes. Tokens/s is measured over HTTP with answers of a fixed number of tokens, not streamed, by a client
on the same machine, which shares its cores. Each figure is the median of `--repeat` runs, in which unguided and guided
requests take turns. Guided requests have a regex or a JSON schema without an early end (llguidance). Writes
`benchmarks/out/serving_startup.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.paths import RESULTS, ROOT
from benchmarks.processes import memory
from benchmarks.report import machine, write_json

TOKENS = 128
PROMPT = {"messages": [{"role": "user", "content": "Maria Keller is 34 years old and lives in Lisbon."}]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "regex": {"regex": "[A-Za-z0-9 ,.:]{4000}"},
    "json_schema": {
        "json_schema": {
            "type": "array",
            "minItems": 400,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    },
}


@dataclass
class Started:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    seconds: float
    """Time from the command to the line that says it serves."""


@contextlib.contextmanager
def started(command: list[str], directory: Path) -> Iterator[Started]:
    begun = time.perf_counter()
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.match(r"guided serves .* on (http://\S+)", line):
            break
    else:
        raise SystemExit("the server doesn't start:\n" + "".join(seen))
    try:
        yield Started(found[1], process, time.perf_counter() - begun)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


async def tokens_per_second(url: str, concurrency: int, fields: dict[str, Any], seconds: float) -> float:
    """Run `concurrency` clients for `seconds`. Each sends one request after the other."""
    body = {**PROMPT, "temperature": 0, "max_tokens": TOKENS, **fields}
    begun, tokens = time.perf_counter(), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        while time.perf_counter() - begun < seconds:
            answer = await http.post(f"{url}/v1/chat/completions", json=body)
            answer.raise_for_status()
            count = answer.json()["usage"]["completion_tokens"]
            assert count == TOKENS, f"an answer of {count} tokens: {answer.text[:300]}"
            tokens += count

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=concurrency)) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return tokens / (time.perf_counter() - begun)


def throughput(url: str, concurrencies: list[int], repeat: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for concurrency in concurrencies:
        runs: dict[str, list[float]] = {way: [] for way in WAYS}
        for fields in WAYS.values():  # compiles and warms up
            asyncio.run(tokens_per_second(url, concurrency, fields, 0.5))
        for _ in range(repeat):
            for way, fields in WAYS.items():
                runs[way].append(asyncio.run(tokens_per_second(url, concurrency, fields, seconds)))
        medians = {way: statistics.median(found) for way, found in runs.items()}
        for way, median in medians.items():
            ratio = median / medians["plain"]
            row = {"concurrency": concurrency, "output": way, "tokens_per_second": median, "of_plain": ratio}
            rows.append({**row, "runs": runs[way]})
    return rows


def report(result: dict[str, Any]) -> None:
    if result["fresh"]:
        print(f"fresh clone, `make serve`, until it serves: {result['first_start_seconds']:.0f} s")
    print(f"start of the server: {result['start_seconds']:.1f} s\n")
    print(f"{'process':36} {'RSS MiB':>9} {'PSS MiB':>9}   after the load: {'RSS MiB':>9} {'PSS MiB':>9}")
    for before, after in zip(result["memory_idle"], result["memory_after"], strict=False):
        sizes = f"{before['rss_mib']:9.0f} {before['pss_mib']:9.0f}"
        print(f"{before['process']:36} {sizes}   {'':15} {after['rss_mib']:9.0f} {after['pss_mib']:9.0f}")
    total = [sum(row["pss_mib"] for row in result[when]) for when in ("memory_idle", "memory_after")]
    print(f"{'all':36} {'':9} {total[0]:9.0f}   {'':15} {'':9} {total[1]:9.0f}\n")
    print(f"{'at a time':>9} {'output':>12} {'tokens/s':>9} {'of plain':>9}")
    for row in result["throughput"]:
        rate = f"{row['tokens_per_second']:9.0f} {row['of_plain']:9.2f}"
        print(f"{row['concurrency']:9} {row['output']:>12} {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fresh", type=Path, help="a new directory: clone the repository into it and run `make serve` there"
    )
    parser.add_argument("--pool", choices=["ray", "inline"], default="ray")
    parser.add_argument("--num-actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    started_on = machine()

    arguments = ["--port", "0", "--pool", options.pool, "--log-level", "warning"]
    if options.pool == "ray":
        arguments += ["--num-actors", str(options.num_actors)]
    first = None
    command = [sys.executable, "-c", "from engine.server.cli import main; main()", "serve", *arguments]
    directory = ROOT
    if options.fresh is not None:
        begun = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(options.fresh)], check=True)
        directory = options.fresh
        command = ["make", "--no-print-directory", "serve", f"ARGS={' '.join(arguments)}"]
        with started(command, directory):
            first = time.perf_counter() - begun
    with started(command, directory) as server:
        root = server.process.pid
        idle = memory(root, "server")
        rates = throughput(server.url, options.concurrency, options.repeat, options.seconds)
        result = {
            "fresh": options.fresh is not None,
            "first_start_seconds": first,
            "start_seconds": server.seconds,
            "memory_idle": idle,
            "memory_after": memory(root, "server"),
            "throughput": rates,
        }
    write_json(options.out / "serving_startup.json", vars(options), result, started_on)
    report(result)


if __name__ == "__main__":
    main()
