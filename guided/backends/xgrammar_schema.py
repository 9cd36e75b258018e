"""JSON Schema for xgrammar: the schema rewritten so that xgrammar enforces all of it.

xgrammar 0.2.8 reads a subschema by its first keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type`. It
ignores the keywords next to it, `not`, `if`, `uniqueItems`, `contains`, names in `required` that are not in
`properties`, and more. So it gets the normal form. Some keywords are replaced by others; where that excludes valid
values, a comment says "narrowed". Named properties are generated in the schema's order, others after them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering, counts
from guided.errors import bounded
from guided.schema import string_pattern
from guided.schema.keywords import NUMBER_BOUNDS, Schema, divides_integers, integer_bounds

PATTERN = "^pattern{}$"

_INT64 = 2**63 - 1024
"""Larger bounds are refused: xgrammar's own check misses those that a double can't represent."""
_COUNT = 2**31 - 1
_LARGEST_MULTIPLE = 1024
_WIDEST_MULTIPLES = 10_000


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

    def any_value(self) -> dict[str, Any]:
        return {}

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self.keep_reference(schema)

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        for value in values:
            if not _keeps_value(value):
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}")
        return {"enum": values}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        most = int(most) if most is not None and most < _COUNT else None
        # xgrammar's own formats allow the 31st of February, 00:00:61, 222.046.46.46 and quotes within JSON pointers.
        required = self.pattern(schema)
        if required is not None:
            return {"type": "string", "pattern": self._pattern_name(schema, *required, least, most)}
        if most == 0:
            return {"const": ""}
        lengths = counts("minLength", least, "maxLength", most)
        self.lengths = self.lengths or bool(lengths)
        return {"type": "string", **lengths}

    def _pattern_name(
        self, schema: dict[str, Any], keyword: str, pattern: str, least: int = 0, most: int | None = None
    ) -> str:
        """Return the placeholder for `pattern` in the schema's text."""
        node = self.parse_pattern(schema, keyword, pattern, least, most)
        # Escapes make masks slow: see `xgrammar._ONE_CHARACTER`.
        self.patterns.append(self.json_text(schema, keyword, node, escapes=False))
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
        narrow = low is not None and high is not None and high - low < _WIDEST_MULTIPLES
        enforced = narrow or (low is None and high is None)
        if multiple != int(multiple) or multiple > _LARGEST_MULTIPLE or not enforced:
            raise self.refusal(schema, "multipleOf", f" {bounded(multiple, 40)} with these bounds")
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
        lowered: dict[str, Any] = {"type": "object"}
        rest, names = schema.get("additionalProperties", True), schema.get("propertyNames", True)
        patterns = self._pattern_properties(schema, rest)
        properties = self._properties(schema, rest)
        if names is not True and properties and rest is not False:
            raise self.refusal(schema, "propertyNames", " next to 'properties'")  # it would ignore these
        if names is not True:
            patterns, rest = self._property_names(schema, patterns, rest)
            names = names if rest is not False and not patterns else True
        if patterns:
            lowered["patternProperties"] = patterns
            rest = False  # narrowed: xgrammar would allow any value under a name that matches
        allowed = {name: self.lower(value) for name, value in properties.items() if value is not False}
        if len(allowed) < len(properties):
            rest, names = False, True  # narrowed: xgrammar excludes a name only by allowing no others
        least = schema.get("minProperties", 0)
        if least > 1 + len(schema.get("required", ())) and (rest is not False or patterns):
            rest, names = False, True  # narrowed: other names could occur twice
            lowered.pop("patternProperties", None)
            patterns = {}
        if rest is False and not patterns and least > len(allowed):
            raise self.refusal(schema, "minProperties", ": only named properties are allowed here")
        if allowed:
            lowered["properties"] = allowed
        if names is not True:
            lowered["propertyNames"] = self._name(names)
        self.open_names = self.open_names or bool(allowed and (rest is not False or patterns))
        if rest is not True:
            lowered["additionalProperties"] = False if rest is False else self.lower(rest)
        if required := schema.get("required"):
            lowered["required"] = required
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema:
                lowered[keyword] = int(min(schema[keyword], _COUNT))
        return lowered

    def _properties(self, schema: dict[str, Any], rest: Schema) -> dict[str, Schema]:
        """Return the named properties, and the required ones that only a pattern describes."""
        declared: dict[str, Schema] = dict(schema.get("properties", {}))
        for name in schema.get("required", ()):
            if name not in declared:  # only next to `patternProperties`: see `NormalForm`
                patterns = schema.get("patternProperties", {})
                matching = [value for pattern, value in patterns.items() if string_pattern.matches(pattern, name)]
                if len(matching) > 1:
                    raise self.refusal(schema, "required", f" {bounded(name, 60)!r}, which several patterns match")
                declared[name] = matching[0] if matching else rest
                if declared[name] is False:
                    raise self.unsatisfiable(schema, f"{bounded(name, 60)!r} is required and not allowed")
        self.check_names(schema, declared)
        return declared

    def _pattern_properties(self, schema: dict[str, Any], rest: Schema) -> dict[str, Any]:
        raw: dict[str, Schema] = schema.get("patternProperties", {})
        if all(value in (True, {}) for value in raw.values()) and rest is True:
            return {}  # any value under any name
        kept = {pattern: value for pattern, value in raw.items() if value is not False}
        if len(kept) < len(raw) and (rest is not False or kept):
            raise self.refusal(schema, "patternProperties", " that forbid names")
        if len({json.dumps(value, sort_keys=True) for value in kept.values()}) > 1 and not _disjoint(list(kept)):
            raise self.refusal(schema, "patternProperties", " that may overlap")
        return {
            self._pattern_name(schema, "patternProperties", pattern): self.lower(value)
            for pattern, value in kept.items()
        }

    def _property_names(
        self, schema: dict[str, Any], patterns: dict[str, Any], rest: Schema
    ) -> tuple[dict[str, Any], Schema]:
        """Replace `propertyNames` by `patternProperties` where xgrammar would ignore one of the two."""
        names = schema["propertyNames"]
        if rest is False and not patterns:
            return patterns, rest
        if patterns or names is False:
            reason = " next to 'patternProperties'" if patterns else " that is false"
            raise self.refusal(schema, "propertyNames", reason)
        if rest is True:
            return patterns, rest
        if isinstance(names, dict) and names.keys() <= {"pattern", "type"} and "pattern" in names:
            return {self._pattern_name(schema, "propertyNames", names["pattern"]): self.lower(rest)}, False
        raise self.refusal(schema, "propertyNames", " next to 'additionalProperties'")

    def _name(self, names: Schema) -> dict[str, Any]:
        """Lower `propertyNames`, for strings only: xgrammar would allow other types as names."""
        if isinstance(names, bool) or names.keys() & {"$ref", "anyOf", "enum", "const", "type"}:
            return self.lower(names)
        return self.lower(self.form.copied(names, {**names, "type": "string"}))


def _disjoint(patterns: list[str]) -> bool:
    """Whether no name can match two of `patterns`, because each begins with another literal."""
    found = [None if "|" in pattern else re.match(r"\^([\w -]+)(?![*?{|])", pattern) for pattern in patterns]
    prefixes = sorted(match[1] for match in found if match)
    overlapping = any(second.startswith(first) for first, second in pairwise(prefixes))
    return len(prefixes) == len(patterns) and not overlapping


def _keeps_value(value: Any) -> bool:
    """Whether xgrammar writes `value` as an equal value (its integers have 64 bits)."""
    if isinstance(value, list):
        return all(map(_keeps_value, value))
    if isinstance(value, dict):
        return all(map(_keeps_value, value.values()))
    return not isinstance(value, int) or isinstance(value, bool) or abs(value) < _INT64
