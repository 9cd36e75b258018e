"""JSON Schema for llguidance: the canonical form, without what llguidance would enforce
wrongly.

Corrected are patterns (it reads them as Rust does, and a class with all control
characters also matches escaped quotes), formats (it allows a year 0, and leap seconds
in any minute, and lacks some), `not` for strings, `propertyNames`, counts of
properties, and bounds of numbers (`maximum: 0.95` would exclude 0.9). Left out are:

- `multipleOf` with many digits, and next to `allOf`, which it merges;
- numbers that are not exact as doubles;
- control characters in values and patterns: where only short escapes are allowed, it
  leaves the others out;
- `minProperties` that a repeated name could reach: it counts each time.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import chain, combinations
from math import comb, inf, prod
from typing import Any

from guided.backends.schema_lowering import SchemaLowering, any_of, only
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.regex.parser import parse_search
from guided.regex.tree import Chars, complement, intersection, map_chars, points, render
from guided.schema import string_pattern
from guided.schema.formats import FORMATS
from guided.schema.keywords import Schema, numbers_in
from guided.schema.numbers import EXACT
from guided.schema.string_pattern import complement_of, other_names, pattern_of, without

_OWN_FORMATS = frozenset(("ipv4", "ipv6", "uuid", "uri"))
"""Formats that llguidance enforces by the RFCs.

