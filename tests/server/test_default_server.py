"""The default server under a mixed load: embedded model, local Ray, mask actors, all
kinds and backends."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
DATE = "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
COLORS = ["red", "green", "blue"]
TAG = {
    "type": "tag",
    "begin": "<color>",
    "content": {"type": "choice", "choice": COLORS},
    "end": "</color>",
}
CONSTRAINTS: dict[str, tuple[Any, Callable[[str], bool]]] = {
    "json_schema": (
        SCHEMA,
        lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
    ),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
    "regex": (DATE, lambda text: re.fullmatch(DATE, text) is not None),
    "choice": (COLORS, lambda text: text in COLORS),
    "grammar": (
        'root ::= "it is " ("yes" | "no") "."',
        lambda text: text in ("it is yes.", "it is no."),
    ),
    "structural_tag": (
        {"type": "structural_tag", "format": TAG},
        lambda text: text in [f"<color>{color}</color>" for color in COLORS],
    ),
}
"""By kind: a constraint, and whether a text satisfies it."""
TASKS = {
    "json_schema": "Extract name, age and city as JSON. ",
    "json_object": "Describe as JSON: ",
}
KEY = {"authorization": "Bearer two"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(
        "--num-actors", "2", "--grace-seconds", "2", GUIDED_API_KEY="one,two"
    ) as running:
        yield running


def ask(
    server: ServerProcess, kind: str | None, backend: str | None, number: int
) -> tuple[str, str, str | None]:
    """Return the text, the reason of its end, and the backend that was used."""
    text = f"{TASKS.get(kind or '', '')}Maria Keller is {30 + number} years old and lives in Lisbon."
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 48,
    }
    if kind is not None:
        body |= {kind: CONSTRAINTS[kind][0], "backend": backend, "max_tokens": 400}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=KEY, timeout=240
    )
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return (
        choice["message"]["content"],
        choice["finish_reason"],
        (answer.json()["guided"] or {}).get("backend"),
    )


def test_64_mixed_requests_32_at_a_time(server: ServerProcess) -> None:
    able = [
        (kind, backend)
        for kind in KINDS
        for backend, adapter in BACKENDS.items()
        if kind in adapter.kinds
    ]
    assert {kind for kind, _ in able} == set(KINDS)
    # compiles for 2 s on a quiet machine: over its limit beside all others
    able.remove(("json_object", "outlines"))
    able.remove(("grammar", "llguidance"))  # it reads Lark only, and this is GBNF
    guided = [(*able[number % len(able)], number) for number in range(48)]
    plain = [(None, None, number) for number in range(16)]
    with ThreadPoolExecutor(32) as threads:

        def all_answered(asked: list[Any]) -> list[tuple[str, str, str | None]]:
            return list(threads.map(lambda each: ask(server, *each), asked))

        mixed = all_answered([*guided, *plain])
        assert mixed[48:] == all_answered(plain), "constrained requests change no other"
    assert [backend for _, _, backend in mixed[:48]] == [
        backend for _, backend, _ in guided
    ]
    assert {reason for _, reason, _ in mixed[:48]} <= {"stop", "length"}
    stopped = [
        (kind, text)
        for (kind, _, _), (text, reason, _) in zip(guided, mixed, strict=False)
        if reason == "stop"
    ]
    assert len(stopped) >= 0.9 * len(guided), mixed
    for kind, text in stopped:
        assert CONSTRAINTS[kind][1](text), (kind, text)


def test_the_api_key_is_in_no_child_and_hosts_are_checked(
    server: ServerProcess,
) -> None:
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code
        == 401
    )
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) > 3
    for child in children:
        with suppress(psutil.NoSuchProcess):
            assert "GUIDED_API_KEY" not in child.environ(), child.cmdline()
    port = server.url.rpartition(":")[2]
    assert httpx.get(f"http://localhost:{port}/version").status_code == 200
    assert (
        httpx.get(
            f"{server.url}/version", headers={"host": f"evil.example:{port}"}
        ).status_code
        == 400
    )


def test_sigterm_lets_answers_end_and_leaves_no_process(server: ServerProcess) -> None:
    """The last one of this module: the server is gone after it."""
    family = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    assert len(family) > 4, "Ray's processes and the actors"

    def stream(tokens: int) -> Iterator[str]:
        body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        answer = httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=KEY, timeout=60
        )
        lines = stack.enter_context(answer).iter_lines()
        next(lines)
        return lines

    with ExitStack() as stack:
        short, long = stream(10), stream(1900)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in short if line][-1] == "data: [DONE]"
        assert '"code":"shutting_down"' in [line for line in long if line][-1]
    assert server.stop() == 0
    assert "Finished server process" in server.log[-1], (
        "nothing follows, such as reports of leaks"
    )
    wait_until(lambda: not any(process.is_running() for process in family), 30)
