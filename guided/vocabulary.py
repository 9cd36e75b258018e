"""Vocabulary: the tokens of a tokenizer as bytes. `guided` needs nothing else of a
tokenizer.

Every grammar library works on token bytes. `Vocabulary.encode` returns the tokenizer's
own tokens for a text, which grammar libraries need where a constraint forces a text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer

from guided.bitmask import Bitmask, pack
from guided.errors import InvalidRequest, bounded

TokenIds = Sequence[int]
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_Packed = tuple[tuple[bytes, ...], tuple[int, ...], list[int], int, str, str]
"""The msgpack form of a vocabulary: all fields in order."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer as bytes. Frozen. Vocabularies are equal if their
    fingerprints are equal.

    The bytes of an output are the concatenated bytes of its tokens. SentencePiece's
    dummy space is neither added nor removed: `▁yes` is b" yes" at every position, so a
    constraint for `yes` starts with the piece `yes`.

    Args:
        token_bytes: bytes of each token id. b"" for ids without bytes: special tokens,
            and holes in the numbering.
        stop_token_ids: tokens that end an output. They are allowed exactly where the
            constraint is satisfied.
        special_token_ids: tokens that are not text (bos, pad, role markers, ...). They
            are allowed only as stop tokens.
        padded_vocab_size: width of the model's logits, usually >= vocab_size. Larger
            ids can't be sampled.
        tokenizer_json: the text of a Hugging Face `tokenizer.json`, for canonical
            `encode`.
        split_pattern: the regex of a `tekken.json` that splits a text into pieces, for
            canonical `encode`.
    """

    token_bytes: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    padded_vocab_size: int
    tokenizer_json: str = ""
    split_pattern: str = ""

    def __post_init__(self) -> None:
        beyond = [
            token
            for token in self.stop_token_ids
            if not 0 <= token < self.padded_vocab_size
        ]
        if beyond or not self.stop_token_ids:
            message = f"stop tokens {beyond} are not among the {self.padded_vocab_size} logits"
            missing = "the vocabulary has no stop token: say which ids end an output"
            raise InvalidRequest(message if beyond else missing, param="stop_token_ids")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including holes."""
        return len(self.token_bytes)

    @cached_property
    def text_token_ids(self) -> tuple[int, ...]:
        """The ids of text tokens, ascending: they have bytes and a logit, and are
        neither special nor stop tokens.

        Tokens with UTF-8-encoded surrogates are excluded: they cannot occur in valid
        UTF-8.
        """
        never = self.special_token_ids.union(self.stop_token_ids)
        tokens = enumerate(self.token_bytes[: self.padded_vocab_size])
        return tuple(
            token
            for token, text in tokens
            if text and token not in never and not _SURROGATE.search(text)
        )

    @cached_property
    def text_mask(self) -> Bitmask:
        """`text_token_ids` as a bitmask, int32 `[words]`. Callers must not change
        it."""
        return self.mask(self.text_token_ids)

    def mask(self, token_ids: Iterable[int]) -> Bitmask:
        """Return the bitmask of tokens, int32 `[words]`."""
        return pack(token_ids, self.padded_vocab_size)

    def allows_stop(self, row: Bitmask) -> bool:
        """Return whether a library's mask allows the first stop token. `row`: int32
        `[words]`."""
        word, bit = divmod(self.stop_token_ids[0], 32)
        return bool(int(row[word]) >> bit & 1)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """The special tokens that a structural tag may name: name -> id. Empty without
        `tokenizer_json`."""
        if not self.tokenizer_json:
            return {}
        added = (
            (entry["content"], entry["id"])
            for entry in json.loads(self.tokenizer_json)["added_tokens"]
        )
        usable = self.special_token_ids.difference(self.stop_token_ids)
        return {
            name: token
            for name, token in added
            if token in usable and token < self.padded_vocab_size
        }

    @cached_property
    def _name_bytes(self) -> dict[int, bytes]:
        return {token: name.encode() for name, token in self.special_names.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of 32 hex digits, equal for equal vocabularies in every process."""
        ids = (
            self.stop_token_ids,
            sorted(self.special_token_ids),
            self.padded_vocab_size,
        )
        packed = msgspec.msgpack.encode((self.token_bytes, ids))
        return hashlib.sha256(packed).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Vocabulary({self.vocab_size} tokens, {self.padded_vocab_size} logits, {self.fingerprint[:8]})"

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """Return the concatenated bytes of tokens. Special and unknown tokens have no
        bytes."""
        size = self.vocab_size
        return b"".join(
            self.token_bytes[token] for token in token_ids if 0 <= token < size
        )

    def spelled(self, token_ids: Iterable[int]) -> bytes:
        """Return the text of tokens. Special tokens that a structural tag may name are
        spelled as their names."""
        contents = self.token_bytes
        names = self._name_bytes
        return b"".join(names.get(token) or contents[token] for token in token_ids)

    def encode(self, text: str | bytes) -> list[int]:
        """Return text tokens that spell exactly `text`: the tokenizer's own tokens, or
        else the longest matches.

        Raises `InvalidRequest` if no text tokens spell it.
        """
        if isinstance(text, str):
            data = text.encode("utf-8")
        else:
            data = text
        if not data:
            return []
        valid = data[: valid_utf8(data)]
        if valid:
            tokens = self._encode_canonically(valid.decode("utf-8"))
        else:
            tokens = []
        return tokens + self._encode_greedily(data[len(self.decode(tokens)) :])

    def _encode_canonically(self, text: str) -> list[int]:
        """Return the tokenizer's own tokens if they spell `text` exactly, without dummy
        space or normalization."""
        tokenize = self._tokenize
        if tokenize is None:
            return []
        wanted = text.encode("utf-8")
        # A leading control character separates the dummy space from the text.
        for lead in ("", "\x02"):
            tokens = tokenize(lead + text)
            while tokens and len(self.decode(tokens)) > len(wanted):
                del tokens[0]
            if self.decode(tokens) == wanted and self._text_tokens.issuperset(tokens):
                return tokens
        return []

    def _encode_greedily(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        start = 0
        longest = self._longest
        by_bytes = self._by_bytes
        while start < len(data):
            for end in range(min(len(data), start + longest), start, -1):
                token = by_bytes.get(data[start:end])
                if token is not None:
                    tokens.append(token)
                    start = end
                    break
            else:
                raise InvalidRequest(
                    f"no token of the vocabulary spells {data[start : start + 4]!r}"
                )
        return tokens

    def beginning_with(self, texts: Iterable[bytes]) -> Bitmask:
        """Return a mask of the text tokens that begin with one of `texts`: int32
        `[words]`."""
        ids = self._sorted
        contents = self.token_bytes.__getitem__
        tokens: list[int] = []
        for text in texts:
            start = bisect_left(ids, text, key=contents)
            tokens += ids[start : bisect_left(ids, text + b"\xff", key=contents)]
        return self.mask(tokens)

    def spelled_like(self, texts: Iterable[bytes]) -> Bitmask:
        """Return a mask of the text tokens that are spelled like one of `texts`: int32
        `[words]`."""
        by_bytes = self._by_bytes
        return self.mask([by_bytes[text] for text in texts if text in by_bytes])

    @cached_property
    def _sorted(self) -> list[int]:
        """The ids of text tokens, sorted by their bytes."""
        return sorted(self.text_token_ids, key=self.token_bytes.__getitem__)

    @cached_property
    def _text_tokens(self) -> frozenset[int]:
        return frozenset(self.text_token_ids)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        # Later tokens replace earlier ones with the same bytes: SentencePiece's byte
        # pieces precede its characters.
        return {self.token_bytes[token]: token for token in self.text_token_ids}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    @cached_property
    def _tokenize(self) -> Callable[[str], list[int]] | None:
        """The tokenizer's own encoding of a text, without special tokens. None: the
        tokenizer is unknown."""
        if self.tokenizer_json:
            tokenizer = Tokenizer.from_str(self.tokenizer_json)
            return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        if self.split_pattern:
            # an optional dependency, for tekken.json only
            from tiktoken import Encoding

            ranks = dict(self._by_bytes)  # a token's id is its rank
            pairs = Encoding(
                "tekken",
                pat_str=self.split_pattern,
                mergeable_ranks=ranks,
                special_tokens={},
            )
            return pairs.encode_ordinary
        return None

    def to_bytes(self) -> bytes:
        """Pack the vocabulary as msgpack, for `from_bytes` in any process."""
        ids = (
            self.stop_token_ids,
            sorted(self.special_token_ids),
            self.padded_vocab_size,
        )
        return msgspec.msgpack.encode(
            (self.token_bytes, *ids, self.tokenizer_json, self.split_pattern)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """Unpack a vocabulary that `to_bytes` packed. Raises `msgspec.MsgspecError` for
        other data."""
        contents, stop, special, *others = msgspec.msgpack.decode(data, type=_Packed)
        return cls(contents, stop, frozenset(special), *others)

    def __reduce__(self) -> tuple[object, ...]:
        return Vocabulary.from_bytes, (self.to_bytes(),)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        padded_vocab_size: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Vocabulary:
        """Read a Hugging Face fast tokenizer, a `tokenizers.Tokenizer`, or
        transformers' wrapper of mistral_common.

        Byte 255, which no text contains, is not a token: llguidance marks special
        tokens with it.

        Args:
            tokenizer: duck-typed; neither transformers nor mistral_common is imported.
            padded_vocab_size: width of the model's logits; the tokenizer's size if
                None.
            stop_token_ids: the tokenizer's `eos_token_id` if None.

        Raises:
            InvalidRequest: the tokenizer has no stop token, or its tokens have no bytes
                of their own (WordPiece, slow tokenizers).
        """
        if stop_token_ids is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            if eos is None:
                stop_token_ids = ()
            else:
                stop_token_ids = (eos,)
        instruct = getattr(
            getattr(tokenizer, "tokenizer", None), "instruct_tokenizer", None
        )
        if instruct is not None:
            path = os.fspath(instruct.tokenizer.file_path)
        else:
            path = ""
        if path.endswith(".json"):
            return cls.from_tekken(path, padded_vocab_size, stop_token_ids)
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            message = f"{type(tokenizer).__name__} is no fast tokenizer: a tokenizer.json or a tekken.json is needed"
            raise InvalidRequest(message, param="tokenizer")
        from llguidance import LLTokenizer  # most uses of this module need no library

        text = backend.to_str()
        try:
            tokens = LLTokenizer(text, eos_token=0)
        except ValueError as error:
            message = f"the tokens of this tokenizer have no bytes of their own ({bounded(error)})"
            message += (
                ": byte-level BPE, SentencePiece-style and tekken tokenizers have"
            )
            raise InvalidRequest(message, param="tokenizer") from None
        special = {
            added["id"]
            for added in json.loads(text)["added_tokens"]
            if added["special"]
        }
        special.update(getattr(tokenizer, "all_special_ids", ()))
        contents = [
            b"" if token in special else tokens.decode_bytes([token])
            for token in range(tokens.vocab_size)
        ]
        if padded_vocab_size is None:
            width = len(contents)
        else:
            width = padded_vocab_size
        return cls(
            tuple(contents),
            tuple(dict.fromkeys(stop_token_ids)),
            frozenset(special),
            width,
            text,
        )

    @classmethod
    def from_tekken(
        cls,
        path: str | os.PathLike[str],
        padded_vocab_size: int | None = None,
        stop_token_ids: Sequence[int] = (2,),
    ) -> Vocabulary:
        """Read a `tekken.json` (Mistral's tiktoken-like format), in which token 2 is
        always `</s>`."""
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        config = document["config"]
        num_special = config["default_num_special_tokens"]
        ordinary = document["vocab"][: config["default_vocab_size"] - num_special]
        contents = [b""] * num_special + [
            base64.b64decode(entry["token_bytes"]) for entry in ordinary
        ]
        if padded_vocab_size is None:
            width = len(contents)
        else:
            width = padded_vocab_size
        special = frozenset(range(num_special))
        pattern = config["pattern"]
        return cls(
            tuple(contents),
            tuple(stop_token_ids),
            special,
            width,
            split_pattern=pattern,
        )


def valid_utf8(data: bytes) -> int:
    """Return the length of the longest prefix of `data` that is valid UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
