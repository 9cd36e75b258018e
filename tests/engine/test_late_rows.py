"""A late mask changes when a token comes, never which, and delays no other sequence."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.errors import BackendError, WorkerDied
from guided.post_processor import LogitPostProcessor
from guided.sequence import GuidedSequence
from tests.engine.conftest import MakeEngine, Run

PROMPT = "Zwölf Boxkämpfer"
REGEX = "[0-9]{30,60}[a-f]{4,9}"
FOREVER = 1 << 30


@pytest.mark.parametrize("at", [2, 4])
def test_a_group_that_fails_leaves_no_late_sequence(
    make_engine: MakeEngine, tiny_model: LoadedModel, finish: Run, at: int
) -> None:
    """One of its sequences is late, and the other one fails in the same step, or later."""
    pool = FaultyPool(tiny_model.vocabulary)
    pool.delay = lambda sequence_id, position: FOREVER if (sequence_id == pool.opened[0] and position == 2) else 0
    pool.fails = lambda sequence_id, position: sequence_id == pool.opened[1] and position == at
    engine = make_engine(pool=pool)
    engine.add_request("pair", PROMPT, SamplingParams(regex=REGEX, n=2, max_tokens=30))
    finish(engine)
    assert engine.stats.late == 0
    assert engine.stats.failures == {BackendError.code: 1}, "a group, not a row"


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
    for name, n in (("victim", 2), ("other", 1)):
        engine.add_request(name, PROMPT, SamplingParams(regex=REGEX, n=n, max_tokens=30))
    pool.delay = lambda sequence_id, position: 6 if sequence_id == pool.opened[0] and position == 3 else 0
    while not engine.stats.late:
        engine.step()
    victim = pool.opened[0]
    if how == "fails":
        pool.fails = lambda sequence_id, position: sequence_id == victim
    else:
        pool.lose(victim)
    found = finish(engine)
    assert [name for name, output in found.items() if output.error] == ["victim"]
    assert isinstance(found["victim"].error, BackendError if how == "fails" else WorkerDied)
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

        def sampled(self, seq: GuidedSequence, token_id: int, logprobs: Any) -> tuple[int, list[int], bool]:
            self.seen.setdefault(seq.sequence_id, []).append(token_id)
            return 0, [token_id], False

    pool, noting, generator = FaultyPool(tiny_model.vocabulary), Noting(), random.Random(1)
    pool.delay = lambda sequence_id, position: generator.choice([0, 0, 1, 4])
    engine = LLMEngine(tiny_model, EngineConfig(max_model_len=128), pool, noting)
    params = SamplingParams(regex=REGEX, n=2, max_tokens=30)
    found = run(engine, dict.fromkeys("abc", (PROMPT, params)))
    outputs = [one.token_ids for output in found.values() for one in output.outputs]
    assert sorted(noting.seen.values()) == sorted(outputs)
    assert engine.stats.late_rows > 10
