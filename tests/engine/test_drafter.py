"""Speculative decoding changes no output: neither greedy nor sampled, guided or not, with late masks and preemption."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from faulty_pool import FaultyPool

from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.pools.inline import InlinePool

MakeEngine = Callable[..., LLMEngine]
Run = Callable[..., dict[str, RequestOutput]]
ITEM = {"type": "object", "properties": {"kind": {"enum": ["quick", "lazy"]}}, "required": ["kind"]}
SCHEMA = {"type": "array", "minItems": 3, "maxItems": 4, "items": {**ITEM, "additionalProperties": False}}


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    fields: dict[str, dict[str, Any]] = {
        "json": {"json_schema": SCHEMA, "whitespace_pattern": "", "temperature": 0.0, "logprobs": 1},
        "random json": {"json_schema": SCHEMA, "whitespace_pattern": "", "seed": 4, "n": 2},
        "regex": {"regex": "((fox|dog|cat) ){12}", "seed": 5, "temperature": 1.5},
        "free": {"temperature": 0.0},
        "penalised": {"temperature": 0.0, "frequency_penalty": 0.3, "logit_bias": {30: 3.0}, "min_tokens": 20},
        "stopped": {"temperature": 0.0, "logit_bias": {70: 60.0, 71: 60.0}, "frequency_penalty": 0.7, "stop": ["qqqq"]},
        "random": {"seed": 3, "temperature": 0.3, "logit_bias": {70: 50.0, 71: 50.0}},
    }
    prompt = [40, 41, 42, 43, 44] * 3
    return {name: (prompt, SamplingParams(**{"max_tokens": 60, **params})) for name, params in fields.items()}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("config", [{}, {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 24}])
def test_outputs_are_those_without_drafts(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run, config: dict[str, Any], late: bool
) -> None:
    expected = run(make_engine(), requests())
    pool = FaultyPool(tiny_model.vocabulary)
    if late:
        generator = random.Random(3)
        pool.delay = lambda sequence_id, position: generator.choice([0, 0, 0, 0, 3])
    engine = make_engine(pool, num_speculative_tokens=4, **config)
    found = run(engine, requests())
    for name, output in expected.items():
        for one, same in zip(found[name].outputs, output.outputs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (same.token_ids, same.text, same.finish_reason), name
            assert len(one.logprobs or ()) == len(same.logprobs or ())
            for entries, others in zip(one.logprobs or (), same.logprobs or (), strict=True):
                assert entries is not None
                assert others is not None
                assert {token: each.rank for token, each in entries.items()} == {
                    token: each.rank for token, each in others.items()
                }
    assert engine.stats.accepted_tokens > 50
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens
    assert len(pool.freed) >= len(set(pool.opened)), "the matchers of drafts are freed with their sequence"


def test_with_forced_tokens(make_engine: MakeEngine, tiny_model: LoadedModel, run: Run) -> None:
    expected = run(make_engine(), requests())
    engine = make_engine(InlinePool(tiny_model.vocabulary, forced_tokens=True), num_speculative_tokens=3)
    found = run(engine, requests())
    for name, output in expected.items():
        assert [one.token_ids for one in found[name].outputs] == [one.token_ids for one in output.outputs]
    assert engine.stats.forced_tokens > 10
    assert engine.stats.accepted_tokens > 10


def test_the_sampled_distribution_is_the_same(make_engine: MakeEngine, run: Run) -> None:
    """Two engines with different seeds: the counts of 3-token words are those of one distribution (chi-squared)."""

    def counts(**config: Any) -> Counter[str]:
        params = SamplingParams(regex="((a|b)(c|d) ){6}", temperature=1.2, n=40, max_tokens=40)
        found = run(make_engine(max_num_seqs=64, **config), {str(place): ([50, 51, 52], params) for place in range(5)})
        texts = [one.text for output in found.values() for one in output.outputs]
        return Counter(word for text in texts for word in text.split())

    plain, drafted = counts(seed=1), counts(seed=2, num_speculative_tokens=4)
    words = sorted(plain.keys() | drafted.keys())
    assert len(words) > 1
    total, others = sum(plain.values()), sum(drafted.values())
    statistic = sum(
        (plain[word] * (others / total) ** 0.5 - drafted[word] * (total / others) ** 0.5) ** 2
        / (plain[word] + drafted[word])
        for word in words
    )
    assert statistic < 5 * 16.3, "words of one output are not independent: far above the 0.1 % limit of 3 degrees"
