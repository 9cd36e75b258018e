"""The engine takes vetoed tokens back: answers, streams, several outputs, and what they
report."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine, finish, run

PROMPT = "Zwölf Boxkämpfer"
DIGITS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9},
    "uniqueItems": True,
    "minItems": 3,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "digits": {**DIGITS, "maxItems": 5},
        "ok": {"type": "boolean"},
    },
    "required": ["title", "digits", "ok"],
}


def params(seed: int, schema: Any = SCHEMA, **others: Any) -> SamplingParams:
    return SamplingParams(
        json_schema=schema, max_tokens=100, seed=seed, whitespace_pattern="", **others
    )


def stream(engine: LLMEngine, name: str, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request(name, PROMPT, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def test_answers_are_valid_and_count_their_vetoes(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=8)
    found = run(engine, {f"{seed}": (PROMPT, params(seed)) for seed in range(12)})
    ends = [output.outputs[0].finish_reason for output in found.values()]
    assert ends.count("stop") >= 10
    for output in found.values():
        if output.outputs[0].finish_reason == "stop":
            assert jsonschema.Draft202012Validator(SCHEMA).is_valid(
                json.loads(output.outputs[0].text)
            )
    vetoes = [output.outputs[0].vetoes for output in found.values()]
    assert (
        sum(one.get("uniqueItems", 0) for one in vetoes)
        == engine.stats.vetoes["uniqueItems"]
        > 5
    )
    assert set(engine.stats.vetoes) == {"uniqueItems"}


def test_streams_never_take_back_what_was_sent(make_engine: MakeEngine) -> None:
    vetoes = 0
    for seed in range(6):
        answer = run(make_engine(), {"answer": (PROMPT, params(seed))})[
            "answer"
        ].outputs[0]
        pieces = [
            output.outputs[0]
            for output in stream(make_engine(), "answer", params(seed))
        ]
        for before, after in pairwise(pieces):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert (pieces[-1].text, pieces[-1].token_ids) == (
            answer.text,
            answer.token_ids,
        )
        assert sum(0 < len(piece.text) < len(answer.text) for piece in pieces) > 3
        vetoes += sum(answer.vetoes.values())
    assert vetoes > 3


def test_several_outputs_logprobs_and_details_stay_in_step(
    make_engine: MakeEngine,
) -> None:
    asked = params(1, n=4, logprobs=1, mask_details=True, presence_penalty=0.5)
    output = run(make_engine(), {"n": (PROMPT, asked)})["n"]
    assert sum(sum(one.vetoes.values()) for one in output.outputs) > 0
    for one in output.outputs:
        assert one.logprobs is not None
        assert one.mask_details is not None
        assert len(one.logprobs) == len(one.mask_details.allowed) == len(one.token_ids)


def test_a_budget_and_vetoes_go_together(make_engine: MakeEngine) -> None:
    schema = {**DIGITS, "minItems": 1}
    asked = SamplingParams(
        json_schema=schema, max_tokens=24, seed=3, complete=True, n=6
    )
    output = run(make_engine(), {"n": (PROMPT, asked)})["n"]
    assert [one.finish_reason for one in output.outputs] == ["stop"] * 6, output.error


@pytest.mark.parametrize(
    "schema",
    [{**SCHEMA, "properties": {**SCHEMA["properties"], "digits": {"type": "null"}}}],
)
def test_without_a_checked_keyword_nothing_is_held(
    make_engine: MakeEngine, schema: Any
) -> None:
    engine = make_engine()
    engine.add_request("free", PROMPT, params(1, schema))
    (sequence,) = engine.groups["free"].sequences
    engine.step()
    assert sequence.view is not None
    assert (sequence.view.final, sequence.held_back) == (None, 0)
    finish(engine)
    assert not engine.stats.vetoes


def test_beams_keep_what_they_have_accepted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = SamplingParams(
        json_schema=DIGITS, max_tokens=20, use_beam_search=True, n=2, temperature=0.0
    )
    run(engine, {"beams": (PROMPT, asked)})
    assert not engine.stats.vetoes
