"""Constraints of the traffic: a fixed set, and generated ones that the server has not seen.

Every backend that supports their kind enforces all of them, so no answer may be a rejection.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from guided.constraint import Constraint, ConstraintKind

PEOPLE = [
    ("Maria Keller", 34, "Lisbon"),
    ("Jonas Berg", 51, "Oslo"),
    ("Aiko Tanaka", 27, "Kyoto"),
    ("Ada Reed", 8, "York"),
    ("Tomas Silva", 63, "Porto"),
    ("Lena Fischer", 19, "Vienna"),
]
PLAIN_PROMPTS = [f"{name} is {age} years old and lives in {city}. Who is it?" for name, age, city in PEOPLE]
PLAIN_PROMPTS += [f"Where does {name} live? {name} lives in {city}." for name, _, city in PEOPLE]


@dataclass(frozen=True)
class Example:
    """A constraint in the form of a request field, and a prompt for it."""

    kind: ConstraintKind
    value: Any
    prompt: str
    pattern: str | None = None
    """For a grammar or structural tag: a regex with the same language, to check outputs with."""

    @property
    def constraint(self) -> Constraint:
        if self.kind == "json_object":
            return Constraint.json_object()
        made: Constraint = getattr(Constraint, self.kind)(self.value)
        return made


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string", "maxLength": 24}
_SCHEMAS = [
    _object(name={"type": "string"}, age={"type": "integer"}, city={"type": "string"}),
    _object(name=_TEXT, adult={"type": "boolean"}, level={"enum": ["low", "middle", "high"]}),
    _object(who=_object(name=_TEXT, age={"type": "integer"}), city=_TEXT),
    {"type": "array", "items": _object(name=_TEXT, city=_TEXT), "minItems": 1, "maxItems": 3},
]
_PATTERNS = [
    "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]",
    "[A-Z][a-z]{2,9} [A-Z][a-z]{2,9}, [1-9][0-9]?",
    "[A-Z]{3}-[0-9]{4}(-[a-z]+)?",
    "[a-z ]{60}",
]
_CHOICES = [
    ["red", "green", "blue"],
    ["Lisbon", "Lisbon, Portugal", "Oslo", "Kyoto in Japan", "York"],
    ["a", "ab", "abc", 'say "hi"', "C:\\tmp", "[a-z]+"],
]
_GRAMMARS = [
    ('root ::= "the answer is " ("yes" | "no") "."', "the answer is (yes|no)\\."),
    ('root ::= term (("+" | "-") term)*\nterm ::= [0-9]{1,3}', "[0-9]{1,3}([+-][0-9]{1,3})*"),
    ('root ::= line line?\nline ::= [A-Z] [a-z]{1,8} ": " [0-9]+ ";"', "([A-Z][a-z]{1,8}: [0-9]+;){1,2}"),
]


def _tag(pattern: str) -> dict[str, Any]:
    content = {"type": "regex", "pattern": pattern}
    return {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<answer>", "content": content, "end": "</answer>"},
    }


def _prompt(number: int, question: str) -> str:
    name, age, city = PEOPLE[number % len(PEOPLE)]
    return f"{name} is {age} years old and lives in {city}. {question}"


EXAMPLES: dict[ConstraintKind, list[Example]] = {
    "json_schema": [
        Example("json_schema", schema, _prompt(index, "Extract it as JSON.")) for index, schema in enumerate(_SCHEMAS)
    ],
    "json_object": [Example("json_object", True, _prompt(index, "Describe it as JSON.")) for index in range(2)],
    "regex": [Example("regex", pattern, _prompt(index, "Which?")) for index, pattern in enumerate(_PATTERNS)],
    "choice": [Example("choice", options, _prompt(index, "Choose one.")) for index, options in enumerate(_CHOICES)],
    "grammar": [
        Example("grammar", text, _prompt(index, "Is it so?"), pattern)
        for index, (text, pattern) in enumerate(_GRAMMARS)
    ],
    "structural_tag": [
        Example("structural_tag", _tag(pattern), _prompt(index, "Which?"), f"<answer>({pattern})</answer>")
        for index, pattern in enumerate(_PATTERNS)
    ],
}
"""Fixed constraints, which many requests share."""


def fresh(kind: ConstraintKind, source: random.Random) -> Example:
    """Return a random constraint that is almost certainly new. `json_object` has only one."""
    first, second = (_word(source) for _ in range(2))
    bound = source.randint(10, 9999)
    prompt = _prompt(bound, f"What of {first}?")
    match kind:
        case "json_schema":
            fields = {
                first: {"enum": [bound, bound + 1, "unknown"]},
                second: {"type": "string", "maxLength": 9 + bound % 9},
            }
            return Example(kind, _object(**fields), prompt)
        case "regex":
            return Example(kind, f"{first} [0-9]{{{1 + bound % 5}}}( {second})?", prompt)
        case "structural_tag":
            return Example(kind, _tag(f"{first} [0-9]{{2}}"), prompt, f"<answer>{first} [0-9]{{2}}</answer>")
        case "choice":
            return Example(kind, [first, f"{first} {second}", second, str(bound)], prompt)
        case "grammar":
            text = f'root ::= "{first} " ("yes" | "no") tail?\ntail ::= ", {second}"'
            return Example(kind, text, prompt, f"{first} (yes|no)(, {second})?")
        case _:
            return EXAMPLES["json_object"][0]


def _word(source: random.Random) -> str:
    return "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(5, 9)))
