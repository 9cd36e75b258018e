from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer, TokenTexts
from guided.vocabulary import Vocabulary

TEXTS = [
    "plain text, with punctuation.",
    "Zwölf große Boxkämpfer",
    "敏捷的棕色狐狸 いろは 안녕",
    "👩‍👩‍👧 🇫🇷 ½ ≤",
    "  two  spaces \n\t and lines\n",
]


@pytest.fixture(scope="module")
def texts(tiny_tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(Vocabulary.from_tokenizer(tiny_tokenizer, padded_vocab_size=640), tiny_tokenizer)


def feed_one_by_one(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    shown = []
    for count in range(1, len(ids) + 1):
        detokenizer.feed(ids, count)
        shown.append(detokenizer.visible(False))
    detokenizer.flush()
    return shown


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_shown_only_grows_and_ends_as_the_text(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tiny_tokenizer.encode(text)
    detokenizer = Detokenizer(texts)
    shown = feed_one_by_one(detokenizer, ids)
    assert detokenizer.text == text == tiny_tokenizer.decode(ids)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert all("\ufffd" not in part for part in shown), "no half characters"


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(6, 599), max_size=40), cuts=st.sets(st.integers(0, 40)))
def test_any_tokens_in_any_pieces_are_what_the_tokenizer_decodes(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast, ids: list[int], cuts: set[int]
) -> None:
    detokenizer = Detokenizer(texts)
    for count in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        detokenizer.feed(ids, count)
    detokenizer.flush()
    assert detokenizer.text == tiny_tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_left_out_or_spelled(texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*tiny_tokenizer.encode("<|user|>hello<|end|>"), 639]  # which is beyond the tokenizer
    without, with_them = Detokenizer(texts), Detokenizer(texts, skip_special_tokens=False)
    for one in (without, with_them):
        one.feed(ids, len(ids))
    assert without.text == "hello"
    assert with_them.text == "<|user|>hello<|end|>"


def test_what_may_begin_a_stop_string_is_held_back(texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(texts, stop=["END", "!"])
    ids = [token for letter in "some ENough" for token in tiny_tokenizer.encode(letter)]
    shown = feed_one_by_one(detokenizer, ids)
    assert shown[5] == "some"
    assert shown[-1] == "some ENou"
    assert detokenizer.visible(True) == "some ENough"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one two")])
def test_the_stop_string_that_ends_first_cuts(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast, include: bool, expected: str
) -> None:
    detokenizer = Detokenizer(texts, stop=["o three", "two"], include_stop=include)
    ids = tiny_tokenizer.encode("one two three")
    assert detokenizer.find_stop(ids, 0) == "two"
    assert detokenizer.visible(True) == expected


def test_a_stop_string_across_tokens_is_found(texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(texts, stop=["狐狸"])
    ids = tiny_tokenizer.encode("棕色狐狸跳")
    found = next(stop for count in range(1, len(ids) + 1) if (stop := detokenizer.find_stop(ids[:count], 0)))
    assert found == "狐狸"
    assert detokenizer.text == "棕色"


def test_a_constraints_text_ends_with_a_whole_character(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tiny_tokenizer.encode("a🦖", add_special_tokens=False)
    assert len(ids) > 2
    for count in range(1, len(ids) + 1):
        free, constrained = Detokenizer(texts), Detokenizer(texts, whole_characters=True)
        for one in (free, constrained):
            one.feed(ids, count)
            one.flush()
        assert constrained.text == ("a🦖" if count == len(ids) else "a")
        assert free.text == ("a" if count == 1 else "a🦖" if count == len(ids) else "a\ufffd")
