"""Offsets of tokens in the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import TokenTexts
from engine.server.logprobs import TextOffsets
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def texts(tiny_tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(Vocabulary.from_tokenizer(tiny_tokenizer, padded_vocab_size=640), tiny_tokenizer)


@given(ids=st.lists(st.integers(0, 599), max_size=30))
def test_a_token_that_begins_with_a_character_stands_at_it(texts: TokenTexts, ids: list[int]) -> None:
    place = TextOffsets(texts, skip_special_tokens=False)
    pieces = [texts.with_special[token] for token in ids]
    text = b"".join(pieces).decode("utf-8", "replace")
    offsets = [place.next(token) for token in ids]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
        if piece and piece[0] & 0xC0 != 0x80:  # it doesn't go on with a character
            assert offset == len(b"".join(pieces[:index]).decode("utf-8", "replace"))


def test_special_tokens_that_are_left_out_take_no_place(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tiny_tokenizer.encode("<|user|>a<|end|>b", add_special_tokens=False)
    without = TextOffsets(texts, skip_special_tokens=True)
    assert [without.next(token) for token in ids] == [0, 0, 1, 1]
    spelled = TextOffsets(texts, skip_special_tokens=False)
    assert [spelled.next(token) for token in ids] == [0, 8, 9, 16]
