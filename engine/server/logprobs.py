"""The engine's log-probabilities in OpenAI's two shapes. JSON has no -inf: the floor is -9999.0."""

from __future__ import annotations

from engine.detokenizer import TokenTexts
from engine.outputs import CompletionOutput
from engine.sequence import Logprob
from engine.server.protocol import ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]

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


def completion_logprobs(
    output: CompletionOutput, texts: TokenTexts, start: int = 0, offset: int = 0
) -> CompletionLogprobs | None:
    """Those of the tokens from `start` on. `top_logprobs` holds the sampled token beside the alternatives.

    Args:
        offset: characters before token `start`.
    """
    if output.logprobs is None:
        return None
    tokens, own, tops, offsets = [], [], [], []
    for token, alternatives in zip(output.token_ids[start:], output.logprobs[start:], strict=True):
        text = texts.of(token)
        tokens.append(text)
        own.append(_finite(alternatives[token]))
        tops.append({texts.of(each): _finite(logprob) for each, logprob in _ranked(alternatives)})
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(tokens=tokens, token_logprobs=own, top_logprobs=tops, text_offset=offsets)


def _ranked(alternatives: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(alternatives.items(), key=lambda item: item[1].rank)


def _top(texts: TokenTexts, token: int, logprob: Logprob) -> ChatTopLogprob:
    return ChatTopLogprob(token=texts.of(token), logprob=_finite(logprob), bytes=list(texts.bytes_of(token)))


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
