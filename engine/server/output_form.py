"""The form of a chat's output: what is enforced on thoughts, calls and answer, and the parser that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.server.constraints import RequestedConstraint
from engine.server.context import ServerContext
from engine.server.generation import locate
from engine.server.protocol import ChatRequest
from engine.server.tools import places
from guided.backends import candidates
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, InvalidRequest
from guided.tools.formats import Calls, ReasoningFormat, answer_format, as_format
from guided.tools.parser import OutputParser

_TAIL = 32
"""Number of tokens at the end of a prompt that can show a thinking phase."""

Thinking = Literal["open", "possible", "no"]


@dataclass(frozen=True)
class OutputForm:
    """What a chat's output consists of."""

    wanted: RequestedConstraint
    """The constraint on the whole output."""
    kind: str | None = None
    """What the answer calls this constraint, if the request's own is only a part of it."""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parser: Callable[[], OutputParser] | None = None
    shows_special_tokens: bool = False
    """The parser reads special tokens."""
    id_length: int = 29
    """Number of characters of a call's id."""


def output_form(
    body: ChatRequest, context: ServerContext, wanted: RequestedConstraint, calls: Calls | None, prompt: list[int]
) -> OutputForm:
    """Combine the request's constraint, its calls and the model's thinking phase."""
    reasoning = context.reasoning_format if body.reasoning != "constrained" else None
    thinking = _thinking(reasoning, prompt, context)
    if reasoning is not None and thinking == "no" and not reasoning.answer:
        reasoning = None
    if body.max_reasoning_tokens is not None and context.reasoning_format is None:
        message = "the model's chat template has none of the known thinking phases: choose one with --reasoning-format"
        raise InvalidRequest(message, param="max_reasoning_tokens")
    if calls is None and reasoning is None:
        return OutputForm(wanted)

    def parser() -> OutputParser:
        if calls is None:
            return OutputParser(reasoning, thinking=thinking == "open")
        names, anywhere = [function.name for function in calls.functions], calls.anywhere(reasoning)
        opened = thinking == "open"
        return OutputParser(reasoning, thinking=opened, tools=calls.format, names=names, anywhere=anywhere)

    texts = f"{reasoning}{calls and calls.format}"
    special = any(name in texts for name in context.vocabulary.special_names)
    if calls is None and wanted.constraint is None and body.max_reasoning_tokens is None:
        return OutputForm(wanted, parser=parser, shows_special_tokens=special)
    whole, found = _combined(body, context, wanted, calls, reasoning, thinking)
    kind = "structural_tag" if wanted.constraint is None else wanted.constraint.kind
    length = OutputForm.id_length if calls is None else calls.format.id_length
    name = kind if calls is None else "tools"
    return OutputForm(replace(wanted, constraint=whole), name, found, parser, special, length)


def _combined(
    body: ChatRequest,
    context: ServerContext,
    wanted: RequestedConstraint,
    calls: Calls | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
) -> tuple[Constraint, dict[str, tuple[str, str]]]:
    """Return the constraint on the whole output, and the request's fields that its parts come from (`Job.places`)."""
    given = wanted.constraint
    answer = calls.answer if calls is not None else None if given is None else as_format(given)
    limit = body.max_reasoning_tokens
    document = {"type": "structural_tag", "format": answer_format(calls or answer, reasoning, thinking, limit)}
    owners: dict[int, tuple[str, str]] = {}
    if calls is not None:
        numbers = {tool.function.name: index for index, tool in enumerate(body.tools or ())}
        for function in calls.functions:
            owners[id(function.parameters)] = f"tools[{numbers[function.name]}].function.parameters", ""
    if answer is not None and given is not None:
        owners[id(answer.get("json_schema", answer))] = (
            wanted.param or given.kind,
            "/format" if given.kind == "structural_tag" else "",
        )
    found = dict(places(document, owners))
    candidates("structural_tag", wanted.backend)
    try:
        options: dict[str, Any] = {"whitespace": None if given is None else given.whitespace, "limits": context.limits}
        return Constraint.structural_tag(document, strict_schema=body.strict_schema is True, **options), found
    except InvalidConstraint as error:
        locate(error, found)
        raise


def _thinking(reasoning: ReasoningFormat | None, prompt: list[int], context: ServerContext) -> Thinking:
    """Return whether the prompt ends within a thinking phase, or after one, or before one."""
    if reasoning is None:
        return "no"
    tail = b"".join(map(context.texts.bytes_of, prompt[-_TAIL:])).decode("utf-8", "replace").rstrip()
    if tail.endswith(reasoning.begin):
        return "open"
    return "no" if tail.endswith(reasoning.end) else "possible"
