"""The tokens of a text have the bytes of the text, in every tokenizer family."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from guided.errors import InvalidRequest
from guided.vocabulary import Vocabulary

TEXTS = [
    "The quick brown fox.",
    "  two spaces, a\ttab,\r\nlines \n\n\n and a trailing space ",
    "Zwölf Boxkämpfer; Ελληνικά Ωμέγα; Привет; שלום עולם; مرحبا بالعالم; नमस्ते दुनिया",
    "敏捷的棕色狐狸 いろはにほへと 안녕하세요 𠮷野家",
    "👩‍👩‍👧 🇫🇷 👍🏽 😀",
    "e\u0301 a\u0308\u0323 \u200d\u200f\ufeff \u00a0",
    "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    '{"a": [1, 2.5e-3, true, null, "\\u00e9\\n"]}',
    "\u017f İ ﬁ ﷺ ½ ² Ⅷ",
]
LONG = "".join(TEXTS) + "ab" * 5000 + "=" * 3000 + "日本" * 300
"""Text with long pieces."""


def sentencepiece_style(mistral_data: Path) -> Tokenizer:
    """The 32,000 SentencePiece pieces as a Hugging Face tokenizer with the layout of
    Llama's."""
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(mistral_data / "tokenizer.model.v1")
    )
    pieces = [
        (model.IdToPiece(i), model.GetScore(i)) for i in range(model.vocab_size())
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_byte_level(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny_tokenizer)
    for text in TEXTS:
        ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert vocabulary.decode(ids) == text.encode()
        assert vocabulary.encode(text) == ids


@settings(max_examples=40, deadline=None)
@given(st.binary())
def test_any_bytes_are_their_tokens(vocabulary: Vocabulary, data: bytes) -> None:
    data = data.replace(b"\xff", b"")  # in no text
    assert vocabulary.decode(vocabulary.encode(data)) == data


def test_tekken(mistral_data: Path) -> None:
    path = mistral_data / "tekken_240911.json"
    reference, vocabulary = Tekkenizer.from_file(path), Vocabulary.from_tekken(path)
    assert vocabulary.vocab_size == reference.n_words == 131_072
    for text in TEXTS:
        ids = reference.encode(text, bos=False, eos=False)
        assert vocabulary.decode(ids) == text.encode()
        assert vocabulary.encode(text) == ids
    copy = Vocabulary.from_bytes(vocabulary.to_bytes())
    assert (
        copy.encode(LONG)
        == vocabulary.encode(LONG)
        == reference.encode(LONG, bos=False, eos=False)
    )
    assert all(
        vocabulary.token_bytes[token] == reference.id_to_byte_piece(token)
        for token in range(0, 131_072, 97)
    )
    assert reference.eos_id in vocabulary.stop_token_ids


def test_sentencepiece_as_hugging_face_has_it(mistral_data: Path) -> None:
    tokenizer = sentencepiece_style(mistral_data)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[2])
    assert vocabulary.vocab_size == 32_000
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.decode(ids) == b" " + text.encode()
        assert tokenizer.decode(ids) == text
        assert vocabulary.decode(vocabulary.encode(text)) == text.encode()
    assert vocabulary.token_bytes[vocabulary.encode("\x01")[0]] == b"\x01"
    assert 0 in vocabulary.special_token_ids  # <unk>


def test_added_tokens_that_are_not_special_are_text(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    copy = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<|end|>")
    tokenizer.add_tokens(
        [
            AddedToken("<tool_call>", normalized=False),
            AddedToken("naïve 日本", normalized=False),
        ]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    call, phrase, extra = tokenizer.convert_tokens_to_ids(
        ["<tool_call>", "naïve 日本", "<|extra|>"]
    )
    assert vocabulary.token_bytes[call] == b"<tool_call>"
    assert vocabulary.token_bytes[phrase] == "naïve 日本".encode()
    assert {call, phrase} <= set(vocabulary.text_token_ids)
    assert extra in vocabulary.special_token_ids
    assert extra not in vocabulary.text_token_ids
    assert vocabulary.encode("a<tool_call>naïve 日本b")[1:3] == [call, phrase]
    for token in (call, phrase):
        assert tokenizer.decode([token]).encode() == vocabulary.token_bytes[token]


def test_special_tokens_are_never_permitted(
    tiny_tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> None:
    special = set(tiny_tokenizer.all_special_ids)
    assert special == vocabulary.special_token_ids
    assert not special.intersection(vocabulary.text_token_ids)
    assert all(vocabulary.token_bytes[token] == b"" for token in special)
    # Text that looks like one is spelled in ordinary tokens.
    assert not special & set(vocabulary.encode("<|user|>"))
    assert vocabulary.decode(vocabulary.encode("<|user|>")) == b"<|user|>"


def test_stop_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ordinary = tiny_tokenizer.convert_tokens_to_ids("a")
    vocabulary = Vocabulary.from_tokenizer(tiny_tokenizer, stop_token_ids=[1, ordinary])
    assert ordinary in vocabulary.stop_token_ids
    assert ordinary not in vocabulary.text_token_ids
    with pytest.raises(InvalidRequest, match="no stop token"):
        Vocabulary.from_tokenizer(tiny_tokenizer.backend_tokenizer)
    with pytest.raises(InvalidRequest, match="9999"):
        Vocabulary.from_tokenizer(tiny_tokenizer, stop_token_ids=[9999])


def test_a_head_narrower_than_the_tokenizer(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    vocabulary = Vocabulary.from_tokenizer(tiny_tokenizer, padded_vocab_size=500)
    assert vocabulary.vocab_size == len(tiny_tokenizer)
    assert max(vocabulary.text_token_ids) < 500
    assert max(vocabulary.encode(" ".join(TEXTS[:1]))) < 500


def test_tokenizers_without_token_bytes_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    wordpiece = Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    )
    wordpiece.decoder = decoders.WordPiece()
    undecoded = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    refused: list[tuple[Any, str]] = [
        (wordpiece, "WordPiece"),
        (undecoded, "None"),
        (object(), "object"),
    ]
    for tokenizer, named in refused:
        with pytest.raises(InvalidRequest, match=named):
            Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[0])


def test_travels(vocabulary: Vocabulary) -> None:
    for copy in (
        Vocabulary.from_bytes(vocabulary.to_bytes()),
        pickle.loads(pickle.dumps(vocabulary)),
    ):
        assert copy == vocabulary
        assert hash(copy) == hash(vocabulary)
        assert copy.fingerprint == vocabulary.fingerprint
        assert copy.token_bytes == vocabulary.token_bytes
        assert copy.encode("Zwölf 狐狸") == vocabulary.encode("Zwölf 狐狸")


def test_the_fingerprint_is_the_same_in_every_process(vocabulary: Vocabulary) -> None:
    program = "import sys; from guided.vocabulary import Vocabulary as V;"
    program += "print(V.from_bytes(sys.stdin.buffer.read()).fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=vocabulary.to_bytes(),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == vocabulary.fingerprint
