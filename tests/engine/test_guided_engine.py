"""The engine with constraints: suppression, and failures that end one group."""

from __future__ import annotations

import re
from typing import Any

from faulty_pool import FaultyPool

from engine.model_loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import BackendError, InternalError
from guided.pools.protocol import StepMasks
from tests.engine.conftest import MakeEngine, Run

PROMPT = "Zwölf Boxkämpfer"


def mixed(**others: Any) -> dict[str, tuple[Any, SamplingParams]]:
    """Guided and free requests, greedy and random, one and several outputs."""
    fields: dict[str, dict[str, Any]] = {
        "schema": {
            "json_schema": {"type": "array", "items": {"enum": ["abc", 12]}, "minItems": 2, "maxItems": 4},
            "n": 2,
        },
        "regex": {"regex": "[0-9]{3}-[a-f]{4,9}", "temperature": 0.0},
        "choice": {"choice": ["yes", "no", "naïve"], "seed": 1},
        "grammar": {"grammar": 'start: "(" start ")" | "x"', "temperature": 0.0},
        "free": {"temperature": 0.0},
        "random": {"seed": 3},
    }
    return {
        name: (PROMPT, SamplingParams(**{"max_tokens": 40, "seed": 7, **params, **others}))
        for name, params in fields.items()
    }


def tokens(found: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [one.token_ids for one in output.outputs] for name, output in found.items()}


def test_min_tokens_keeps_an_open_constraint_going(make_engine: MakeEngine, run: Run) -> None:
    request = SamplingParams(regex="[a-z]*", temperature=0.0, max_tokens=40, min_tokens=12, logit_bias={1: 100.0})
    output = run(make_engine(), {"r": (PROMPT, request)})["r"].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (13, "stop")
    assert re.fullmatch("[a-z]+", output.text)


def test_one_aborted_while_its_grammar_compiles_releases_it(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    pool.hold_compiles = True
    engine = make_engine(pool)
    for name, (prompt, params) in mixed().items():
        engine.add_request(name, prompt, params)
    while engine.has_work:
        engine.step()
    assert set(engine.groups) == {"schema", "regex", "choice", "grammar"}, "the others have ended meanwhile"
    engine.awake.clear()
    engine.abort_request("grammar")
    pool.finish_compiles()
    assert engine.awake.is_set()
    found = finish(engine)
    assert {name: output.outputs[0].finish_reason for name, output in found.items()} == {
        **dict.fromkeys(("schema", "regex", "choice"), "stop"), "grammar": "abort"
    }  # fmt: skip
    assert pool.released == 4


def test_a_failing_row_ends_its_group_and_no_other(make_engine: MakeEngine, tiny_model: LoadedModel, run: Run) -> None:
    expected = tokens(run(make_engine(), mixed()))
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    # The second of the schema's two: opened second.
    pool.fails = lambda sequence_id, position: position == 3 and sequence_id == pool.opened[1]
    found = run(engine, mixed())
    failed = found.pop("schema")
    assert isinstance(failed.error, BackendError)
    assert [output.finish_reason for output in failed.outputs] == ["error", "error"]
    assert [len(output.token_ids) for output in failed.outputs] == [3, 3], "nothing after the failure"
    del expected["schema"]
    assert tokens(found) == expected
    assert set(pool.opened) <= pool.freed
    assert engine.stats.failures == {"backend_error": 1}


def test_a_mask_that_forbids_everything_is_an_error_and_no_token(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run
) -> None:
    class EmptyPool(FaultyPool):
        def collect(self, deadline: float | None = None) -> StepMasks:
            step = super().collect(deadline)
            for part in step.ready:
                part.masks[part.slots] = 0
            return step

    found = run(make_engine(EmptyPool(tiny_model.vocabulary)), mixed())
    for name, output in found.items():
        if name not in ("free", "random"):
            assert isinstance(output.error, InternalError)
            assert output.outputs[0].token_ids == []
