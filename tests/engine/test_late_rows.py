"""A late mask changes when a token comes, never which, and delays no other sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from engine.step.scheduler import Batch
from guided.errors import BackendError, WorkerDied
from guided.processors.logit_post_processor import LogitPostProcessor, SampledEdit
from guided.sequence import SequenceOutput
from tests.engine.conftest import MakeEngine, finish, run

PROMPT = "Zwölf Boxkämpfer"
REGEX = "[0-9]{30,60}[a-f]{4,9}"
FOREVER = 1 << 30


def test_the_others_go_on_while_one_is_late(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: (
        8 if sequence_id == pool.opened[0] and position == 2 else 0
    )
    engine.add_request("slow", PROMPT, SamplingParams(regex="[0-9]{12}", max_tokens=30))
    engine.add_request(
        "other", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30)
    )
    engine.add_request("free", PROMPT, SamplingParams(temperature=0.0, max_tokens=30))
    (slow,) = engine.groups["slow"].sequences
    groups, computed = list(engine.groups.values()), count_computed(engine)
    lengths = []
    for _ in range(12):
        engine.step()
        others = (
            engine.groups[name].sequences[0].num_output_tokens
            for name in ("other", "free")
        )
        lengths.append((slow.num_output_tokens, *others))
    assert [row[0] for row in lengths] == [1, 2] + [2] * 8 + [3, 4]
    assert (
        [row[1] for row in lengths] == [row[2] for row in lengths] == list(range(1, 13))
    )
    assert engine.stats.late_rows == 1
    finish(engine)
    assert computed() == sum(one.sequences[0].length - 1 for one in groups), (
        "no token is computed twice"
    )


def count_computed(engine: LLMEngine) -> Callable[[], int]:
    """Count the tokens of the forward passes that follow."""
    counts: list[int] = []
    execute = engine.runner.execute

    def counted(batch: Batch) -> torch.Tensor:
        hidden = execute(batch)
        counts.append(len(hidden))
        return hidden

    engine.runner.execute = counted  # type: ignore[method-assign]
    return lambda: sum(counts)


def test_a_step_that_waits_ends_for_new_requests(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    """With one sequence, whose mask does not come: a step ends without it, and the next
    one sees what is new."""
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: (
        FOREVER if sequence_id == pool.opened[0] else 0
    )
    engine.add_request("late", PROMPT, SamplingParams(regex=REGEX, max_tokens=40))
    engine.step()
    engine.step()
    assert engine.stats.late_rows == 2
    engine.add_request("new", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30))
    for _ in range(3):
        engine.step()
    assert engine.groups["new"].sequences[0].num_output_tokens == 3
    engine.abort_request("late")
    finish(engine)
    assert engine.stats.late == 0


@pytest.mark.parametrize(
    "how",
    ["it fails", "it is lost", "its sibling fails at once", "its sibling fails later"],
)
def test_a_failure_beside_a_late_mask_ends_that_group(
    make_engine: MakeEngine, tiny_model: LoadedModel, how: str
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    params = [SamplingParams(regex=REGEX, n=n, max_tokens=30) for n in (2, 1)]
    groups = [engine.add_request(f"{one.n}", PROMPT, one) for one in params]
    pool.delay = lambda sequence_id, position: (
        6 if sequence_id == pool.opened[0] and position == 2 else 0
    )
    if "sibling" in how:
        at = 4 if "later" in how else 2
        pool.fails = lambda sequence_id, position: (
            sequence_id == pool.opened[1] and position == at
        )
    while not engine.stats.late_rows:
        engine.step()
    if how == "it is lost":
        pool.lose(pool.opened[0])
    elif how == "it fails":
        pool.fails = lambda sequence_id, position: sequence_id == pool.opened[0]
    finish(engine)
    error = WorkerDied if how == "it is lost" else BackendError
    assert [type(group.sequences[0].error) for group in groups] == [error, type(None)]
    assert engine.stats.late == 0
    assert engine.stats.failures == {error.code: 1}, "a group, not a row"
    assert pool.freed.issuperset(pool.opened)


def test_beams_wait_for_each_other_and_others_do_not(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    pool = FaultyPool(tiny_model.vocabulary)
    engine = make_engine(pool)
    pool.delay = lambda sequence_id, position: (
        4 if sequence_id == pool.opened[1] and position == 2 else 0
    )
    beams = SamplingParams(
        regex="[a-z ]{30}", use_beam_search=True, n=3, temperature=0.0, max_tokens=20
    )
    engine.add_request("beams", PROMPT, beams)
    engine.add_request(
        "other", PROMPT, SamplingParams(regex="[0-9]{20}", max_tokens=30)
    )
    group, lengths = engine.groups["beams"], []
    for _ in range(8):
        engine.step()
        lengths.append(
            [
                one.num_output_tokens
                for one in [*group.sequences, *engine.groups["other"].sequences]
            ]
        )
    assert lengths == [
        [own] * 3 + [other]
        for own, other in zip([1, 2, 2, 2, 2, 2, 3, 4], range(1, 9), strict=True)
    ]
    assert engine.stats.late_rows == 1
    finish(engine)


def test_a_post_processor_gets_each_token_once(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    class Noting(LogitPostProcessor):
        needs_samples = True

        def __init__(self) -> None:
            self.seen: dict[int, list[int]] = {}

        def edits(
            self, sequences: Any, samples: Sequence[SequenceOutput | None] = ()
        ) -> dict[int, SampledEdit]:
            for sample in samples:
                if sample is not None:
                    self.seen.setdefault(sample.parent_seq_id, []).append(
                        sample.output_token
                    )
            return {}

    pool, noting, generator = (
        FaultyPool(tiny_model.vocabulary),
        Noting(),
        random.Random(1),
    )
    pool.delay = lambda sequence_id, position: generator.choice([0, 0, 1, 4])
    engine = LLMEngine(tiny_model, EngineConfig(max_model_len=128), pool, noting)
    params = SamplingParams(regex=REGEX, n=2, max_tokens=30)
    found = run(engine, dict.fromkeys("abc", (PROMPT, params)))
    outputs = [one.token_ids for output in found.values() for one in output.outputs]
    assert sorted(noting.seen.values()) == sorted(outputs)
    assert engine.stats.late_rows > 10
