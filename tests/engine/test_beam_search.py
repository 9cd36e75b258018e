"""Beam search equals transformers' `generate(num_beams=...)`; its beams satisfy a
constraint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_processors import DummyLogitsProcessor
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers_generation import SCHEMA, Replaying, check

from engine.sampling_params import SamplingParams
from guided.constraint import Constraint
from guided.errors import InvalidRequest
from tests.engine.conftest import MakeEngine, run

STOPS = list(range(80, 110))
"""Enough for outputs to end at different lengths."""


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, dtype=torch.float32
    ).eval()


def beams(width: int, **others: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "use_beam_search": True,
            "temperature": 0.0,
            "n": width,
            "max_tokens": 16,
            **others,
        }
    )


def expected(
    reference: Any,
    prompt: list[int],
    params: SamplingParams,
    stops: list[int],
    **others: Any,
) -> Any:
    result = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=stops,
        output_scores=True,
        return_dict_in_generate=True,
        **others,
    )
    found = []
    for row in result.sequences[:, len(prompt) :].tolist():
        ends = [place for place, token in enumerate(row) if token in stops]
        found.append(row[: ends[0] + 1] if ends else row)
    return found, result.sequences_scores.tolist()


def prompts() -> dict[str, list[int]]:
    generator = random.Random(5)
    return {
        str(size): [generator.randrange(6, 600) for _ in range(size)]
        for size in (1, 5, 19)
    }


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
def test_it_equals_transformers(
    make_engine: MakeEngine, reference: Any, early_stopping: Any, length_penalty: float
) -> None:
    params = beams(
        4,
        n=3,
        best_of=4,
        stop_token_ids=STOPS,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
    )
    engine = make_engine(block_size=4)
    found = run(engine, {name: (prompt, params) for name, prompt in prompts().items()})
    stops = sorted({*engine.model.vocabulary.stop_token_ids, *STOPS})
    for name, prompt in prompts().items():
        sequences, scores = expected(reference, prompt, params, stops)
        outputs = found[name].outputs
        assert [one.token_ids for one in outputs] == sequences
        mine = [
            (one.cumulative_logprob or 0.0) / len(one.token_ids) ** length_penalty
            for one in outputs
        ]
        assert mine == pytest.approx(scores, rel=1e-3)
        assert {one.finish_reason for one in outputs} <= {"stop", "length"}


def test_guided_beams_equal_those_of_transformers(
    make_engine: MakeEngine, reference: Any
) -> None:
    constraint = Constraint.json_schema(SCHEMA, whitespace="")
    params = beams(3, constraint=constraint, max_tokens=60)
    engine = make_engine()
    (prompt,) = [engine.model.tokenizer.encode("As JSON: ")]
    outputs = run(engine, {"r": (prompt, params)})["r"].outputs
    replaying = Replaying(engine.model.vocabulary, [constraint], len(prompt))
    stops = list(engine.model.vocabulary.stop_token_ids)
    sequences, _ = expected(
        reference,
        prompt,
        params,
        stops,
        logits_processor=LogitsProcessorList([replaying]),
    )
    assert [one.token_ids for one in outputs] == sequences
    for one in outputs:
        check(0, one.text)
        assert one.finish_reason == "stop"


def test_logprobs_of_beams_are_those_of_their_own_tokens(
    make_engine: MakeEngine,
) -> None:
    """The same outputs, scored as a prompt, have the same log-probabilities."""
    prompt = [9] * 5
    for kind in ({"stop_token_ids": STOPS}, {"regex": "[a-z ]{12}"}):
        output = run(make_engine(), {"r": (prompt, beams(3, logprobs=2, **kind))})["r"]
        plain = run(make_engine(), {"r": (prompt, beams(3, **kind))})["r"]
        assert [one.token_ids for one in output.outputs] == [
            one.token_ids for one in plain.outputs
        ]
        for one in output.outputs:
            scored = SamplingParams(prompt_logprobs=2, max_tokens=1)
            again = (
                run(make_engine(), {"r": (prompt + one.token_ids, scored)})[
                    "r"
                ].prompt_logprobs
                or []
            )
            pairs = list(
                zip(
                    one.token_ids, one.logprobs or (), again[len(prompt) :], strict=True
                )
            )
            mine = [(entries or {})[token].logprob for token, entries, _ in pairs]
            assert mine == pytest.approx(
                [(same or {})[token].logprob for token, _, same in pairs], abs=1e-3
            )
            assert all(len(entries or ()) >= 2 for _, entries, _ in pairs)
            assert one.cumulative_logprob == pytest.approx(sum(mine), abs=1e-3)


def test_a_stop_string_ends_beams(make_engine: MakeEngine) -> None:
    params = {"n": 4, "max_tokens": 12}
    free = run(make_engine(), {"r": ("So?", beams(4, **params))})["r"].outputs
    stop = free[0].text[3:5]
    found = run(make_engine(), {"r": ("So?", beams(4, **params, stop=[stop]))})[
        "r"
    ].outputs
    cut = [one for one in found if one.stop_reason == stop]
    assert free[0].text[: free[0].text.index(stop)] in [one.text for one in cut]
    assert {one.finish_reason for one in cut} == {"stop"}
    assert all(stop not in one.text for one in found)
    kept = run(
        make_engine(),
        {
            "r": (
                "So?",
                beams(4, **params, stop=[stop], include_stop_str_in_output=True),
            )
        },
    )["r"]
    assert [one.text.endswith(stop) for one in kept.outputs] == [
        one.stop_reason == stop for one in found
    ]
    late = run(
        make_engine(),
        {"r": ("So?", beams(4, **params, stop=[free[0].text[0]], min_tokens=5))},
    )["r"].outputs
    assert all(len(one.token_ids) > 5 for one in late)


def test_beams_of_a_temperature(make_engine: MakeEngine) -> None:
    """The search is that of a model with logits divided by the temperature."""

    class Cooling(DummyLogitsProcessor):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits / 3.0

    fields: dict[str, Any] = {"regex": "[a-z]{6,}", "max_tokens": 10, "logprobs": 0}
    warm = run(make_engine(), {"r": ("So?", beams(3, temperature=3.0, **fields))})[
        "r"
    ].outputs
    cooled = run(
        make_engine(logits_processors=(Cooling,)), {"r": ("So?", beams(3, **fields))}
    )["r"].outputs
    assert [one.token_ids for one in warm] == [one.token_ids for one in cooled]
    sums = [one.cumulative_logprob for one in cooled]
    assert [one.cumulative_logprob for one in warm] == pytest.approx(sums, abs=1e-3)


def test_beams_that_can_never_fit_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(
        InvalidRequest,
        match="4 beams with 280 tokens don't fit in the KV cache of 128 tokens",
    ):
        make_engine(block_size=4, num_blocks=32).add_request(
            "r", [5] * 10, beams(4, max_tokens=60)
        )
