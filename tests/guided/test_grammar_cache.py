from __future__ import annotations

from concurrent.futures import Future

from guided.constraint import Constraint
from guided.errors import CompileTimeout, InvalidConstraint
from guided.pools.grammar_cache import GrammarCache, cache_key
from guided.pools.protocol import Grammar

MEGABYTE = 1 << 20


class Compilations:
    """Asks a cache for grammars, and counts the compilations that it starts."""

    def __init__(self, max_bytes: int = 64 * MEGABYTE) -> None:
        self.cache = GrammarCache(max_bytes)
        self.started: list[str] = []

    def start(self, text: str) -> Future[Grammar]:
        """Ask for a grammar."""
        future: Future[Grammar] = Future()

        def start(key: str) -> Future[Grammar]:
            self.started.append(text)
            return future

        return self.cache.get(Constraint.choice([text]), ["llguidance"], start)

    def compile(self, text: str, nbytes: int = MEGABYTE) -> Grammar:
        """Ask for a grammar, which is compiled at once if it is not there."""
        future = self.start(text)
        if not future.done():
            future.set_result(
                Grammar(text, "llguidance", Constraint.choice([text]), nbytes=nbytes)
            )
        return future.result(0)


def test_equal_constraints_share_one_compilation() -> None:
    compilations = Compilations()
    assert compilations.start("a") is compilations.start("a")
    assert compilations.cache.compiling == 1
    assert compilations.compile("a") is compilations.compile("a")
    assert compilations.started == ["a"]
    assert compilations.cache.compiling == 0


def test_the_order_of_backends_is_part_of_the_key() -> None:
    constraint = Constraint.choice(["a"])
    assert cache_key(constraint, ["x", "y"]) != cache_key(constraint, ["y", "x"])


def test_the_least_recently_used_grammar_leaves() -> None:
    compilations = Compilations(max_bytes=3 * MEGABYTE)
    for text in "abcad":
        compilations.compile(text)
    assert compilations.started == list("abcd")
    for text in "acdb":
        compilations.compile(text)
    assert compilations.started == list("abcdb")


def test_the_newest_grammar_stays_whatever_its_size() -> None:
    compilations = Compilations(max_bytes=MEGABYTE)
    large = compilations.compile("a", nbytes=2 * MEGABYTE)
    assert compilations.compile("a") is large
    compilations.compile("b")
    compilations.compile("a")
    assert compilations.started == list("aba")


def test_what_is_being_compiled_stays() -> None:
    compilations = Compilations(max_bytes=0)
    future = compilations.start("a")
    for text in "bc":
        compilations.compile(text)
    assert compilations.start("a") is future


def test_invalid_is_remembered_and_a_timeout_is_not() -> None:
    compilations = Compilations()
    for error in (InvalidConstraint("no"), CompileTimeout("later")):
        for _ in range(2):
            future = compilations.start(error.code)
            if not future.done():
                future.set_exception(error)
            assert future.exception(0) is error
    assert compilations.started == [
        InvalidConstraint.code,
        CompileTimeout.code,
        CompileTimeout.code,
    ]
