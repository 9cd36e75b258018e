"""The default server under a mixed load: embedded model, local Ray, mask actors, all kinds and backends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
from serving import ServerProcess, serving, wait_until

from guided.backends import BACKENDS
from guided.constraint import KINDS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
KEY = {"authorization": "Bearer two"}
DATE = "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
COLORS = ["red", "green", "blue"]
GRAMMAR = 'root ::= "the answer is " ("yes" | "no") "."'
TAG = {"type": "tag", "begin": "<color>", "content": {"type": "choice", "choice": COLORS}, "end": "</color>"}
CONSTRAINTS: dict[str, Any] = {
    "json_schema": SCHEMA,
    "json_object": True,
    "regex": DATE,
    "choice": COLORS,
    "grammar": GRAMMAR,
    "structural_tag": {"type": "structural_tag", "format": TAG},
}
PROMPTS = {
    "json_schema": "Extract name, age and city as JSON. {who} is {age} years old and lives in {city}.",
    "json_object": "Describe as JSON: {who} is {age} years old and lives in {city}.",
}
OTHER_PROMPT = "{who} is {age} years old and lives in {city}. Who is it?"
PEOPLE = [("Maria Keller", 34, "Lisbon"), ("Jonas Berg", 51, "Oslo"), ("Ada Reed", 8, "York")]


@dataclass
class Asked:
    """One request of the mix, and what came back."""

    kind: str | None
    backend: str | None
    body: dict[str, Any]
    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    used: str | None = None


def ask_for(kind: str | None, backend: str | None, number: int, **fields: Any) -> Asked:
    who, age, city = PEOPLE[number % len(PEOPLE)]
    text = PROMPTS.get(kind or "", OTHER_PROMPT).format(who=who, age=age + number, city=city)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    if kind is not None:
        body |= {kind: CONSTRAINTS[kind], "backend": backend}
    return Asked(kind, backend, body)


def answered(server: ServerProcess, asked: Asked) -> Asked:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked.body, headers=KEY, timeout=240)
    asked.status = answer.status_code
    if answer.status_code == 200:
        [choice] = answer.json()["choices"]
        asked.text, asked.finish_reason = choice["message"]["content"], choice["finish_reason"]
        asked.used = (answer.json()["guided"] or {}).get("backend")
    else:
        asked.error = answer.json()["error"]
    return asked


def all_answered(server: ServerProcess, requests: list[Asked], at_a_time: int) -> list[Asked]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda asked: answered(server, asked), requests))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--num-actors", "2", GUIDED_API_KEY="one,two") as running:
        yield running


def satisfies(kind: str, text: str) -> bool:
    match kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(DATE, text) is not None
        case "choice":
            return text in COLORS
        case "structural_tag":
            return text in [f"<color>{color}</color>" for color in COLORS]
        case _:
            return text in ("the answer is yes.", "the answer is no.")


def test_64_mixed_requests_32_at_a_time(server: ServerProcess) -> None:
    able = [(kind, backend) for kind in KINDS for backend, adapter in BACKENDS.items() if kind in adapter.kinds]
    assert {kind for kind, _ in able} == set(KINDS)
    able.remove(("json_object", "outlines"))  # compiles for 2 s on a quiet machine: over its limit beside all others
    able.remove(("grammar", "llguidance"))  # it reads Lark only, and this is GBNF
    mix: list[Asked] = []
    for number in range(64):
        if number % 4 == 3:
            mix.append(ask_for(None, None, number, max_tokens=48))
        else:
            mix.append(ask_for(*able[(number - number // 4) % len(able)], number, max_tokens=400))
    mixed = all_answered(server, mix, 32)
    assert [asked.error for asked in mixed if asked.status != 200] == []

    guided = [asked for asked in mixed if asked.kind is not None]
    assert {asked.used for asked in guided} == set(BACKENDS)
    assert all(asked.used == asked.backend for asked in guided)
    stopped = [asked for asked in guided if asked.finish_reason == "stop"]
    assert len(stopped) >= 0.9 * len(guided), [(a.kind, a.backend, a.text) for a in guided if a not in stopped]
    for asked in stopped:
        assert asked.kind is not None
        assert satisfies(asked.kind, asked.text), asked
    for asked in guided:
        if asked.finish_reason != "stop":
            assert asked.finish_reason == "length"

    plain = [asked for asked in mixed if asked.kind is None]
    alone = all_answered(server, [Asked(None, None, asked.body) for asked in plain], 32)
    assert [asked.text for asked in alone] == [asked.text for asked in plain]


def test_the_api_key_is_in_no_child_and_hosts_are_checked(server: ServerProcess) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 401
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) > 3
    for child in children:
        with suppress(psutil.NoSuchProcess):
            assert "GUIDED_API_KEY" not in child.environ(), child.cmdline()
    port = server.url.rpartition(":")[2]
    assert httpx.get(f"http://localhost:{port}/version").status_code == 200
    rebound = httpx.get(f"{server.url}/version", headers={"host": f"evil.example:{port}"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (400, "host_not_allowed")


def test_sigterm_leaves_no_process(server: ServerProcess) -> None:
    """The last one of this module: the server is gone after it."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len(family) > 4, "Ray's processes and the actors"
    assert server.stop() == 0
    wait_until(lambda: not any(process.is_running() for process in family), 30)
