"""The loop of examples/own_engine.py, as a reader runs it, with failed and late masks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from transformers import AutoModelForCausalLM

from engine.default_model import checkpoint_path
from examples.default_model_training.tokenizer import load
from guided.constraint import Constraint
from guided.errors import BackendError, UnsupportedConstraint, WorkerDied
from guided.pools.inline import InlinePool
from guided.processor import GuidedProcessor
from guided.vocabulary import Vocabulary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "own_engine.py"
DATE = r"20\d\d-\d\d-\d\d"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_engine"] = module  # for dataclasses, which look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def vocabulary(model: Any) -> Vocabulary:
    return Vocabulary.from_tokenizer(load(checkpoint_path()), model.config.vocab_size)


def requests(example: ModuleType, vocabulary: Vocabulary) -> list[Any]:
    """Three dates, and a request without a constraint (rounding may change its text in another batch)."""
    prompts = ["On 2024-03-05: ", "It was 2021-12-24, then ", "2030-01-01, or ", "Anything: "]
    constraints = [*[Constraint.regex(DATE)] * 3, None]
    return [
        example.Request(vocabulary.encode(text), constraint)
        for text, constraint in zip(prompts, constraints, strict=True)
    ]


def texts(vocabulary: Vocabulary, found: list[Any]) -> list[bytes]:
    return [vocabulary.decode(request.output) for request in found]


@pytest.fixture(scope="module")
def undisturbed(example: ModuleType, model: Any, vocabulary: Vocabulary) -> list[bytes]:
    found = requests(example, vocabulary)
    example.decode(model, GuidedProcessor(InlinePool(vocabulary)), found, max_tokens=20)
    assert all(re.fullmatch(DATE, text.decode()) for text in texts(vocabulary, found)[:3])
    return texts(vocabulary, found)


def test_late_rows_get_the_same_tokens(
    example: ModuleType, model: Any, vocabulary: Vocabulary, undisturbed: list[bytes]
) -> None:
    pool = FaultyPool(vocabulary)
    waited: list[tuple[int, int]] = []

    def delay(sequence_id: int, position: int) -> int:
        waited.append((sequence_id, position))
        return 3 if sequence_id == 0 and position % 3 == 1 else 2 * (sequence_id == 1 and position == 4)

    pool.delay = delay
    found = requests(example, vocabulary)
    example.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert {(0, 1), (0, 4), (1, 4)} <= set(waited)
    assert texts(vocabulary, found)[:3] == undisturbed[:3]
    assert not any(request.error for request in found)
    assert set(pool.opened) == pool.freed


def test_masks_from_actors_are_the_same(
    example: ModuleType, model: Any, vocabulary: Vocabulary, undisturbed: list[bytes], local_ray: None
) -> None:
    """`--ray`, in the tests' own Ray."""
    found = requests(example, vocabulary)
    pool = example.open_pool(vocabulary, ray=True)
    try:
        example.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    finally:
        pool.shutdown()
    assert not any(request.error for request in found)
    assert texts(vocabulary, found)[:3] == undisturbed[:3]


def test_a_failed_row_ends_its_request_and_no_other(
    example: ModuleType, model: Any, vocabulary: Vocabulary, undisturbed: list[bytes]
) -> None:
    pool = FaultyPool(vocabulary)
    pool.fails = lambda sequence_id, position: sequence_id == 1 and position == 2
    found = requests(example, vocabulary)
    example.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert isinstance(found[1].error, BackendError)
    assert len(found[1].output) == 2
    assert [request.error is None for request in found] == [True, False, True, True]
    for index in (0, 2):
        assert texts(vocabulary, found)[index] == undisturbed[index]
    assert pool.released == 3


def test_a_worker_that_dies_between_two_steps_ends_its_requests(
    example: ModuleType, model: Any, vocabulary: Vocabulary, undisturbed: list[bytes]
) -> None:
    pool = FaultyPool(vocabulary)

    def dies(sequence_id: int, position: int) -> bool:
        if (sequence_id, position) == (2, 3):
            pool.lose(2)
        return False

    pool.fails = dies
    found = requests(example, vocabulary)
    example.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert isinstance(found[2].error, WorkerDied)
    assert texts(vocabulary, found)[:2] == undisturbed[:2]


def test_a_constraint_that_cant_be_compiled_fails_its_request_only(
    example: ModuleType, model: Any, vocabulary: Vocabulary, undisturbed: list[bytes]
) -> None:
    found = requests(example, vocabulary)
    found[0].constraint = Constraint.regex("a(?=b)")
    example.decode(model, GuidedProcessor(FaultyPool(vocabulary)), found, max_tokens=20)
    assert isinstance(found[0].error, UnsupportedConstraint)
    assert texts(vocabulary, found)[1:3] == undisturbed[1:3]
