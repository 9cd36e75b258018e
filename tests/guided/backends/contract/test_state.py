"""Rollback, forks, forced tokens and serialisation lead to the state that the tokens
alone lead to."""

from __future__ import annotations

import numpy as np
from contract_cases import Case, mask, stop

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.vocabulary import Vocabulary

LOOK_AHEAD = {"llguidance"}
"""Backends that report forced tokens."""
WITH_LITERALS = {"person", "options", "calls"}
"""Cases in which only one text can follow somewhere."""


def test_rollback_is_replay(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    for text in case.valid:
        tokens = [*vocabulary.encode(text), stop(vocabulary)]
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens)
        for count in (1, 2, 3):
            if count > len(tokens):
                break
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
            replay = grammar.matcher()
            replay.accept_tokens(tokens)
            assert not matcher.is_terminated()
            assert matcher.is_accepting() == replay.is_accepting()
            assert np.array_equal(mask(matcher, vocabulary), mask(replay, vocabulary))
        matcher.rollback(0)
        matcher.rollback(len(tokens))
        assert np.array_equal(
            mask(matcher, vocabulary), mask(grammar.matcher(), vocabulary)
        )
        matcher.accept_tokens([*vocabulary.encode(text), stop(vocabulary)])
        assert matcher.is_terminated()


def test_accepts_counts_tokens_and_changes_nothing(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    for text in case.valid:
        tokens = [*vocabulary.encode(text), stop(vocabulary)]
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens[: len(tokens) // 2])
        rest = tokens[len(tokens) // 2 :]
        before = mask(matcher, vocabulary)
        assert matcher.accepts(rest) == len(rest)
        assert matcher.accepts([*rest, rest[0]]) == len(rest)
        assert np.array_equal(mask(matcher, vocabulary), before)


def test_forks_go_their_own_ways(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    tokens = vocabulary.encode(case.valid[0])
    for cut in {0, len(tokens) // 2, len(tokens)}:
        parent = grammar.matcher()
        parent.accept_tokens(tokens[:cut])
        before = mask(parent, vocabulary)
        child = parent.fork()
        child.accept_tokens([*tokens[cut:], stop(vocabulary)])
        assert child.is_terminated()
        assert not parent.is_terminated()
        assert np.array_equal(mask(parent, vocabulary), before)
        parent.accept_tokens(tokens[cut:])
        child.rollback(len(tokens) - cut + 1)
        assert np.array_equal(mask(child, vocabulary), before)


def test_forced_tokens_are_forced(
    grammar: CompiledGrammar, case: Case, backend: str, vocabulary: Vocabulary
) -> None:
    """A forced continuation is allowed, and every allowed token is consistent with
    it."""
    found = 0
    for text in case.valid:
        matcher = grammar.matcher()
        for token in vocabulary.encode(text):
            forced = matcher.forced_tokens()
            if forced:
                found += 1
                assert not matcher.is_accepting()
                matcher.fork().accept_tokens(forced)
                expected = vocabulary.decode(forced)
                for other in mask(matcher, vocabulary):
                    content = vocabulary.token_bytes[other]
                    assert expected.startswith(content) or content.startswith(
                        expected
                    ), (expected, content)
            matcher.accept_tokens([token])
    assert found or backend not in LOOK_AHEAD or case.name not in WITH_LITERALS


def test_a_fresh_backend_loads_what_was_dumped(
    grammar: CompiledGrammar, case: Case, backend: str, vocabulary: Vocabulary
) -> None:
    dumped = grammar.dump()
    loaded = Backends(Vocabulary.from_bytes(vocabulary.to_bytes()))[backend].load(
        case.constraint, dumped
    )
    left, right = grammar.matcher(), loaded.matcher()
    for token in vocabulary.encode(case.valid[0]):
        assert np.array_equal(mask(left, vocabulary), mask(right, vocabulary))
        left.accept_tokens([token])
        right.accept_tokens([token])
    assert left.is_accepting()
    assert right.is_accepting()
