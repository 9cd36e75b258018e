"""Prompts to token ids: text, token ids, or chat messages through the tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from engine.server.protocol import Message
from guided.errors import InvalidRequest, bounded

__all__ = ["encode", "render_chat", "text_prompts"]

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


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The messages as the tokenizer's chat template renders them.

    Raises:
        InvalidRequest: there is no template, or it refuses these messages.
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
    try:
        text: str = tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        message = f"the chat template refuses these messages: {bounded(error)}"
        raise InvalidRequest(message, param="messages") from error
    return text


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
    vocab_size: int,
) -> list[list[int]]:
    """The completion request's prompts, one or many, text or token ids.

    Raises:
        InvalidRequest: a prompt is empty, or holds ids that are no tokens.
    """
    many: list[Any]
    if isinstance(prompt, str):
        many = [prompt]
    elif prompt and isinstance(prompt[0], int):
        many = [list(prompt)]
    else:
        many = list(prompt)
    if not many:
        raise InvalidRequest("prompt is empty: give at least one", param="prompt")
    encoded = []
    for number, one in enumerate(many):
        where = "prompt" if len(many) == 1 else f"prompt[{number}]"
        ids = (
            encode(tokenizer, one, add_special_tokens=add_special_tokens, param="prompt")
            if isinstance(one, str)
            else list(one)
        )
        if not ids:
            raise InvalidRequest(f"{where} is empty: the model needs at least one token", param="prompt")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{where}: {wrong} is no token id of this model", param="prompt")
        encoded.append(ids)
    return encoded
