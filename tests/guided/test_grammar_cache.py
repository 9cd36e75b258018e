from __future__ import annotations

from guided.constraint import Constraint
from guided.errors import CompileTimeout, GuidedError, InvalidConstraint
from guided.pools.grammar_cache import GrammarCache, cache_key
from guided.pools.protocol import Grammar

MEGABYTE = 1 << 20


def compile_into(cache: GrammarCache, text: str, nbytes: int = MEGABYTE) -> Grammar:
    constraint = Constraint.choice([text])
    key = cache_key(constraint, ["llguidance"])
    future, new = cache.acquire(key)
    if new:
        grammar = Grammar(key, "llguidance", constraint)
        cache.admit(grammar, nbytes)
        future.set_result(grammar)
    return future.result(0)


def fail_into(cache: GrammarCache, error: GuidedError) -> None:
    future, new = cache.acquire("bad")
    assert new
    cache.fail("bad", error)
    future.set_exception(error)


def test_equal_constraints_share_one_compilation() -> None:
    cache = GrammarCache()
    assert compile_into(cache, "a") is compile_into(cache, "a")


def test_the_order_of_backends_is_part_of_the_key() -> None:
    constraint = Constraint.choice(["a"])
    assert cache_key(constraint, ["x", "y"]) != cache_key(constraint, ["y", "x"])


def test_the_oldest_unused_grammar_is_evicted() -> None:
    cache = GrammarCache(max_bytes=5 * MEGABYTE)
    grammars = [compile_into(cache, text) for text in "abcdef"]
    assert [cache.release(grammar) for grammar in grammars[:5]] == [[], [grammars[0].key], [], [], []]
    assert compile_into(cache, "b") is grammars[1]


def test_a_large_grammar_is_not_kept_and_evicts_no_others() -> None:
    cache = GrammarCache(max_bytes=4 * MEGABYTE)
    small, large = compile_into(cache, "a"), compile_into(cache, "b", nbytes=MEGABYTE + 1)
    assert compile_into(cache, "b") is large
    assert cache.release(small) == []
    assert cache.release(large) == []
    assert cache.release(large) == [large.key]
    assert compile_into(cache, "a") is small


def test_unused_grammars_make_room_for_those_in_use() -> None:
    cache = GrammarCache(max_bytes=4 * MEGABYTE)
    unused = [compile_into(cache, text) for text in "abcd"]
    for grammar in unused:
        cache.release(grammar)
    used = [compile_into(cache, text) for text in "efghij"]
    assert len(cache) == len(used) + 1, "a quarter is left to them"
    assert compile_into(cache, "d") is unused[-1]


def test_invalid_is_remembered_and_a_timeout_is_not() -> None:
    cache = GrammarCache()
    fail_into(cache, InvalidConstraint("no"))
    _, new = cache.acquire("bad")
    assert not new
    cache = GrammarCache()
    fail_into(cache, CompileTimeout("later"))
    _, new = cache.acquire("bad")
    assert new


def test_what_is_asked_for_again_is_no_longer_unused() -> None:
    cache = GrammarCache(max_bytes=5 * MEGABYTE)
    grammars = [compile_into(cache, text) for text in "abcde"]
    for grammar in grammars:
        assert cache.release(grammar) == []
    assert compile_into(cache, "a") is grammars[0]
    compile_into(cache, "f")
    assert [cache.release(grammars[0]) for _ in range(2)] == [[], []]
    assert cache.acquire(grammars[1].key)[1], "evicted"
