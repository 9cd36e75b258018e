"""Function calls of a chat: which ones a request offers, and which its answer may have."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from engine.server.protocol import ChatRequest, Tool
from guided.constraint import Constraint
from guided.errors import InvalidRequest, bounded
from guided.schema.pointer import escape
from guided.tools.formats import Calls, Function, ToolFormat, as_format

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def requested_calls(body: ChatRequest, tool_format: ToolFormat | None, constraint: Constraint | None) -> Calls | None:
    """Return the calls that the answer may have; None if it may have none.

    Args:
        tool_format: the model's format. None: it is not known.
        constraint: on an answer without calls.

    Raises:
        InvalidRequest: a tool or the choice is invalid; `param` names it.
    """
    tools = body.tools or []
    _check_names(tools)
    mode, names = _choice(body.tool_choice, [tool.function.name for tool in tools])
    if not tools or mode == "none":
        return None
    if tool_format is None:
        raise InvalidRequest(
            "the model's chat template has none of the known formats of function calls: choose one with --tool-format,"
            " or ask for the call's JSON with json_schema",
            param="tools",
        )
    functions = [
        Function(tool.function.name, _parameters(tool, f"tools[{index}].function.parameters"))
        for index, tool in enumerate(tools)
        if tool.function.name in names
    ]
    parallel = body.parallel_tool_calls is not False and mode != "named"
    answer = None if constraint is None else as_format(constraint)
    return Calls(tool_format, functions, mode != "auto", parallel, answer)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name, param = tool.function.name, f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{bounded(name, 140)!r} is no name of a function: it has 1 to 128 of the characters a-z, A-Z, 0-9,"
                " _, -, . and :",
                param=param,
            )
        if name in seen:
            raise InvalidRequest(f"tools[{seen[name]}] has the name {name!r} too: names are unique", param=param)
        seen[name] = index


def _choice(choice: Any, known: Sequence[str]) -> tuple[str, Collection[str]]:
    """Return the mode (none, auto, required or named), and the functions that may be called."""
    if choice is None or isinstance(choice, str):
        mode = choice or "auto"
        if mode not in ("none", "auto", "required"):
            raise _invalid(f"{bounded(mode, 60)!r} is not one of none, auto and required")
        if mode == "required" and not known:
            raise _invalid("required needs tools")
        return mode, frozenset(known)
    kind = choice.get("type")
    if kind == "function":
        return "named", _known([choice], known)
    if kind != "allowed_tools":
        raise _invalid("its type is function or allowed_tools")
    allowed = choice.get("allowed_tools", choice)
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise _invalid("allowed_tools has a mode and a list of tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise _invalid("the mode of allowed_tools is auto or required")
    return allowed["mode"], _known(allowed["tools"], known)


def _known(chosen: Sequence[Any], known: Sequence[str]) -> Collection[str]:
    names, there = [], frozenset(known)
    for each in chosen:
        function = each.get("function", each) if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in there:
            shown = ", ".join(known[:10]) or "none"
            raise _invalid(f"there is no tool {bounded(name, 140)!r}; there are: {bounded(shown)}")
        names.append(name)
    return frozenset(names)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {message}", param="tool_choice")


def _parameters(tool: Tool, param: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = tool.function.parameters
    if tool.function.strict is False:
        return {"type": "object"}
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise InvalidRequest("the parameters of a function are an object: their schema has another type", param=param)
    if "$ref" in schema:  # up to draft 7 it has no siblings
        others = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
        given = others.get("allOf", [])  # another value than a list is refused with the schema
        schema = {**others, "allOf": [{"$ref": schema["$ref"]}, *given] if isinstance(given, list) else given}
    return {**schema, "type": "object"}


def places(document: Any, owners: dict[int, tuple[str, str]], at: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield where `document` has the objects of `owners`: (JSON pointer, (field of the request, pointer in the field)).

    Args:
        owners: by `id` of an object: the field of the request that describes it, and the pointer in this field.
        at: JSON pointer of `document`.
    """
    if id(document) in owners:
        yield at, owners[id(document)]
    elif isinstance(document, dict):
        for name, value in document.items():
            yield from places(value, owners, f"{at}/{escape(name)}")
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from places(value, owners, f"{at}/{index}")
