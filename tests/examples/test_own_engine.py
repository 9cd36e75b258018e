"""The loop of examples/own_engine.py with failed and late masks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from transformers import AutoModelForCausalLM

from engine.default_model import checkpoint_path
from examples import own_engine
from examples.default_model_training.tokenizer import load
from guided.constraint import Constraint
from guided.errors import BackendError, UnsupportedConstraint, WorkerDied
from guided.pools.inline import InlinePool
from guided.processor import GuidedProcessor
from guided.vocabulary import Vocabulary

DATE = r"20\d\d-\d\d-\d\d"


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def vocabulary(model: Any) -> Vocabulary:
    return Vocabulary.from_tokenizer(load(checkpoint_path()), model.config.vocab_size)


def requests(vocabulary: Vocabulary) -> list[Any]:
    """Three dates, and a request without a constraint (rounding may change its text in another batch)."""
    prompts = ["On 2024-03-05: ", "It was 2021-12-24, then ", "2030-01-01, or ", "Anything: "]
    constraints = [*[Constraint.regex(DATE)] * 3, None]
    return [
        own_engine.Request(vocabulary.encode(text), constraint)
        for text, constraint in zip(prompts, constraints, strict=True)
    ]


def texts(vocabulary: Vocabulary, found: list[Any]) -> list[bytes]:
    return [vocabulary.decode(request.output) for request in found]


@pytest.fixture(scope="module")
def undisturbed(model: Any, vocabulary: Vocabulary) -> list[bytes]:
    found = requests(vocabulary)
    own_engine.decode(model, GuidedProcessor(InlinePool(vocabulary)), found, max_tokens=20)
    assert all(re.fullmatch(DATE, text.decode()) for text in texts(vocabulary, found)[:3])
    return texts(vocabulary, found)


def test_late_rows_get_the_same_tokens(model: Any, vocabulary: Vocabulary, undisturbed: list[bytes]) -> None:
    pool = FaultyPool(vocabulary)
    waited: list[tuple[int, int]] = []

    def delay(sequence_id: int, position: int) -> int:
        waited.append((sequence_id, position))
        return 3 if sequence_id == 0 and position % 3 == 1 else 2 * (sequence_id == 1 and position == 4)

    pool.delay = delay
    found = requests(vocabulary)
    own_engine.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert {(0, 1), (0, 4), (1, 4)} <= set(waited)
    assert texts(vocabulary, found)[:3] == undisturbed[:3]
    assert not any(request.error for request in found)
    assert set(pool.opened) == pool.freed


def test_masks_from_actors_are_the_same(
    model: Any, vocabulary: Vocabulary, undisturbed: list[bytes], local_ray: None
) -> None:
    """`--ray`, in the tests' own Ray."""
    found = requests(vocabulary)
    pool = own_engine.open_pool(vocabulary, ray=True)
    try:
        own_engine.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    finally:
        pool.shutdown()
    assert not any(request.error for request in found)
    assert texts(vocabulary, found)[:3] == undisturbed[:3]


def cannot_be_compiled(pool: FaultyPool, found: list[Any]) -> None:
    found[1].constraint = Constraint.regex("a(?=b)")


def row_fails(pool: FaultyPool, found: list[Any]) -> None:
    pool.fails = lambda sequence_id, position: (sequence_id, position) == (1, 2)


def worker_dies(pool: FaultyPool, found: list[Any]) -> None:
    def dies(sequence_id: int, position: int) -> bool:
        if (sequence_id, position) == (1, 3):
            pool.lose(1)
        return False

    pool.fails = dies


@pytest.mark.parametrize(
    ("fault", "error"),
    [(cannot_be_compiled, UnsupportedConstraint), (row_fails, BackendError), (worker_dies, WorkerDied)],
)
def test_a_fault_ends_its_request_and_no_other(
    model: Any, vocabulary: Vocabulary, undisturbed: list[bytes], fault: Any, error: type
) -> None:
    pool, found = FaultyPool(vocabulary), requests(vocabulary)
    fault(pool, found)
    own_engine.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert isinstance(found[1].error, error)
    assert [request.error is None for request in found] == [True, False, True, True]
    assert [texts(vocabulary, found)[index] for index in (0, 2)] == [undisturbed[index] for index in (0, 2)]
    assert set(pool.opened) == pool.freed
