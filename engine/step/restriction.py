"""The vocabulary of one request: `allowed_token_ids` and `bad_words`. Both are masks.

A token that would complete a bad word in the output is forbidden: the word in other,
smaller tokens is forbidden too. Within one token, a word counts only where it is no
part of a longer one: `he` forbids "he" and " he", but not " the".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from engine.detokenizer import TokenTexts
from engine.sampling_params import MAX_STOP_LENGTH, SamplingParams

_LONGEST = 32
"""Bytes of the longest token that is expected to complete a word."""


class Restriction:
    """Forbids tokens of a request. Tokens of `stop_ids`, which end an output, stay
    allowed."""

    def __init__(
        self,
        params: SamplingParams,
        texts: TokenTexts,
        stop_ids: Collection[int],
        device: torch.device,
    ) -> None:
        self._texts = texts.with_special
        self._stop_ids = list(stop_ids)
        self._forbidden = torch.full(
            [len(self._texts)], params.allowed_token_ids is not None, device=device
        )
        self._forbidden[list(params.allowed_token_ids or ())] = False
        completing = cache(
            lambda ending: torch.tensor(texts.beginning_with(ending), device=device)
        )
        self._begun: list[tuple[bytes, Tensor]] = []
        """Beginnings of bad words, and the tokens that complete the word after each."""
        for given in params.bad_words:
            word = (given.lstrip() or given).encode()
            self._forbidden[texts.containing(word)] = True
            for cut in range(max(1, len(word) - _LONGEST), len(word)):
                tokens = completing(word[cut:])  # words have endings in common
                if len(tokens):
                    self._begun.append((word[:cut], tokens))

    def apply(self, logits: Tensor, output: Sequence[int]) -> None:
        """Write -inf over the forbidden logits, float32 `[vocab]`, of the token after
        `output`."""
        ending = logits[self._stop_ids]
        logits.masked_fill_(self._forbidden, -torch.inf)
        text = b"".join([self._texts[token] for token in output[-MAX_STOP_LENGTH:]])
        for beginning, tokens in self._begun:
            if text.endswith(beginning):
                logits.index_fill_(0, tokens, -torch.inf)
        logits[self._stop_ids] = ending
