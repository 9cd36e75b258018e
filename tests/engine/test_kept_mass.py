"""Kept mass: how much of the model's probability a mask leaves, and outputs that are
drawn by it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling.adjustments import PROBE_STEPS
from engine.sampling_params import SamplingParams
from guided.pools.inline import InlinePool
from guided.processors.logit_post_processor import LogitPostProcessor
from tests.engine.conftest import MakeEngine, run

Tokens = tuple[int, ...]


class _Flat(torch.nn.Module):
    """The head of the tiny model, with a temperature: no answer is improbable."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) / 3.0


@pytest.fixture(scope="module")
def flat_model(tiny_model: LoadedModel) -> LoadedModel:
    return replace(tiny_model, head=_Flat(tiny_model.head))


def answered(
    model: LoadedModel, forced_tokens: bool = False, **fields: Any
) -> RequestOutput:
    """The output of one request."""
    engine = LLMEngine(
        model,
        EngineConfig(max_model_len=64, max_num_seqs=256),
        InlinePool(model.vocabulary, forced_tokens=forced_tokens),
    )
    output = run(
        engine, {"r": ("So?", SamplingParams(seed=3, max_tokens=20, **fields))}
    )["r"]
    assert output.error is None
    return output


def shares(output: RequestOutput) -> dict[Tokens, float]:
    counts = Counter(tuple(one.token_ids) for one in output.outputs)
    return {tokens: count / len(output.outputs) for tokens, count in counts.items()}


def own_shares(output: RequestOutput) -> dict[Tokens, float]:
    """The model's own distribution, conditioned on the outputs that there are."""
    found = {
        tuple(one.token_ids): math.exp(one.cumulative_logprob or 0.0)
        for one in output.outputs
    }
    return {tokens: mass / sum(found.values()) for tokens, mass in found.items()}


def distance(left: Mapping[Tokens, float], right: Mapping[Tokens, float]) -> float:
    """Total variation."""
    return (
        sum(
            abs(left.get(one, 0.0) - right.get(one, 0.0))
            for one in left.keys() | right.keys()
        )
        / 2
    )


def test_resampling_approaches_the_model_s_own(flat_model: LoadedModel) -> None:
    fields: dict[str, Any] = {"regex": "[qxz]{2}"}
    plain = answered(flat_model, **fields, n=256)
    fields |= {"n": 255, "best_of": 256, "resample": True}
    drawn = answered(flat_model, **fields)
    own = own_shares(plain)
    assert len(own) == 9, "each output was sampled"
    assert distance(shares(plain), own) > 0.2
    assert distance(shares(drawn), own) < distance(shares(plain), own) / 2
    assert drawn.effective_samples is not None
    assert 100 < drawn.effective_samples < 256
    assert shares(answered(flat_model, **fields)) == shares(drawn)


def test_an_output_that_was_cut_off_is_not_drawn(flat_model: LoadedModel) -> None:
    fields: dict[str, Any] = {"regex": "x{40}|z", "n": 63, "best_of": 64}
    assert {one.finish_reason for one in answered(flat_model, **fields).outputs} == {
        "stop",
        "length",
    }
    assert {
        one.text for one in answered(flat_model, **fields, resample=True).outputs
    } == {"z"}


@pytest.mark.parametrize("mode", ["raw", "masked"])
@pytest.mark.parametrize("forced_tokens", [False, True])
def test_the_weight_is_the_quotient_of_the_probabilities(
    flat_model: LoadedModel, forced_tokens: bool, mode: Any
) -> None:
    """Of an output under the model and under the masks, with forced tokens as
    without."""
    fields: dict[str, Any] = {
        "choice": ["✓✓q", "✗✓", "dog"],
        "n": 8,
        "mask_details": True,
    }
    own, masked = (
        answered(flat_model, **fields, logprobs_mode=one) for one in ("raw", "masked")
    )
    found = answered(flat_model, forced_tokens, logprobs_mode=mode, **fields)
    weights = {
        tuple(left.token_ids): math.exp(
            (left.cumulative_logprob or 0.0) - (right.cumulative_logprob or 0.0)
        )
        for left in own.outputs
        for right in masked.outputs
        if left.token_ids == right.token_ids
    }
    assert len(weights) > 1
    for one in found.outputs:
        assert one.mask_details is not None
        kept = [mass for mass in one.mask_details.kept_mass if mass is not None]
        assert len(kept) == len(one.token_ids)
        assert math.prod(kept) == pytest.approx(weights[tuple(one.token_ids)], rel=1e-3)
    assert (
        any(any(one.mask_details.forced) for one in found.outputs if one.mask_details)
        == forced_tokens
    )


def test_measured_masks_and_a_few_others_count_in_the_statistics(
    make_engine: MakeEngine,
) -> None:
    params = SamplingParams(regex="[0-9]{70}", temperature=0.0, max_tokens=90)
    engine = make_engine()
    [output] = run(engine, {"r": ("So?", replace(params, mask_details=True))})[
        "r"
    ].outputs
    assert output.mask_details is not None
    kept = [mass for mass in output.mask_details.kept_mass if mass is not None]
    assert sum(engine.stats.kept_mass) == len(kept) == len(output.token_ids)
    assert engine.stats.kept_mass_sum == pytest.approx(sum(kept))
    engine = make_engine()
    run(engine, {"r": ("So?", params)})
    assert sum(engine.stats.kept_mass) == 1
    assert engine.stats.kept_mass_sum == pytest.approx(kept[PROBE_STEPS - 1])


def test_rows_without_a_constraint_do_not_count(tiny_model: LoadedModel) -> None:
    """Not even where a post-processor sees all rows."""
    pool = InlinePool(tiny_model.vocabulary)
    engine = LLMEngine(
        tiny_model, EngineConfig(max_model_len=64), pool, LogitPostProcessor()
    )
    params = SamplingParams(max_tokens=5, mask_details=True)
    found = run(
        engine,
        {"free": ("So?", params), "digits": ("So?", replace(params, regex="[0-9]{9}"))},
    )
    assert [len(output.outputs[0].token_ids) for output in found.values()] == [5, 5]
    assert sum(engine.stats.kept_mass) == 5
