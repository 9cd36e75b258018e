"""Prompts to token ids: text, token ids, or chat messages through the tokenizer's template."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from engine.server.protocol import Message
from guided.errors import InvalidRequest, bounded

__all__ = ["encode", "encode_chat", "text_prompts"]

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that are not a template's own variables: a request can't set them."""


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of the messages as the tokenizer's chat template renders them.

    Special tokens are the template's: a text that looks like one ("<|end|>" in what a user says) stays text.

    Args:
        add_special_tokens: the tokenizer's own, besides those that the template writes.

    Raises:
        InvalidRequest: there is no template, it refuses these messages, or they are not valid Unicode.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest("the tokenizer of this model has no chat template: use /v1/completions", param="messages")
    for name in variables or ():
        if name in _RESERVED:
            raise InvalidRequest(f"chat_template_kwargs can't set {name}", param="chat_template_kwargs")
    if continue_final_message and (add_generation_prompt or messages[-1].role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt: false and an assistant message at the end",
            param="continue_final_message",
        )
    hidden = _Hidden(tokenizer)
    try:
        text: str = tokenizer.apply_chat_template(
            [hidden.hide(message.for_template()) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **hidden.hide(variables or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        message = f"the chat template refuses these messages: {bounded(error)}"
        raise InvalidRequest(message, param="messages") from error
    ids: list[int] = []
    for piece in hidden.pieces(text):
        # The tokenizer's own special tokens stand before all of it.
        ids += encode(tokenizer, piece, add_special_tokens=add_special_tokens and not ids, param="messages")
    return ids


class _Hidden:
    """Keeps the tokenizer from seeing special tokens in a user's text: the text is cut within them, by a mark that
    goes through the template, and what is left of them is tokenised for itself.

    (`split_special_tokens` is no way: transformers sets it on the tokenizer, which other threads use meanwhile.)
    """

    def __init__(self, tokenizer: Any) -> None:
        self._begins = _special_begins(tokenizer)
        self._mark = f"<{uuid.uuid4().hex}>"  # nobody can say it beforehand

    def hide(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`fields` with marks in what looks like a special token."""
        return {
            name: self._begins.sub(lambda first: first[0] + self._mark, value) if isinstance(value, str) else value
            for name, value in fields.items()
        }

    def pieces(self, rendered: str) -> list[str]:
        """The rendered text, without the marks."""
        return rendered.split(self._mark)


@lru_cache(maxsize=8)
def _special_begins(tokenizer: Any) -> re.Pattern[str]:
    """Matches the first character of what the tokenizer reads as a special token (one of a single character can't be
    cut, and stays)."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = sorted({str(token) for token in added.values() if token.special and len(str(token)) > 1})
    return re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts) or r"(?!)")


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidRequest: JSON can spell lone surrogates; they are no text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {bounded(error)}", param=param) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return ids


def text_prompts(
    tokenizer: Any,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Tokenize the prompts of a completion request: one or many, text or token ids. The engine checks the ids.

    Raises:
        InvalidRequest: there is no prompt, or a text is not valid Unicode.
    """
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    many: Sequence[Any] = [prompt] if one else prompt
    return [
        encode(tokenizer, each, add_special_tokens=add_special_tokens, param="prompt")
        if isinstance(each, str)
        else list(each)
        for each in many
    ]
