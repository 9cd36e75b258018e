"""Custom processors: what is not loaded, the same tokens as the engine's own, and the
batch when one raises."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sample_processors as sample
from faulty_pool import FaultyPool

from engine import LLM, AsyncLLM
from engine.config import EngineConfig
from engine.logits_processors import BatchUpdate, LogitsProcessor
from engine.logits_processors.custom_logits_processors import LogitsProcessorFailed
from engine.logits_processors.loading import load_classes
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.pools.inline import InlinePool
from tests.engine.conftest import MakeEngine, run

PROMPT = "Zwölf Boxkämpfer"
REGEX = "[0-9]{30,60}[a-f]{4,9}"
TIGHT = {"block_size": 4, "num_blocks": 26, "max_model_len": 72}
"""So few blocks that sequences are preempted."""


def tokens(found: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {
        name: [list(one.token_ids) for one in output.outputs]
        for name, output in found.items()
    }


def test_a_processor_sees_prompt_and_output(make_engine: MakeEngine) -> None:
    echo = SamplingParams(max_tokens=30, extra_args={"echo": True})
    engine = make_engine(logits_processors=(sample.EchoLogitsProcessor,), **TIGHT)
    found = tokens(
        run(engine, {f"{n}": ([n, 20 + n, 30 + n], echo) for n in range(10, 17)})
    )
    assert engine.scheduler.num_preemptions > 0
    assert found == {f"{n}": [[n, 20 + n, 30 + n] * 10] for n in range(10, 17)}


def requests(bias: str, min_p: str) -> dict[str, tuple[Any, SamplingParams]]:
    """With a bias and min_p: the engine's own, or those of processors that do the
    same."""
    values = {20: 4.0, 30: -3.0, 40: 2.5}
    fields: dict[str, dict[str, Any]] = {
        "seeded": {"regex": REGEX, "n": 3, "seed": 5, "logprobs": 2, min_p: 0.05},
        "unseeded": {
            "regex": REGEX,
            "top_k": 20,
            "min_tokens": 25,
            bias: values,
            min_p: 0.2,
        },
        "penalised": {
            "regex": REGEX,
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            bias: values,
        },
        "biased": {"regex": REGEX, "temperature": 0.0, bias: values, "logprobs": 0},
        "free": {"temperature": 0.0, "repetition_penalty": 1.1, bias: values},
        "random": {"seed": 3, "temperature": 0.8, min_p: 0.1, "presence_penalty": 0.5},
        "plain": {"seed": 4, "top_p": 0.9},
    }
    built = {}
    for name, given in fields.items():
        extra = {
            key.removeprefix("my "): given.pop(key)
            for key in list(given)
            if key.startswith("my ")
        }
        built[name] = (
            PROMPT,
            SamplingParams(**{"max_tokens": 30, **given}, extra_args=extra or None),
        )
    return built


@pytest.mark.parametrize(
    "model", [(sample.MyBias, sample.MyMinP), (sample.RevisedBias, sample.RevisedMinP)]
)
@pytest.mark.parametrize(("config", "late"), [({}, False), (TIGHT, True)])
def test_custom_bias_and_min_p_equal_the_engines_own(
    make_engine: MakeEngine,
    tiny_model: LoadedModel,
    model: Any,
    config: dict[str, Any],
    late: bool,
) -> None:
    """Before the penalties and after the mask, preempted or not, and with late rows:
    the same tokens."""
    expected = run(make_engine(), requests("logit_bias", "min_p"))
    pool = FaultyPool(tiny_model.vocabulary)
    if late:
        generator = random.Random(1)
        pool.delay = lambda sequence_id, position: generator.choice([0, 0, 0, 0, 1, 4])
    engine = make_engine(pool, logits_processors=model, **config)
    found = run(engine, requests("my bias", "my min_p"))
    assert tokens(found) == tokens(expected)
    assert (engine.stats.late_rows > 20) == late


def test_a_late_row_stays_in_the_batch(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    """A processor of V1's model is told once of each sequence."""
    added: list[list[int]] = []

    class Stateful(sample.DummyLogitsProcessor):
        def update_state(self, batch_update: BatchUpdate | None) -> None:
            super().update_state(batch_update)
            added.extend(
                output for *_, output in (batch_update.added if batch_update else ())
            )

    pool, generator = FaultyPool(tiny_model.vocabulary), random.Random(1)
    pool.delay = lambda sequence_id, position: generator.choice([0, 0, 0, 1, 4])
    engine = make_engine(pool, logits_processors=(Stateful,))
    digits = tiny_model.tokenizer.convert_tokens_to_ids(list("0123456789"))
    fields: dict[str, Any] = {"regex": "[0-9]{40}", "n": 2, "max_tokens": 20}
    wanted = {
        str(one): (PROMPT, SamplingParams(**fields, extra_args={"target_token": one}))
        for one in digits
    }
    assert tokens(run(engine, wanted)) == {
        str(token): [[token] * 20] * 2 for token in digits
    }
    assert engine.stats.late_rows > 20
    assert len(added) == 20


