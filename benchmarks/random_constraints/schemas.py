"""Random JSON Schemas of every draft, with the combinations of keywords that grammar
libraries tend to get wrong."""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.random_constraints.languages import Case, pattern
from benchmarks.random_constraints.validation import FORMATS, problem
from guided.constraint import Constraint

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
_NEAR = [2**k for k in (0, 31, 53, 63, 64, 70)]
_NUMBERS: list[Any] = [
    0,
    0,
    0,
    0.25,
    0.5,
    2.5,
    9,
    10,
    99.9,
    100,
    1e-7,
    1e-20,
    1e15,
    1e22,
    0.1,
    1.5e3,
    12345.678,
]
_NUMBERS += [10**18]
_NUMBERS += [near + step for near in _NEAR for step in (-1, 0, 1)]
_MULTIPLES = [1, 2, 7, 10, 0.1, 0.01, 0.07, 1.5, 0.5, 1e-9, 65537, 65539, 1000000, 3]
_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    2**53 + 1,
    -(2**63),
    2**64,
    1e-7,
    "",
    "a",
    "ab",
    "é",
    '"',
]
_VALUES += [
    "\\",
    "\n",
    "a\n",
    "2020-02-30",
    "2020-02-29",
    "1.2.3.4",
    "12:00:00Z",
    "٣",
    "5",
]
_VALUES += [
    1e300,
    0.1 + 0.2,
    123456789.12345679,
    -0.0,
    1e22,
    5e-324,
    10**30,
    [2**53 + 1],
    {"b": 0.1},
]
_VALUES += [
    [],
    [1],
    ["a", None],
    {},
    {"a": 1},
    "\x01",
    "a\x7f",
    "\x1b[0m",
    "\x85",
    "\u2028",
    "\ue000",
    "\uffff",
]
_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
_NAMES = ["a", "b", "ab", "c d", 'q"', "é"]
_ODD_NAMES = [
    "",
    "a/b",
    "~",
    "$ref",
    "type",
    "enum",
    "__proto__",
    "0",
    "\\",
    "\n",
    "😀",
    "\x01",
    "a\x7f",
    "\u2028",
]
_ANNOTATIONS: list[dict[str, Any]] = [
    {"title": "a"},
    {"description": "b", "default": 0},
    {"examples": [1]},
]
_ANNOTATIONS += [
    {"$comment": "c"},
    {"readOnly": True},
    {"deprecated": True},
    {"x-own": {"type": 0}},
]
_AHEAD = ["^(?!a){}$", "^(?=.*b){}", "^(?!.*--)(?=[^b]){}", "^(?!{}$).{0,4}$"]
_SIMPLE_PATTERNS = ["", ".", "^a", "b", "^[a-c]+$", "^(?!a$)", r"\d", "^.{2}$", "^x-"]
_LENGTHS = [10, 20, 40, 255]


def random_schema(source: random.Random) -> Case:
    """Return a schema of a random draft."""
    draft = source.choice([2020, 2020, *DRAFTS])
    schema = _Generator(source, draft).document()
    return schema_case(
        schema, source.choice([None] * 9 + ["", r"\s*", "[ ]{0,2}", r" |\n|"])
    )


def schema_case(schema: Any, whitespace: str | None = None) -> Case:
    """Return a schema as a case."""
    text = json.dumps(schema)
    return Case(
        "json_schema",
        schema,
        lambda: Constraint.json_schema(json.loads(text), whitespace=whitespace),
        lambda output: problem(output, json.loads(text)),
    )


