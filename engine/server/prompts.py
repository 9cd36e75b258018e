"""Tokenize prompts: text, token ids, or chat messages in the tokenizer's template."""

from __future__ import annotations

import inspect
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from engine.server.protocol import Message, Tool
from guided.errors import ContextLengthExceeded, GuidedError, InvalidRequest, bounded


@dataclass(frozen=True)
class TextLimit:
    """The longest text that is tokenized: `tokens` tokens of `token_characters` characters each."""

    tokens: int
    token_characters: int

    def check(self, text: str, param: str) -> None:
        """Raise `ContextLengthExceeded` for a text that is too long whatever its tokens are."""
        if len(text) > self.tokens * self.token_characters:
            raise self.exceeded(param)

    def exceeded(self, param: str) -> InvalidRequest:
        """Return the error for a text that is too long."""
        return ContextLengthExceeded(
            f"This model's maximum context length is {self.tokens} tokens. However, '{param}' resulted in more. Please"
            " reduce the length of the messages.",
            param=param,
        )


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    add_special_tokens: bool = False,
    limit: TextLimit,
) -> list[int]:
    """Render the messages with the tokenizer's chat template and tokenize them.

    Only the template produces special tokens. Text of a message that looks like one ("<|end|>") stays text.
    `add_special_tokens` adds the tokenizer's own to those of the template.
    """
    _check_template(tokenizer, variables or {})
    if continue_final_message and (add_generation_prompt or messages[-1].role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt: false and an assistant message at the end",
            param="continue_final_message",
        )
    rendered = [message.for_template() for message in messages]
    functions = [tool.for_template() for tool in tools]
    for message in messages:
        limit.check(message.text, "messages")
    limit.check(json.dumps([message.get("tool_calls") for message in rendered]), "messages")
    limit.check(json.dumps(functions), "tools")
    escaped = _EscapedSpecialTokens(tokenizer, limit)
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
    for piece in text.split(escaped.mark):
        # The tokenizer adds its own special tokens to the first piece only.
        special = add_special_tokens and not ids
        ids += encode(tokenizer, piece, add_special_tokens=special, param="messages", limit=limit)
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

    def __init__(self, tokenizer: Any, limit: TextLimit) -> None:
        self._begins = _special_begins(tokenizer)
        self._limit = limit
        self._left = limit.tokens
        self.mark = f"<{uuid.uuid4().hex}>"  # unpredictable

    def escape(self, value: Any) -> Any:
        """Return a copy of `value` with marks in the special tokens of its strings. Refuse too many."""
        if isinstance(value, Mapping):
            return {self.escape(name): self.escape(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.escape(inner) for inner in value]
        if not isinstance(value, str):
            return value
        marked, count = self._begins.subn(lambda first: first[0] + self.mark, value, self._left)
        self._left -= count
        if self._left <= 0:
            raise self._limit.exceeded("messages")
        return marked


@lru_cache(maxsize=8)
def _special_begins(tokenizer: Any) -> re.Pattern[str]:
    """Compile a pattern for the first character of a special token. (One of a single character can't be split.)"""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ends: dict[str, list[str]] = {}
    for text in sorted({str(token) for token in added.values() if token.special and len(str(token)) > 1}):
        ends.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in ends.items()) or r"(?!)")


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool, param: str, limit: TextLimit) -> list[int]:
    """Tokenize a text, unless it is far too long, or has lone surrogates, which JSON can spell."""
    limit.check(text, param)
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
    limit: TextLimit,
) -> list[list[int]]:
    """Tokenize the prompts of a completion request: one or many, text or token ids. The engine checks the ids."""
    if not prompt and not isinstance(prompt, str):
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    many: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    prompts: list[list[int]] = []
    for number, each in enumerate(many):
        try:
            if isinstance(each, str):
                ids = encode(tokenizer, each, add_special_tokens=add_special_tokens, param="prompt", limit=limit)
            else:
                ids = list(each)
        except InvalidRequest as error:
            name_prompt(error, number, len(many))
            raise
        prompts.append(ids)
    return prompts


def name_prompt(error: GuidedError, number: int, count: int) -> None:
    """Prefix the message of an error about one of several prompts with the prompt's number."""
    if error.param == "prompt" and count > 1:
        error.message = f"prompt[{number}]: {error.message}"
