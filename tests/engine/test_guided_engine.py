"""The engine with constraints: suppression, and failures that end one group."""

from __future__ import annotations

import re
from typing import Any

from faulty_pool import FaultyPool

from engine.model_loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.errors import InternalError
from guided.pools.protocol import StepMasks
from tests.engine.conftest import MakeEngine, finish, run

PROMPT = "Zwölf Boxkämpfer"


GUIDED: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": {"enum": ["abc", 12]}, "n": 2},
    "regex": {"regex": "[0-9]{3}-[a-f]{4,9}"},
    "grammar": {"grammar": 'start: "x" | "y"'},
}
FIELDS = {**GUIDED, "free": {"temperature": 0.0}}
REQUESTS = {name: (PROMPT, SamplingParams(max_tokens=40, seed=7, **fields)) for name, fields in FIELDS.items()}


def test_min_tokens_keeps_an_open_constraint_going(make_engine: MakeEngine) -> None:
    request = SamplingParams(regex="[a-z]*", temperature=0.0, max_tokens=40, min_tokens=12, logit_bias={1: 100.0})
    output = run(make_engine(), {"r": (PROMPT, request)})["r"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (13, "stop")
    assert re.fullmatch("[a-z]+", output.text)


def test_one_can_be_aborted_while_its_grammar_compiles(make_engine: MakeEngine, tiny_model: LoadedModel) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    pool.hold_compiles = True
    engine = make_engine(pool)
    for name, (prompt, params) in REQUESTS.items():
        engine.add_request(name, prompt, params)
    while engine.has_work:
        engine.step()
    assert engine.groups.keys() == GUIDED.keys(), "the other has ended meanwhile"
    engine.awake.clear()
    engine.abort_request("grammar")
    pool.finish_compiles()
    assert engine.awake.is_set()
    found = finish(engine)
    assert {name: output.outputs[0].finish_reason for name, output in found.items()} == {
        "schema": "stop", "regex": "stop", "grammar": "abort"
    }  # fmt: skip


def test_a_mask_that_forbids_everything_is_an_error_and_no_token(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    class EmptyPool(FaultyPool):
        def collect(self, deadline: float | None = None) -> StepMasks:
            step = super().collect(deadline)
            for part in step.ready:
                part.masks[part.slots] = 0
            return step

    found = run(make_engine(EmptyPool(tiny_model.vocabulary)), REQUESTS)
    assert found.pop("free").error is None
    for output in found.values():
        assert isinstance(output.error, InternalError)
        assert output.outputs[0].token_ids == []
