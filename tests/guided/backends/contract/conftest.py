"""The contract of `guided.backends.base`: each test runs for every registered backend
and each of its kinds.

A new backend needs no tests of its own for this: an entry in the registry is enough.
"""

from __future__ import annotations

import pytest
from contract_cases import CASES, Case

from guided.backends import BACKENDS, Backends
from guided.backends.base import CompiledGrammar
from guided.errors import UnsupportedConstraint


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CASES, ids=[case.name for case in CASES])
def case(request: pytest.FixtureRequest, backend: str) -> Case:
    chosen: Case = request.param
    if chosen.constraint.kind not in BACKENDS[backend].kinds:
        pytest.skip(f"{backend} has no {chosen.constraint.kind}")
    return chosen


_compiled: dict[tuple[str, str, str], CompiledGrammar] = {}


@pytest.fixture
def grammar(backends: Backends, backend: str, case: Case) -> CompiledGrammar:
    key = (backends.vocabulary.fingerprint, backend, case.constraint.key)
    if key not in _compiled:
        try:
            _compiled[key] = backends[backend].compile(case.constraint)
        except UnsupportedConstraint as refusal:
            # a backend with grammars may read one notation only
            if case.name in ("lark", "gbnf"):
                pytest.skip(str(refusal))
            raise
    return _compiled[key]
