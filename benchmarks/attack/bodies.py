"""Attacks by what a request's body says: its size, counts, numbers and constraints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from benchmarks.attack.case import Setup, Target, case
from benchmarks.chaos.traffic import CHAT, COMPLETIONS

GRACE_SECONDS = 10.0
"""Default of `--grace-seconds`."""
STOP_SECONDS = 8.0
"""What the server may need to end in addition."""
DRAFT_4 = "http://json-schema.org/draft-04/schema#"


def _constrained(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 16, "json_schema": schema, **fields}


def _quadratic() -> list[dict[str, Any]]:
    """Return schemas of up to 500 KB that take quadratic time to check item by item."""
    mixed = ["a", *range(60_000)]
    duplicate = "{" + ",".join(f'"k{number}":0' for number in range(40_000)) + ',"k0":0}'
    return [
        _constrained({"required": mixed}),
        _constrained({"$schema": DRAFT_4, "enum": [*mixed[:9_000], {}, []]}),
        _constrained(duplicate),
    ]


@case("1")
async def big_schema(target: Target) -> None:
    """A schema of 490 KB: a long key, and many elements below it."""
    await target.post(_constrained({"k" * 230_000: [0] * 130_000}))


@case("2", seconds=40)
async def quadratic_schemas(target: Target) -> None:
    """Six schemas at once whose checks compare all items with each other."""
    await target.posts(*2 * _quadratic())


@case("2", seconds=60, ends_server=True)
async def quadratic_schemas_then_sigterm(target: Target) -> None:
    """SIGTERM while six such schemas are checked."""
    posts = asyncio.create_task(target.posts(*2 * _quadratic()))
    await asyncio.sleep(2)
    began = time.monotonic()
    target.server.process.terminate()
    while target.server.alive and time.monotonic() - began < GRACE_SECONDS + STOP_SECONDS:
        await asyncio.sleep(0.1)
    state = "alive" if target.server.alive else "ended"
    target.notes.append(f"{state} {time.monotonic() - began:.1f} s after SIGTERM")
    target.expect(not target.server.alive, "SIGTERM does not end the server")
    posts.cancel()
    await asyncio.gather(posts, return_exceptions=True)


@case("3")
async def million_messages(target: Target) -> None:
    """A million messages that are no objects; half a million prompts that are null."""
    await target.post(b'{"messages": [' + b"0," * 1_000_000 + b"0]}", CHAT)
    await target.post(b'{"prompt": [' + b"null," * 500_000 + b"null]}")


@case("4", seconds=60)
async def long_prompts(target: Target) -> None:
    """Two prompts of 4 MB, and 800,000 prompts."""
    await target.posts(*[{"prompt": "lorem ipsum " * 340_000}] * 2)
    await target.post(b'{"prompt": [' + b'"a",' * 800_000 + b'"a"]}', limit=40)


@case("8", seconds=40)
async def stop_strings(target: Target) -> None:
    """480,000 stop strings with n = 64; 64 that nearly end in each of eight outputs of one letter."""
    stops = b",".join(b'"%05x"' % number for number in range(480_000))
    await target.post(b'{"prompt": "a", "n": 64, "max_tokens": 100, "stop": [' + stops + b"]}", limit=30)
    tokens = (await target.http.post("/tokenize", json={"prompt": "a"}, timeout=10)).json()["tokens"]
    nearly = ["z" * 1_000, *("a" * (230 + number) + "b" + "a" * (260 - number) for number in range(63))]
    body = {"prompt": "a", "n": 8, "max_tokens": 1_200, "temperature": 0, "ignore_eos": True, "stop": nearly}
    await target.post({**body, "logit_bias": {str(tokens[-1]): 100}}, limit=120)


@case("9", seconds=70)
async def many_prompts_times_n(target: Target) -> None:
    """1,000 prompts with n = 64."""
    await target.post({"prompt": ["a"] * 1000, "n": 64, "max_tokens": 16, "ignore_eos": True}, limit=60)


@case("9", seconds=70)
async def many_logprobs(target: Target) -> None:
    """64 outputs of 700 tokens with 20 logprobs each, in one answer."""
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    await target.post({**chat, "n": 64, "max_tokens": 700, "ignore_eos": True}, CHAT, limit=60)


@case("10", seconds=60)
async def crashing_constraints(target: Target) -> None:
    """Five constraints that crash llguidance, and then a good one with auto."""
    low = -(2**70)
    crashing = [
        _constrained({"type": "integer", "minimum": low - each, "maximum": low + 1}, backend="llguidance")
        for each in range(5)
    ]
    await target.posts(*crashing, limit=25, allowed=("backend_error",))
    status = await target.post({"prompt": "a", "regex": "[0-9]{4}", "max_tokens": 16})
    target.expect(status in (200, 503), f"a good constraint with auto: {status}")


@case("11", setup=Setup(arguments=("--max-enum", "9000")))
async def limit_not_at_default(target: Target) -> None:
    """Three large legal schemas with a limit that is not at its default."""
    properties = [{f"{name}{each}": {"type": "string"} for each in range(14_000)} for name in "abc"]
    await target.posts(*(_constrained({"type": "object", "properties": each}) for each in properties), limit=25)


@case("17", seconds=40)
async def odd_schemas(target: Target) -> None:
    """draft-03 extends as an object, a minimum of 4,000 digits, a reference below prefixItems with maxItems 0."""
    number = b'{"prompt": "a", "max_tokens": 16, "json_schema": {"type": "integer", "minimum": ' + b"9" * 4000 + b"}}"
    draft_3 = {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"type": "object"}}
    empty = {"$defs": {"a": {"type": "string"}}, "prefixItems": [{"$ref": "#/$defs/a"}], "maxItems": 0}
    for backend in ("auto", "llguidance", "xgrammar", "outlines", "lm-format-enforcer"):
        bodies = [_constrained(schema, backend=backend) for schema in (draft_3, empty, {"type": "array", **empty})]
        await target.posts(
            *bodies, limit=25
        )  # outlines may need all of the compile time, and the last one waits for it
    await target.post(number)


@case("held", seconds=70)
async def five_hundred_schemas(target: Target) -> None:
    """500 different schemas at once."""
    properties = ({f"p{number}": {"type": "integer"}, "name": {"enum": ["a", number]}} for number in range(500))
    await target.posts(*(_constrained({"type": "object", "properties": each}) for each in properties), limit=60)


@case("held")
async def chunked_bodies(target: Target) -> None:
    """Four chunked bodies of 100 MB."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(1_000):
            yield b"a" * 100_000

    async def send() -> None:
        try:
            async with asyncio.timeout(20):
                response = await target.http.post(COMPLETIONS, content=chunks())
            target.answers[str(response.status_code)] += 1
        except TimeoutError:
            target.answers["hung"] += 1
        except httpx.HTTPError:  # the server closed the connection before the end of the body
            target.answers["cut"] += 1

    await asyncio.gather(*(send() for _ in range(4)))


@case("held")
async def invalid_text(target: Target) -> None:
    """Invalid UTF-8, lone surrogates, NUL characters, and JSON that nests a million levels."""
    bodies = [b'{"prompt": "\xff\xfe\x80"}', b'{"prompt": "\\ud800", "max_tokens": 4}']
    bodies += [b'{"prompt": "a", "max_tokens": 4, "regex": "\\u0000\\ud800"}', b"[" * 1_000_000, b'{"a":' * 500_000]
    for body in bodies:
        await target.post(body)


@case("held")
async def huge_integers(target: Target) -> None:
    """Integers of up to 4 million digits in every numeric place."""
    for digits in (400, 5_000, 4_000_000):
        for field in ("max_tokens", "seed", "n", "temperature", "top_k"):
            await target.post(b'{"prompt": "a", "%s": %s}' % (field.encode(), b"9" * digits))
    for number in ("1e999999", "-1e999999", "1e-999999", "NaN", "Infinity"):
        await target.post(json.dumps({"prompt": "a", "temperature": "?"}).replace('"?"', number).encode())
