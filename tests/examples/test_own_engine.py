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
from guided.errors import BackendError, UnsupportedConstraint
from guided.pools.inline import InlinePool
from guided.processors.guided_processor import GuidedProcessor
from guided.vocabulary import Vocabulary

DATE = r"20\d\d-\d\d-\d\d"


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def vocabulary(model: Any) -> Vocabulary:
    return Vocabulary.from_tokenizer(load(checkpoint_path()), model.config.vocab_size)


def requests(vocabulary: Vocabulary) -> list[Any]:
    """Three dates, and a request without a constraint (rounding may change its text in
    another batch)."""
    prompts = [
        "On 2024-03-05: ",
        "It was 2021-12-24, then ",
        "2030-01-01, or ",
        "Anything: ",
    ]
    constraints = [*[Constraint.regex(DATE)] * 3, None]
    return [
        own_engine.Request(vocabulary.encode(text), constraint)
        for text, constraint in zip(prompts, constraints, strict=True)
    ]


def texts(vocabulary: Vocabulary, found: list[Any]) -> list[bytes]:
    return [vocabulary.decode(request.output) for request in found]


def test_late_and_failed_rows_change_no_other(
    model: Any, vocabulary: Vocabulary
) -> None:
    """The first request is late now and then, the second one fails."""
    undisturbed = requests(vocabulary)
    own_engine.decode(
        model, GuidedProcessor(InlinePool(vocabulary)), undisturbed, max_tokens=20
    )
    assert all(
        re.fullmatch(DATE, text.decode()) for text in texts(vocabulary, undisturbed)[:3]
    )
    pool, found = FaultyPool(vocabulary), requests(vocabulary)
    pool.delay = lambda sequence_id, position: (
        3 if sequence_id == 0 and position % 3 == 1 else 0
    )
    pool.fails = lambda sequence_id, position: (sequence_id, position) == (1, 2)
    own_engine.decode(model, GuidedProcessor(pool), found, max_tokens=20)
    assert isinstance(found[1].error, BackendError)
    assert [request.error is None for request in found] == [True, False, True, True]
    assert [found[index].output for index in (0, 2)] == [
        undisturbed[index].output for index in (0, 2)
    ]
    assert set(pool.opened) == pool.freed


def test_a_constraint_that_cannot_be_compiled_ends_its_request(
    model: Any, vocabulary: Vocabulary
) -> None:
    found = requests(vocabulary)
    found[1].constraint = Constraint.regex("a(?=b)")
    own_engine.decode(
        model, GuidedProcessor(InlinePool(vocabulary)), found, max_tokens=20
    )
    assert isinstance(found[1].error, UnsupportedConstraint)
    assert [request.error is None for request in found] == [True, False, True, True]
