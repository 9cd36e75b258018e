"""Tokenize prompts: text, token ids, or chat messages in the tokenizer's template."""

from __future__ import annotations

import inspect
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from engine.server.context import ServerContext
from engine.server.request.bodies import Message, PromptFields, Tool
from guided.errors import ContextLengthExceeded, InvalidRequest, bounded

_SAMPLE = "How many?"


def encode_body(
    context: ServerContext, body: PromptFields, messages: Sequence[Message]
) -> list[int]:
    """Tokenize the messages of a request, with the options of its body."""
    continues = body.continue_final_message
    begins_answer = body.add_generation_prompt
    if continues and begins_answer:
        message = "continue_final_message and add_generation_prompt exclude each other: leave one of the two out"
        raise InvalidRequest(message, param="add_generation_prompt")
    if begins_answer is None:
        begins_answer = not continues
    variables: dict[str, Any] = {}
    effort = body.reasoning_effort or getattr(body.reasoning, "effort", None)
    if effort:
        variables["reasoning_effort"] = effort
    variables |= body.chat_template_kwargs or {}
    tools = body.tools or ()
    if body.tool_choice == "none":
        tools = ()
    return encode_chat(
        context,
        messages,
        add_generation_prompt=begins_answer,
        continue_final_message=continues,
        variables=variables,
        tools=tools,
    )


def encode_chat(
    context: ServerContext,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
) -> list[int]:
    """Render the messages with the tokenizer's chat template and tokenize them.

    Only the template produces special tokens. Text of a message that looks like one
    ("<|end|>") stays text: an unpredictable mark after its first character divides it,
    and the pieces between the marks are tokenized separately. (`split_special_tokens`
    is a setting of the tokenizer, which other threads use meanwhile.)
    """
    tokenizer = context.llm.tokenizer
    limit = context.max_characters
    _check_template(tokenizer, variables or {})
    rendered = [message.for_template() for message in messages]
    if _takes_parts(tokenizer):
        for message in rendered:
            message["content"] = [{"type": "text", "text": message["content"]}]
    functions = [tool.for_template() for tool in tools]
    _check_length(json.dumps(rendered, ensure_ascii=False), limit, "messages")
    _check_length(json.dumps(functions, ensure_ascii=False), limit, "tools")
    begins = _special_begins(tokenizer)
    mark = f"<{uuid.uuid4().hex}>"
    given = dict(variables or {})
    if functions:
        given["tools"] = functions
    try:
        text: str = tokenizer.apply_chat_template(
            _marked(rendered, begins, mark),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **_marked(given, begins, mark),
        )
    except (TemplateError, ValueError, TypeError) as error:
        refusal = f"the chat template refuses these messages: {bounded(error)}"
        raise InvalidRequest(refusal, param="messages") from error
    ids = []
    for piece in text.split(mark):
        ids += encode(context, piece, add_special_tokens=False, param="messages")
    return ids


@lru_cache(maxsize=8)
def _takes_parts(tokenizer: Any) -> bool:
    """Return whether the chat template reads the content of messages only as a list of
    parts, as the templates of some models with images do. Such a template drops a
    string without an error."""
    return not _renders(tokenizer, _SAMPLE) and _renders(
        tokenizer, [{"type": "text", "text": _SAMPLE}]
    )


def _renders(tokenizer: Any, content: Any) -> bool:
    try:
        return _SAMPLE in tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False
        )
    except (TemplateError, ValueError, TypeError):
        return False


def _check_template(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    if not tokenizer.chat_template:
        raise InvalidRequest(
            "the tokenizer of this model has no chat template: use /v1/completions",
            param="messages",
        )
    # Arguments of `apply_chat_template` are not variables of the template.
    reserved = {
        "messages",
        *inspect.signature(tokenizer.apply_chat_template).parameters,
    }
    for name in variables:
        if name in reserved:
            raise InvalidRequest(
                f"chat_template_kwargs can't set {name}", param="chat_template_kwargs"
            )


def _marked(value: Any, begins: re.Pattern[str], mark: str) -> Any:
    """Return a copy of `value` with `mark` in the special tokens of its strings."""
    if isinstance(value, Mapping):
        return {
            _marked(name, begins, mark): _marked(inner, begins, mark)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_marked(inner, begins, mark) for inner in value]
    if isinstance(value, str):
        return begins.sub(lambda first: first[0] + mark, value)
    return value


@lru_cache(maxsize=8)
def _special_begins(tokenizer: Any) -> re.Pattern[str]:
    """Compile a pattern for the first character of a special token. (A token of a
    single character can't be split.)"""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    ends: dict[str, set[str]] = {}
    for token in added.values():
        text = str(token)
        if token.special and len(text) > 1:
            ends.setdefault(text[0], set()).add(re.escape(text[1:]))
    begins = [
        f"{re.escape(first)}(?={'|'.join(sorted(rest))})"
        for first, rest in ends.items()
    ]
    return re.compile("|".join(begins) or r"(?!)")


def encode(
    context: ServerContext, text: str, *, add_special_tokens: bool, param: str
) -> list[int]:
    """Tokenize a text. Raises if it is far too long, or has lone surrogates, which JSON
    escapes can spell."""
    _check_length(text, context.max_characters, param)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode: {bounded(error)}", param=param
        ) from None
    ids: list[int] = context.llm.tokenizer.encode(
        text, add_special_tokens=add_special_tokens
    )
    return ids


def _check_length(text: str, max_characters: int, param: str) -> None:
    """Refuse a text that cannot fit into the context with any tokenization."""
    if len(text) > max_characters:
        raise ContextLengthExceeded(
            f"This model's maximum context length is exceeded: '{param}' has {len(text)} characters, and at most"
            f" {max_characters} can fit.",
            param=param,
        )
