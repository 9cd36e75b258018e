"""Measure what guided requests cost at the HTTP server: `python -m benchmarks.serving [MODEL]`.

Clients keep `--concurrency` streamed chat requests in flight. They run on the same machine and share its cores. None,
half or all of the requests have a JSON Schema (16 different ones), and every answer has the same number of tokens.
There is one server per pool, on which the shares take turns. Reported are requests/s, time to first token (TTFT), time
per output token after it (TPOT) and the time between two chunks of a stream (ITL). Writes
benchmarks/out/serving.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import canvas, fail, machine, percentiles, print_table, write_json
from benchmarks.serving_startup import PROMPT, started

NAMES = ("name", "city", "title", "street", "note", "code", "phone", "email")
SCHEMAS = 16


@dataclass
class Timings:
    """Times of the requests of one share, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0


def schema(index: int) -> dict[str, Any]:
    """Return the schema of an array that is longer than any answer."""
    first, second = NAMES[index % len(NAMES)], NAMES[(index // len(NAMES) + 1 + index) % len(NAMES)]
    text = {"type": "string", "maxLength": 8 + index % 9}
    fields = {first: text, f"{second}_of": text, "count": {"type": "integer", "minimum": 0, "maximum": 99 + index}}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "minItems": 400, "items": item}


async def ask(http: httpx.AsyncClient, number: int, share: float, tokens: int, timings: Timings) -> None:
    """Send one streamed request."""
    body: dict[str, Any] = {**PROMPT, "temperature": 0, "max_tokens": tokens, "stream": True, "seed": number}
    body["stream_options"] = {"include_usage": True}
    guided = int((number + 1) * share) > int(number * share)
    body |= {"json_schema": schema(number % SCHEMAS)} if guided else {"ignore_eos": True}
    begun = time.perf_counter()
    arrivals: list[float] = []
    count = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in event["choices"]):
                arrivals.append(time.perf_counter())
    if count != tokens:
        raise RuntimeError(f"an answer of {count} tokens, not {tokens}")
    timings.ttft.append(arrivals[0] - begun)
    timings.tpot.append((arrivals[-1] - arrivals[0]) / (tokens - 1))
    timings.itl += [after - before for before, after in itertools.pairwise(arrivals)]
    timings.requests += 1


async def load(url: str, share: float, concurrency: int, requests: int, tokens: int, timings: Timings) -> None:
    """Send `requests` requests, `concurrency` at a time."""
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=concurrency)

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            await ask(http, number, share, tokens, timings)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        begun = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
        timings.seconds += time.perf_counter() - begun


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        for pool in options.pool:
            arguments = ["--port", "0", "--pool", pool, "--log-level", "warning"]
            arguments += ["--num-actors", str(options.actors)] if pool == "ray" else []
            arguments += ["--max-num-seqs", str(max(64, options.concurrency))]
            command = [sys.executable, "-c", "from engine.server.cli import main; main()", "serve", *arguments]
            server = stack.enter_context(started([*command, *([options.model] if options.model else [])], ROOT))
            urls[pool] = server.url
        runs = {(pool, share): Timings() for pool in urls for share in options.share}
        rounds = range(-1, options.rounds)
        with tqdm(total=len(runs) * len(rounds), unit=" runs", disable=None) as bar:
            for index in rounds:
                for (pool, share), timings in runs.items():
                    bar.set_description(f"{pool}, {share:.0%} guided")
                    mine = timings if index >= 0 else Timings()  # the first round compiles and warms up
                    count = options.requests if index >= 0 else max(SCHEMAS, options.concurrency)
                    asyncio.run(load(urls[pool], share, options.concurrency, count, options.tokens, mine))
                    bar.update()
    for (pool, share), timings in runs.items():
        row: dict[str, Any] = {"pool": pool, "guided_percent": round(100 * share), "requests": timings.requests}
        row["requests_per_second"] = timings.requests / timings.seconds
        row["tokens_per_second"] = row["requests_per_second"] * options.tokens
        for name, values in {"ttft": timings.ttft, "tpot": timings.tpot, "itl": timings.itl}.items():
            row |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
        base = runs[pool, options.share[0]]
        row["of_first"] = row["requests_per_second"] / (base.requests / base.seconds)
        rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    figure, axes = canvas(4, width=3.6, height=3.8)
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    panels = {"requests_per_second": "requests/s", "ttft_p50": "TTFT, ms", "tpot_p50": "TPOT, ms", "itl_p50": "ITL, ms"}
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for index, pool in enumerate(pools):
            mine = [row for row in rows if row["pool"] == pool]
            at = [place + (index - (len(pools) - 1) / 2) * 0.8 / len(pools) for place in range(len(mine))]
            bars = axis.bar(at, [row[key] for row in mine], 0.74 / len(pools), label=f"{pool} pool")
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
            if key.endswith("p50"):
                color = bars[0].get_facecolor()
                axis.scatter(at, [row[key.replace("p50", "p99")] for row in mine], marker="_", color=color)
        axis.set_xticks(range(len(mine)), [f"{row['guided_percent']} %" for row in mine])
        axis.set_xlabel("guided")
        axis.set_title(label if key == "requests_per_second" else f"{label} (bar p50, dash p99)", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a local directory or hub name; default: the embedded model")
    parser.add_argument("--share", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="share of guided requests")
    parser.add_argument("--pool", nargs="+", choices=["ray", "inline"], default=["ray", "inline"])
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64, help="requests per share and round")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns per share")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="run a minute: 8 at a time, one round, the Ray pool")
    options = parser.parse_args()
    if options.quick:
        options.concurrency, options.requests, options.rounds, options.tokens = 8, 16, 1, 32
        options.pool = ["ray"]
    if options.model and ("/" in options.model or options.model.startswith(".")) and not Path(options.model).is_dir():
        fail(f"there is no directory {options.model}")
    if any(not 0 <= share <= 1 for share in options.share):
        fail("--share must be between 0 and 1")
    return options


def main() -> None:
    options = parsed()
    started_on = machine()
    rows = measure(options)
    columns = {"pool": "pool", "guided_percent": "% guided", "requests_per_second": "requests/s", "of_first": "ratio"}
    spread = {f"{name}_{at}": f"{name.upper()} {at}" for name in ("ttft", "tpot", "itl") for at in ("p50", "p99")}
    print_table(rows, {**columns, "tokens_per_second": "tokens/s", **spread})
    setting = vars(options) | {"model": Path(options.model).name if options.model else "embedded"}
    write_json(options.out / "serving.json", setting, rows, started_on)
    title = f"{setting['model']} model, {options.concurrency} at a time, {options.tokens} tokens per answer"
    plot(rows, options.out / "serving.png", f"{title}, {started_on['cpus']} CPUs")
    print(f"wrote {options.out / 'serving.json'} and .png")


if __name__ == "__main__":
    main()
