"""JSON Schema for llguidance: the canonical form, corrected where llguidance would enforce it wrongly.

Corrected are:

- bounds of numbers: it takes integers that a double can't represent for their neighbours, aborts on those with more
  than 64 bits, and reads `exclusiveMinimum: 0` with `maximum: 0.25` as inclusive;
- patterns: it reads them as Rust does, and a class with all control characters also matches escaped quotes;
- control characters: where only short escapes are allowed, it leaves the others out of values and patterns;
- formats: it allows a year 0, and leap seconds in any minute, and lacks some;
- `not` for strings, `propertyNames`, and counts of properties, which it does not know or only in part.

It merges `allOf` itself. It counts duplicate keys for `minProperties`; this and values that it would change are
refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import comb, lcm, prod
from typing import Any

from guided import regex
from guided.backends.schema_lowering import ArrayShape, SchemaLowering, any_of, counts
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.regex import Chars
from guided.schema import string_pattern
from guided.schema.keywords import Schema, integer_bounds, is_number, types_of
from guided.schema.string_language import complement_of, disjoint_patterns, pattern_of, without

_OWN_FORMATS = frozenset(("duration", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that llguidance enforces by the RFCs.

Its `email` does not limit the length of a label, nor its `hostname` the length of the whole."""
_LARGEST = 2**63 - 1024
"""The largest double below 2^63."""
_EXACT = 2**53
"""All smaller integers are exact as doubles."""
_DIGITS = 15
"""A decimal with at most this many significant digits, and an exponent within the limit, is read exactly."""
_LEAST_EXPONENT = -22
"""Least decimal exponent that is read exactly: the power of ten is exact as a double."""
_MULTIPLES = 2**32
"""Limit for a `multipleOf` that llguidance has scaled to an integer: it has 32 bits."""
_MULTIPLES_WITHIN = 5_000
"""Largest scaled `multipleOf` next to a bound that is beyond it. Larger ones exhaust the lexer's states while masks are
computed."""
_MOST_DIGITS = 9
"""Maximum number of decimals of `multipleOf`."""
_SHORT = Decimal("1e-7")
"""Negative exclusive bounds that are multiples of this are kept: numbers of `_MOST_DIGITS` are next to them."""
_MAX_PATTERNS = 8
"""Maximum number of `patternProperties` that are made disjoint."""
_MAX_COUNTED = 40
"""Maximum number of alternatives for `minProperties` and `maxProperties`."""
_REFERENCE = '{"$ref": '
_CONTROLS = regex.ranges_of([(0, 0x7), (0xB, 0xB), (0xE, 0x1F), (0x7F, 0x7F)])
"""Characters that llguidance writes as `\\u0000` only."""
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00|\x7f")
"""Matches one of these characters in a JSON text."""
_CONTROLS_AND_ESCAPED = regex.ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])