class _Generator:
    def __init__(self, source: random.Random, draft: int) -> None:
        self._source = source
        self._draft = draft
        self._definitions = "$defs" if draft >= 2019 else "definitions"
        self._defined: dict[str, Any] = {}
        self._anchors = self._chance(0.2)
        """Whether references use the definitions' own identifiers."""
        self._names = [*_NAMES, *source.sample(_ODD_NAMES, source.choice([0, 0, 0, 2]))]

    def document(self) -> dict[str, Any]:
        """Return a schema with the definitions that it refers to."""
        schema = self._object_schema(3)
        if self._draft != 2020 or self._chance(0.3):
            schema = {"$schema": DRAFTS[self._draft], **schema}
        for name in "xyz":  # a definition may refer to others
            if name in self._defined:
                self._defined[name] = self._anchored(name, self._schema(1))
        if self._defined:
            schema[self._definitions] = self._defined
        return dict(schema)

    def _anchored(self, name: str, schema: Any) -> Any:
        if not self._anchors or not isinstance(schema, dict):
            return schema
        return {
            **schema,
            **({"$anchor": name} if self._draft >= 2019 else {self._id: f"#{name}"}),
        }

    @property
    def _id(self) -> str:
        return "$id" if self._draft > 4 else "id"

    def _chance(self, probability: float) -> bool:
        return self._source.random() < probability

    def _schema(self, depth: int) -> Any:
        draw = self._source.random()
        if draw < 0.03 and self._draft > 4:
            return draw < 0.02
        if depth and draw < 0.25:
            return self._combined(depth)
        if draw < 0.32:
            return self._listed(depth)
        kind = self._source.choice(_TYPES)
        schema: dict[str, Any] = {} if self._chance(0.12) else {"type": kind}
        schema |= self._of_type(kind, depth)
        if self._chance(0.08):
            other = self._source.choice(_TYPES)
            schema |= {"type": sorted({kind, other}), **self._of_type(other, depth)}
        if self._chance(0.05):
            schema |= self._source.choice(_ANNOTATIONS)
        return schema

    def _of_type(self, kind: str, depth: int) -> dict[str, Any]:
        match kind:
            case "integer" | "number":
                return self._number()
            case "string":
                return self._string()
            case "array":
                return self._array(max(0, depth - 1))
            case "object":
                return self._object(max(0, depth - 1))
        return {}

    def _number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        first = self._source.choice(_NUMBERS) * self._source.choice([1, 1, -1])
        gap = self._source.choice([0, 0.25, 0.5, 1, 1, 2, 100, 2**10, 0.001])
        if self._chance(0.7):
            schema |= self._bound("inimum", first)
        if self._chance(0.6):
            second = first + gap if self._chance(0.7) else self._source.choice(_NUMBERS)
            schema |= self._bound("aximum", second)
        if self._chance(0.2):
            schema["multipleOf"] = self._source.choice(_MULTIPLES)
        return schema

    def _bound(self, name: str, value: Any) -> dict[str, Any]:
        exclusive, plain = f"exclusiveM{name}", f"m{name}"
        if self._chance(0.5):
            return {plain: value}
        return (
            {plain: value, exclusive: True} if self._draft == 4 else {exclusive: value}
        )

    def _string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if self._chance(0.4):
            schema["pattern"] = self._pattern()
        if self._chance(0.2):
            schema["format"] = self._source.choice([*FORMATS])
        if self._chance(0.3):
            schema["minLength"] = self._source.randint(0, 4)
        if self._chance(0.3):
            schema["maxLength"] = self._source.choice([*range(7), *range(7), *_LENGTHS])
        return schema

    def _pattern(self) -> str:
        frame = self._source.choice(
            ["^{}$", "^{}$", "^(?:{})$", "^{}", "{}$", "{}", "^a|{}$", "(^a|{}$)"]
        )
        if self._chance(0.08):
            frame = self._source.choice(_AHEAD)
        return frame.replace("{}", pattern(self._source))

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        tuples, rest = (
            ("prefixItems", "items")
            if self._draft == 2020
            else ("items", "additionalItems")
        )
        if self._chance(0.35):
            schema[tuples] = [
                self._schema(depth) for _ in range(self._source.randint(1, 3))
            ]
            if self._chance(0.6):
                schema[rest] = (
                    False if self._chance(0.5) else self._object_schema(depth)
                )
        elif self._chance(0.8):
            schema["items"] = self._object_schema(depth)
            if self._chance(0.1):
                schema["additionalItems"] = False
        for keyword, most in (("minItems", 3), ("maxItems", 4)):
            if self._chance(0.4):
                schema[keyword] = self._source.randint(0, most)
        if self._chance(0.08):
            schema["uniqueItems"] = True
            if self._chance(0.5):
                schema["items"] = {"enum": self._source.sample(_VALUES, 3)}
        if self._draft > 4 and self._chance(0.08):
            schema["contains"] = self._schema(depth)
            for keyword, least in (("minContains", 0), ("maxContains", 1)):
                if self._draft >= 2019 and self._chance(0.4):
                    schema[keyword] = self._source.randint(least, 3)
        return schema

    def _object_schema(self, depth: int) -> Any:
        while not isinstance(schema := self._schema(depth), dict):
            pass
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        names = self._source.sample(self._names, self._source.randint(0, 3))
        if names:
            schema["properties"] = {name: self._object_schema(depth) for name in names}
        if self._chance(0.5) and (
            required := [name for name in _NAMES[:4] if self._chance(0.3)] or names
        ):
            schema["required"] = required
        if self._chance(0.5):
            schema["additionalProperties"] = (
                False if self._chance(0.5) else self._object_schema(depth)
            )
        if self._chance(0.15):
            patterns = self._source.sample(
                [self._pattern(), *_SIMPLE_PATTERNS], self._source.choice([1, 1, 2, 3])
            )
            schema["patternProperties"] = {
                each: self._object_schema(depth) for each in patterns
            }
        for keyword in ("minProperties", "maxProperties"):
            if self._chance(0.2):
                schema[keyword] = self._source.randint(0, 3)
        if self._draft > 4 and self._chance(0.06):
            schema["propertyNames"] = self._source.choice(
                [
                    {"pattern": self._pattern()},
                    {"maxLength": 1},
                    {"enum": _NAMES},
                    {"not": {"const": "a"}},
                    self._schema(0),
                ]
            )
        if self._chance(0.05):
            schema["dependentRequired" if self._draft >= 2019 else "dependencies"] = {
                "a": ["b"]
            }
        elif self._chance(0.05):
            then = {self._source.choice("ab"): self._object_schema(depth)}
            schema["dependentSchemas" if self._draft >= 2019 else "dependencies"] = then
        return schema

    def _listed(self, depth: int) -> dict[str, Any]:
        values = self._source.sample(_VALUES, self._source.randint(1, 5))
        schema = (
            {"const": values[0]}
            if self._draft > 4 and self._chance(0.3)
            else {"enum": values}
        )
        return {
            **self._of_type(
                self._source.choice(["number", "string", "string", "array", "object"]),
                0,
            ),
            **schema,
        }

    def _combined(self, depth: int) -> dict[str, Any]:
        siblings = self._schema(0) if self._chance(0.3) else {}
        siblings = siblings if isinstance(siblings, dict) else {}
        parts = [self._schema(depth - 1) for _ in range(self._source.randint(1, 3))]
        draw = self._source.random()
        if draw < 0.3:
            name = self._source.choice("xyz")
            self._defined.setdefault(name, True)
            named = f"#{name}" if self._anchors else f"#/{self._definitions}/{name}"
            reference = named if self._chance(0.9) else "#"
            return {**siblings, "$ref": reference}
        keyword = self._source.choice(
            ["allOf", "allOf", "anyOf", "anyOf", "oneOf", "not", "if", "unevaluated"]
        )
        # `guided` applies it there too, and a validator does not
        if keyword == "if" and self._draft < 7:
            keyword = "allOf"
        match keyword:
            case "not":
                return {**siblings, "not": parts[0]}
            case "if":
                branches = {"then": parts[-1]} if self._chance(0.7) else {}
                branches |= (
                    {"else": parts[len(parts) // 2]} if self._chance(0.5) else {}
                )
                return {**siblings, "if": parts[0], **branches}
            case "unevaluated":
                rest = False if self._chance(0.7) else self._schema(0)
                inner = (
                    self._combined(depth - 1)
                    if depth > 1 and self._chance(0.3)
                    else {"anyOf": parts}
                )
                inner = inner if self._chance(0.8) else {"allOf": parts}
                return {
                    **siblings,
                    **inner,
                    self._source.choice(
                        ["unevaluatedProperties", "unevaluatedItems"]
                    ): rest,
                }
        return {**siblings, keyword: parts}
