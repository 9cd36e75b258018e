"""Calls and thinking of a chat: the calls that its answer may have, the constraint on
the whole output, and the parser of the output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

from engine.server.context import ServerContext
from engine.server.request.bodies import ChatRequest, Tool, is_hosted
from engine.server.request.constraints import RequestedConstraint
from engine.server.request.custom_calls import CustomCallParser
from engine.server.request.job import OutputForm
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, InvalidRequest, bounded
from guided.json_text import JsonObject
from guided.regex.parser import parse
from guided.tools.formats import (
    NAME,
    Calls,
    Function,
    ReasoningFormat,
    ToolFormat,
    answer_format,
    as_format,
)

Thinking = Literal["open", "possible", "no"]
_OBJECT_TYPES = ("object", "Object", "OBJECT", "dict")
"""Spellings of the type `object` in schemas that need not be enforced."""


def requested_calls(
    body: ChatRequest,
    context: ServerContext,
    requested: RequestedConstraint,
    refused: dict[str, list[str]],
) -> Calls | None:
    """Return the calls that the answer may have, or None.

    Args:
        requested: has the constraint on an answer without calls.
        refused: field of a schema that need not be enforced -> JSON pointers of the
            parts that a library refused. This function adds the fields.
    """
    tools = body.tools or []
    _check_names(tools)
    mode, names = _choice(body.tool_choice, [tool.function.name for tool in tools])
    if not tools or mode == "none":
        return None
    tool_format = context.tool_format
    if tool_format is None:
        raise InvalidRequest(
            "the model's chat template has none of the known formats of function calls: choose one with --tool-format,"
            " or ask for the call's JSON with json_schema",
            param="tools",
        )
    is_off = context.settings.tool_strict == "off"
    functions = []
    for index, tool in enumerate(tools):
        if tool.function.name not in names:
            continue
        field = schema_field(index, tool)
        strict = tool.function.strict
        faults = None
        if is_off and strict is False:
            faults = [""]
        elif not (body.strict_schema or strict):
            faults = refused.setdefault(field, [])
        options = {
            "open_objects": requested.open_objects,
            "strict_schema": body.strict_schema is True,
        }
        parameters = _parameters(tool, field, faults, **options)
        if (pattern := tool.input_grammar("regex")) is not None:
            # raises if the regex can't be enforced
            parse(pattern, param=field, lookaheads=False)
        text = None
        if (lark := tool.input_grammar("lark")) is not None:
            text = _text_constraint(lark, field, tool_format)
        functions.append(Function(tool.function.name, parameters, text))
    parallel = body.parallel_tool_calls is not False and mode != "named"
    answer = None
    if requested.constraint is not None:
        answer = as_format(requested.constraint)
    return Calls(tool_format, functions, mode != "auto", parallel, answer)


def schema_field(index: int, tool: Tool) -> str:
    """Return the path of the schema of a tool's arguments, or of the format of its
    input, in a chat."""
    if tool.type == "custom":
        return f"tools[{index}].custom.format"
    return f"tools[{index}].function.parameters"


def _text_constraint(lark: str, field: str, tool_format: ToolFormat) -> Constraint:
    if tool_format.separator is not None or tool_format.call[0].endswith(NAME):
        message = "this model's format of calls has no marks around an input that is no JSON: use a regex, not Lark"
        raise InvalidRequest(message, param=field)
    return Constraint.grammar(lark, param=field)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        first = seen.setdefault(tool.function.name, index)
        if first != index:
            text = f"tools[{first}] has the name {tool.function.name!r} too: names are unique"
            raise InvalidRequest(text, param=f"tools[{index}].{tool.type}.name")


def _choice(
    choice: str | JsonObject | None, known: Sequence[str]
) -> tuple[str, Collection[str]]:
    """Return the mode (none, auto, required or named), and the functions that may be
    called."""
    if choice is None or isinstance(choice, str):
        mode = choice or "auto"
        if mode not in ("none", "auto", "required"):
            raise _invalid(
                f"{bounded(mode, 60)!r} is not one of none, auto and required"
            )
        if mode == "required" and not known:
            raise _invalid("required needs tools")
        return mode, frozenset(known)
    try:
        mode = "named"
        tools: Any = [choice]
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            mode = allowed["mode"]
            tools = allowed["tools"]
        functions = [tool for tool in tools if not is_hosted(tool.get("type"))]
        names = [tool.get(tool.get("type"), tool)["name"] for tool in functions]
    except (AttributeError, KeyError, TypeError):
        names = []
    if not names or mode not in ("named", "auto", "required"):
        raise _invalid(
            "its type is function or custom, with a name; or allowed_tools, with a mode and a list of tools"
        )
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        tools_here = ", ".join(known[:10]) or "none"
        raise _invalid(
            f"there is no tool {bounded(unknown, 140)!r}; there are: {bounded(tools_here)}"
        )
    return mode, frozenset(names)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")


def _parameters(
    tool: Tool, field: str, faults: Collection[str] | None, **options: Any
) -> Constraint:
    """Return the constraint on the arguments of a function, which are an object.

    Args:
        faults: JSON pointers of parts of their schema that are not enforced. None: the
            whole schema must be enforced.
        options: arguments of `Constraint.json_schema`.
    """
    schema = tool.function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if not isinstance(kinds, list):
        kinds = [kinds]
    if faults is None and "object" not in kinds:
        message = (
            "the parameters of a function are an object: their schema has another type"
        )
        raise InvalidConstraint(message, param=field)
    if faults is not None and not any(kind in _OBJECT_TYPES for kind in kinds):
        faults = [""]
    return Constraint.json_schema(
        {**schema, "type": "object"}, faults=faults, param=field, **options
    )


def output_form(
    body: ChatRequest,
    context: ServerContext,
    requested: RequestedConstraint,
    calls: Calls | None,
    prompt: list[int],
) -> OutputForm:
    """Combine the request's constraint, its calls and the model's thinking phase."""
    reasoning = context.reasoning_format
    if body.reasoning == "constrained":
        reasoning = None
    thinking = _thinking(reasoning, prompt, context)
    if (
        reasoning is not None
        and thinking == "no"
        and not (reasoning.answer or reasoning.finish)
    ):
        reasoning = None
    if body.max_reasoning_tokens is not None and context.reasoning_format is None:
        message = "the model's chat template has none of the known thinking phases: choose one with --reasoning-format"
        raise InvalidRequest(message, param="max_reasoning_tokens")
    if calls is None and reasoning is None:
        return OutputForm(requested.constraint)
    custom = {}
    for tool in body.tools or ():
        if tool.type == "custom":
            custom[tool.function.name] = tool.input_grammar("lark") is not None
    parser = partial(
        CustomCallParser,
        custom,
        reasoning=reasoning,
        thinking=thinking == "open",
        shows_thoughts=body.include_reasoning is not False,
    )
    if calls is not None:
        anywhere = calls.anywhere(reasoning)
        parser = partial(
            parser, tools=calls.format, functions=calls.functions, anywhere=anywhere
        )
    texts = f"{reasoning}{calls and calls.format}"
    special = any(name in texts for name in context.llm.model.vocabulary.special_names)
    if (
        calls is None
        and requested.constraint is None
        and body.max_reasoning_tokens is None
    ):
        return OutputForm(parser=parser, shows_special_tokens=special)
    whole = _combined(body, requested, calls, reasoning, thinking)
    if calls is not None:
        return OutputForm(whole, "tools", parser, special, calls.format.id_length)
    kind = "structural_tag"
    if requested.constraint is not None:
        kind = requested.constraint.kind
    return OutputForm(whole, kind, parser, special)


def _combined(
    body: ChatRequest,
    requested: RequestedConstraint,
    calls: Calls | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
) -> Constraint:
    """Return the constraint on the whole output."""
    constraint = requested.constraint
    name = "tools"
    answer = None
    whitespace = None
    if constraint is not None:
        name = constraint.param
        answer = as_format(constraint)
        whitespace = constraint.whitespace
    form = answer_format(
        calls or answer, reasoning, thinking, body.max_reasoning_tokens
    )
    return Constraint.structural_tag(
        {"format": form},
        whitespace=whitespace,
        open_objects=requested.open_objects,
        strict_schema=body.strict_schema is True,
        param=name,
    )


def _thinking(
    reasoning: ReasoningFormat | None, prompt: list[int], context: ServerContext
) -> Thinking:
    """Return whether a thinking phase is open at the end of the prompt, may begin
    there, or may not."""
    if reasoning is None:
        return "no"
    # The last tokens of the prompt show whether it ends with the begin or the end of a
    # thinking phase.
    tail = context.decode(prompt[-32:]).rstrip()
    if tail.endswith(reasoning.begin.rstrip()):
        return "open"
    if tail.endswith(reasoning.end):
        return "no"
    return "possible"
