"""How model families write function calls and their thinking: one table for each, as data.

The structural tag that enforces a format (`calls_format`, `answer_format`) and the parser that reads it
(`guided/tools/parser.py`) are both made from these descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from guided.constraint import Constraint

_NAME = "{name}"


@dataclass(frozen=True)
class ToolFormat:
    """The text of function calls: `opening`, then calls with `separator` between them, then `closing`.

    Without `separator`, each call stands for itself, and free text may stand between them.
    """

    call: tuple[str, str]
    """The text of a call before its arguments (`{name}` stands for the function's name), and after them."""
    trigger: str
    """The first characters of any call. Text that contains them is a call."""
    marks: tuple[str, ...]
    """Texts that a chat template of the family contains: all of them."""
    opening: str = ""
    closing: str = ""
    separator: str | None = None
    gap: str = "\n"
    """Text between calls that must be written one after the other, without `separator`."""
    id_length: int = 29
    """Number of characters of a call's id ("call_" and 24 digits). Mistral's templates refuse other lengths than 9."""
    parallel: bool = True
    """A turn of the model may have several calls."""
    others: tuple[str, ...] = ()
    """Texts that only the templates of other families contain."""

    def begin(self, name: str) -> str:
        """Return the text of a call of `name` before its arguments."""
        return self.call[0].replace(_NAME, name)


@dataclass(frozen=True)
class ReasoningFormat:
    """The text of a thinking phase: `begin`, the thoughts, `end`, and `answer` before the answer."""

    begin: str
    end: str
    marks: tuple[str, ...]
    between: str = ""
    """Text after the end, before the answer."""
    answer: str = ""
    """Text at the beginning of each answer that is no function call."""
    others: tuple[str, ...] = ()
    """Texts that only the templates of other families contain."""


_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = (
    f"<\uff5c{name}\uff5c>".replace("_", "\u2581")
    for name in ("tool_calls_begin", "tool_call_begin", "tool_sep", "tool_call_end", "tool_calls_end")
)
"""DeepSeek's tokens."""

TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        call=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
        trigger="<|channel|>commentary to=functions.",
        marks=("<|channel|>", "functions"),
        parallel=False,  # the stop token <|call|> ends the turn
    ),
    "deepseek": ToolFormat(
        call=(f"{_CALL}function{_SEP}{_NAME}\n```json\n", f"\n```{_CALL_END}"),
        trigger=_CALLS,
        marks=(_CALLS, "```json"),
        opening=_CALLS,
        closing=_CALLS_END,
        separator="\n",
    ),
    "deepseek-v3.1": ToolFormat(
        call=(f"{_CALL}{_NAME}{_SEP}", _CALL_END),
        trigger=_CALLS,
        marks=(_CALLS,),
        opening=_CALLS,
        closing=_CALLS_END,
        separator="",
    ),
    "tekken": ToolFormat(
        call=("[TOOL_CALLS]{name}[ARGS]", ""),
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        gap="",
        id_length=9,
    ),
    "mistral": ToolFormat(
        call=('{"name": "{name}", "arguments": ', "}"),
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS][",
        closing="]",
        separator=", ",
        id_length=9,
    ),
    "hermes": ToolFormat(
        call=('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
        trigger="<tool_call>",
        marks=("<tool_call>", "arguments"),
        others=("<function=", "<arg_key>"),  # Qwen 3 Coder, GLM
    ),
    "llama3": ToolFormat(
        call=('{"name": "{name}", "parameters": ', "}"),
        trigger='{"name": "',
        marks=('"parameters": ', "ipython"),
        gap="; ",
    ),
}
"""Name -> format. The first one with all its marks in the chat template is the model's. `hermes` is also the format of
Qwen 2.5 and 3, and of the embedded model."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        marks=("<|channel|>",),
        between="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
    "think": ReasoningFormat(begin="<think>", end="</think>", marks=("</think>",)),
}
"""Name -> format, chosen as in `TOOL_FORMATS`."""


def detect(template: str, formats: Mapping[str, Any]) -> str | None:
    """Return the name of the format that a chat template has; None if it has none of them."""
    for name, each in formats.items():
        if all(mark in template for mark in each.marks) and not any(other in template for other in each.others):
            return name
    return None


@dataclass(frozen=True)
class Function:
    """A function that the model may call, and the schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    text: dict[str, Any] | None = None
    """The format (of a structural tag) of an input that is no JSON. It follows the text before a call's arguments, and
    is the end of the output: what follows it could be a part of it."""


@dataclass(frozen=True)
class Calls:
    """The function calls that an answer may, or must, have."""

    format: ToolFormat
    functions: Sequence[Function]
    required: bool
    parallel: bool
    answer: dict[str, Any] | None = None
    """The format of an answer without calls. None: any text."""

    def anywhere(self, reasoning: ReasoningFormat | None) -> bool:
        """Whether calls may stand anywhere in free text, and not only at the beginning of the answer."""
        return not self.required and self.answer is None and not (reasoning is not None and reasoning.answer)


def calls_format(calls: Calls, reasoning: ReasoningFormat | None) -> dict[str, Any]:
    """Return the format (of a structural tag) of an answer with function calls."""
    form = calls.format
    once = not (calls.parallel and form.parallel) or any(function.text for function in calls.functions)
    tags = [
        {
            "type": "tag",
            "begin": form.begin(function.name),
            "content": function.text or {"type": "json_schema", "json_schema": function.parameters},
            "end": "" if function.text else form.call[1],
        }
        for function in calls.functions
    ]
    separator = form.gap if form.separator is None else form.separator
    listed: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": once,
    }
    section = {"type": "tag", "begin": form.opening, "content": listed, "end": form.closing}
    if calls.required:
        return section
    if not calls.anywhere(reasoning):
        return {"type": "or", "elements": [section, _answered(reasoning, calls.answer)]}
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags if form.separator is None else [section],
        "stop_after_first": once or form.separator is not None,
        "excludes": [] if reasoning is None else [reasoning.begin],
    }


def answer_format(
    answer: dict[str, Any] | Calls | None,
    reasoning: ReasoningFormat | None,
    thinking: Literal["open", "possible", "no"] = "no",
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the format of a whole output: the thinking phase, then calls or the answer.

    Args:
        answer: calls, or the format of an answer without them. None: any text.
        thinking: the prompt ends within a thinking phase (`open`), or the model may begin one.
        max_tokens: maximum number of tokens of the thoughts.
    """
    form = calls_format(answer, reasoning) if isinstance(answer, Calls) else _answered(reasoning, answer)
    if reasoning is None or thinking == "no":
        return form
    thoughts = {
        "type": "tag",
        "begin": reasoning.begin if thinking == "possible" else "",
        "content": {"type": "any_text", "max_tokens": max_tokens},
        "end": reasoning.end,
    }
    lines = {"type": "optional", "content": {"type": "or", "elements": [_literal("\n"), _literal("\n\n")]}}
    phase = _sequence(thoughts, _literal(reasoning.between) if reasoning.between else lines)
    return _sequence({"type": "optional", "content": phase} if thinking == "possible" else phase, form)


def as_format(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as a format."""
    match constraint.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(constraint.source)}
        case "regex":
            return {"type": "regex", "pattern": constraint.source}
        case "choice":
            return {"type": "choice", "choice": constraint.choices}
        case "grammar":
            return {"type": "grammar", "grammar": constraint.source}
        case "json_object":
            return {"type": "json_object"}
    form: dict[str, Any] = json.loads(constraint.source)["format"]
    return form


def _answered(reasoning: ReasoningFormat | None, answer: dict[str, Any] | None) -> dict[str, Any]:
    answer = answer or {"type": "any_text", "excludes": [] if reasoning is None else [reasoning.begin]}
    return _sequence(_literal(reasoning.answer), answer) if reasoning is not None and reasoning.answer else answer


def _literal(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
