"""JSON Schema for outlines-core: the regex of the JSON text that a schema allows.

outlines_core 0.2.14 reads a subschema by its first keyword of `properties`, `allOf`, `anyOf`, `oneOf`, `prefixItems`,
`enum`, `const`, `$ref`, `type`. It ignores bounds of numbers, counts of properties, `patternProperties`, `uniqueItems`
and more, puts patterns between quotes unchanged, drops properties where a reference is nested too deep, and writes some
alternatives without parentheses. So it gets the normal form with references expanded. Strings and numbers with
conditions of their own get a regex here, which replaces a placeholder. Objects hold the named properties and no others.
"""

from __future__ import annotations

import json
import re
from typing import Any

from outlines_core.json_schema import build_regex_from_schema

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering, any_of, counts
from guided.errors import UnsupportedConstraint, bounded
from guided.schema import number_pattern, string_pattern
from guided.schema.keywords import NUMBER_BOUNDS, Schema, divides_integers, integer_bounds

_ANY: dict[str, Any] = {"anyOf": [{}]}
"""Any value, up to three levels deep. outlines writes `{}` alone without parentheses."""
_FIRST_PLACEHOLDER = 7_310_000_000_000_000
"""The first of the numbers that stand for a regex of this module while outlines builds the whole one."""
_ANYTHING = regex.Repeat(regex.Chars(regex.UNIVERSE), 0, None)
_LARGEST_BOUND = 10**12
"""Largest magnitude of a bound. The compilation time doubles with every digit: 7 s for 20 digits with 600 tokens."""
_LONGEST_WITH_ESCAPES = 8
"""Maximum length of strings with escapes. The compilation time doubles with every character that may be an escape."""
_MOST_CHARACTERS = 10_000
"""Maximum number of characters that the lengths and counts in a schema require together."""
_ESCAPE = r'\\["\\/bfnrt]'
"""outlines' own regex of an escape in a string. It has none for control characters without a letter."""
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
"""outlines' own regex requires a sign in every exponent."""


def to_regex(schema: Schema, whitespace: str | None) -> str:
    """Return a regex for the JSON text that `schema` allows. Raises as `SchemaLowering` does.

    Args:
        whitespace: regex for the text between JSON tokens; outlines' default (a space, or none) where None.
    """
    if whitespace:
        whitespace = f"(?:{string_pattern.whitespace(whitespace)})"
    lowering = _Lowering(schema)
    document = json.dumps(lowering.lower(lowering.form.root), ensure_ascii=False)
    placeholders = re.compile(rf"{_FIRST_PLACEHOLDER // 10**9}[0-9]{{9}}")
    if len(placeholders.findall(document)) > len(lowering.regexes):
        raise UnsupportedConstraint(
            f"outlines: the schema may not contain numbers from {_FIRST_PLACEHOLDER} on", param="json_schema"
        )
    try:
        built: str = build_regex_from_schema(document, whitespace)
    except ValueError as error:
        raise UnsupportedConstraint(f"outlines refuses the schema: {bounded(error)}", param="json_schema") from None
    built = built.replace(_ESCAPE, f"(?:{_ESCAPE}|\\\\u00[01][0-9a-fA-F])")
    return placeholders.sub(lambda found: f"(?:{lowering.regexes[int(found[0]) - _FIRST_PLACEHOLDER]})", built)


