"""What a compilation reports of the grammar."""

from __future__ import annotations

import gc

import pytest

from guided.backends import BACKENDS, Backends
from guided.compilation import compile_with
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_a_grammar_is_measured(backend: str, vocabulary: Vocabulary) -> None:
    backends = Backends(vocabulary)
    backends[backend]
    sizes = []
    for number in (3, 3000):
        options = [f"{each:05} and more" for each in range(number)]
        gc.collect()  # what other tests have left behind is not freed while it is measured
        compiled = [compile_with(backends, Constraint.choice([*options, name]), backend) for name in "ab"]
        sizes.append(compiled[1].nbytes)
    assert sizes[1] > sizes[0] + 50_000