class LLGuidanceLowering(SchemaLowering):
    """Lowers one schema for llguidance."""

    library = "llguidance"
    never = ("oneOf", "if", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems")

    def __init__(self, schema: Schema, *, leave_out: Collection[str] = (), strict: bool = False) -> None:
        super().__init__(schema, leave_out=leave_out, strict=strict)
        self.names_properties = False
        """Some object has properties with schemas of their own."""
        self._control: UnsupportedConstraint | None = None
        """Error for a value with a control character, raised if the schema names properties: then, only short escapes
        are allowed, and llguidance leaves out characters without one."""
        self._multiples: set[Fraction] = set()
        self._merges = False
        """llguidance merges parts of the schema with each other."""

    def document(self) -> dict[str, Any]:
        document = super().document()
        if self.names_properties and self._control is not None:
            raise self._control
        factor = lcm(*(multiple.denominator for multiple in self._multiples))
        several = self._merges and len(self._multiples) > 1
        if several and prod(self._multiples) * factor ** len(self._multiples) >= _MULTIPLES:
            raise UnsupportedConstraint(  # the least common multiple overflows, which llguidance would not notice
                "llguidance can't enforce these values of 'multipleOf' together", param="json_schema"
            )
        return document

    def _lower(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "allOf" in schema:
            self._merges = True
            return {"allOf": [self.lower(part) for part in schema["allOf"]]}
        if "not" in schema:
            if schema.get("type") != "string":
                raise self.refusal(schema, "not")
            return self._other_strings(schema)
        return super()._lower(schema)

    def part(self, schema: Schema) -> Schema:
        """Lower the schema of a property or an item, which may be false."""
        return False if schema is False else self.lower(schema)

    def any_value(self) -> dict[str, Any]:
        return {}

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self.keep_reference(schema)

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        for value in _numbers(values):
            if abs(value) > _LARGEST or (isinstance(value, int) and int(float(value)) != value):
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}: it is not a double")
            # It writes large doubles without an exponent: as integers, which may have other digits than the double.
            is_other = abs(value) >= _EXACT and Decimal(repr(value)) != Decimal(value)
            if is_other or not _is_read_exactly(value):
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}: it has too many digits")
        if _CONTROL.search(json.dumps(values, ensure_ascii=False)):
            self._note_control(schema, keyword)
        return {"enum": values}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        lowered: dict[str, Any] = {"type": "string"}
        patterns = []
        if "pattern" in schema:
            patterns += self._patterns(schema, "pattern", schema["pattern"])
        if schema.get("format") in _OWN_FORMATS:
            lowered["format"] = schema["format"]
        elif "format" in schema:
            patterns += self._patterns(schema, "format", string_pattern.FORMATS[schema["format"]])
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        lowered |= counts("minLength", least, "maxLength", None if most is None else int(most))
        if patterns:
            lowered["pattern"] = patterns[0]
        return {"allOf": [lowered, *({"pattern": one} for one in patterns[1:])]} if len(patterns) > 1 else lowered

    def _other_strings(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Lower the type string with `not`: to a pattern for the strings that `not` does not exclude."""
        try:
            pattern = complement_of(schema["not"])
        except UnsupportedConstraint:
            raise self.refusal(schema, "not") from None
        kept = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        others = {"pattern": self._pattern(schema, "not", pattern)}
        return {"allOf": [self.lower(self.form.copied(schema, kept)), others]}

    def _patterns(self, schema: dict[str, Any], keyword: str, pattern: str) -> list[str]:
        try:
            patterns, needs_control = _common_patterns(pattern)
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, keyword) from None
        if needs_control:
            self._note_control(schema, keyword)
        return patterns

    def _note_control(self, schema: dict[str, Any], keyword: str) -> None:
        self._control = self.refusal(schema, keyword, " with a control character next to named properties")

    def _pattern(self, schema: dict[str, Any], keyword: str, pattern: str) -> str:
        found = self._patterns(schema, keyword, pattern)
        if len(found) > 1:
            whole = f"^(?:{regex.render(self.parse_pattern(schema, keyword, pattern))})$"
            found = self._patterns(schema, keyword, whole)
        return found[0]

    def integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        bounds = self._bounds("integer", schema)
        return {"type": "integer", **bounds, **self._multiple(schema, bounds)}

    def number(self, schema: dict[str, Any]) -> dict[str, Any]:
        bounds = self._bounds("number", schema)
        exclusive = [abs(bounds[each]) for each in ("exclusiveMinimum", "exclusiveMaximum") if each in bounds]
        if exclusive and "multipleOf" not in schema:
            # A reader with doubles would round a longer number to the excluded bound, so the decimals are limited.
            length = len(str(int(max(exclusive))))
            decimals = min(max(length < _DIGITS + 1, _DIGITS - length), _MOST_DIGITS)
            self._multiples.add(Fraction(1, 10**decimals))
            return {"type": "number", **bounds, "multipleOf": 10.0**-decimals}
        return {"type": "number", **bounds, **self._multiple(schema, bounds)}

    def _bounds(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the nearest bounds within those of `schema` that llguidance handles correctly.

        Narrowed: numbers have at most 64 bits; beyond 2^53, those between a bound and the next double are excluded. An
        exclusive bound, which a reader with doubles would round to, is replaced by the next number of 15 digits, unless
        it limits the magnitude: with `maximum: 0.99`, llguidance does not allow 0.9.
        """
        bounds: dict[str, Any] = {}
        for sign, inclusive, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
            keyword = inclusive if inclusive in schema else exclusive
            if keyword not in schema:
                continue
            bound, keeps_out = schema[keyword], keyword == exclusive
            if kind == "integer":
                bound, keeps_out = integer_bounds(schema)[sign < 0], False
                assert bound is not None
            inner = _inner(bound * sign, keeps_out)
            if inner is None:
                raise self.refusal(schema, keyword, f" {bounded(bound, 40)}: it is beyond 64 bits")
            if not _is_read_exactly(inner):
                raise self.refusal(schema, keyword, f" {bounded(bound, 40)}: it has too many digits")
            bounds[exclusive if keeps_out and inner == bound * sign else inclusive] = inner * sign
        # llguidance calculates the next power of ten where there is no other bound.
        if bounds.get("minimum", 0) >= 10**18:
            bounds.setdefault("maximum", _LARGEST)
        if bounds.get("maximum", 0) <= -(10**18):
            bounds.setdefault("minimum", -_LARGEST)
        return bounds

    def _multiple(self, schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
        """Return `multipleOf`. llguidance multiplies the double by ten until it is an integer, which has 32 bits."""
        value = schema.get("multipleOf")
        if value is None:
            return {}
        exact = Fraction(Decimal(str(value)))
        scaled, exponent = value, 0
        while scaled < _MULTIPLES and scaled != int(scaled):
            scaled, exponent = scaled * 10.0, exponent + 1
        if scaled >= _MULTIPLES or exponent > _MOST_DIGITS or Fraction(int(scaled), 10**exponent) != exact:
            raise self.refusal(schema, "multipleOf", f" {bounded(value, 40)}")
        if scaled > _MULTIPLES_WITHIN and any(abs(bound) > value for bound in bounds.values()):
            raise self.refusal(schema, "multipleOf", f" {bounded(value, 40)} with these bounds")
        self._multiples.add(exact)
        return {"multipleOf": value}

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        prefix, items, least, most = shape
        lowered: dict[str, Any] = {"type": "array", **counts("minItems", least, "maxItems", most)}
        if prefix:
            lowered["prefixItems"] = [self.part(item) for item in prefix]
        if items is not True:
            lowered["items"] = self.part(items)
        return lowered

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        properties, patterns, rest = self._apart(schema, *self._named(schema))
        self._merges = self._merges or bool(patterns)
        lowered: dict[str, Any] = {"type": "object"}
        if properties:
            lowered["properties"] = {name: self.part(value) for name, value in properties.items()}
        if patterns:
            written = {
                self._pattern(schema, "patternProperties", pattern): self.part(value)
                for pattern, value in patterns.items()
            }
            if len(written) < len(patterns):
                raise self.refusal(schema, "patternProperties", ": two patterns match the same names")
            lowered["patternProperties"] = written
        if rest is not True:
            lowered["additionalProperties"] = self.part(rest)
        required = list(dict.fromkeys(schema.get("required", ())))
        if required:
            lowered["required"] = required
        self.names_properties = self.names_properties or bool(properties or patterns or required)
        return self._counted(schema, lowered, closed=rest is False and not patterns)

    def _named(self, schema: dict[str, Any]) -> tuple[dict[str, Schema], dict[str, Schema], Schema]:
        """Return the schemas of properties by name, by pattern, and of others, as `propertyNames` restricts them."""
        properties: dict[str, Schema] = schema.get("properties", {})
        patterns: dict[str, Schema] = schema.get("patternProperties", {})
        rest: Schema = schema.get("additionalProperties", True)
        names = schema.get("propertyNames", True)
        while isinstance(names, dict) and "$ref" in names:
            names = self.form.target(names)
        if names is True:
            return properties, patterns, rest
        if "string" not in types_of(names):
            names = False
        allowed = self.allowed_names(schema, properties)
        properties = {name: value if name in allowed else False for name, value in properties.items()}
        if rest is False and not patterns:
            return properties, {}, False
        if patterns:
            raise self.refusal(schema, "propertyNames", " next to 'patternProperties'")
        listed = self.listed_names(names)
        if listed is not None:
            return {**dict.fromkeys(listed, rest), **properties}, {}, False
        try:
            return properties, {pattern_of(names): rest}, False
        except UnsupportedConstraint:
            raise self.refusal(schema, "propertyNames") from None

    def _apart(
        self, schema: dict[str, Any], properties: dict[str, Schema], patterns: dict[str, Schema], rest: Schema
    ) -> tuple[dict[str, Schema], dict[str, Schema], Schema]:
        """Exclude named properties from the patterns that they match: the canonical form has merged the two."""
        found = {}
        for pattern, value in self._disjoint(schema, patterns).items():
            names = [name for name in properties if string_pattern.matches(pattern, name)]
            apart = _REFERENCE in json.dumps(value) or pattern not in schema.get("patternProperties", {})
            try:
                found[without(pattern, names) if names and apart else pattern] = value
            except UnsupportedConstraint:
                keyword = "patternProperties" if pattern in schema.get("patternProperties", {}) else "propertyNames"
                raise self.refusal(schema, keyword, " that match named properties too") from None
        return properties, found, rest

    def _disjoint(self, schema: dict[str, Any], patterns: dict[str, Schema]) -> dict[str, Schema]:
        """Return `patternProperties` in which no name matches two patterns."""
        if not 1 < len(patterns) <= _MAX_PATTERNS:
            return patterns
        try:
            found = disjoint_patterns(list(patterns))
        except UnsupportedConstraint:
            return patterns  # llguidance may be able to
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, "patternProperties") from None
        return {pattern: _all_of([patterns[one] for one in together]) for pattern, together in found}

    def _counted(self, schema: dict[str, Any], lowered: dict[str, Any], *, closed: bool) -> dict[str, Any]:
        """Add `minProperties` and `maxProperties`, which llguidance counts only where every named property is required.

        Otherwise, there is one alternative for each set of optional properties. A minimum is refused if a name that
        occurs twice could reach it (required names can't occur twice).
        """
        required, named = lowered.get("required", []), lowered.get("properties", {})
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        least, most = (0 if least <= len(required) else least), None if most is None else int(most)
        optional = [name for name, value in named.items() if value is not False and name not in required]
        if closed and most is not None and most >= len(required) + len(optional):
            most = None
        if not least and most is None:
            return lowered
        if least > 1 + len(required) and not closed:
            raise self.refusal(schema, "minProperties", f" {least}: the same name would count twice")
        bounds = counts("minProperties", least, "maxProperties", most)
        if not optional:
            return lowered | bounds
        chosen = max(0, least - len(required))
        if most is None:  # the first `chosen` of those that are present, and any later ones
            if closed and comb(len(optional), chosen) > _MAX_COUNTED:
                raise self.refusal(schema, "minProperties", f" {least} of {len(optional)} optional properties")
            found = [self._with(lowered, optional, some, before=True) for some in combinations(optional, chosen)]
            return any_of(found if closed else [*found, self._with(lowered, optional) | bounds])
        room = min(len(optional), most - len(required))
        if sum(comb(len(optional), size) for size in range(room + 1)) > _MAX_COUNTED:
            raise self.refusal(schema, "maxProperties", f" {most} with {len(optional)} optional properties")
        if closed:
            bounds = {}
        sizes = range(chosen if closed else 0, room + 1)
        sets = [some for size in sizes for some in combinations(optional, size)]
        return any_of([self._with(lowered, optional, some) | bounds for some in sets])

    def _with(
        self, lowered: dict[str, Any], optional: list[str], some: Collection[str] = (), *, before: bool = False
    ) -> Any:
        """Return an object with exactly the optional properties `some`; `before`: and any that follow the last."""
        last = max((index for index, name in enumerate(optional) if name in some), default=-1)
        absent = [name for index, name in enumerate(optional) if name not in some and not (before and index > last)]
        properties = {**lowered["properties"], **dict.fromkeys(absent, False)}
        required = [*lowered.get("required", []), *(name for name in optional if name in some)]
        return {**lowered, "properties": properties, **({"required": required} if required else {})}


def _all_of(parts: list[Schema]) -> Schema:
    kept = [part for part in parts if part not in (True, {})]
    return False if False in parts else {"allOf": kept} if len(kept) > 1 else (kept or [True])[0]


def _inner(low: Any, exclusive: bool) -> int | float | None:
    """Return the least lower bound from `low` on that llguidance handles correctly; None if there is none."""
    if low > _LARGEST:
        return None
    if low < -_LARGEST:
        return -_LARGEST
    if abs(low) >= _EXACT:
        found = float(low)
        after = int(math.nextafter(found, math.inf) if exclusive or found < low else found)
        return after if after <= _LARGEST else None
    exact = Decimal(repr(low))
    if exclusive and (exact >= 0 or exact % _SHORT):
        step = Decimal(10) ** max(min(exact.adjusted() + 1 - _DIGITS, 0), _LEAST_EXPONENT)
        low = (exact // step + (exact >= 0 or not exact % step)) * step
    return int(low) if low == int(low) else float(low)


def _is_read_exactly(value: float) -> bool:
    """Return whether llguidance's JSON reader finds the double that `value` is.

    It multiplies the digits, as a double, by a power of ten. Both are exact up to these limits; beyond them the result
    may be the next double.
    """
    if isinstance(value, int):
        return True
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return int("".join(map(str, digits))) <= _EXACT and abs(int(exponent)) <= -_LEAST_EXPONENT


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
        elif is_number(value):
            yield value


@lru_cache(maxsize=256)  # the functions of one request have many properties with the same format
def _common_patterns(pattern: str) -> tuple[list[str], bool]:
    """Return `pattern` in the common subset, and whether it needs a control character without a short escape.

    Control characters are left out of classes that have other characters: from a class with all control characters,
    llguidance would also generate quotes.
    """
    needs_control = False

    def safe(chars: Chars) -> Chars:
        nonlocal needs_control
        if regex.intersection(chars.ranges, _CONTROLS_AND_ESCAPED) == _CONTROLS_AND_ESCAPED:
            return chars
        if ranges := regex.intersection(chars.ranges, regex.complement(_CONTROLS)):
            return Chars(ranges)
        needs_control = True
        if ranges := regex.intersection(chars.ranges, regex.complement(((0, 0),))):
            return Chars(ranges)
        raise UnsupportedConstraint("the pattern needs a NUL character, which llguidance can't write in JSON")

    nodes = [regex.map_chars(node, safe) for node in string_pattern.conjuncts(pattern)]
    return [f"^(?:{regex.render(node)})$" for node in nodes], needs_control
