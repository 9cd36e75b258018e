from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer, TokenTexts
from engine.sampling_params import SamplingParams
from guided.tools.output_parser import Piece
from guided.vocabulary import Vocabulary

FREE = SamplingParams()
TEXTS = [
    "plain text, with punctuation.",
    "Zwölf große Boxkämpfer",
    "敏捷的棕色狐狸 いろは 안녕",
    "👩‍👩‍👧 🇫🇷 ½ ≤",
    "  two  spaces \n\t and lines\n",
]


@pytest.fixture(scope="module")
def texts(tiny_tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(
        Vocabulary.from_tokenizer(tiny_tokenizer, padded_vocab_size=640), tiny_tokenizer
    )


# Token 193 is the byte 255, which is in no text: it has no bytes
# (`Vocabulary.from_tokenizer`).
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(6, 599).filter(lambda token: token != 193), max_size=40),
    cuts=st.sets(st.integers(0, 40)),
)
def test_any_tokens_in_any_pieces_are_what_the_tokenizer_decodes(
    texts: TokenTexts,
    tiny_tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    cuts: set[int],
) -> None:
    detokenizer = Detokenizer(texts, FREE)
    for count in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        detokenizer.feed(ids, count)
    detokenizer.flush()
    assert detokenizer.text == tiny_tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_left_out_or_spelled(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    # which is beyond the tokenizer
    ids = [*tiny_tokenizer.encode("<|user|>hello<|end|>"), 639]
    without, with_them = (
        Detokenizer(texts, FREE),
        Detokenizer(texts, SamplingParams(skip_special_tokens=False)),
    )
    for one in (without, with_them):
        one.feed(ids, len(ids))
    assert without.text == "hello"
    assert with_them.text == "<|user|>hello<|end|>"


def test_what_may_begin_a_stop_string_is_held_back(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    detokenizer = Detokenizer(texts, SamplingParams(stop=["END", "!"]))
    ids = [token for letter in "some ENough" for token in tiny_tokenizer.encode(letter)]
    shown = []
    for count in range(1, len(ids) + 1):
        detokenizer.feed(ids, count)
        shown.append(detokenizer.visible(False))
    assert shown[5] == "some"
    assert shown[-1] == "some ENou"
    assert detokenizer.visible(True) == "some ENough"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one two")])
def test_the_stop_string_that_ends_first_cuts(
    texts: TokenTexts,
    tiny_tokenizer: PreTrainedTokenizerFast,
    include: bool,
    expected: str,
) -> None:
    detokenizer = Detokenizer(
        texts,
        SamplingParams(stop=["o three", "two"], include_stop_str_in_output=include),
    )
    ids = tiny_tokenizer.encode("one two three")
    assert detokenizer.find_stop(ids, 0) == "two"
    assert detokenizer.visible(True) == expected


def test_a_constraints_text_ends_with_a_whole_character(
    texts: TokenTexts, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tiny_tokenizer.encode("a🦖", add_special_tokens=False)
    assert len(ids) > 2
    for count in range(1, len(ids) + 1):
        free, constrained = (
            Detokenizer(texts, FREE),
            Detokenizer(texts, SamplingParams(regex=".*")),
        )
        for one in (free, constrained):
            one.feed(ids, count)
            one.flush()
        assert constrained.text == ("a🦖" if count == len(ids) else "a")
        assert free.text == (
            "a" if count == 1 else "a🦖" if count == len(ids) else "a\ufffd"
        )


class Brackets:
    """A parser of outputs in which brackets enclose calls."""

    def __init__(self) -> None:
        self._position, self._kind = 0, "text"

    def feed(self, text: str, finished: bool) -> list[Piece]:
        pieces = []
        for character in text[self._position :]:
            kind = {"[": "arguments", "]": "text"}.get(character)
            self._kind = kind or self._kind
            pieces += [Piece(self._kind, character)] if kind is None else []
        self._position = len(text)
        return pieces


@pytest.mark.parametrize(
    ("text", "include", "expected"),
    [
        ("a[b END]c END d", False, "a[b END]c "),
        ("a[b END]c END d", True, "a[b END]c END"),
        ("END[a]", False, ""),
        ("a[b END]c", False, None),
        ("a EN[b]D", False, None),  # not across a call
    ],
)
def test_stop_strings_end_only_the_free_text(
    texts: TokenTexts,
    tiny_tokenizer: PreTrainedTokenizerFast,
    text: str,
    include: bool,
    expected: str | None,
) -> None:
    params = SamplingParams(
        stop="END", include_stop_str_in_output=include, parser=Brackets
    )
    detokenizer = Detokenizer(texts, params)
    ids = [
        token
        for letter in text
        for token in tiny_tokenizer.encode(letter, add_special_tokens=False)
    ]
    found = [detokenizer.find_stop(ids[:count], 0) for count in range(1, len(ids) + 1)]
    if expected is None:
        assert not any(found)
    else:
        end = found.index("END") + 1
        again = Detokenizer(texts, params)
        assert [again.find_stop(ids[:count], 0) for count in range(1, end + 1)][
            -1
        ] == "END"
        assert again.visible(True) == expected
