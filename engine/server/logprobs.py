"""The engine's log-probabilities in OpenAI's two shapes. JSON has no -inf: the floor is -9999.0."""

from __future__ import annotations

import codecs

from engine.detokenizer import TokenTexts
from engine.outputs import CompletionOutput
from engine.sequence import Logprob
from engine.server.protocol import ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs"]

FLOOR = -9999.0


def chat_logprobs(output: CompletionOutput, texts: TokenTexts, top: int, start: int = 0) -> ChatLogprobs | None:
    """Those of the tokens from `start` on, each with the `top` most likely alternatives; None where none were asked.

    A token's `bytes` are its own, also where they are no text by themselves; joined, they are the text's.
    """
    if output.logprobs is None:
        return None
    content = []
    for token, alternatives in zip(output.token_ids[start:], output.logprobs[start:], strict=True):
        best = [_top(texts, each, logprob) for each, logprob in _ranked(alternatives)[:top]]
        own = _top(texts, token, alternatives[token])
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=best))
    return ChatLogprobs(content=content)


class TextOffsets:
    """Where in a choice's text its tokens begin, in characters; tokens are asked for in order.

    A token that begins within a character stands where that character does. One without text (a stop token, a special
    one that is left out) stands where the text goes on.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._pieces = texts.without_special if skip_special_tokens else texts.with_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token: int) -> int:
        """Of the next token."""
        piece = self._pieces[token]
        if not piece:
            return self._length
        before = self._length
        self._length += len(self._decoder.decode(piece[:1]))
        unfinished, _ = self._decoder.getstate()
        # Bytes that turn out to be no character end at this byte, and it begins the next one.
        offset = self._length if unfinished else max(before, self._length - 1)
        self._length += len(self._decoder.decode(piece[1:]))
        return offset


def completion_logprobs(
    output: CompletionOutput, texts: TokenTexts, place: TextOffsets, start: int = 0
) -> CompletionLogprobs | None:
    """Those of the tokens from `start` on. `top_logprobs` holds the sampled token beside the alternatives.

    Args:
        place: was asked for the tokens before `start`.
    """
    if output.logprobs is None:
        return None
    tokens, own, tops, offsets = [], [], [], []
    for token, alternatives in zip(output.token_ids[start:], output.logprobs[start:], strict=True):
        text = texts.of(token)
        tokens.append(text)
        own.append(_finite(alternatives[token]))
        tops.append({texts.of(each): _finite(logprob) for each, logprob in _ranked(alternatives)})
        offset = place.next(token)
        # A stop string, or a character that was left unfinished, is no part of the text.
        offsets.append(offset if output.finish_reason is None else min(offset, len(output.text)))
    return CompletionLogprobs(tokens=tokens, token_logprobs=own, top_logprobs=tops, text_offset=offsets)


def _ranked(alternatives: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(alternatives.items(), key=lambda item: item[1].rank)


def _top(texts: TokenTexts, token: int, logprob: Logprob) -> ChatTopLogprob:
    return ChatTopLogprob(token=texts.of(token), logprob=_finite(logprob), bytes=list(texts.bytes_of(token)))


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
