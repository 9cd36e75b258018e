"""Inputs that crashed, hung or misled servers. Every backend and `auto` make the
expected decision in time.

`shared/data/hostile-inputs.json` has the expected decisions. A backend may reject what
it can't enforce. Where both decisions are correct (`bounded`), there must be one within
the time budget. These inputs take minutes, so they are compiled only with
GUIDED_HOSTILE=all, with the time budget of a server.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_vocabulary import BYTES, tokens
from msgspec import msgpack

from actors.compiler import Compiler
from actors.packages import CompileResult, buffer
from engine.server.options import ServerSettings
from engine.server.request.bodies import ChatRequest
from engine.server.request.constraints import requested_constraint as asked
from guided.backends import AUTO, BACKENDS, Backends, candidates
from guided.constraint import Constraint
from guided.errors import (
    CompileTimeout,
    GuidedError,
    InvalidConstraint,
    InvalidRequest,
    UnsupportedConstraint,
)
from guided.limits import CompileLimits
from guided.pools.options import RayPoolOptions
from guided.pools.protocol import Grammar

HOSTILE = Path(__file__).parents[3] / "shared" / "data" / "hostile-inputs.json"
ALL = os.environ.get("GUIDED_HOSTILE") == "all"
SECONDS = 10.0 if ALL else 2.0
SLACK_SECONDS = 20.0
"""Extra time for a busy machine."""

pytestmark = pytest.mark.skipif(not HOSTILE.exists(), reason="shared/data is not here")

FOOLED = {
    "silent-ignore-2": ('{"code": "abc"}', ['{"code": "abcd"}', '{"code": "a1"}']),
    "silent-ignore-3": ('"abc"', ['"a"', '"abcde"', '"ab1"']),
    "silent-ignore-4": ("[1]", ["[2]", "[]"]),
    "silent-ignore-5": ('{"yes": "x"}', ['{"yes": 1}', '{"no": null}']),
    "silent-ignore-6": (
        '{"score": 10, "tags": ["abcdefghijkl"]}',
        ['{"score": 7, "tags": []}', '{"score": 10, "tags": ["abc"]}', '{"score": 5}'],
    ),
    "silent-ignore-7": ('{"fool": 1}', ['{"foo": 1.5}', '{"fo": "a"}']),
    "silent-ignore-8": ('"a/b"', ['"a b"', '"<a>"']),
    "silent-ignore-10": ("1", ['"a"']),
    "xgr-suite-schema-11": ("{}", ['{"a": 1}']),
    "xgr-suite-regex-6": ("", ["a", "abc"]),
}
"""Inputs that must be rejected unless the backend enforces them: (outputs that satisfy
them, outputs that don't)."""


def entries() -> list[dict[str, Any]]:
    return json.loads(HOSTILE.read_text())["entries"] if HOSTILE.exists() else []


def payload(entry: dict[str, Any]) -> Any:
    if "generator_py" not in entry:
        return entry["payload"]
    modules = {
        "functools": functools,
        "itertools": itertools,
        "json": json,
        "random": random,
    }
    return eval(entry["generator_py"], dict(modules))


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    limits = CompileLimits(processes=2, seconds=SECONDS)
    compiler = Compiler(BYTES, RayPoolOptions(compile_limits=limits))
    compiler.compile(Constraint.regex("a"), ["llguidance"]).result(120)
    yield compiler
    compiler.close()


def decided(
    compiler: Compiler, constraint: Constraint, backend: str
) -> Grammar | GuidedError:
    """The outcome. It is there in time, and no compile process crashed."""
    try:
        names = list(candidates(constraint.kind, backend))
    except UnsupportedConstraint as error:
        return error
    started = time.monotonic()
    compiled = compiler.compile(constraint, names)
    failure = compiled.exception(SECONDS + 120)
    assert time.monotonic() - started < SECONDS + SLACK_SECONDS
    assert not any(each.crashes for each in compiler.backends())
    if failure is None:
        return compiled.result()
    assert isinstance(failure, InvalidConstraint | CompileTimeout), failure
    assert len(str(failure)) < 2000
    return failure


def cant(backend: str, outcome: Grammar | GuidedError) -> bool:
    """Return whether the backend can't enforce it: it says so, or it is a slow backend
    and the time was not enough."""
    slow = backend in ("xgrammar", "outlines", "lm-format-enforcer")
    return isinstance(outcome, UnsupportedConstraint) or (
        slow and isinstance(outcome, CompileTimeout)
    )


def accepts(outcome: Grammar | GuidedError, constraint: Constraint, text: str) -> bool:
    """Whether the compiled grammar lets `text` be the whole output."""
    assert isinstance(outcome, Grammar)
    result = msgpack.decode(buffer(outcome.dumped), type=CompileResult)
    matcher = Backends(BYTES)[outcome.backend].load(constraint, result.dumped).matcher()
    try:
        matcher.accept_tokens(tokens(text))
    except GuidedError:
        return False
    return matcher.is_accepting()


@pytest.mark.parametrize(
    "entry",
    [each for each in entries() if each["scope"] in ("spec", "model-output")],
    ids=lambda each: str(each["id"]),
)
def test_it_is_decided_as_listed_by_every_backend(
    entry: dict[str, Any], compiler: Compiler
) -> None:
    try:
        constraint = getattr(Constraint, entry["kind"])(payload(entry))
    except InvalidConstraint as refusal:
        assert entry["expected"] == "reject" or entry["bounded"]
        assert len(str(refusal).encode()) < 1000  # noqa: PT017
        return
    if entry["bounded"] and entry["expected"] != "reject" and not ALL:
        return
    slow = entry["bounded"] and not ALL
    for backend in ("llguidance", "xgrammar", AUTO) if slow else (*BACKENDS, AUTO):
        outcome = decided(compiler, constraint, backend)
        if entry["bounded"] or cant(backend, outcome):
            continue
        if entry["id"] in FOOLED:
            good, bad = FOOLED[entry["id"]]
            assert accepts(outcome, constraint, good), (backend, good)
            for text in bad:
                assert not accepts(outcome, constraint, text), (backend, text)
        else:
            assert isinstance(outcome, Grammar) == (entry["expected"] == "accept"), (
                backend,
                outcome,
            )
    if entry["expected"] == "accept" and not entry["bounded"]:
        assert isinstance(decided(compiler, constraint, AUTO), Grammar), (
            "at least one backend enforces it"
        )


# a form that we take, as llama.cpp does: the schema beside the type
UNDERSTOOD = {"vllm-35438-missing-json_schema"}


@pytest.mark.parametrize(
    "entry",
    [
        each
        for each in entries()
        if each["scope"] == "request" and each["id"] not in UNDERSTOOD
    ],
    ids=lambda each: each["id"],
)
def test_a_request_is_decided_as_listed(entry: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], **payload(entry)}
    if entry["expected"] == "accept":
        assert (
            asked(ChatRequest.model_validate(body), ServerSettings()).constraint
            is not None
        )
    else:
        with pytest.raises((ValueError, InvalidRequest)):
            asked(ChatRequest.model_validate(body), ServerSettings())
