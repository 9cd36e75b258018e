"""Measure the cost of guided requests at the HTTP server, beside vLLM's: `python -m
benchmarks.serving`.

Clients keep `--concurrency` streamed chat requests in flight, on the machine and the
cores of the server. None or all of the requests have a JSON Schema (16 different ones),
and every answer has the same number of tokens. The servers are `guided serve` with each
pool and, with `--vllm-python`, vLLM's CPU build with its guidance backend. They take
turns, and serve the embedded model, or the checkpoint of `--model`, with the same
number of threads. Reported are requests/s, tokens/s, time to first token (TTFT), time
per output token after it (TPOT), and the time between two chunks of a stream (ITL).
Writes serving.{json,png}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks import report
from benchmarks.client import Answer, ask
from benchmarks.comparison import vllm_candidate
from benchmarks.servers import Server, guided_server, vllm_server

MESSAGES = [
    {"role": "user", "content": "Maria Keller is 34 years old and lives in Lisbon."}
]
NAMES = ("name", "city", "title", "street", "note", "code", "phone", "email")
SCHEMAS = 16
LIMIT_SECONDS = 300.0
COLUMNS = {
    "way": "way",
    "concurrency": "at once",
    "guided_percent": "% guided",
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "of_unguided": "to unguided",
    **{
        f"{name}_{at}": f"{name.upper()} {at}"
        for name in ("ttft", "tpot", "itl")
        for at in ("p50", "p99")
    },
}


@dataclass
class Load:
    """The answers of one server to one kind of requests, and the seconds that they
    took."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the request field for a JSON Schema of both servers."""
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }
    }


def endless_schema(index: int) -> dict[str, Any]:
    """Return the schema of an array that is longer than any answer."""
    first, second = (
        NAMES[index % len(NAMES)],
        NAMES[(index // len(NAMES) + 1 + index) % len(NAMES)],
    )
    text = {"type": "string", "maxLength": 8 + index % 9}
    fields = {
        first: text,
        f"{second}_of": text,
        "count": {"type": "integer", "minimum": 0, "maximum": 99 + index},
    }
    item = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 400, "items": item}


async def send(
    http: httpx.AsyncClient, number: int, guided: bool, tokens: int
) -> Answer:
    """Send one streamed request."""
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }
    body |= {"seed": number, "stream_options": {"include_usage": True}}
    body |= (
        response_format(endless_schema(number % SCHEMAS))
        if guided
        else {"ignore_eos": True}
    )
    answer = await ask(http, body, LIMIT_SECONDS)
    if answer.failure or answer.tokens != tokens:
        raise RuntimeError(
            f"{answer.failure or 'an answer'} of {answer.tokens} tokens, not {tokens}: {answer.error}"
        )
    return answer


async def load(
    url: str, guided: bool, concurrency: int, requests: int, tokens: int, found: Load
) -> None:
    """Send `requests` requests, `concurrency` at a time."""
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=concurrency)

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            found.answers.append(await send(http, number, guided, tokens))

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        begun = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
        found.seconds += time.perf_counter() - begun


def measure(
    servers: Mapping[str, Server], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row per server, number of requests at once and share of guided
    requests."""
    runs = {
        run: Load()
        for run in itertools.product(servers, options.concurrency, (False, True))
    }
    rounds = range(-1, options.rounds)
    with tqdm(total=len(runs) * len(rounds), unit=" runs", disable=None) as bar:
        for index in rounds:
            for (way, concurrency, guided), found in runs.items():
                bar.set_description(
                    f"{way}, {concurrency} at once, {'guided' if guided else 'unguided'}"
                )
                # the first round compiles and warms up
                mine = found if index >= 0 else Load()
                count = 2 * concurrency if index >= 0 else max(SCHEMAS, concurrency)
                asyncio.run(
                    load(
                        servers[way].url,
                        guided,
                        concurrency,
                        count,
                        options.tokens,
                        mine,
                    )
                )
                bar.update()
    return [figures(runs, *run, options.tokens) for run in runs]


def figures(
    runs: Mapping[tuple[str, int, bool], Load],
    way: str,
    concurrency: int,
    guided: bool,
    tokens: int,
) -> dict[str, Any]:
    found, base = runs[way, concurrency, guided], runs[way, concurrency, False]
    row: dict[str, Any] = {
        "way": way,
        "concurrency": concurrency,
        "guided_percent": 100 * guided,
    }
    row |= {
        "requests": len(found.answers),
        "requests_per_second": len(found.answers) / found.seconds,
    }
    row["tokens_per_second"] = row["requests_per_second"] * tokens
    times = {
        "ttft": [answer.arrivals[0] - answer.began for answer in found.answers],
        "tpot": [
            (answer.arrivals[-1] - answer.arrivals[0]) / (tokens - 1)
            for answer in found.answers
        ],
        "itl": [gap for answer in found.answers for gap in answer.gaps],
    }
    for name, values in times.items():
        row |= {
            f"{name}_{key}": value for key, value in report.percentiles(values).items()
        }
    row["of_unguided"] = round(
        row["requests_per_second"] * base.seconds / len(base.answers), 3
    )
    return row


def start(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of `measure`."""
    parser = report.start(description)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 32], help="requests at once"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="turns per server, of two requests per client",
    )
    parser.add_argument(
        "--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)"
    )
    return parser


def shorten(options: argparse.Namespace) -> argparse.Namespace:
    """Apply `--quick`."""
    if options.quick:
        options.concurrency, options.rounds, options.tokens = [8], 1, 32
    return options


def show(
    rows: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    name: str,
    title: str,
) -> None:
    """Print the table, and draw the picture of this name."""
    report.print_table(rows, COLUMNS)
    panels = {
        "tokens_per_second": "tokens/s",
        "ttft_p50": "TTFT, ms",
        "itl_p50": "ITL, ms",
    }
    named = [
        {**row, "share": "guided" if row["guided_percent"] else "unguided"}
        for row in rows
    ]
    named = [{**row, "at once": f"{row['concurrency']} at once"} for row in named]
    report.plot(options.out / f"{name}.png", title, named, ("share", "at once"), panels)


def main() -> None:
    parser = start(__doc__)
    parser.add_argument(
        "--pool", choices=["ray", "inline"], nargs="+", default=["ray", "inline"]
    )
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a checkpoint (default: the embedded model)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="data type of the weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of each forward pass (default: 1)",
    )
    options = shorten(parser.parse_args())
    started_on = report.machine()
    most = max(64, *options.concurrency)
    vllm = vllm_candidate(options.vllm_python)
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    shared = ["--dtype", options.dtype, "--max-num-seqs", str(most)]
    model = [str(options.model)] if options.model else []
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for pool in options.pool:
            arguments = [*model, "--pool", pool, *shared]
            arguments += ["--num-actors", str(options.actors)] if pool == "ray" else []
            servers[f"guided serve, {pool}"] = stack.enter_context(
                guided_server(*arguments, environment=environment)
            )
        if vllm is not None:
            arguments = ["--dtype", options.dtype]
            run = vllm_server(
                vllm.python,
                "guidance",
                *arguments,
                switch=False,
                max_num_seqs=most,
                model=options.model,
                environment=environment,
            )
            servers["vLLM, guidance"] = stack.enter_context(run)
        rows = measure(servers, options)
    name = options.model.name if options.model else "embedded model"
    report.write_json(options.out / "serving.json", vars(options), rows, started_on)
    show(
        rows,
        options,
        "serving",
        f"{name}, {options.tokens} tokens per answer, {started_on['cpus']} CPUs",
    )


if __name__ == "__main__":
    main()
