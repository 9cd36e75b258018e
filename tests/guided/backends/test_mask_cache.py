"""Cached masks stay within one bound, are removed with their grammar, and equal those without a cache."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from guided.backends import BACKENDS, Backends
from guided.backends.base import Matcher
from guided.backends.mask_cache import MaskCache
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary

KEEPING = [name for name, adapter in BACKENDS.items() if adapter.keeps_masks]
ROW = np.arange(50, dtype=np.int32)
"""200 bytes."""


def test_one_bound_for_all_grammars() -> None:
    cache = MaskCache(5 * ROW.nbytes)
    first, second = cache.of_grammar(), cache.of_grammar()
    for key in range(4):
        first.put(key, ROW)
    assert first.get(0) is ROW  # used last: key 1 is the oldest now
    second.put(0, ROW)
    second.put(1, ROW)
    assert cache.nbytes == 5 * ROW.nbytes
    assert [first.get(key) is not None for key in range(4)] == [True, False, True, True]
    assert [second.get(key) is not None for key in range(2)] == [True, True]


def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache = MaskCache(0)
    masks = cache.of_grammar()
    masks.put("state", ROW)
    assert masks.get("state") is None
    assert cache.nbytes == 0


def test_masks_go_with_their_grammar() -> None:
    cache = MaskCache(10 * ROW.nbytes)
    gone, stays = cache.of_grammar(), cache.of_grammar()
    for key in range(4):
        gone.put(key, ROW)
    del gone
    gc.collect()
    stays.put("state", ROW)
    assert cache.nbytes == ROW.nbytes
    for key in range(9):  # none is pushed out by what is gone
        stays.put(key, ROW)
    assert stays.get("state") is ROW


@pytest.mark.parametrize("backend", KEEPING)
def test_sequences_and_backends_share_the_bound(vocabulary: Vocabulary, backend: str) -> None:
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    backends = Backends(vocabulary, mask_cache_bytes=3 * row.nbytes)
    for choice in ("abcdefgh", "stuvwxyz"):
        grammar = backends[backend].compile(Constraint.choice([choice]))
        for _ in range(2):
            matcher = grammar.matcher()
            for character in choice:
                matcher.fill_bitmask(row)
                token = vocabulary.encode(character)[0]
                assert token in allowed_ids(row)
                matcher.accept_tokens([token])
    assert backends.masks.nbytes == 3 * row.nbytes


CONSTRAINTS = [
    Constraint.json_schema(json.dumps(schema))
    for schema in (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name"],
        },
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 4}, "maxItems": 3},
        {"type": "array", "items": {"anyOf": [{"enum": ["red", "green"]}, {"type": "null"}, {"type": "number"}]}},
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^[a-c]{2,5}é?$"}, "b": {"type": "boolean"}},
        },
    )
] + [Constraint.regex("(ab|ac|[0-9é]){2,9}x*"), Constraint.choice(["yes", "yes please", "no", "näh"])]


@pytest.fixture(scope="module")
def kept(vocabulary: Vocabulary) -> list[Backends]:
    """Backends without a cache, with one that is too small, and with a large one."""
    row = 4 * words(vocabulary.padded_vocab_size)
    return [Backends(vocabulary, mask_cache_bytes=size) for size in (0, 3 * row, 1 << 20)]


@pytest.fixture(scope="module")
def grammars(kept: list[Backends]) -> dict[tuple[str, Constraint], list[Any]]:
    """Grammars by backend and constraint, compiled once, so that examples share cached masks."""
    return {
        (backend, constraint): [backends[backend].compile(constraint) for backends in kept]
        for backend in KEEPING
        for constraint in CONSTRAINTS
    }


def masks(matchers: list[Matcher], row: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the mask that all of them give. Each row is filled with other bits before."""
    filled = []
    for matcher in matchers:
        row[:] = 0x5A5A5A5A
        matcher.fill_bitmask(row)
        filled.append(row.copy())
    assert all((other == filled[0]).all() for other in filled[1:])
    assert len({matcher.is_accepting() for matcher in matchers}) == 1
    return filled[0]


@pytest.mark.parametrize("backend", KEEPING)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    constraint=st.sampled_from(CONSTRAINTS),
    moves=st.lists(st.tuples(st.sampled_from(["accept", "accept", "accept", "back", "fork"]), st.integers(0, 999))),
)
def test_kept_masks_are_those_that_would_be_computed(
    grammars: dict[tuple[str, Constraint], list[Any]],
    vocabulary: Vocabulary,
    backend: str,
    constraint: Constraint,
    moves: list[tuple[str, int]],
) -> None:
    matchers: list[Matcher] = [grammar.matcher() for grammar in grammars[backend, constraint]]
    forks: list[tuple[list[Matcher], int]] = []
    row = np.zeros(words(vocabulary.padded_vocab_size), dtype=np.int32)
    text = set(vocabulary.text_token_ids)
    length = 0
    for move, number in moves:
        allowed = [int(token) for token in allowed_ids(masks(matchers, row)) if token in text]
        if move == "accept" and allowed:
            for matcher in matchers:
                matcher.accept_tokens([allowed[number % len(allowed)]])
            length += 1
        elif move == "back" and length:
            count = 1 + number % length
            for matcher in matchers:
                matcher.rollback(count)
            length -= count
        elif move == "fork":
            forks.append(([matcher.fork() for matcher in matchers], length))
            if number % 2:
                (matchers, length), forks[-1] = forks[-1], (matchers, length)
    for others, _ in [(matchers, length), *forks]:
        masks(others, row)
