"""Send the requests of existing client code to vLLM with `GUIDED_VLLM=1`: `python -m benchmarks.vllm_clients
--vllm-python PATH`.

OpenAI's client library asks vLLM's server with the embedded model, `--at-once` requests at a time, all kinds in turn:
`parse` (whole, streamed, and of `/v1/responses`), `response_format`, every field of `structured_outputs` on both
routes, and tools (required and named, whole and streamed). Nothing in the requests is particular to this project. Each
answer is checked: the text or the arguments satisfy the constraint, and the output ended by itself. Unguided requests
run beside them. At last each misspelt key in `vllm_xargs` must be a 400. Functions without `strict` are counted apart:
vLLM asks no backend to constrain their arguments. Writes benchmarks/out/vllm_clients.json, and ends with status 1 if
another answer is not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from pydantic import BaseModel, Field, TypeAdapter

from benchmarks.child_process import SINGLE_THREADED, VLLM_ON_CPU, log_tail
from benchmarks.comparison import vllm_candidate
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import exit_with, machine, print_table, write_json

MODEL = ROOT / "engine" / "default_model" / "checkpoint"
TEXT = "Text: Maria Keller is {age} years old and lives in Lisbon."
MISSPELT = ("json", "regex", "structural_tag", "guided_json", "backend")
_START_SECONDS = 300.0
COLUMNS = {
    "kind": "kind",
    "constrained": "constrained",
    "requests": "requests",
    "valid": "valid",
    "problems": "problems",
}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class Order(BaseModel):
    """A nested type."""

    kind: Literal["order"]
    person: Person
    items: list[Literal["pen", "ink", "paper"]] = Field(min_length=1, max_length=4)


TYPES: tuple[type[BaseModel], ...] = (Person, Order)
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CITIES = ["Lisbon", "Oslo", "Quito"]
LARK = 'start: "<" NUMBER ("," NUMBER)? ">"\nNUMBER: /[0-9]{1,4}/'
NUMBERS = r"<[0-9]{1,4}(,[0-9]{1,4})?>"
CONTENT = {"type": "json_schema", "json_schema": Person.model_json_schema()}
TAG = {"type": "tag", "begin": "<person>", "content": CONTENT, "end": "</person>"}
FIELDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json": ({"json": Person.model_json_schema()}, Person.model_validate_json),
    "json, without whitespace": (
        {"json": json.dumps(Order.model_json_schema()), "disable_any_whitespace": True},
        Order.model_validate_json,
    ),
    "regex": ({"regex": DATE}, lambda text: _match(DATE, text)),
    "choice": ({"choice": CITIES}, CITIES.index),
    "grammar": ({"grammar": LARK}, lambda text: _match(NUMBERS, text)),
    "structural_tag": (
        {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})},
        lambda text: Person.model_validate_json(_match("<person>(.*)</person>", text)),
    ),
}
FUNCTIONS = {of.__name__.lower(): of for of in TYPES}
STRICT = [pydantic_function_tool(of, name=name) for name, of in FUNCTIONS.items()]
NOT_STRICT = [
    {"type": "function", "function": {"name": name, "parameters": of.model_json_schema()}}
    for name, of in FUNCTIONS.items()
]
Ask = Callable[[AsyncOpenAI, dict[str, Any], int], Awaitable[None]]


def _match(pattern: str, text: str) -> str:
    found = re.fullmatch(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(f"{text!r} does not match {pattern}")
    return found[found.re.groups]


def _complete(reason: str | None, *allowed: str) -> None:
    if reason not in allowed:
        raise ValueError(f"finish_reason {reason}")


async def parse(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
    answer = await client.chat.completions.parse(**chat, response_format=TYPES[index % 2])
    _complete(answer.choices[0].finish_reason, "stop")
    assert isinstance(answer.choices[0].message.parsed, TYPES[index % 2])


async def parse_streamed(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
    async with client.chat.completions.stream(**chat, response_format=TYPES[index % 2]) as stream:
        answer = await stream.get_final_completion()
    _complete(answer.choices[0].finish_reason, "stop")
    assert isinstance(answer.choices[0].message.parsed, TYPES[index % 2])


async def parse_response(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
    answer = await client.responses.parse(
        model=chat["model"], input=chat["messages"][0]["content"], temperature=chat["temperature"],
        max_output_tokens=chat["max_tokens"], text_format=TYPES[index % 2],
    )  # fmt: skip
    assert isinstance(answer.output_parsed, TYPES[index % 2]), answer.output_text


async def json_object(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
    answer = await client.chat.completions.create(**chat | {"temperature": 0}, response_format={"type": "json_object"})
    _complete(answer.choices[0].finish_reason, "stop")
    TypeAdapter(dict[str, Any]).validate_json(answer.choices[0].message.content or "")


def structured(name: str, route: str) -> Ask:
    outputs, check = FIELDS[name]

    async def ask(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
        extra = {"structured_outputs": outputs}
        if route == "chat":
            answer = await client.chat.completions.create(**chat, extra_body=extra)
            text = answer.choices[0].message.content or ""
        else:
            prompt = {
                "prompt": chat["messages"][0]["content"],
                **{name: chat[name] for name in chat if name != "messages"},
            }
            answer = await client.completions.create(**prompt, extra_body=extra)
            text = answer.choices[0].text
        _complete(answer.choices[0].finish_reason, "stop")
        check(text)

    return ask


def tools(choice: Any, streamed: bool, offered: list[Any] = STRICT) -> Ask:
    async def ask(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
        asked = {**chat, "tools": offered, "tool_choice": choice}
        if streamed:
            async with client.chat.completions.stream(**asked) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        _complete(answer.choices[0].finish_reason, "stop", "tool_calls")
        calls = answer.choices[0].message.tool_calls
        assert calls, "there is no tool call"
        for call in calls:
            FUNCTIONS[call.function.name].model_validate_json(call.function.arguments)

    return ask


async def unguided(client: AsyncOpenAI, chat: dict[str, Any], index: int) -> None:
    answer = await client.chat.completions.create(**chat | {"max_tokens": 60}, extra_body={"ignore_eos": True})
    _complete(answer.choices[0].finish_reason, "length")


NAMED = {"type": "function", "function": {"name": "person"}}
KINDS: dict[str, Ask] = {
    "parse": parse,
    "parse, streamed": parse_streamed,
    "responses.parse": parse_response,
    "response_format json_object": json_object,
    **{
        f"structured_outputs {name}, {route}": structured(name, route)
        for name in FIELDS
        for route in ("chat", "completions")
    },
    "tools, required": tools("required", False),
    "tools, required, streamed": tools("required", True),
    "tools, named": tools(NAMED, False),
    "tools, named, streamed": tools(NAMED, True),
    "unguided": unguided,
}
NOT_CONSTRAINED: dict[str, Ask] = {
    "tools without strict, required": tools("required", False, NOT_STRICT),
    "tools without strict, named": tools(NAMED, False, NOT_STRICT),
}
"""By vLLM."""


@contextlib.asynccontextmanager
async def serving(python: str, arguments: list[str]) -> AsyncIterator[str]:
    """Run vLLM's server with the switch. Yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024", *arguments]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {**SINGLE_THREADED, **VLLM_ON_CPU, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GUIDED_VLLM": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(log_tail(log))
                await asyncio.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait(60)
            for one in psutil.wait_procs(family, timeout=30)[1]:
                one.kill()


