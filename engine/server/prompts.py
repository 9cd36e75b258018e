"""Tokenize prompts: text, token ids, or chat messages in the tokenizer's template."""

from __future__ import annotations

import inspect
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from engine.server.protocol import Message, Tool
from guided.errors import ContextLengthExceeded, GuidedError, InvalidRequest, bounded

_CHARACTERS_PER_TOKEN = 8
"""Few texts have more. A text longer than this times the maximum number of tokens is checked by its beginnings."""
_SURE = 2
"""If a part of a text has this multiple of the maximum number of tokens, the whole text is too long."""


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    add_special_tokens: bool = False,
    max_tokens: int = sys.maxsize,
) -> list[int]:
    """Render the messages with the tokenizer's chat template and tokenize them.

    Only the template produces special tokens. Text of a message that looks like one ("<|end|>") stays text.
    `add_special_tokens` adds the tokenizer's own to those of the template; `max_tokens` as in `encode`.
    """
    _check_template(tokenizer, variables or {})
    if continue_final_message and (add_generation_prompt or messages[-1].role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt: false and an assistant message at the end",
            param="continue_final_message",
        )
    rendered = [message.for_template() for message in messages]
    functions = [tool.for_template() for tool in tools]
    written = [("messages", message.text) for message in messages]
    written += [
        ("messages", json.dumps([each.get("tool_calls") for each in rendered])),
        ("tools", json.dumps(functions)),
    ]
    for param, part in written:
        _check_length(tokenizer, part, param, max_tokens)
    escaped = _EscapedSpecialTokens(tokenizer, max_tokens)
    try:
        text: str = tokenizer.apply_chat_template(
            escaped.escape(rendered),
            **({"tools": escaped.escape(functions)} if functions else {}),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **escaped.escape(variables or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        refusal = f"the chat template refuses these messages: {bounded(error)}"
        raise InvalidRequest(refusal, param="messages") from error
    ids: list[int] = []
    for piece in escaped.pieces(text):
        # The tokenizer adds its own special tokens to the first piece only.
        special = add_special_tokens and not ids
        ids += encode(tokenizer, piece, add_special_tokens=special, param="messages", max_tokens=max_tokens)
        if len(ids) > _SURE * max_tokens:
            raise _too_long("messages", max_tokens)
    return ids


def _check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    if not tokenizer.chat_template:
        raise InvalidRequest("the tokenizer of this model has no chat template: use /v1/completions", param="messages")
    # Arguments of `apply_chat_template` are not variables of the template.
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in variables:
        if name in reserved:
            raise InvalidRequest(f"chat_template_kwargs can't set {name}", param="chat_template_kwargs")


class _EscapedSpecialTokens:
    """Prevents special tokens in a user's text from being tokenized as such.

    `escape` inserts a mark after the first character of each. The rendered text is split at the marks, and the pieces
    are tokenized separately. (`split_special_tokens` is a setting of the tokenizer, which other threads use meanwhile.)
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._begins = _special_begins(tokenizer)
        self._most = most
        self._mark = f"<{uuid.uuid4().hex}>"  # unpredictable

    def escape(self, value: Any) -> Any:
        """Return a copy of `value` with marks in the special tokens of its strings. Refuse more than `most` of them."""
        if isinstance(value, Mapping):
            return {self.escape(name): self.escape(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.escape(inner) for inner in value]
        if not isinstance(value, str):
            return value
        marked, count = self._begins.subn(lambda first: first[0] + self._mark, value, self._most)
        self._most -= count
        if self._most <= 0:
            raise _too_long("messages", count)
        return marked

    def pieces(self, rendered: str) -> list[str]:
        """Split the rendered text at the marks."""
        return rendered.split(self._mark)


@lru_cache(maxsize=8)
def _special_begins(tokenizer: Any) -> re.Pattern[str]:
    """Compile a pattern for the first character of a special token. (One of a single character can't be split.)"""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ends: dict[str, list[str]] = {}
    for text in sorted({str(token) for token in added.values() if token.special and len(str(token)) > 1}):
        ends.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in ends.items()) or r"(?!)")


def encode(
    tokenizer: Any, text: str, *, add_special_tokens: bool, param: str, max_tokens: int = sys.maxsize
) -> list[int]:
    """Tokenize a text, unless its beginning shows that it is far too long, or it has lone surrogates, which JSON can
    spell.

    A text with more than twice `max_tokens` tokens may be rejected here. The caller checks shorter ones.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {bounded(error)}", param=param) from None
    _check_length(tokenizer, text, param, max_tokens)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return ids


def _check_length(tokenizer: Any, text: str, param: str, max_tokens: int) -> None:
    """Refuse a text if one of its beginnings, each twice as long as the one before, has far too many tokens."""
    length = _CHARACTERS_PER_TOKEN * max_tokens
    while length < len(text):
        # Near the cut, tokens may differ from those of the whole text, but by far fewer than `max_tokens`.
        if len(tokenizer.encode(text[:length], add_special_tokens=False)) > _SURE * max_tokens:
            raise _too_long(param, max_tokens)
        length *= 2


def _too_long(param: str, max_tokens: int) -> InvalidRequest:
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_tokens} tokens. However, '{param}' resulted in more. Please"
        " reduce the length of the messages.",
        param=param,
    )


def text_prompts(
    tokenizer: Any,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    add_special_tokens: bool,
    max_tokens: int = sys.maxsize,
) -> list[list[int]]:
    """Tokenize the prompts of a completion request: one or many, text or token ids. The engine checks the ids.
    `max_tokens` as in `encode`."""
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    many: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    prompts: list[list[int]] = []
    for number, each in enumerate(many):
        try:
            if isinstance(each, str):
                ids = encode(
                    tokenizer, each, add_special_tokens=add_special_tokens, param="prompt", max_tokens=max_tokens
                )
            else:
                ids = list(each)
            if len(many) > 1 and len(ids) > max_tokens:  # one is enough: skip the other prompts
                raise _too_long("prompt", max_tokens)
        except InvalidRequest as error:
            name_prompt(error, number, len(many))
            raise
        prompts.append(ids)
    return prompts


def name_prompt(error: GuidedError, number: int, count: int) -> None:
    """Prefix the message of an error about one of several prompts with the prompt's number."""
    if error.param == "prompt" and count > 1:
        error.message = f"prompt[{number}]: {error.message}"