# -- what raises


def poisoned(where: str, **params: Any) -> SamplingParams:
    return SamplingParams(extra_args={"poison": where}, max_tokens=12, **params)


@pytest.mark.parametrize(
    ("processor", "where"),
    [(sample.Poisonable, "apply"), (sample.Poisonable, "update_state")]
    + [(sample.PoisonableLate, "None"), (sample.PoisonableLate, "shape")]
    + [
        (sample.RevisedPoisonable, where)
        for where in ("add_request", "update_state", "apply")
    ],
)
def test_a_processor_that_raises_fails_one_request(
    make_engine: MakeEngine, processor: type[sample.Poisonable], where: str
) -> None:
    """Although it has spoilt all logits by then. It is made anew, and the other
    processors run once in that step."""
    expected = run(make_engine(), requests("logit_bias", "min_p"))
    others = requests("my bias", "my min_p")
    engine = make_engine(logits_processors=(sample.MyBias, processor, sample.MyMinP))
    engine.add_request("early", PROMPT, SamplingParams(max_tokens=40, seed=2))
    engine.step()
    found = run(engine, {**others, "poison": (PROMPT, poisoned(where, n=2, seed=1))})
    error = found.pop("poison").error
    assert isinstance(error, LogitsProcessorFailed)
    assert processor.__name__ in str(error)
    assert found.pop("early").error is None
    assert tokens(found) == tokens(run(engine, others)) == tokens(expected)
    assert engine.stats.failures == {"logits_processor_failed": 1}


def test_a_processor_that_cannot_be_made_again_fails_all(
    make_engine: MakeEngine,
) -> None:
    class Once(sample.Poisonable):
        made = 0

        def __init__(self, *config: Any) -> None:
            super().__init__(*config)
            if type(self).made > 1:
                raise OSError("the file has gone")

    engine = make_engine(logits_processors=(Once,))
    found = run(
        engine,
        {"a": (PROMPT, poisoned("apply")), "b": (PROMPT, SamplingParams(max_tokens=3))},
    )
    assert all("the file has gone" in str(output.error) for output in found.values())
    later = run(engine, {"c": (PROMPT, SamplingParams(max_tokens=3))})
    assert isinstance(later["c"].error, LogitsProcessorFailed), "never without it"


# -- loading and admission


def test_validate_params_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(logits_processors=(sample.BadValidator,))
    with pytest.raises(LogitsProcessorFailed, match="BadValidator"):
        engine.add_request("r", PROMPT, SamplingParams())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "sample_processors",
            "sample_processors can't be loaded: .*give it as module:Class",
        ),
        ("sample_processors:", "module:Class"),
        ("no_such_module:It", "no_such_module:It can't be loaded: ModuleNotFoundError"),
        (
            "sample_processors:Nobody",
            "sample_processors:Nobody can't be loaded: AttributeError",
        ),
        (
            "sample_processors:logger",
            "is not a subclass of engine.logits_processors.LogitsProcessor",
        ),
        ("sample_processors:SamplingParams", "is not a subclass"),
        (dict, "is not a subclass"),
    ],
)
def test_what_is_no_processor_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_classes(EngineConfig(logits_processors=(given,)))


@pytest.mark.parametrize("method", ["apply", "remove_request"])
def test_a_missing_method_is_refused(method: str) -> None:
    methods = {
        name: value
        for name, value in vars(sample.RevisedBias).items()
        if name != method
    }
    processor = type("Incomplete", (LogitsProcessor,), methods)
    with pytest.raises(ValueError, match=f"Incomplete needs the method {method}"):
        load_classes(EngineConfig(logits_processors=(processor,)))


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_one_that_cant_be_made_stops_the_start(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    shut: list[InlinePool] = []
    monkeypatch.setattr(InlinePool, "shutdown", lambda pool: shut.append(pool))
    with pytest.raises(
        ValueError, match=r"CantBeMade can't be made: OSError\('no such file'\)"
    ):
        kind(tiny_model, "inline", logits_processors=[sample.CantBeMade])
    assert len(shut) == 1, "its pool is shut down"
