"""The engine's requests: ends, limits, repeatability, and masks without a token."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool

from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.step.seeds import sequence_seed
from guided.errors import InternalError, InvalidRequest
from guided.pools.inline import InlinePool
from guided.pools.protocol import StepMasks
from tests.engine.conftest import MakeEngine, finish, run

PROMPT = "The quick brown fox"


def greedy(**params: Any) -> SamplingParams:
    params.setdefault("max_tokens", 30)
    return SamplingParams(temperature=0.0, **params)


def one(
    make_engine: MakeEngine, params: SamplingParams, prompt: Any = PROMPT
) -> RequestOutput:
    return run(make_engine(), {"r": (prompt, params)})["r"]


def test_it_ends_at_max_tokens_or_at_the_context(make_engine: MakeEngine) -> None:
    output = one(make_engine, greedy(ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 30
    rest = one(make_engine, greedy(max_tokens=None, ignore_eos=True))
    assert len(rest.outputs[0].token_ids) == 128 - len(rest.prompt_token_ids)
    assert rest.outputs[0].token_ids[:30] == output.outputs[0].token_ids


def test_a_stop_token_ends_it_and_is_no_text(make_engine: MakeEngine) -> None:
    free = one(make_engine, greedy(ignore_eos=True)).outputs[0]
    stop = free.token_ids[7]
    assert stop not in free.token_ids[:7]
    stopped = one(make_engine, greedy(stop_token_ids=[stop])).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[:8]
    kept = one(
        make_engine, greedy(stop_token_ids=[stop], include_stop_str_in_output=True)
    ).outputs[0]
    assert kept.text.startswith(stopped.text)
    assert len(kept.text) > len(stopped.text)


def test_the_model_s_own_stop_token_has_no_stop_reason(make_engine: MakeEngine) -> None:
    eos = make_engine().model.vocabulary.stop_token_ids[0]
    output = one(make_engine, greedy(logit_bias={eos: 100})).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert (output.text, output.token_ids) == ("", [eos])
    spelled = greedy(
        logit_bias={eos: 100},
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert one(make_engine, spelled).outputs[0].text == "<|end|>"


def test_min_tokens_and_ignore_eos(make_engine: MakeEngine) -> None:
    eos = make_engine().model.vocabulary.stop_token_ids[0]
    held = one(make_engine, greedy(logit_bias={eos: 100}, min_tokens=5)).outputs[0]
    assert (held.finish_reason, len(held.token_ids)) == ("stop", 6)
    never = one(make_engine, greedy(logit_bias={eos: 100}, ignore_eos=True)).outputs[0]
    assert (never.finish_reason, never.token_ids) == ("length", [eos] * 30)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(make_engine: MakeEngine, include: bool) -> None:
    free = one(make_engine, greedy()).outputs[0]
    stop = free.text[9:11]
    at = free.text.index(stop)
    output = one(
        make_engine,
        greedy(stop=[stop, "never there"], include_stop_str_in_output=include),
    ).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == free.text[: at + len(stop) * include]
    assert free.token_ids[: len(output.token_ids)] == output.token_ids
    later = one(make_engine, greedy(stop=stop, min_tokens=25)).outputs[0]
    assert len(later.token_ids) > 25


def test_a_seed_repeats_in_any_batch_and_with_any_id(make_engine: MakeEngine) -> None:
    mine = SamplingParams(
        seed=42, temperature=1.2, top_p=0.95, max_tokens=40, n=2, ignore_eos=True
    )
    others = {
        f"other {index}": (
            PROMPT[index:],
            SamplingParams(max_tokens=40, ignore_eos=True),
        )
        for index in range(5)
    }
    alone = run(make_engine(), {"mine": (PROMPT, mine)})["mine"]
    crowded = run(make_engine(), {**others, "another id": (PROMPT, mine)})["another id"]
    assert [one.token_ids for one in crowded.outputs] == [
        one.token_ids for one in alone.outputs
    ]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
    seeds = [
        sequence_seed(*each)
        for each in (
            (0, "a", None, 0),
            (1, "a", None, 0),
            (0, "b", None, 0),
            (0, "a", 7, 0),
        )
    ]
    assert len(set(seeds)) == 4


def test_a_prompt_too_long_is_ignored_and_says_why(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found = run(
        engine,
        {
            "long": ([5] * 128, greedy(max_tokens=1, n=2)),
            "short": ([5] * 127, greedy(max_tokens=1)),
        },
    )
    assert found["long"].finished
    assert [output.finish_reason for output in found["long"].outputs] == [
        "length",
        "length",
    ]
    error = found["long"].error
    assert isinstance(error, InvalidRequest)
    assert error.param == "prompt"
    assert "128 tokens" in str(error)
    assert len(found["short"].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([5] * 100, {"max_tokens": 29}, "max_tokens"),
        ([], {}, "prompt"),
        ([640], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"n": 65}, "n"),
        ([5], {"logit_bias": {640: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [640]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    make_engine: MakeEngine, prompt: list[int], params: dict[str, Any], param: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as refusal:
        engine.add_request("r", prompt, SamplingParams(**params))
    assert refusal.value.param == param
    assert not engine.has_unfinished


def test_abort_in_every_state(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in ("running", "stays", "waiting"):
        engine.add_request(name, PROMPT, greedy(ignore_eos=True))
    for _ in range(5):
        engine.step()
    for name in ("running", "waiting", "not there"):
        engine.abort_request(name)
    found = finish(engine)
    assert {
        name: output.outputs[0].finish_reason for name, output in found.items()
    } == {"running": "abort", "waiting": "abort", "stays": "length"}
    assert len(found["running"].outputs[0].token_ids) == 5
    engine.add_request("running", PROMPT, greedy())  # the id is free again
    assert finish(engine)["running"].finished


def test_min_tokens_keeps_an_open_constraint_going(make_engine: MakeEngine) -> None:
    output = one(
        make_engine,
        greedy(regex="[a-z]*", max_tokens=40, min_tokens=12, logit_bias={1: 100.0}),
    ).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (13, "stop")
    assert re.fullmatch("[a-z]+", output.text)


def test_a_mask_that_forbids_everything_is_an_error_and_no_token(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    class EmptyPool(FaultyPool):
        def collect(self, deadline: float | None = None) -> StepMasks:
            step = super().collect(deadline)
            for part in step.ready:
                part.masks[part.slots] = 0
            return step

    guided = [
        SamplingParams(regex="[0-9]{3}", n=2),
        SamplingParams(choice=["x"], use_beam_search=True, temperature=0),
    ]
    requests = {
        name: (PROMPT, params)
        for name, params in zip("abc", (*guided, greedy()), strict=True)
    }
    found = run(make_engine(EmptyPool(tiny_model.vocabulary)), requests)
    assert found.pop("c").error is None
    for output in found.values():
        assert isinstance(output.error, InternalError)
        assert output.outputs[0].token_ids == []


def test_two_engines_share_a_pool_and_a_request_id(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    pool = InlinePool(tiny_model.vocabulary)
    engines = [make_engine(pool), make_engine(pool)]
    for engine, regex in zip(engines, ("[0-9]{3}", "[0-9]{12}"), strict=True):
        engine.add_request("0", PROMPT, greedy(regex=regex))
    texts: list[str] = ["", ""]
    while any(engine.has_unfinished for engine in engines):
        for number, engine in enumerate(engines):
            for output in engine.step():
                texts[number] = output.outputs[0].text
    assert [len(text) for text in texts] == [3, 12]
    assert all(re.fullmatch("[0-9]+", text) for text in texts)


def test_a_step_with_beams_that_is_given_up_leaves_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.add_request("plain", PROMPT, greedy(ignore_eos=True))
    beams = SamplingParams(
        temperature=0.0, use_beam_search=True, best_of=3, max_tokens=30
    )
    engine.add_request("beams", PROMPT, beams)
    for _ in range(3):
        engine.step()
    sample = engine.sampler.sample

    def fail(*arguments: Any) -> Any:
        monkeypatch.setattr(engine.sampler, "sample", sample)
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(engine.sampler, "sample", fail)
    ended = finish(engine)
    assert ended["beams"].outputs[0].finish_reason == "error"
    assert ended["plain"].outputs[0].finish_reason == "length"
