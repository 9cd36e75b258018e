"""The output is the same wherever the masks are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors import CompileLimits, RayPool
from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.backends import candidates
from guided.errors import UnsupportedConstraint

MakeEngine = Callable[..., LLMEngine]
Run = Callable[..., dict[str, RequestOutput]]
BACKENDS = ["llguidance", "xgrammar", "outlines", "lm-format-enforcer"]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "[0-9]{3}-[a-f]{4,9}"},
    "choice": {"choice": ["yes", "no", "naïve"]},
    "grammar": {"grammar": 'start: "(" start ")" | "x"'},
}


def requests() -> dict[str, tuple[str, SamplingParams]]:
    """Every cell of the matrix, greedy and random, with free requests between them."""
    found: dict[str, tuple[str, SamplingParams]] = {"free": ("Quick", SamplingParams(temperature=0.0, max_tokens=24))}
    for backend in BACKENDS:
        for kind, fields in KINDS.items():
            try:
                candidates(kind, backend)  # type: ignore[arg-type]
            except UnsupportedConstraint:
                continue
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    **fields,
                    backend=backend,
                    temperature=temperature,
                    seed=5,
                    max_tokens=24,
                    n=1 if not temperature else 2,
                )
                found[f"{backend} {kind} {temperature}"] = ("Quick", params)
    return found


@pytest.fixture(scope="module")
def ray_pool(tiny_model: LoadedModel, local_ray: None) -> Iterator[RayPool]:
    pool = RayPool(tiny_model.vocabulary, num_actors=2, compile_limits=CompileLimits(seconds=60.0))
    yield pool
    pool.shutdown()


def tokens(found: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [one.token_ids for one in output.outputs] for name, output in found.items()}


@pytest.mark.timeout(600)
def test_the_inline_pool_and_the_ray_pool_give_the_same_tokens(
    make_engine: MakeEngine, run: Run, ray_pool: RayPool
) -> None:
    inline = run(make_engine(), requests())
    assert {output.error for output in inline.values()} == {None}
    assert tokens(run(make_engine(ray_pool), requests())) == tokens(inline)
    assert {output.backend for output in inline.values()} == {None, *BACKENDS}
    for name, output in inline.items():
        for one in output.outputs:
            if one.finish_reason == "stop":
                _check(name, one.text)


def _check(name: str, text: str) -> None:
    if "json_schema" in name:
        assert set(json.loads(text)) == {"ok", "kind"}
    elif "regex" in name:
        assert re.fullmatch(KINDS["regex"]["regex"], text)
    elif "choice" in name:
        assert text in KINDS["choice"]["choice"]
    elif "grammar" in name:
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")
