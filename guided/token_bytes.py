"""Token bytes: the bytes of each token, for each tokenizer family.

Byte-level BPE encodes them with an alphabet of 256 printable characters, SentencePiece with `▁` and `<0xXX>`, tekken in
base64. For Hugging Face tokenizers, they are what the tokenizer's own decoder writes in the middle of a text.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from guided.errors import InvalidRequest

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(NamedTuple):
    """`contents[id]`: the bytes of a token (b"" for holes). `special`: the ids that are no text."""

    contents: tuple[bytes, ...]
    special: frozenset[int]


def from_huggingface(tokenizer: Tokenizer) -> TokenBytes:
    """Read a byte-level BPE or SentencePiece-style tokenizer, by its decoder.

    Raises:
        InvalidRequest: the decoder inserts text between tokens (WordPiece, CTC, no decoder).
    """
    document = json.loads(tokenizer.to_str())
    spell = _Speller(document["decoder"])
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    contents = [b""] * (max(vocab.values(), default=-1) + 1)
    for piece, token in vocab.items():
        contents[token] = spell(piece)
    special = {added["id"] for added in document["added_tokens"] if added["special"]}
    special.update(_unknown_ids(document["model"], vocab))
    return TokenBytes(tuple(contents), frozenset(special))


def from_tekken(path: str | os.PathLike[str]) -> tuple[TokenBytes, str]:
    """Read a `tekken.json`: special tokens first, then the vocabulary up to `default_vocab_size`.

    Returns:
        The tokens, and the regex of the pieces in which a text is encoded.
    """
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    num_special = document["config"]["default_num_special_tokens"]
    num_ordinary = document["config"]["default_vocab_size"] - num_special
    ordinary = [base64.b64decode(entry["token_bytes"]) for entry in document["vocab"][:num_ordinary]]
    tokens = TokenBytes((b"",) * num_special + tuple(ordinary), frozenset(range(num_special)))
    return tokens, document["config"]["pattern"]


def from_sentencepiece(content: bytes) -> TokenBytes:
    """Read the content of a SentencePiece model file. Its control, unknown and unused pieces are special."""
    from sentencepiece import SentencePieceProcessor  # an optional dependency, for these files only

    model = SentencePieceProcessor(model_proto=content)
    ids = range(model.vocab_size())
    special = frozenset(i for i in ids if model.IsControl(i) or model.IsUnknown(i) or model.IsUnused(i))
    contents = []
    for token in ids:
        piece = model.IdToPiece(token)
        byte = _BYTE_PIECE.fullmatch(piece) if model.IsByte(token) else None
        contents.append(bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode("utf-8"))
    return TokenBytes(tuple(contents), special)


def _unknown_ids(model: dict[str, Any], vocab: dict[str, int]) -> Iterable[int]:
    if isinstance(model.get("unk_id"), int):
        yield model["unk_id"]
    if model.get("unk_token") in vocab:
        yield vocab[model["unk_token"]]


class _Speller:
    """The `decoder` of a tokenizer.json, applied to one token in the middle of a text."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._alphabet: dict[str, int] | None = None
        fused = False
        for step in _steps(decoder):
            match step:
                case {"type": "ByteLevel"}:
                    self._alphabet = _byte_level_alphabet()
                case {"type": "Metaspace", "replacement": str(piece)}:
                    self._replacements.append((piece, " "))
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip"} if fused:  # strips the ends of the whole text
                    pass
                case _:
                    raise InvalidRequest(
                        f"tokens of a tokenizer with a {(step or {}).get('type')!r} decoder have no bytes of their own:"
                        " byte-level BPE, SentencePiece-style and tekken tokenizers have",
                        param="tokenizer",
                    )

    def __call__(self, piece: str) -> bytes:
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        if self._byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._alphabet is not None:
            # An added token is plain text: if a character is outside the alphabet, the decoder, and this function,
            # take the whole token literally.
            try:
                return bytes([self._alphabet[character] for character in piece])
            except KeyError:
                pass
        return piece.encode("utf-8")


def _steps(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any] | None]:
    if decoder is not None and decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet for the 256 bytes: printable ones represent themselves, the rest start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet
