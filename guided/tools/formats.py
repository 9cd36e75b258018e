"""The formats in which families of models write function calls and thoughts.

Most formats of calls are taken from the structural tags that `xgrammar` builds for the
families. The other formats are written here. Both the structural tag that enforces a
format (`calls_format`, `answer_format`) and the parser that reads the output
(`guided/tools/output_parser.py`) are made from these descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from guided.backends.without_torch import import_xgrammar
from guided.constraint import Constraint
from guided.json_text import JsonObject
from guided.schema.keywords import replaced

NAME = "{name}"
NUMBER = "{number}"


@dataclass(frozen=True)
class ToolFormat:
    """The text of function calls: `opening`, then calls with `separator` between them,
    then `closing`.

    Without `separator`, each call is independent, and free text may stand between
    calls.
    """

    marks: Sequence[str]
    """Texts that all occur in the chat templates of the family."""
    family: str = ""
    """`xgrammar`'s name of the family. `tool_format` takes missing texts from its
    structural tag."""
    call: tuple[str, str] = ("", "")
    """The texts of a call before and after its arguments. `{name}` stands for the
    function's name, `{number}` for any number."""
    trigger: str = ""
    """The first characters of any call. They never occur in free text."""
    opening: str = ""
    closing: str = ""
    separator: str | None = None
    gap: str = "\n"
    """Text between successive calls of a format without `separator`."""
    id_length: int = 29
    """Number of characters of a call's id ("call_" and 24 digits). Mistral's templates
    require 9."""
    parallel: bool = True
    """Whether a turn of the model may have several calls."""
    style: str = "json"
    """The style of the arguments: see `Content.style`."""
    variants: Sequence[str] = ()
    """Alternative texts of a call before its arguments."""
    pattern: str = ""
    """Regex of the text before the arguments, with `{name}`, for calls that models
    write without a mask. It begins with the trigger. Empty: the text of `call`, with
    any whitespace."""
    preamble: tuple[str, str] | None = None
    """The text before and after a message to the user that may stand before a call."""
    finish: str = ""
    """The text at the end of an answer without calls."""
    answer: str = ""
    """Regex of an answer without calls, if calls stand only at the beginning of an
    answer. Such an answer begins with no mark of calls or thoughts. Empty: any text."""
    around: tuple[str, str] = ("", "")
    """Regexes of text that models write without a mask before and after calls. The
    parser drops this text."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The text of a thinking phase: `begin`, the thoughts, `end`, and `answer` before
    the answer."""

    begin: str
    end: str
    marks: Sequence[str]
    between: str = ""
    """Text after the end, before the answer."""
    answer: str = ""
    """Text at the beginning of each answer that is not a function call."""
    finish: str = ""
    """Text at the end of the answer."""


_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_K3_FINISH = "<|close|>response<|sep|><|close|>message<|sep|>"
_HERMES = ToolFormat(("<tool_call>", "arguments"), "qwen_3")
_QWEN_XML = ToolFormat(
    ("<tool_call>", "<function="),
    "qwen_3_5",
    trigger="<function=",  # the models sometimes leave out <tool_call>
    pattern=r"(?:<tool_call>\s*)?<function={name}>",
)
_CHANNEL = r"(?:<\|channel\|>(?:commentary|analysis))?"

TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(
        call=(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "",
        ),
        variants=(
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
        ),
        pattern=rf"{_CHANNEL}\s*to=functions\.{{name}}{_CHANNEL}\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        trigger="<|channel|>commentary to=functions.",
        marks=("<|channel|>", "functions"),
        parallel=False,  # the stop token <|call|> ends the turn
        preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        around=("", r"<\|(?:call|end)\|>(?:<\|start\|>assistant|\Z)"),
    ),
    "tekken": ToolFormat(
        call=("[TOOL_CALLS]{name}[ARGS]", ""),
        pattern=r"\[TOOL_CALLS\]{name}(?:\[CALL_ID\]\w+)?\[ARGS\]",
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        gap="",
        id_length=9,
    ),
    "mistral": ToolFormat(
        call=('{"name": "{name}", "arguments": ', "}"),
        trigger="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS] [",
        closing="]",
        separator=", ",
        id_length=9,
    ),
    "kimi_k3": ToolFormat(
        ("<|open|>", "<|sep|>"),
        "kimi_k3",
        trigger="<|close|>response<|sep|>",
        opening="<|close|>response<|sep|><|open|>tools<|sep|>",
        closing="<|close|>tools<|sep|><|close|>message<|sep|>",
        finish=_K3_FINISH,
    ),
    "kimi": ToolFormat(
        ("<|tool_calls_section_begin|>",),
        "kimi",
        pattern=r"<\|tool_call_begin\|>\s*(?:functions\.)?{name}:\d+\s*<\|tool_call_argument_begin\|>",
    ),
    "deepseek_v4_1": ToolFormat(("\uff5cDSML\uff5c calls",), "deepseek_v4_1"),
    "deepseek_v4": ToolFormat(("\uff5cDSML\uff5ctool_calls",), "deepseek_v4"),
    "deepseek_v3_2": ToolFormat(("\uff5cDSML\uff5cfunction_calls",), "deepseek_v3_2"),
    "deepseek_r1": ToolFormat((_CALLS, "```json"), "deepseek_r1"),
    "deepseek_v3_1": ToolFormat((_CALLS,), "deepseek_v3_1"),
    "cohere": ToolFormat(("cofl:tool_call",), "cohere"),
    "minimax_m3": ToolFormat(("]<]minimax[>[",), "minimax_m3"),
    "minimax": ToolFormat(("<minimax:tool_call>",), "minimax"),
    "glm_4_7": ToolFormat(("<tool_call>", "<arg_key>"), "glm_4_7", gap=""),
    "mimo": ToolFormat(("<tool_call><function=",), "mimo", gap=""),
    "qwen_3_5": _QWEN_XML,
    "qwen_3_coder": _QWEN_XML,
    "exaone": ToolFormat(("<tool_call>", "[|assistant|]"), "exaone"),
    "hermes": _HERMES,
    "qwen_3": _HERMES,
    "gemma_4": ToolFormat(
        call=("<|tool_call>call:{name}{", "}<tool_call|>"),
        trigger="<|tool_call>",
        marks=("<|tool_call>call:",),
        gap="",
        style="gemma",
    ),
    "llama_4": ToolFormat(
        call=("{name}(", ")"),
        trigger="[",
        marks=("[func_name1(",),
        opening="[",
        closing="]",
        separator=", ",
        style="python",
        answer=r"\s*(?:[^\[<\s][\s\S]*)?",
        around=(r"(?:<\|python_start\|>)?", r"<\|python_end\|>"),
    ),
    "llama": ToolFormat(
        ('"parameters": ', "ipython"),
        "llama",
        gap="; ",
        pattern=(
            r'(?:<\|python_tag\|>\s*\{\s*"type":\s*"function",\s*|(?:<\|python_(?:tag|start)\|>)?\{)'
            r'"name": "{name}",\s*"(?:parameters|arguments)":'
        ),
        around=("", r"<\|python_end\|>"),
    ),
}
"""Name -> format. A model has the first format with all its marks in the chat template.
`hermes` is the format of Qwen 2.5 and 3, and of the embedded model; `tekken` and
`mistral` are Mistral's newer and older formats. `llama_4` is for templates that ask
Llama 4 for Python's calls; Meta's own template asks for `llama`."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        marks=("<|channel|>",),
        between="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
    "kimi_k3": ReasoningFormat(
        begin="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        marks=("<|open|>", "<|sep|>"),
        between="<|open|>response<|sep|>",
        finish=_K3_FINISH,
    ),
    "gemma_4": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[/THINK]",)),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|END_THINKING|>",)
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>", ("</mm:think>",)),
    "think": ReasoningFormat("<think>", "</think>", ("</think>",)),
}
"""Name -> format, chosen as in `TOOL_FORMATS`."""


def detect(template: str, formats: Mapping[str, Any]) -> str | None:
    """Return the name of the first format with all its marks in a chat template, or
    None."""
    return next(
        (
            name
            for name, form in formats.items()
            if all(mark in template for mark in form.marks)
        ),
        None,
    )


@cache
def tool_format(name: str | None) -> ToolFormat | None:
    """Return the complete format with this name, or None for an unknown name.

    Missing texts of a format with a `family` are taken from xgrammar's structural tag
    for one function.
    """
    listed = TOOL_FORMATS.get(name or "")
    if listed is None or not listed.family:
        return listed
    import_xgrammar()
    from xgrammar.builtin_structural_tag import get_model_structural_tag

    function = {"type": "function", "function": {"name": NAME}}
    form = get_model_structural_tag(
        listed.family, [function], "auto", "disabled"
    ).format.model_dump()
    *outer, call = _parts(form, "tag")
    section = next(
        (tag for tag in outer if tag["content"]["type"] == "tags_with_separator"), None
    )
    *before, arguments = call["content"].get("elements", [call["content"]])
    begin = call["begin"] + "".join(element.get("value", NUMBER) for element in before)
    style = arguments["style"]
    if listed.family == "mimo":
        style = "mimo_xml"
    end = call["end"]
    if style == "qwen_xml":
        # xgrammar's elements have no line break at their end
        end = end.removeprefix("\n")
    trigger = listed.trigger or _parts(form, "triggered_tags")[0]["triggers"][0]
    complete = replace(listed, call=(begin, end), trigger=trigger, style=style)
    if section is None:
        return complete
    opening = listed.opening or section["begin"]
    closing = listed.closing or section["end"]
    return replace(
        complete,
        opening=opening,
        closing=closing,
        separator=section["content"]["separator"],
    )


def _parts(form: Any, kind: str) -> list[JsonObject]:
    """Return the formats of type `kind` within a format, the outer formats first."""
    parts = []
    inner: Iterable[Any] = ()
    if isinstance(form, dict):
        inner = form.values()
        if form.get("type") == kind:
            parts.append(form)
    elif isinstance(form, list):
        inner = form
    for value in inner:
        parts += _parts(value, kind)
    return parts


@dataclass(frozen=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Constraint
    """The schema of the arguments, an object."""
    text: Constraint | None = None
    """The constraint on a custom tool's plain input, which ends the output."""


@dataclass(frozen=True)
class Calls:
    """The function calls that an answer may, or must, have."""

    format: ToolFormat
    functions: Sequence[Function]
    required: bool
    parallel: bool
    answer: JsonObject | None = None
    """The format of an answer without calls. None: any text."""

    def anywhere(self, reasoning: ReasoningFormat | None) -> bool:
        """Return whether calls may stand anywhere in free text, and not only at the
        beginning of the answer."""
        if self.required or self.answer is not None or self.format.answer:
            return False
        return reasoning is None or not reasoning.answer


def calls_format(calls: Calls, reasoning: ReasoningFormat | None) -> JsonObject:
    """Return the format (of a structural tag) of an answer with function calls."""
    form = calls.format
    once = not (calls.parallel and form.parallel) or any(
        function.text for function in calls.functions
    )
    tags = []
    for function in calls.functions:
        tags += [
            _call(form, begin, function) for begin in (form.call[0], *form.variants)
        ]
    listed: JsonObject = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.gap,
        "at_least_one": True,
        "stop_after_first": once,
    }
    if form.separator is not None:
        listed["separator"] = form.separator
    section = _tag(form.opening, listed, form.closing)
    if calls.anywhere(reasoning):
        parts = [section]
        if form.separator is None:
            parts = tags
        if form.finish:
            parts.append(_tag(form.finish, _literal(""), ""))
        triggered = []
        for part in parts:
            _, trigger, rest = part["begin"].partition(form.trigger)
            if trigger:
                triggered.append({**part, "begin": trigger + rest})
        return {
            "type": "triggered_tags",
            "triggers": [form.trigger],
            "tags": triggered,
            "stop_after_first": once or form.separator is not None,
            "excludes": _begins(reasoning),
        }
    if form.preamble is not None:
        begin, end = form.preamble
        section = _sequence(_optional(_tag(begin, {"type": "any_text"}, end)), section)
    if calls.required:
        return section
    answer = calls.answer
    if answer is None and form.answer:
        answer = {"type": "regex", "pattern": form.answer}
    return {"type": "or", "elements": [section, _answered(reasoning, answer)]}


def _call(form: ToolFormat, begin: str, function: Function) -> JsonObject:
    """Return the tag of a call."""
    first, *others = begin.replace(NAME, function.name).split(NUMBER)
    content: JsonObject = {
        "type": "json_schema",
        "json_schema": function.parameters,
        "style": form.style,
    }
    end = form.call[1]
    if function.text is not None:
        content = as_format(function.text)
        end = ""
    for text in others:
        content = _sequence(
            {"type": "regex", "pattern": r"\d{1,3}"}, _literal(text), content
        )
    return _tag(first, content, end)


def answer_format(
    answer: JsonObject | Calls | None,
    reasoning: ReasoningFormat | None,
    thinking: Literal["open", "possible", "no"] = "no",
    max_tokens: int | None = None,
) -> JsonObject:
    """Return the format of a whole output: the thinking phase, then calls or the
    answer.

    Args:
        answer: function calls, or the format of an answer without calls. None: any
            text.
        thinking: whether the prompt ends within a thinking phase (`open`), or the model
            may begin one (`possible`).
        max_tokens: maximum number of tokens of the thoughts.
    """
    if isinstance(answer, Calls):
        form = calls_format(answer, reasoning)
    else:
        form = _answered(reasoning, answer)
    if reasoning is None or thinking == "no":
        return form
    between = _literal(reasoning.between)
    if not reasoning.between:
        between = _optional(
            {"type": "or", "elements": [_literal("\n"), _literal("\n\n")]}
        )
    thoughts = {"type": "any_text", "max_tokens": max_tokens}
    if thinking == "open":
        return _sequence(_tag("", thoughts, reasoning.end), between, form)
    return _sequence(
        _optional(_sequence(_tag(reasoning.begin, thoughts, reasoning.end), between)),
        form,
    )


def as_format(constraint: Constraint) -> JsonObject:
    """Return the format (of a structural tag) of a constraint. The format contains the
    constraint, or its contents."""
    match constraint.kind:
        case "json_object":
            return {"type": "json_object"}
        case "regex":
            return {"type": "regex", "pattern": constraint}
        case "structural_tag":
            document = constraint.value
            for pointer, content in constraint.contents.items():
                if content.kind != "json_object":
                    document = replaced(document, pointer, content)
            form: JsonObject = document["format"]
            return form
        case kind:
            return {"type": kind, kind: constraint}


def _answered(
    reasoning: ReasoningFormat | None, answer: JsonObject | None
) -> JsonObject:
    answer = answer or {"type": "any_text", "excludes": _begins(reasoning)}
    if reasoning is not None and reasoning.answer:
        return _sequence(_literal(reasoning.answer), answer)
    return answer


def _begins(reasoning: ReasoningFormat | None) -> list[str]:
    """Return the text that begins thoughts, which free text excludes, as a list."""
    if reasoning is None:
        return []
    return [reasoning.begin]


def _optional(content: JsonObject) -> JsonObject:
    return {"type": "optional", "content": content}


def _literal(text: str) -> JsonObject:
    return {"type": "const_string", "value": text}


def _sequence(*elements: JsonObject) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)}


def _tag(begin: str, content: JsonObject, end: str) -> JsonObject:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