class _Lowering(SchemaLowering):
    library = "outlines"
    max_subschemas = 5_000

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._characters = 0
        self._times = 1
        """Number of times that the current subschema may occur: the product of the counts of the arrays around it."""
        self.regexes: list[str] = []
        """Number n replaces `_FIRST_PLACEHOLDER + n` in outlines' regex."""

    def _placeholder(self, pattern: str) -> dict[str, Any]:
        self.regexes.append(pattern)
        return {"const": _FIRST_PLACEHOLDER + len(self.regexes) - 1}

    def any_value(self) -> dict[str, Any]:
        return _ANY

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        expanded = self.expand(schema)
        if expanded is None:
            raise self.refusal(schema, "$ref", " that is recursive: a regex can't count levels")
        return expanded

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        parts = []
        for value in values:
            if isinstance(value, bool | str | None):
                parts.append({"const": value})
            else:  # outlines writes some numbers with fewer digits
                parts.append(self._placeholder(_literal(value)))
        return any_of(parts)

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        most = None if most is None else int(most)
        required = self.pattern(schema)
        if required is None and not least and most is None:
            return {"type": "string"}
        if required is None:
            keyword = "maxLength"
            node = self.fit_length(schema, keyword, _ANYTHING, least, most)
        else:
            keyword = required[0]
            node = self.parse_pattern(schema, *required, least, most)
        low, high = string_pattern.width(node)
        length = max(low, high or 0)
        self._count(length, schema)
        text = self.json_text(schema, keyword, node, escapes=length <= _LONGEST_WITH_ESCAPES)
        return self._placeholder(f'"(?:{regex.render(text)})"')

    def _count(self, characters: int, schema: Schema) -> None:
        """Count characters that a length or a count requires, and refuse too many: each is at least one state."""
        self._characters += characters * self._times
        if self._characters > _MOST_CHARACTERS:
            raise UnsupportedConstraint(
                f"outlines: lengths and counts of items add up to more than {_MOST_CHARACTERS} characters",
                param="json_schema",
                pointer=self.form.pointer(schema),
            )

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        multiple = schema.get("multipleOf", 1)
        if not divides_integers(multiple):
            raise self.refusal(schema, "multipleOf")
        low, high = integer_bounds(schema)
        if low is None and high is None:
            return {"type": "integer"}
        self._check_bounds(schema)
        pattern = number_pattern.integers(low, high)
        if not pattern:
            raise self.unsatisfiable(schema, "no integer is within the bounds")
        return self._placeholder(pattern)

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "multipleOf" in schema:
            if schema["multipleOf"] == 1:
                return self.integer(schema)
            raise self.refusal(schema, "multipleOf")
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None and high is None:
            return self._placeholder(_NUMBER)
        if low is None or low < 0 or low != int(low) or (high is not None and high != int(high)):
            keyword = next(keyword for keyword in NUMBER_BOUNDS if keyword in schema)
            raise self.refusal(schema, keyword, " of numbers, except for integer bounds from 0 on")
        self._check_bounds(schema)
        above, below = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
        last = None if high is None else int(high)
        return self._placeholder(number_pattern.numbers(int(low), last, above=above, below=below))

    def _check_bounds(self, schema: dict[str, Any]) -> None:
        for keyword in NUMBER_BOUNDS:
            if abs(schema.get(keyword, 0)) > _LARGEST_BOUND:
                bound = bounded(schema[keyword], 40)
                raise self.refusal(schema, keyword, f" {bound}: bounds are enforced up to {_LARGEST_BOUND}")

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        prefix, items, least, most = shape
        if prefix:  # narrowed: a tuple of exactly these
            if least > len(prefix):
                raise self.refusal(schema, "minItems", " beyond 'prefixItems'")
            return {"prefixItems": [self.lower(item) for item in prefix]}
        if items is False:
            return {"type": "array", "maxItems": 0}
        if items is True or items == {}:
            raise self.refusal(schema, "items", " that may be anything: its automaton would take minutes")
        times, before = max(least, most or 1), self._times
        self._count(times, schema)
        self._times *= times
        lowered = self.lower(items)
        self._times = before
        return {"type": "array", "items": lowered, **counts("minItems", least, "maxItems", most)}

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        named = self.only_named(schema)
        if named:
            return {
                "type": "object",
                "properties": {_in_quotes(name): self.lower(value) for name, value in named.items()},
                "required": [_in_quotes(name) for name in schema.get("required", [])],
            }
        if named is not None:
            return {"type": "object", "maxProperties": 0}
        rest = schema.get("additionalProperties", True)
        least = {"minProperties": 1} if schema.get("minProperties") else {}
        return {"type": "object", **least, **({} if rest is True else {"additionalProperties": self.lower(rest)})}


def _in_quotes(text: str) -> str:
    """Return `text` as written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal(value: Any) -> str:
    """Return a regex for one JSON value, as `json.dumps` writes it or without spaces."""
    texts = {json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
    return "|".join(regex.render(regex.literal(text)) for text in sorted(texts))
