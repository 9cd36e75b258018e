"""JSON Schema for xgrammar: the schema rewritten so that xgrammar enforces all of it.

xgrammar 0.2.8 reads a subschema by its first keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type`. It
ignores the keywords next to it, `not`, `if`, `uniqueItems`, `contains`, names in `required` that are not in
`properties`, and more. So it gets the normal form. Some keywords are replaced by others; where that excludes valid
values, a comment says "narrowed". Named properties are generated in the schema's order, others after them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering, counts
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema import string_pattern
from guided.schema.keywords import NUMBER_BOUNDS, Schema, divides_integers, integer_bounds

PATTERN = "^pattern{}$"

_INT64 = 2**63 - 1024
"""Larger bounds are refused: xgrammar's own check misses those that a double can't represent."""
_COUNT = 2**31 - 1
_LARGEST_MULTIPLE = 1024


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema that xgrammar enforces, except for three mistakes in its grammar (`xgrammar.py` corrects them)."""

    text: str
    """The schema as JSON text."""
    open_names: bool
    """Some object has named properties and may have others: xgrammar treats `{"\\u0061": ...}` as a name other than
    `a`."""
    lengths: bool
    """Some string has a minLength or a maxLength: xgrammar allows control characters in those, and no escapes."""
    patterns: list[regex.Node]
    """JSON text between quotes. Number n appears in `text` as the pattern `PATTERN.format(n)`: xgrammar's own automata
    for patterns let `(a+b)?` match `a`."""
    checked: tuple[str, ...]
    """JSON pointers of the keywords that are left out, in the schema as sent."""


def lower(schema: Schema, leave_out: Collection[str] = (), *, strict: bool = False) -> Lowered:
    """Lower `schema` for xgrammar. Arguments and errors as those of `SchemaLowering`."""
    lowering = _Lowering(schema, leave_out=leave_out, strict=strict)
    text = json.dumps(lowering.document(), ensure_ascii=False)
    return Lowered(text, lowering.open_names, lowering.lengths, lowering.patterns, tuple(lowering.checked))