Its `duration` limits no number of digits, its `email` no length of a label, its
`hostname` not the whole length."""
_CONTROLS = points([*range(0x8), 0xB, *range(0xE, 0x20), 0x7F])
"""Characters that llguidance writes as `\\u0000` only."""
_MAX_CHOICES = 40
"""Maximum number of alternatives for counts of properties."""
_CONTROLS_AND_ESCAPED = points([*range(0x20), *b'"\\'])


class LLGuidanceLowering(SchemaLowering):
    """Lowers one schema for llguidance."""

    library = "llguidance"
    enforces = ("allOf", "not")

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(constraint)
        self.names_properties = False
        """Some object has properties with schemas of their own, and may have others."""
        self._merges = '"allOf":' in json.dumps([self.form.root, self.form.definitions])
        """llguidance merges parts of the schema. A common multiple may then have more
        than 32 bits, unnoticed."""

    def _lower(self, schema: JsonObject) -> JsonObject:
        if "allOf" in schema:
            return {"allOf": [self.lower(part) for part in schema["allOf"]]}
        if "not" in schema:
            if schema.get("type") != "string":
                raise self.refusal(schema, "not")
            return self._other_strings(schema)
        return super()._lower(schema)

    def finite(self, schema: JsonObject, keyword: str, values: list[Any]) -> JsonObject:
        for value in numbers_in(values):
            if not _is_exact(value):
                raise self.refusal(
                    schema,
                    keyword,
                    f" with {bounded(value, 40)}: it has too many digits",
                )
        if re.search(
            r"(?<!\\)(?:\\\\)*\\u00|\x7f", json.dumps(values, ensure_ascii=False)
        ):
            raise self.refusal(schema, keyword, " with a control character")
        return {"enum": values}

    def string(self, schema: JsonObject) -> JsonObject:
        lengths = only(schema, "minLength", "maxLength")
        pattern = schema.get("pattern", "")
        if pattern and lengths:
            # for the library, each state of the pattern has each length
            with suppress(InvalidConstraint):
                pattern = pattern_of(schema)
                lengths = {}
        lowered: JsonObject = {"type": "string", **lengths}
        parts = [lowered]
        if schema.get("format") in _OWN_FORMATS:
            lowered["format"] = schema["format"]
        elif "format" in schema:
            parts.append(
                {"pattern": self._pattern(schema, "format", FORMATS[schema["format"]])}
            )
        if "pattern" in schema:
            parts.append({"pattern": self._pattern(schema, "pattern", pattern)})
        if len(parts) > 2:
            return {"allOf": parts}
        return parts[0] | parts[-1]

    def _other_strings(self, schema: JsonObject) -> JsonObject:
        """Lower the type string with `not`: to a pattern for the strings that `not`
        does not exclude."""
        try:
            pattern = complement_of(schema["not"])
        except UnsupportedConstraint:
            raise self.refusal(schema, "not") from None
        kept = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        others = {"pattern": self._pattern(schema, "not", pattern)}
        return {"allOf": [self.lower(self.form.copied(schema, kept)), others]}

    def _pattern(self, schema: JsonObject, keyword: str, pattern: str) -> str:
        try:
            return _common_pattern(pattern)
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, keyword) from None

    def numeric(self, schema: JsonObject, kind: str) -> JsonObject:
        """Lower to one alternative for each number of decimals.

        Of a bound with decimals, the library excludes what it begins with (`maximum:
        0.95` excludes 0.9), and of the multiples of 0.25 it writes 0.50, not 0.5.
        """
        numbers = self.numbers(schema, kind)
        has_multiple = "multipleOf" in schema
        if has_multiple and self._merges:
            raise self.refusal(schema, "multipleOf", " next to 'allOf'")
        # the library's own check that there is one is not exact
        if has_multiple and numbers.are_few:
            return {"enum": list(map(numbers.value, numbers.units))}
        options: list[JsonObject] = []
        for decimals in range(numbers.decimals + 1):
            part = numbers.with_decimals(decimals)
            lowered: JsonObject = {"type": kind, **part.bounds()}
            if has_multiple:
                lowered["multipleOf"] = part.value(part.step)
                if not _is_readable(lowered["multipleOf"], decimals):
                    raise self.refusal(
                        schema, "multipleOf", f" {bounded(schema['multipleOf'], 40)}"
                    )
            if part.units and lowered not in options:
                options.append(lowered)
        return any_of(options)

    def array(self, schema: JsonObject) -> JsonObject:
        lowered: JsonObject = {"type": "array", **only(schema, "minItems", "maxItems")}
        if schema.get("prefixItems"):
            lowered["prefixItems"] = [self.part(item) for item in schema["prefixItems"]]
        if "items" in schema:
            lowered["items"] = self.part(schema["items"])
        return lowered

    def object(self, schema: JsonObject) -> JsonObject:
        properties, patterns, rest = self._named(schema)
        patterns = self._apart(schema, properties, patterns)
        if self.distinct_names and properties and not patterns and rest is not False:
            patterns = {f"^(?:{render(other_names(properties))})$": rest}
            rest = False
        lowered: JsonObject = {"type": "object"}
        if properties:
            lowered["properties"] = {
                name: self.part(value) for name, value in properties.items()
            }
        if patterns:
            sent = "patternProperties"
            written = {
                self._pattern(schema, sent, pattern): self.part(value)
                for pattern, value in patterns.items()
            }
            if len(written) < len(patterns):
                raise self.refusal(schema, sent, ": two patterns match the same names")
            lowered["patternProperties"] = written
        if rest is not True:
            lowered["additionalProperties"] = self.part(rest)
        lowered |= only(schema, "required")
        if patterns or (
            rest is not False and lowered.keys() & {"properties", "required"}
        ):
            self.names_properties = True
        return self._counted(schema, lowered, closed=rest is False and not patterns)

    def _named(self, schema: JsonObject) -> tuple[JsonObject, JsonObject, Schema]:
        """Return the schemas of properties by name, by pattern, and of others, as
        `propertyNames` restricts them."""
        properties: JsonObject = schema.get("properties", {})
        patterns: JsonObject = schema.get("patternProperties", {})
        rest: Schema = schema.get("additionalProperties", True)
        names = schema.get("propertyNames", True)
        if names is True:
            return properties, patterns, rest
        # The library has removed the properties that it forbids, but not those that a
        # reference forbids.
        if not properties and isinstance(names, dict) and "$ref" in names:
            names = self.form.target(names)
        if patterns:
            raise self.refusal(schema, "propertyNames", " next to 'patternProperties'")
        try:
            pattern = pattern_of(names)
        except UnsupportedConstraint:
            raise self.refusal(schema, "propertyNames") from None
        forbidden = [
            name for name in properties if not string_pattern.matches(pattern, name)
        ]
        properties = properties | dict.fromkeys(forbidden, False)
        if rest is False:
            return properties, {}, False
        return properties, {pattern: rest}, False

    def _apart(
        self, schema: JsonObject, properties: JsonObject, patterns: JsonObject
    ) -> JsonObject:
        """Exclude named properties from the patterns that they match: the canonical
        form has merged the two."""
        disjoint = {}
        for pattern, value in patterns.items():
            keyword = "propertyNames"
            if pattern in schema.get("patternProperties", {}):
                keyword = "patternProperties"
            names = [
                name for name in properties if string_pattern.matches(pattern, name)
            ]
            others = pattern
            if names and (
                keyword == "propertyNames" or '{"$ref": ' in json.dumps(value)
            ):
                try:
                    others = without(pattern, names)
                except UnsupportedConstraint:
                    raise self.refusal(
                        schema, keyword, " that match named properties too"
                    ) from None
            disjoint[others] = value
        return disjoint

    def _counted(
        self, schema: JsonObject, lowered: JsonObject, *, closed: bool
    ) -> JsonObject:
        """Add `minProperties` and `maxProperties`, which llguidance counts only where
        every named property is required.

        Otherwise there is an alternative for each choice of further properties.
        """
        required = lowered.get("required", [])
        named = lowered.get("properties", {})
        optional = [
            name
            for name, value in named.items()
            if value is not False and name not in required
        ]
        bounds = only(schema, "minProperties", "maxProperties")
        missing = max(0, bounds.get("minProperties", 0) - len(required))
        room = bounds.get("maxProperties", inf) - len(required)
        if missing > 1 and not closed:
            raise self.refusal(
                schema,
                "minProperties",
                f" {schema['minProperties']}: the same name would count twice",
            )
        if missing == 0:
            bounds.pop("minProperties", None)
        if closed and room >= len(optional):
            bounds.pop("maxProperties", None)
        if not bounds or not optional:
            return lowered | bounds
        if "maxProperties" not in bounds:
            keyword = "minProperties"
            sizes = range(missing, missing + 1)
        else:
            keyword = "maxProperties"
            sizes = range(missing if closed else 0, room + 1)
        if sum(comb(len(optional), size) for size in sizes) > _MAX_CHOICES:
            raise self.refusal(
                schema, keyword, f" with {len(optional)} optional properties"
            )
        options = []
        for chosen in chain.from_iterable(
            combinations(optional, size) for size in sizes
        ):
            others = optional
            if keyword == "minProperties":
                others = optional[: optional.index(chosen[-1])]
            left_out = dict.fromkeys(
                (name for name in others if name not in chosen), False
            )
            option = {
                **lowered,
                "properties": named | left_out,
                "required": [*required, *chosen],
            }
            if keyword == "maxProperties" and not closed:
                option |= bounds
            options.append(option)
        if keyword == "minProperties" and not closed:
            options.append(
                {
                    **lowered,
                    "properties": named | dict.fromkeys(optional, False),
                    **bounds,
                }
            )
        return any_of(options)


def _is_readable(multiple: float, decimals: int) -> bool:
    """Return whether the library can enforce `multiple`, which it multiplies by ten
    until it has no decimals."""
    coefficient: int = round(multiple * 10**decimals)
    # Other large ones exhaust the lexer's states next to a bound.
    is_small = coefficient <= 5_000 or 10**5 % coefficient == 0
    return is_small and prod([10] * decimals, start=multiple) == coefficient


def _is_exact(value: float) -> bool:
    """Return whether llguidance's JSON reader, and any other one, finds the number that
    `value` is.

    It multiplies the digits, as a double, by a power of ten. Both are exact up to these
    limits; beyond them the result may be the next double.
    """
    if isinstance(value, int):
        return abs(value) <= EXACT
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    # Up to 10**22 a power of ten is exact as a double.
    is_short = int("".join(map(str, digits))) <= EXACT and abs(int(exponent)) <= 22
    return is_short and abs(value) < EXACT


# the functions of one request have many properties with the same format
@lru_cache(maxsize=256)
def _common_pattern(pattern: str) -> str:
    """Return `pattern` in the common subset, without control characters.

    From a class with all control characters, llguidance would also generate quotes,
    unless the class has these too.
    """

    def safe(chars: Chars) -> Chars:
        if intersection(chars.ranges, _CONTROLS_AND_ESCAPED) == _CONTROLS_AND_ESCAPED:
            return chars
        if ranges := intersection(chars.ranges, complement(_CONTROLS)):
            return Chars(ranges)
        raise UnsupportedConstraint("the pattern needs a control character")

    return f"^(?:{render(map_chars(parse_search(pattern), safe))})$"
