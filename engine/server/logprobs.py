"""The engine's log-probabilities in OpenAI's two shapes. JSON has no -inf: it becomes -9999.0."""

from __future__ import annotations

import codecs
from typing import Any

from engine.detokenizer import TokenTexts
from engine.logprobs import TokenLogprobs
from engine.outputs import CompletionOutput

FLOOR = -9999.0


def chat_logprobs(output: CompletionOutput, texts: TokenTexts, top: int, which: slice) -> dict[str, Any] | None:
    """Build a chat's `logprobs` of some tokens, each with its `top` most likely alternatives.

    Returns None if the request asked for none. The `bytes` of a token may be only a part of a character.
    """
    if output.logprobs is None:
        return None
    content = []
    for token, alternatives in zip(output.token_ids[which], output.logprobs[which], strict=True):
        assert alternatives is not None
        best = [_top(texts, each, logprob) for each, logprob, _ in _ranked(alternatives)[:top]]
        content.append({**_top(texts, token, alternatives.own), "top_logprobs": best})
    return {"content": content, "refusal": None}


class TextOffsets:
    """Computes where in a choice's text its tokens begin, in characters.

    A token that begins inside a character has the offset of that character. A token without text (a stop token, a
    special token that is left out) has the offset of the next text.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._pieces = texts.without_special if skip_special_tokens else texts.with_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token: int) -> int:
        """Return the offset of the next token."""
        offset = self._length
        self._length += len(self._decoder.decode(self._pieces[token]))
        return offset


def completion_logprobs(
    output: CompletionOutput, texts: TokenTexts, place: TextOffsets, which: slice
) -> dict[str, Any] | None:
    """Build a text completion's `logprobs` of some tokens, in OpenAI's older shape.

    `top_logprobs` includes the sampled token. The first token of an echoed prompt has none. `place` has computed the
    offsets of the tokens before.
    """
    if output.logprobs is None:
        return None
    tokens: list[str] = []
    own: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, alternatives in zip(output.token_ids[which], output.logprobs[which], strict=True):
        tokens.append(texts.of(token))
        own.append(None if alternatives is None else _finite(alternatives.own))
        ranked = None if alternatives is None else _ranked(alternatives)
        tops.append(None if ranked is None else {texts.of(each): _finite(logprob) for each, logprob, _ in ranked})
        offset = place.next(token)
        # Stop strings and incomplete characters are not in the text.
        offsets.append(offset if output.finish_reason is None else min(offset, len(output.text)))
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def _ranked(alternatives: TokenLogprobs) -> list[tuple[int, float, int]]:
    return sorted(alternatives.rows(), key=lambda row: row[2])


def _top(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.of(token), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token))}


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
