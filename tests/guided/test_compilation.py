"""What a compilation reports of the grammar."""

from __future__ import annotations

import gc

import pytest

from guided.backends import BACKENDS, Backends
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, UnsupportedConstraint
from guided.masks.compilation import compile_with
from guided.vocabulary import Vocabulary


def test_what_exceeds_pythons_stack_is_too_large(vocabulary: Vocabulary) -> None:
    elements = [{"type": "json_object"}] * 3_000
    constraint = Constraint.structural_tag(
        {"format": {"type": "sequence", "elements": elements}}
    )
    with pytest.raises(ConstraintTooLarge, match="nested too deep, or too long"):
        compile_with(Backends(vocabulary), constraint, "llguidance")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_a_grammar_is_measured(
    backend: str, vocabulary: Vocabulary
) -> None:
    backends = Backends(vocabulary)
    backends[backend]
    sizes = []
    for number in (3, 3000):
        options = [f"{each:05} and more" for each in range(number)]
        # what other tests have left behind is not freed while it is measured
        gc.collect()
        compiled = [
            compile_with(backends, Constraint.choice([*options, name]), backend)
            for name in "ab"
        ]
        sizes.append(compiled[1].nbytes)
    assert sizes[1] > sizes[0] + 50_000


def test_a_large_grammar_that_fails_after_its_first_mask_is_refused(
    vocabulary: Vocabulary,
) -> None:
    rules = "\n".join(f'r{n}: "a" "b" T{n}\nT{n}: /[a-z]+/ "{n}"' for n in range(1_900))
    grammar = Constraint.grammar(
        f"start: {' | '.join(f'r{n}' for n in range(1_900))}\n{rules}"
    )
    with pytest.raises(
        UnsupportedConstraint, match="too ambiguous, or has too many alternatives"
    ):
        compile_with(Backends(vocabulary), grammar, "llguidance")
