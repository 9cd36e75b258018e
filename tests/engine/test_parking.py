"""Parking: a late mask changes when a token comes, never which, and delays no other sequence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool

from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import BackendError, MaskTimeout, WorkerDied
from guided.pools.protocol import StepMasks

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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", [{}, {"block_size": 4, "num_blocks": 26, "max_model_len": 72}])
def test_parking_changes_when_and_never_what(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run, config: dict[str, Any], seed: int
) -> None:
    expected = run(make_engine(parking=False), requests())
    pool = FaultyPool(tiny_model.vocabulary)
    pool.delay = at_random(seed)
    engine = make_engine(pool, **config)
    found = run(engine, requests())
    assert said(found) == said(expected)
    assert logprobs(found) == pytest.approx(logprobs(expected), rel=1e-3, abs=1e-4)
    assert engine.stats.parkings > 20
    assert engine.stats.parked == 0
    assert engine.stats.parked_seconds > 0
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in config)


def test_a_late_sequence_of_a_group_that_has_just_failed_is_not_parked(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.fails = lambda sequence_id, position: position == 2 and sequence_id != pool.opened[-1]
    pool.delay = lambda sequence_id, position: FOREVER if position == 2 and sequence_id == pool.opened[-1] else 0
    engine.add_request("three", PROMPT, SamplingParams(regex="[0-9]{12}", n=3, max_tokens=30))
    finish(engine)
    assert engine.stats.parked == engine.stats.parkings == 0
    assert engine.stats.failures == {BackendError.code: 1}, "a group, not a row"


def test_without_parking_all_rows_wait(make_engine: MakeEngine, tiny_model: LoadedModel, run: Run) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    pool.delay = lambda sequence_id, position: 3
    engine = make_engine(pool, parking=False)
    run(engine, requests())
    assert engine.stats.parkings == 0


def test_the_others_go_on_while_one_is_parked(make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run) -> None:
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
        lengths.append(
            (
                slow.num_output_tokens,
                *(engine.groups[name].sequences[0].num_output_tokens for name in ("other", "free")),
            )
        )
    assert [row[0] for row in lengths] == [1, 2] + [2] * 8 + [4, 5], "it comes back and runs on in one step"
    assert [row[1] for row in lengths] == [row[2] for row in lengths] == list(range(1, 13))
    assert forward == [0, 3, 3] + [2] * 7 + [3, 3], "nothing is run twice"
    finish(engine)


def test_a_step_waits_for_its_first_mask_only_where_none_is_parked(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool, mask_deadline=0.002)
    pool.delay = lambda sequence_id, position: 8 if sequence_id == pool.opened[0] and position == 2 else 0
    waits: set[tuple[bool, float | None]] = set()
    collect = pool.collect

    def recorded(timeout: float | None = None, patience: float | None = None) -> StepMasks:
        waits.add((bool(engine.stats.parked), timeout))
        return collect(timeout, patience)

    pool.collect = recorded  # type: ignore[method-assign]
    for name in ("slow", "other"):
        engine.add_request(name, PROMPT, SamplingParams(regex="[0-9]{12}", max_tokens=30))
    finish(engine)
    assert waits == {(False, 0.1), (True, 0.002)}


def test_where_all_are_parked_the_step_waits(make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    asked: list[float] = []
    settled = pool.settled

    def recorded(timeout: float = 0.0) -> list[int]:
        if pool.late:
            asked.append(timeout)
        return settled(timeout)

    pool.settled = recorded  # type: ignore[method-assign]
    pool.delay = lambda sequence_id, position: 5 if position == 3 else 0
    engine.add_request("r", PROMPT, SamplingParams(regex=REGEX, max_tokens=6))
    (output,) = finish(engine)["r"].outputs
    assert len(output.token_ids) == 6
    assert asked == [0.0, 0.01, 0.0, 0.01, 0.0]


def test_a_parked_sequence_counts_and_holds_its_blocks(make_engine: MakeEngine, tiny_model: LoadedModel) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool, max_num_seqs=2)
    pool.delay = lambda sequence_id, position: FOREVER if sequence_id == pool.opened[0] else 0
    for name in ("late", "second", "third"):
        engine.add_request(name, PROMPT, SamplingParams(regex=REGEX, max_tokens=40))
    for _ in range(5):
        engine.step()
    assert engine.stats.parked == 1
    free = engine.blocks.num_free
    lengths = {name: group.sequences[0].num_output_tokens for name, group in engine.groups.items()}
    assert lengths == {"late": 0, "second": 5, "third": 0}
    engine.abort_request("late")
    assert engine.stats.parked == 0
    assert engine.blocks.num_free > free
    engine.step()
    assert engine.groups["third"].sequences[0].num_output_tokens == 1


def test_a_mask_that_never_comes_ends_its_group_and_no_other(
    make_engine: MakeEngine, tiny_model: LoadedModel, run: Run
) -> None:
    expected = run(make_engine(), requests())

    class ImpatientPool(FaultyPool):
        """Fails a row that has been late for 0.2 s."""

        since: float | None = None

        def settled(self, timeout: float = 0.0) -> list[int]:
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since > 0.2:
                self.fails = lambda sequence_id, position: self.late.get(sequence_id, (0, 0))[1] > 0
                return list(self.late)
            return super().settled(timeout)

        def collect(self, timeout: float | None = None, patience: float | None = None) -> StepMasks:
            step = super().collect(timeout, patience)
            step.failed = dict.fromkeys(step.failed, MaskTimeout("no mask"))
            return step

    pool = ImpatientPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: FOREVER if sequence_id == pool.opened[1] and position == 4 else 0
    started = time.monotonic()
    found = run(engine, requests())
    assert time.monotonic() - started >= 0.2
    failed = found.pop("seeded")
    del expected["seeded"]
    assert isinstance(failed.error, MaskTimeout)
    assert said(found) == said(expected)
    assert engine.stats.parked == 0


@pytest.mark.parametrize("how", ["fails", "loses"])
def test_a_matcher_that_is_lost_while_parked_ends_its_group(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run, how: str
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    for name, (prompt, params) in requests().items():
        engine.add_request(name, prompt, params)
    pool.delay = lambda sequence_id, position: 6 if sequence_id == pool.opened[0] and position == 3 else 0
    while not engine.stats.parked:
        engine.step()
    victim = pool.opened[0]
    if how == "fails":
        pool.fails = lambda sequence_id, position: sequence_id == victim
    else:
        pool.lose(victim)
    found = finish(engine)
    assert [name for name, output in found.items() if output.error] == ["seeded"]
    assert isinstance(found["seeded"].error, BackendError if how == "fails" else WorkerDied)
    assert engine.stats.parked == 0


def test_a_preempted_parked_sequence_ends_with_its_last_token(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run
) -> None:
    """The token that it was parked before is a stop token, or its last: it never runs again."""
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool, block_size=4, num_blocks=12, max_model_len=44)
    pool.delay = lambda sequence_id, position: 8 if sequence_id == pool.opened[-1] and position == 3 else 0
    prompt = [5] * 8
    engine.add_request("first", prompt, SamplingParams(regex=REGEX, max_tokens=34))
    engine.add_request("second", prompt, SamplingParams(regex=REGEX, max_tokens=34))
    engine.add_request("last", prompt, SamplingParams(regex="[0-9]{3}x", max_tokens=4))
    while not engine.stats.parked:
        engine.step()
    last = engine.groups["last"].sequences[0]
    engine.scheduler.running.remove(last)
    engine.scheduler.preempt(last)
    found = finish(engine)
    assert [len(found[name].outputs[0].token_ids) for name in ("first", "second", "last")] == [34, 34, 4]
    assert not engine.scheduler.preempted