class _Lowering(SchemaLowering):
    library = "xgrammar"

    def __init__(self, schema: Schema, *, leave_out: Collection[str], strict: bool) -> None:
        super().__init__(schema, leave_out=leave_out, strict=strict)
        self.open_names = False
        self.lengths = False
        self.patterns: list[regex.Node] = []

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        for value in values:
            if not _keeps_value(value):
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}")
        return {"enum": values}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        most = int(most) if most is not None and most < _COUNT else None
        # xgrammar's own formats allow the 31st of February, 00:00:61, 222.046.46.46 and quotes within JSON pointers.
        if "pattern" in schema and "format" in schema:
            raise self.refusal(schema, "pattern", " next to 'format'")
        if "pattern" in schema:
            return {"type": "string", "pattern": self._pattern_name(schema, "pattern", schema["pattern"], least, most)}
        if "format" in schema:
            pattern = string_pattern.FORMATS[schema["format"]]
            return {"type": "string", "pattern": self._pattern_name(schema, "format", pattern, least, most)}
        if most == 0:
            return {"const": ""}
        lengths = counts("minLength", least, "maxLength", most)
        self.lengths = self.lengths or bool(lengths)
        return {"type": "string", **lengths}

    def _pattern_name(
        self, schema: dict[str, Any], keyword: str, pattern: str, least: int = 0, most: int | None = None
    ) -> str:
        """Return the placeholder for `pattern`, the value of `keyword`, in the schema's text."""
        try:
            node = string_pattern.fit(string_pattern.read(pattern), least, most)
            try:  # escapes make masks slow: see `xgrammar._ONE_CHARACTER`
                text = string_pattern.in_json(node, escapes=False)
            except UnsupportedConstraint:
                text = string_pattern.in_json(node, escapes=True)
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, keyword) from None
        self.patterns.append(text)
        return PATTERN.format(len(self.patterns) - 1)

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        multiple = schema.get("multipleOf")
        if multiple is not None:
            if multiple != int(multiple):
                raise self.refusal(schema, "multipleOf", " of numbers that are not integers")
            return self.integer(schema)  # narrowed: 5.0 is a multiple of 5 too
        bounds = {keyword: schema[keyword] for keyword in NUMBER_BOUNDS if keyword in schema}
        for keyword, bound in bounds.items():
            if abs(bound) > 1e15 or (bound and abs(bound) < 1e-6):
                raise self.refusal(schema, keyword, f" {bounded(bound, 40)}: bounds are enforced from 1e-6 to 1e15")
        return {"type": "number", **bounds}

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        for keyword in NUMBER_BOUNDS:
            if abs(schema.get(keyword, 0)) > _INT64:
                raise self.refusal(schema, keyword, f" {bounded(schema[keyword], 40)}: it is beyond 64 bits")
        low, high = integer_bounds(schema)
        if low is not None and high is not None and low > high:
            raise self.unsatisfiable(schema, "no integer is within the bounds")
        bounds = {"minimum": low, "maximum": high}
        lowered = {"type": "integer", **{keyword: bound for keyword, bound in bounds.items() if bound is not None}}
        multiple = schema.get("multipleOf", 1)
        if divides_integers(multiple):
            return lowered
        if multiple != int(multiple) or multiple > _LARGEST_MULTIPLE or len(lowered) > 1:
            raise self.refusal(schema, "multipleOf", f" {bounded(multiple, 40)}, or with bounds")
        return {**lowered, "multipleOf": int(multiple)}

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        prefix, items, least, most = shape
        if items is False and not prefix:
            return {"type": "array", "maxItems": 0}
        lowered: dict[str, Any] = {"type": "array"}
        if prefix:
            lowered["prefixItems"] = [self.lower(item) for item in prefix]
        lowered["items"] = False if items is False else self.lower(items)
        most = None if most is None or most >= _COUNT or items is False else most
        # Without `minItems`, xgrammar lets any number of a tuple's last items be missing.
        return lowered | counts("minItems", least, "maxItems", most)

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required, rest = schema.get("required", []), schema.get("additionalProperties", True)
        properties: dict[str, Schema] = dict(schema.get("properties", {}))
        properties |= {name: rest for name in required if name not in properties}
        patterns = self._patterns(schema, properties)
        allowed = {name: self.lower(value) for name, value in properties.items() if value is not False}
        is_escaped = any(json.dumps(name, ensure_ascii=False)[1:-1] != name for name in properties)
        if patterns or is_escaped or len(allowed) < len(properties):
            rest = False  # narrowed: xgrammar would allow any value under these names
        least = schema.get("minProperties", 0)
        if least > (len(allowed) if rest is False and not patterns else 1 + len(required)):
            raise self.refusal(schema, "minProperties", ": other names are not allowed, or could occur twice")
        self.open_names = self.open_names or bool(allowed and rest is not False)
        lowered: dict[str, Any] = {"type": "object"}
        if allowed:
            lowered["properties"] = allowed
        if patterns:
            lowered["patternProperties"] = patterns
        if rest is not True:
            lowered["additionalProperties"] = False if rest is False else self.lower(rest)
        if required:
            lowered["required"] = required
        bounds = (keyword for keyword in ("minProperties", "maxProperties") if keyword in schema)
        return lowered | {keyword: int(min(schema[keyword], _COUNT)) for keyword in bounds}

    def _patterns(self, schema: dict[str, Any], named: Iterable[str]) -> dict[str, Any]:
        """Return `patternProperties` of one pattern that matches none of `named`; `propertyNames` may say it, too."""
        patterns: dict[str, Schema] = schema.get("patternProperties", {})
        if "propertyNames" in schema:
            names = schema["propertyNames"]
            if patterns or [*named] or not isinstance(names, dict) or {*names, "type"} != {"type", "pattern"}:
                raise self.refusal(schema, "propertyNames", " next to others, or other than a pattern")
            patterns = {names["pattern"]: schema.get("additionalProperties", True)}
        elif len(patterns) > 1 or any(string_pattern.matches(one, name) for one in patterns for name in named):
            raise self.refusal(schema, "patternProperties", ": several, or one that matches a named property")
        return {
            self._pattern_name(schema, "patternProperties", pattern): self.lower(value)
            for pattern, value in patterns.items()
        }


def _keeps_value(value: Any) -> bool:
    """Whether xgrammar writes `value` as an equal value (its integers have 64 bits)."""
    if isinstance(value, list):
        return all(map(_keeps_value, value))
    if isinstance(value, dict):
        return all(map(_keeps_value, value.values()))
    return not isinstance(value, int) or isinstance(value, bool) or abs(value) < _INT64