async def run(url: str, count: int, at_once: int) -> list[dict[str, Any]]:
    """Send `count` requests of every kind in turn, and as many of each kind that vLLM does not constrain.

    Returns:
        One row per kind.
    """
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=300, max_retries=0)
    turn, sent, problems = asyncio.Semaphore(at_once), Counter[str](), dict[str, list[str]]()

    async def one(kind: str, ask: Ask, index: int) -> None:
        message = {"role": "user", "content": TEXT.format(age=18 + index % 80)}
        chat = {"model": "m", "messages": [message], "max_tokens": 600, "temperature": 0.7, "seed": index}
        async with turn:
            sent[kind] += 1
            try:
                await ask(client, chat, index // len(KINDS))
            except Exception as error:  # every failure is a part of the result
                problems.setdefault(kind, []).append(f"{type(error).__name__}: {error}"[:300])

    kinds = list(KINDS.items())
    await asyncio.gather(*(one(*kinds[index % len(kinds)], index) for index in range(count)))
    each = range(0, count, len(kinds))
    await asyncio.gather(*(one(kind, ask, index) for kind, ask in NOT_CONSTRAINED.items() for index in each))
    rows = []
    for kind in [*KINDS, *NOT_CONSTRAINED]:
        wrong = problems.get(kind, [])
        rows.append(
            {"kind": kind, "constrained": kind in KINDS, "requests": sent[kind], "valid": sent[kind] - len(wrong),
             "problems": "; ".join(dict.fromkeys(wrong))}
        )  # fmt: skip
    for name in MISSPELT:
        try:
            await client.completions.create(
                model="m", prompt="a", max_tokens=5, extra_body={"vllm_xargs": {name: "[a]"}}
            )
            refused = 0
        except BadRequestError:
            refused = 1
        rows.append({"kind": f"misspelt: {name}", "constrained": True, "requests": 1, "valid": refused, "problems": ""})
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--vllm-python", required=True, help="a Python interpreter with vLLM and this package")
    parser.add_argument("--vllm-arguments", nargs="*", default=[], help="more arguments of vLLM's server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


async def main() -> None:
    options = parsed()
    vllm = vllm_candidate(options.vllm_python)
    assert vllm is not None
    started_on = machine()
    async with serving(vllm.python, options.vllm_arguments) as url:
        begun = time.perf_counter()
        rows = await run(url, options.requests, options.at_once)
        seconds = time.perf_counter() - begun
    print_table(rows, COLUMNS)
    constrained = [row for row in rows if row["constrained"]]
    apart = [row for row in rows if not row["constrained"]]
    print(f"{_total(constrained)} as expected, {_total(apart)} that vLLM does not constrain are valid, {seconds:.0f} s")
    write_json(options.out / "vllm_clients.json", vars(options) | {"seconds": seconds}, rows, started_on)
    exit_with([f"{row['kind']}: {row['problems']}" for row in constrained if row["valid"] < row["requests"]])


def _total(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['valid'] for row in rows)} of {sum(row['requests'] for row in rows)}"


if __name__ == "__main__":
    asyncio.run(main())
