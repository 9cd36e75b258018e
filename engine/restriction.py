"""Restrictions of the vocabulary that a request brings: `allowed_token_ids` and `bad_words`. Both are masks.

A bad word depends on the text before: a token is forbidden if it would complete the word in the output. So the word in
other, smaller tokens is forbidden too. Within one token, a bad word counts only where it is no part of a longer word:
`he` forbids "he" and " he", but not " the".
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import torch

from engine.detokenizer import TokenTexts
from engine.sampling_params import SamplingParams


class TokenIndex:
    """Finds tokens by their bytes."""

    def __init__(self, texts: TokenTexts) -> None:
        tokens = sorted((content, token) for token, content in enumerate(texts.with_special) if content)
        self._contents = [content for content, _ in tokens]
        self._ids = [token for _, token in tokens]
        self._joined = b"\0".join(self._contents)
        self._begins = list(accumulate((len(content) + 1 for content in self._contents), initial=0))
        self._longest = max(map(len, self._contents))
        self.bytes_of = texts.bytes_of

    def containing(self, word: bytes) -> list[int]:
        """Return the tokens that contain `word`, but not only as a part of a longer word."""
        literal = re.escape(word)
        before = rb"(?<!\w%b)" % literal if re.match(rb"\w", word) else b""  # after the literal: `re` finds it faster
        hits = re.finditer(literal + before + _end_of(word), self._joined)
        return [self._ids[bisect_right(self._begins, hit.start()) - 1] for hit in hits]

    def completing(self, word: bytes) -> Iterator[tuple[bytes, list[int]]]:
        """Yield each beginning of `word`, with the tokens that complete the word after it."""
        end = _end_of(word)
        for cut in range(max(1, len(word) - self._longest), len(word)):
            rest = word[cut:]
            whole = re.compile(re.escape(rest) + end)
            tokens: list[int] = []
            place = bisect_left(self._contents, rest)
            while place < len(self._contents) and self._contents[place].startswith(rest):
                if whole.match(self._contents[place]):
                    tokens.append(self._ids[place])
                place += 1
            if tokens:
                yield word[:cut], tokens


def _end_of(word: bytes) -> bytes:
    """Return the regex of the place after `word`: no letter follows, if its last character is one."""
    return rb"(?!\w)" if re.match(rb"\w", word[-1:]) else b""


class Restriction:
    """What one request forbids. Tokens of `stop_ids`, which end an output, stay allowed."""

    def __init__(
        self,
        params: SamplingParams,
        index: TokenIndex,
        stop_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        words = [(word.lstrip() or word).encode() for word in params.bad_words]
        forbidden = torch.full((vocab_size,), params.allowed_token_ids is not None)
        forbidden[list(params.allowed_token_ids or ())] = False
        self._endings: dict[bytes, list[tuple[bytes, list[int]]]] = defaultdict(list)
        """By its last byte: text that an output may end with, and the tokens that are then forbidden."""
        for word in words:
            forbidden[index.containing(word)] = True
            for beginning, tokens in index.completing(word):
                self._endings[beginning[-1:]].append((beginning, [*{*tokens}.difference(stop_ids)]))
        forbidden[list(stop_ids)] = False
        self._forbidden = forbidden.to(device)
        """bool `[vocab]`: the tokens that are forbidden everywhere."""
        self._bytes_of = index.bytes_of
        self._longest = max(map(len, words), default=0)

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        """Write -inf over the forbidden logits, float32 `[vocab]`, of the token after `output`."""
        logits.masked_fill_(self._forbidden, -torch.inf)
        if tokens := self._completing(output):
            logits[tokens] = -torch.inf

    def allows(self, token: int, output: Sequence[int]) -> bool:
        """Return whether `token` may follow `output`."""
        return not self._forbidden[token] and token not in self._completing(output)

    def _completing(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word which `output` has begun."""
        text = b"".join(map(self._bytes_of, output[-self._longest :]))
        forbidden: list[int] = []
        for beginning, tokens in self._endings.get(text[-1:], ()):
            if text.endswith(beginning):
                forbidden += tokens
        return forbidden
