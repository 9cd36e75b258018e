"""A pool that is opened for the first constraint."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from guided.constraint import Constraint
from guided.errors import InvalidConstraint, InvalidRequest, PoolUnavailable
from guided.pools import opening as pools
from guided.pools.inline import InlinePool
from guided.pools.opening import LazyPool
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"</s>", b"a"), (0,), frozenset({0}), 2)


class Opening:
    """A pool that is opened for the first constraint. `gate` holds the opening up."""

    def __init__(self, pool: Any) -> None:
        self.gate, self.opened = threading.Event(), 0
        self._pool = pool
        self.lazy: Any = LazyPool(VOCABULARY, self._open)

    def _open(self) -> Any:
        self.opened += 1
        assert self.gate.wait(10)
        if isinstance(self._pool, BaseException):
            raise self._pool
        return self._pool


def test_a_lazy_pool_opens_for_the_first_constraint() -> None:
    opening = Opening(InlinePool(VOCABULARY))
    assert (opening.lazy.decided([]), opening.opened) == ([], 0)
    opening.lazy.free([1])
    first = opening.lazy.compile(Constraint.regex("a"), ("llguidance",))
    second = opening.lazy.compile(Constraint.regex("aa"), ("llguidance",))
    assert not first.done()
    opening.gate.set()
    assert [one.result(10).backend for one in (first, second)] == ["llguidance"] * 2
    assert opening.opened == 1
    opening.lazy.open(GuidedSequence("r", 0, []), first.result())
    opening.lazy.submit([GuidedSequence("r", 0, [])])
    assert not opening.lazy.collect().failed
    with pytest.raises(InvalidConstraint):
        opening.lazy.compile(Constraint.regex("("), ("llguidance",)).result(10)
    opening.lazy.shutdown()
    with pytest.raises(PoolUnavailable, match="shut down"):
        opening.lazy.compile(Constraint.regex("b"), ("llguidance",)).result(10)


def test_a_pool_that_opens_after_the_shutdown_is_shut_down() -> None:
    gone = threading.Event()
    pool = InlinePool(VOCABULARY)
    pool.shutdown = gone.set  # type: ignore[method-assign]
    opening = Opening(pool)
    opening.lazy.opened()
    opening.lazy.shutdown()
    opening.gate.set()
    assert gone.wait(10)


class Raising(InlinePool):
    def compile(self, *arguments: Any) -> Any:
        raise LookupError("no compiler")


@pytest.mark.parametrize(
    "pool",
    [OSError("no Ray"), SystemExit(1), InvalidRequest("no tokenizer"), Raising(VOCABULARY)],
    ids=["error", "exit", "invalid", "compile"],
)
def test_a_lazy_pool_that_can_t_be_opened_fails_its_requests(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening(pool)
    opening.gate.set()
    for _ in range(2):
        with pytest.raises((PoolUnavailable, LookupError)):
            opening.lazy.compile(Constraint.regex("a"), ("llguidance",)).result(10)
    assert opening.opened == 1
    opening._pool = InlinePool(VOCABULARY)
    monkeypatch.setattr(pools, "_RETRY_SECONDS", -1.0)
    if not isinstance(pool, Raising):
        assert opening.lazy.compile(Constraint.regex("a"), ("llguidance",)).result(10).backend == "llguidance"
