"""Bounds and `multipleOf` of numbers on both libraries, against `decimal`."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from byte_vocabulary import BYTES, STOP, WORDS, accepts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guided.backends.llguidance.adapter import LLGuidanceBackend
from guided.backends.xgrammar.adapter import XGrammarBackend
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import InvalidConstraint

BACKENDS = ("llguidance", "xgrammar")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
MULTIPLES = (0.01, 0.05, 0.25, 0.5, 0.125, 10, 100000, 1e-9)
LONGEST = 60
ZERO = ord("0") + 1


@lru_cache
def backend_named(name: str) -> LLGuidanceBackend | XGrammarBackend:
    return LLGuidanceBackend(BYTES) if name == "llguidance" else XGrammarBackend(BYTES)


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether the decimal value of `text` satisfies the keywords of `schema`."""
    value = Fraction(text)
    compared = {
        "minimum": value.__ge__,
        "exclusiveMinimum": value.__gt__,
        "maximum": value.__le__,
        "exclusiveMaximum": value.__lt__,
        "multipleOf": lambda multiple: value % multiple == 0,
    }
    return all(
        compared[keyword](Fraction(str(bound)))
        for keyword, bound in schema.items()
        if keyword in compared
    )


def text_near(bound: Decimal, rng: random.Random) -> str:
    """Return a number near a bound, with at most six decimals and no zeros at their
    end. Zero has no sign."""
    shifted = bound + rng.choice((0, 0, 1, -1, rng.randint(-30, 30))) * Decimal(
        10
    ) ** rng.randint(-6, 2)
    text = f"{shifted:.{rng.randint(0, 6)}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.removeprefix("-") if Decimal(text) == 0 else text


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A number with a lower or an upper bound, or `multipleOf`, or several of them."""
    # equal ones become a constant
    bounds = sorted(draw(st.sets(st.integers(-20_000, 20_000), min_size=2, max_size=2)))
    scale = 10 ** draw(st.integers(0, 4))
    schema: dict[str, Any] = {"type": "number"}
    for names, bound in zip((LOWER, UPPER), bounds, strict=True):
        if keyword := draw(st.sampled_from((*names, None))):
            schema[keyword] = bound / scale
    # without keywords, a number may be 1E362035742380
    if len(schema) == 1 or draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from(MULTIPLES))
    return schema


def walk(grammar: Any, rng: random.Random) -> str:
    """Write a random text. Every mask must allow something, and the text must end."""
    matcher = grammar.matcher()
    row = np.zeros(WORDS, dtype=np.int32)
    text = ""
    while len(text) < LONGEST:
        row.fill(0)
        matcher.fill_bitmask(row)
        tokens = allowed_ids(row).tolist()
        assert tokens, text
        if STOP in tokens and (len(text) > 20 or rng.random() < 0.2):
            return text
        if tokens == [STOP]:
            return text
        token = rng.choice([token for token in tokens if token != STOP])
        if (
            len(text) > 20
            # the last digits: of a multiple of 100000, or of a number greater than
            # 0.000000001
        ):
            token = ZERO if ZERO in tokens and "." not in text else max(tokens)
        matcher.accept_tokens([token])
        text += chr(token - 1)
    raise AssertionError(f"no end: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
@given(schema=schemas(), seed=st.integers(0, 2**32))
@example(schema={"type": "number", "exclusiveMinimum": 0}, seed=1)
@example(schema={"type": "number", "exclusiveMaximum": 1}, seed=1)
@example(schema={"type": "number", "minimum": -0.35, "maximum": 0.95}, seed=1)
@settings(max_examples=20, deadline=None)
def test_exactly_the_numbers_within_bounds(
    backend: str, schema: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    try:
        grammar = backend_named(backend).compile(Constraint.json_schema(schema))
    except InvalidConstraint:
        grid = [f"{number / 1000:.3f}" for number in range(-2000, 2000)]
        assert not any(allows(schema, text) for text in grid)
        return
    if grammar.checked:
        return
    bounds = [
        Decimal(str(bound))
        for keyword, bound in schema.items()
        if keyword in (*LOWER, *UPPER)
    ]
    for bound in [*bounds, Decimal(0)]:
        for _ in range(8):
            text = text_near(bound, rng)
            assert accepts(grammar, text) == allows(schema, text), text

    for _ in range(2):
        text = walk(grammar, rng)
        assert allows(schema, text), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_multiple_has_at_most_15_digits(backend: str) -> None:
    """A model that repeats a digit would never reach the last one."""
    grammar = backend_named(backend).compile(
        Constraint.json_schema({"type": "integer", "multipleOf": 5, "maximum": -9})
    )
    assert grammar.checked == ()
    assert accepts(grammar, f"-{'4' * 14}5")
    assert not accepts(grammar, f"-{'4' * 15}")
