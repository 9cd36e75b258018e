"""Late masks, preemption, chunks, forced tokens and known prefixes change no output."""

from __future__ import annotations

import random
from typing import Any

import pytest
from faulty_pool import FaultyPool

from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine, run

PROMPT = "12 23 12 23 12"
REGEX = "[0-9]{30,60}[a-f]{4,9}"
ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["quick", "lazy"]}},
    "required": ["kind"],
}
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {**ITEM, "additionalProperties": False},
}
JSON: dict[str, Any] = {
    "json_schema": SCHEMA,
    "whitespace_pattern": "",
    "max_tokens": 40,
}
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0}
FIELDS: dict[str, dict[str, Any]] = {
    "seeded": {"regex": REGEX, "n": 3, "seed": 5, "logprobs": 2},
    "unseeded": {"regex": REGEX, "top_k": 20, "min_tokens": 25},
    "penalised": {
        "regex": REGEX,
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
    },
    "biased": {
        "regex": REGEX,
        "temperature": 0.0,
        "logit_bias": {20: 2.0, 30: -3.0},
        "logprobs": 0,
    },
    "choice": {
        "choice": ["yes", "no", "naïve"],
        "seed": 1,
        "presence_penalty": 0.5,
        "prompt_logprobs": 1,
    },
    "json": {**JSON, "temperature": 0.0, "logprobs": 1},
    "random json": {
        **JSON,
        "seed": 4,
        "n": 2,
        "logprobs_mode": "masked",
        "logprobs": 0,
    },
    "free": {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.1},
    "stopped": {
        "temperature": 0.0,
        "logit_bias": {70: 60.0, 71: 60.0},
        "frequency_penalty": 0.7,
        "stop": ["qqqq"],
    },
    "random": {"seed": 3, "temperature": 0.3, "logit_bias": {70: 50.0, 71: 50.0}},
    "guided beams": {**BEAMS, "regex": "[a-z ]{20}", "n": 3, "logprobs": 1},
    "free beams": {
        **BEAMS,
        "n": 2,
        "best_of": 3,
        "stop_token_ids": list(range(80, 110)),
        "repetition_penalty": 1.2,
    },
}
TIGHT = {"block_size": 4, "num_blocks": 48, "max_model_len": 72}
CHUNKS = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 12}
ENGINES: dict[str, dict[str, Any]] = {
    "late": {},
    "tight": TIGHT,
    "late and tight": TIGHT,
    "chunks": CHUNKS,
    "late, in chunks": CHUNKS,
    "without prefixes": {"enable_prefix_caching": False},
    "forced": {},
    "late and forced": {},
    "forced, in chunks": CHUNKS,
}


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    """All that could depend on when and beside what a row is sampled."""
    return {
        name: (PROMPT, SamplingParams(**{"max_tokens": 30, **fields}))
        for name, fields in FIELDS.items()
    }


def said(found: dict[str, RequestOutput]) -> dict[str, list[Any]]:
    return {
        name: [
            (
                one.token_ids,
                one.text,
                one.finish_reason,
                [*map(list, one.logprobs or ())],
            )
            for one in output.outputs
        ]
        for name, output in found.items()
    }


def logprobs(found: dict[str, RequestOutput]) -> list[float]:
    of_outputs = [
        entries
        for output in found.values()
        for one in output.outputs
        for entries in one.logprobs or ()
    ]
    of_prompts = [
        entries
        for output in found.values()
        for entries in (output.prompt_logprobs or ())[1:]
    ]
    return [
        entry.logprob
        for entries in of_outputs + of_prompts
        if entries is not None
        for entry in entries.values()
    ]


@pytest.fixture(scope="module")
def expected(tiny_model: LoadedModel) -> dict[str, RequestOutput]:
    return run(
        LLMEngine(tiny_model, pool=FaultyPool(tiny_model.vocabulary)), requests()
    )


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_the_same(
    make_engine: MakeEngine,
    tiny_model: LoadedModel,
    expected: dict[str, RequestOutput],
    name: str,
) -> None:
    pool, generator = (
        FaultyPool(tiny_model.vocabulary, forced_tokens="forced" in name),
        random.Random(name),
    )
    if late := "late" in name:
        pool.delay = lambda sequence_id, position: generator.choice([0, 0, 0, 0, 1, 4])
    engine = make_engine(pool, **ENGINES[name])
    found = run(engine, requests())
    for request, outputs in said(expected).items():
        assert said(found)[request] == outputs, request
    assert logprobs(found) == pytest.approx(logprobs(expected), rel=1e-3, abs=1e-3)
    stats = engine.stats
    assert (stats.late_rows > 20) == late
    assert (engine.scheduler.num_preemptions > 0) == ("tight" in name)
    assert (stats.forced_tokens > 10) == ("forced" in name)
    assert stats.late == 0
    assert pool.freed.issuperset(pool.opened)


def test_prefixes_of_a_first_run_change_nothing(
    make_engine: MakeEngine, expected: dict[str, RequestOutput]
) -> None:
    engine = make_engine(block_size=4)
    for _ in range(2):
        assert said(run(engine, requests())) == said(expected)
    assert engine.blocks.tokens_found > engine.blocks.tokens_looked_up // 3


def test_forced_tokens_save_steps(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    steps = []
    for forced in (False, True):
        engine = make_engine(FaultyPool(tiny_model.vocabulary, forced))
        run(engine, {"json": (PROMPT, SamplingParams(**JSON))})
        steps.append(engine.stats.steps)
    assert steps[1] < steps[0] * 0.8
