"""A matcher allows the texts that satisfy a constraint, in any tokens, and no
others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from contract_cases import Case, mask, stop, walk

from guided.backends import BACKENDS
from guided.backends.base import Backend, CompiledGrammar, Matcher
from guided.bitmask import words
from guided.constraint import KINDS
from guided.errors import TokenRejected
from guided.vocabulary import Vocabulary


def test_adapters_are_found_by_their_paths(backend: str) -> None:
    adapter = BACKENDS[backend]
    assert Backend in adapter.load().__mro__
    assert adapter.kinds <= set(KINDS)


def spell(matcher: Matcher, text: bytes, vocabulary: Vocabulary) -> None:
    """Generate `text` with allowed tokens only: the tokenizer's own, unless the mask
    allows only another one."""
    while text:
        allowed = mask(matcher, vocabulary)
        token = vocabulary.encode(text)[0]
        if token not in allowed:
            # If a text is forced, a backend may allow only one token to start it.
            assert len(allowed) == 1, (
                text,
                [vocabulary.token_bytes[other] for other in allowed],
            )
            token = int(allowed[0])
        matcher.accept_tokens([token])
        assert text.startswith(vocabulary.token_bytes[token]), (
            text,
            vocabulary.token_bytes[token],
        )
        text = text[len(vocabulary.token_bytes[token]) :]
        assert not matcher.is_terminated()


def test_valid_texts_can_be_generated(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    for text in case.valid:
        matcher = grammar.matcher()
        spell(matcher, text.encode(), vocabulary)
        assert matcher.is_accepting(), text
        matcher.accept_tokens([stop(vocabulary)])
        assert matcher.is_terminated()
        assert matcher.forced_tokens() == []
        with pytest.raises(TokenRejected):
            matcher.accept_tokens(vocabulary.encode("a"))


def test_any_split_into_tokens_is_accepted(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    """Accept texts byte by byte, also within characters: the constraint is on bytes,
    not on one tokenization."""
    single = {
        content: token
        for token, content in enumerate(vocabulary.token_bytes)
        if len(content) == 1
    }
    for text in case.valid:
        matcher = grammar.matcher()
        for index in range(len(text.encode())):
            matcher.accept_tokens([single[text.encode()[index : index + 1]]])
            assert matcher.is_accepting() or len(mask(matcher, vocabulary))
        assert matcher.is_accepting(), text


def test_accepting_exactly_where_satisfied(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    row = np.zeros(words(vocabulary.padded_vocab_size), np.int32)
    for text in case.valid:
        matcher = grammar.matcher()
        consumed = b""
        for token in [None, *vocabulary.encode(text)]:
            if token is not None:
                matcher.accept_tokens([token])
                consumed += vocabulary.token_bytes[token]
            assert matcher.fill_bitmask(row) == matcher.is_accepting()
            if matcher.is_accepting():
                assert case.satisfied(consumed.decode()), consumed
            else:
                with pytest.raises(TokenRejected):
                    matcher.fork().accept_tokens([stop(vocabulary)])


def test_invalid_texts_are_stopped(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    for text in case.invalid:
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(vocabulary.encode(text))
        except TokenRejected:
            continue
        assert not matcher.is_accepting(), text


def test_mask_and_accept_agree(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    matcher = grammar.matcher()
    for token in vocabulary.encode(case.valid[0])[:6]:
        allowed = set(mask(matcher, vocabulary).tolist())
        accepted = set()
        for other in vocabulary.text_token_ids:
            fork = matcher.fork()
            try:
                fork.accept_tokens([other])
                accepted.add(other)
            except TokenRejected:
                pass
        # If a text is forced, a mask may allow one tokenization only, while
        # `accept_tokens` takes others too.
        assert allowed == accepted or (len(allowed) == 1 and allowed < accepted)
        matcher.accept_tokens([token])


@pytest.mark.parametrize("token", [-1, 639, 640, 10**9, 0, 3])
def test_no_such_token(grammar: CompiledGrammar, token: int) -> None:
    """The token is outside the vocabulary, in the padding, or special."""
    with pytest.raises(TokenRejected):
        grammar.matcher().accept_tokens([token])


def test_random_walks_satisfy(
    grammar: CompiledGrammar, case: Case, vocabulary: Vocabulary
) -> None:
    generator = random.Random(7)
    ended = 0
    for _ in range(12):
        text = walk(grammar.matcher(), vocabulary, generator, 120)
        if text is not None:
            ended += 1
            # xgrammar's free text is any bytes, as unconstrained text is.
            errors = "replace" if case.constraint.kind == "structural_tag" else "strict"
            assert case.satisfied(text.decode(errors=errors)), text
    assert ended
