"""A late mask changes when a token comes, never which, and delays no other sequence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import BackendError, WorkerDied
from guided.post_processor import LogitPostProcessor
from guided.sequence import GuidedSequence

MakeEngine = Callable[..., LLMEngine]
Run = Callable[..., dict[str, RequestOutput]]
PROMPT = "Zwölf Boxkämpfer"
REGEX = "[0-9]{30,60}[a-f]{4,9}"
FOREVER = 1 << 30


def requests(**others: Any) -> dict[str, tuple[Any, SamplingParams]]:
    """All that could depend on when a row is sampled: generators, penalties, bias, suppression, log-probabilities."""
    fields: dict[str, dict[str, Any]] = {
        "seeded": {"regex": REGEX, "n": 3, "seed": 5, "logprobs": 2},
        "unseeded": {"regex": REGEX, "top_k": 20, "min_tokens": 25},
        "penalised": {"regex": REGEX, "temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        "biased": {"regex": REGEX, "temperature": 0.0, "logit_bias": {20: 2.0, 30: -3.0}, "logprobs": 0},
        "stopped": {"choice": ["yes", "no", "naïve"], "seed": 1, "presence_penalty": 0.5},
        "free": {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.1},
        "random": {"seed": 3},
    }
    return {name: (PROMPT, SamplingParams(**{"max_tokens": 30, **params, **others})) for name, params in fields.items()}


def said(found: dict[str, RequestOutput]) -> dict[str, list[Any]]:
    return {
        name: [(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for name, output in found.items()
    }


def logprobs(found: dict[str, RequestOutput]) -> list[float]:
    return [
        entry.logprob
        for name in sorted(found)
        for one in found[name].outputs
        for entries in one.logprobs or ()
        for _, entry in sorted(entries.items())
    ]


def at_random(seed: int) -> Callable[[int, int], int]:
    """Every third mask is late, by up to four looks."""
    generator = random.Random(seed)
    return lambda sequence_id, position: generator.choice([0, 0, 0, 0, 1, 4])


TIGHT = {"block_size": 4, "num_blocks": 26, "max_model_len": 72}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", [{}, TIGHT, {"mask_deadline": 0.0}])
def test_late_masks_change_when_and_not_what(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run, config: dict[str, Any], seed: int
) -> None:
    expected = run(make_engine(), requests())
    pool = FaultyPool(tiny_model.vocabulary)
    pool.delay = at_random(seed)
    engine = make_engine(pool, **config)
    found = run(engine, requests())
    assert said(found) == said(expected)
    assert logprobs(found) == pytest.approx(logprobs(expected), rel=1e-3, abs=1e-4)
    assert engine.stats.late_rows > 20
    assert engine.stats.computed_again > 0
    assert engine.stats.late == 0
    assert (engine.scheduler.num_preemptions > 0) == (config is TIGHT)


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 3}, {"forced_tokens": True}])
def test_late_masks_with_several_tokens_per_step(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run, config: dict[str, Any]
) -> None:
    wanted = {name: one for name, one in requests().items() if name not in ("free", "random")}
    wanted["copied"] = ("12 23 12 23 12", SamplingParams(regex="( 12 23){9}", max_tokens=60, seed=4, n=2, logprobs=1))
    expected = run(make_engine(), wanted)
    pool = FaultyPool(tiny_model.vocabulary, forced_tokens="forced_tokens" in config)
    pool.delay = at_random(5)
    engine = make_engine(pool, **config)
    found = run(engine, wanted)
    assert said(found) == said(expected)
    assert logprobs(found) == pytest.approx(logprobs(expected), rel=1e-3, abs=1e-4)
    assert engine.stats.late_rows > 20
    assert engine.stats.forced_tokens + engine.stats.accepted_tokens > 0


def test_a_late_sequence_of_a_failed_group_is_not_skipped(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.fails = lambda sequence_id, position: position == 2 and sequence_id != pool.opened[-1]
    pool.delay = lambda sequence_id, position: FOREVER if position == 2 and sequence_id == pool.opened[-1] else 0
    engine.add_request("three", PROMPT, SamplingParams(regex="[0-9]{12}", n=3, max_tokens=30))
    finish(engine)
    assert engine.stats.late == engine.stats.late_rows == 0
    assert engine.stats.failures == {BackendError.code: 1}, "a group, not a row"


def test_a_group_that_fails_leaves_no_late_sequence(make_engine: MakeEngine, tiny_model: LoadedModel) -> None:
    """One of its sequences is late, and the other one fails a step later."""
    pool = FaultyPool(tiny_model.vocabulary)
    pool.delay = lambda sequence_id, position: FOREVER if (sequence_id == pool.opened[0] and position == 2) else 0
    pool.fails = lambda sequence_id, position: sequence_id == pool.opened[1] and position == 4
    engine = make_engine(pool=pool)
    engine.add_request("pair", PROMPT, SamplingParams(regex=REGEX, n=2, max_tokens=30))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.late == 0


def test_the_others_go_on_while_one_is_late(make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: 8 if sequence_id == pool.opened[0] and position == 2 else 0
    engine.add_request("slow", PROMPT, SamplingParams(regex="[0-9]{12}", max_tokens=30))
    engine.add_request("other", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30))
    engine.add_request("free", PROMPT, SamplingParams(temperature=0.0, max_tokens=30))
    (slow,) = engine.groups["slow"].sequences
    forward: list[int] = []
    execute = engine.runner.execute

    def counted(batch: Any) -> torch.Tensor:
        forward.append(len(batch.decodes))
        return execute(batch)

    engine.runner.execute = counted  # type: ignore[method-assign]
    lengths = []
    for _ in range(12):
        engine.step()
        others = (engine.groups[name].sequences[0].num_output_tokens for name in ("other", "free"))
        lengths.append((slow.num_output_tokens, *others))
    assert [row[0] for row in lengths] == [1, 2] + [2] * 8 + [3, 4]
    assert [row[1] for row in lengths] == [row[2] for row in lengths] == list(range(1, 13))
    assert forward == [0, 3, 3] + [2] * 7 + [3, 3], "its last token is computed twice"
    assert (engine.stats.late_rows, engine.stats.computed_again) == (1, 1)
    finish(engine)


def test_a_step_that_waits_ends_for_new_requests(make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run) -> None:
    """With one sequence, whose mask does not come: a step takes 0.1 s, and the next one sees what is new."""
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: FOREVER if sequence_id == pool.opened[0] else 0
    engine.add_request("late", PROMPT, SamplingParams(regex=REGEX, max_tokens=40))
    started = time.monotonic()
    engine.step()
    engine.step()
    assert 0.2 <= time.monotonic() - started < 2.0
    assert (engine.stats.late_rows, engine.stats.computed_again) == (2, 1)
    engine.add_request("new", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30))
    for _ in range(3):
        engine.step()
    assert engine.groups["new"].sequences[0].num_output_tokens == 3
    engine.abort_request("late")
    finish(engine)
    assert engine.stats.late == 0


@pytest.mark.parametrize("how", ["fails", "loses"])
def test_a_matcher_that_is_lost_while_late_ends_its_group(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run, how: str
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    for name, (prompt, params) in requests().items():
        engine.add_request(name, prompt, params)
    pool.delay = lambda sequence_id, position: 6 if sequence_id == pool.opened[0] and position == 3 else 0
    while not engine.stats.late:
        engine.step()
    victim = pool.opened[0]
    if how == "fails":
        pool.fails = lambda sequence_id, position: sequence_id == victim
    else:
        pool.lose(victim)
    found = finish(engine)
    assert [name for name, output in found.items() if output.error] == ["seeded"]
    assert isinstance(found["seeded"].error, BackendError if how == "fails" else WorkerDied)
    assert engine.stats.late == 0


def test_a_late_sequence_that_is_preempted_continues(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    config = {"block_size": 4, "num_blocks": 12, "max_model_len": 44}
    wanted = {"first": (REGEX, 34), "second": (REGEX, 34), "last": ("[0-9]{3}x", 4)}

    def add(engine: LLMEngine) -> None:
        for name, (regex, tokens) in wanted.items():
            engine.add_request(name, [5] * 8, SamplingParams(regex=regex, max_tokens=tokens, seed=3))

    waiting = make_engine(**config)
    add(waiting)
    expected = finish(waiting)
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool, **config)
    pool.delay = lambda sequence_id, position: 8 if sequence_id == pool.opened[-1] and position == 3 else 0
    add(engine)
    while not engine.stats.late:
        engine.step()
    engine.scheduler.preempt(engine.groups["last"].sequences[0])
    found = finish(engine)
    assert said(found) == said(expected)
    assert engine.stats.late == 0


def test_beams_wait_for_each_other_and_others_do_not(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: 4 if sequence_id == pool.opened[1] and position == 2 else 0
    beams = SamplingParams(regex="[a-z ]{30}", use_beam_search=True, n=3, temperature=0.0, max_tokens=20)
    engine.add_request("beams", PROMPT, beams)
    engine.add_request("other", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30))
    group, lengths = engine.groups["beams"], []
    for _ in range(8):
        engine.step()
        lengths.append([one.num_output_tokens for one in [*group.sequences, *engine.groups["other"].sequences]])
    assert lengths == [[own] * 3 + [other] for own, other in zip([1, 2, 2, 2, 2, 2, 3, 4], range(1, 9), strict=True)]
    assert (engine.stats.late_rows, engine.stats.computed_again) == (1, 3)
    finish(engine)


def test_a_post_processor_gets_each_token_once(make_engine: MakeEngine, tiny_model: LoadedModel, run: Run) -> None:
    class Noting(LogitPostProcessor):
        def __init__(self) -> None:
            self.seen: dict[int, list[int]] = {}
            self.prepared = 0

        def prepare(self, sequences: Any, logits_rows: Any = None, new_tokens: Any = None) -> None:
            self.prepared += len(sequences)

        def sampled(self, seq: GuidedSequence, token_id: int, logprobs: Any) -> tuple[int, list[int], bool]:
            self.seen.setdefault(seq.sequence_id, []).append(token_id)
            return 0, [token_id], False

    pool, noting = FaultyPool(tiny_model.vocabulary), Noting()
    pool.delay = at_random(1)
    engine = LLMEngine(tiny_model, EngineConfig(max_model_len=128), pool, noting)
    found = run(engine, requests())
    outputs = [one.token_ids for output in found.values() for one in output.outputs]
    assert sorted(noting.seen.values()) == sorted(outputs)
    assert noting.prepared > sum(map(len, outputs))
