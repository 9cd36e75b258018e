"""Random requests: every kind of constraint on every backend that supports it,
unconstrained ones, several choices, streamed and not. Every backend enforces these
constraints, so no answer may be a rejection."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from guided.backends import AUTO, BACKENDS
from guided.constraint import KINDS, ConstraintKind

ABLE: list[tuple[ConstraintKind, str]] = [
    (kind, backend)
    for kind in KINDS
    for backend in (AUTO, *BACKENDS)
    if backend == AUTO
    or (
        kind in BACKENDS[backend].kinds
        and (kind, backend) != ("json_object", "outlines")
    )
]
"""All (kind, backend) that must work. outlines needs most of the compilation's time
limit for any JSON object."""
PLAIN, FRESH, STREAMED, SEVERAL, SAMPLED, LEAVING = 0.25, 0.1, 0.5, 0.1, 0.3, 0.04
"""Shares of the traffic. Of the constrained requests: those with a new constraint,
those with temperature 1."""
REPEATED = 4
"""Number of repeated constraints per kind."""
PEOPLE = [
    "Maria Keller, 34, Lisbon",
    "Jonas Berg, 51, Oslo",
    "Aiko Tanaka, 27, Kyoto",
    "Ada Reed, 8, York",
]


@dataclass(frozen=True)
class Example:
    """A constraint in the form of a request field."""

    kind: ConstraintKind
    value: Any
    pattern: str = ""
    """A regex with the same language, for a regex, grammar or structural tag."""


def example(kind: ConstraintKind, number: int, backend: str = AUTO) -> Example:
    """Return the `number`th constraint of a kind, in the notation of a backend.
    `json_object` has only one."""
    source = random.Random(number)
    first, second = (
        "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(5, 9)))
        for _ in range(2)
    )
    match kind:
        case "json_schema":
            text: dict[str, Any] = {"type": "string", "maxLength": 9 + number % 9}
            inner = _object(
                {"name": text, "age": {"type": "integer"}, "adult": {"type": "boolean"}}
            )
            fields = {
                first: {"enum": [number, number + 1, "x"]},
                second: inner if number % 2 else text,
            }
            listed = {
                "type": "array",
                "items": _object(fields),
                "minItems": 1,
                "maxItems": 3,
            }
            return Example(kind, listed if number % 3 == 0 else _object(fields))
        case "regex" | "structural_tag":
            pattern = f"{first} 20[0-9]{{2}}-(0[1-9]|1[0-2])(, [A-Z][a-z]{{2,9}})?( {second})?"
            if kind == "regex":
                return Example(kind, pattern, pattern)
            content = {"type": "regex", "pattern": pattern}
            tag = {
                "type": "tag",
                "begin": "<answer>",
                "content": content,
                "end": "</answer>",
            }
            return Example(
                kind,
                {"type": "structural_tag", "format": tag},
                f"<answer>{pattern}</answer>",
            )
        case "choice":
            return Example(
                kind,
                [
                    first,
                    f"{first} {second}",
                    second,
                    f'say "{number}"',
                    "C:\\tmp",
                    "[a-z]+",
                ],
            )
        case "grammar":
            rules = f'root ::= "{first} " term (("+" | "-") term)* tail?\nterm ::= [0-9]{{1,3}}\ntail ::= ", {second}"'
            if backend == "llguidance":  # Lark
                rules = (
                    rules.replace("root ::=", "start:")
                    .replace("::=", ":")
                    .replace("[0-9]{1,3}", "/[0-9]{1,3}/")
                )
            return Example(
                kind, rules, f"{first} [0-9]{{1,3}}([+-][0-9]{{1,3}})*(, {second})?"
            )
        case _:
            return Example("json_object", True)


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    number: int
    body: dict[str, Any]
    example: Example | None = None
    """The constraint; None for an unconstrained request."""
    backend: str | None = None
    leaves: bool = False
    """Whether the client disconnects early."""
    hostile: str | None = None
    """Id of the hostile input, if the request is hostile."""

    @property
    def good(self) -> bool:
        """Whether the request must get a valid answer under any fault."""
        return self.hostile is None and not self.leaves

    @property
    def key(self) -> str | None:
        """A key that is equal for constrained requests with equal outputs, or None if
        the output is random."""
        if self.example is None or self.body.get("temperature") != 0:
            return None
        return json.dumps(
            {
                name: value
                for name, value in self.body.items()
                if name not in ("stream", "n")
            }
        )


def request(seed: int, number: int) -> Request:
    """Return the `number`th request of a seed, the same at every call."""
    source = random.Random(f"{seed}:{number}")
    if source.random() < PLAIN:
        made = plain(number, source.randrange(len(PEOPLE)))
    else:
        kind, backend = source.choice(ABLE)
        which = (
            source.randint(REPEATED, 10**6)
            if source.random() < FRESH
            else source.randrange(REPEATED)
        )
        made = constrained(number, example(kind, which, backend), backend)
        if source.random() < SAMPLED:
            made.body.update(temperature=1.0, seed=number)
    if source.random() < STREAMED:
        made.body.update(stream=True)
    if source.random() < SEVERAL:
        made.body.update(n=source.choice((2, 3)))
    return replace(made, leaves=source.random() < LEAVING)


def repeated() -> list[Request]:
    """Return one of each repeated request with a deterministic output, for the
    reference outputs."""
    numbers = range(REPEATED)
    return [
        constrained(index, example(kind, index, backend), backend)
        for kind, backend in ABLE
        for index in numbers
    ]


def plain(number: int, prompt: int) -> Request:
    """Return an unconstrained greedy request."""
    messages = [{"role": "user", "content": f"{PEOPLE[prompt]}. Who is it?"}]
    return Request(
        number,
        {
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24 + prompt,
            "ignore_eos": True,
        },
    )


def constrained(number: int, example: Example, backend: str) -> Request:
    """Return a constrained greedy request."""
    messages = [{"role": "user", "content": f"{PEOPLE[0]}. Answer."}]
    body = {
        example.kind: example.value,
        "backend": backend,
        "temperature": 0,
        "max_tokens": 80,
        "messages": messages,
    }
    return Request(number, body, example, backend)
