"""Runs of an engine, for tests that compare outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faulty_backend import NAME

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.pools.protocol import MaskPool

PROMPT = "Quick"
Requests = dict[str, SamplingParams]


def bystanders() -> Requests:
    """Random and greedy, unconstrained and constrained, one and several sequences. Some
    masks are late."""
    return {
        "free": SamplingParams(temperature=1.0, seed=1, max_tokens=30),
        "pair": SamplingParams(
            regex="[a-f0-9]{24}", temperature=1.0, seed=2, n=2, max_tokens=40
        ),
        "greedy": SamplingParams(
            regex="[0-9]{9}-[a-f]{9}", temperature=0.0, max_tokens=40
        ),
        "late": SamplingParams(
            regex="sleep@fill=0.02 length=20", backend=NAME, seed=3, n=2, max_tokens=40
        ),
        **{
            f"sound {seed}": SamplingParams(
                regex="length=24", backend=NAME, seed=seed, max_tokens=40
            )
            for seed in range(4)
        },
    }


def generate(
    model: LoadedModel,
    pool: MaskPool,
    requests: Requests,
    between: Callable[[LLMEngine], None] = lambda engine: None,
    **config: Any,
) -> dict[str, RequestOutput]:
    """Run all requests to their ends in one engine. Calls `between` between the
    steps."""
    engine = LLMEngine(model, EngineConfig(max_model_len=128, **config), pool)
    for name, params in requests.items():
        engine.add_request(name, PROMPT, params)
    last = finish(engine, between)
    assert not engine.stats.late
    return last


def finish(
    engine: LLMEngine, between: Callable[[LLMEngine], None] = lambda engine: None
) -> dict[str, RequestOutput]:
    """Step until no request is left. Calls `between` between the steps. Returns the
    last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        engine.awake.clear()
        if not engine.has_work:
            assert engine.awake.wait(120), (
                "no request can run, and no event wakes the engine"
            )
        between(engine)
        for output in engine.step():
            last[output.request_id] = output
    assert engine.blocks.num_free == engine.blocks.num_blocks, "all blocks are back"
    return last


def said(
    outputs: dict[str, RequestOutput], *but: str
) -> dict[str, list[tuple[list[int], str | None]]]:
    """Return tokens and finish reason of every sequence, by request."""
    return {
        name: [(one.token_ids, one.finish_reason) for one in output.outputs]
        for name, output in outputs.items()
        if name not in but
    }


def errors(outputs: dict[str, RequestOutput]) -> dict[str, str]:
    """Return the error codes of failed requests."""
    return {
        name: output.error.code
        for name, output in outputs.items()
        if output.error is not None
    }
