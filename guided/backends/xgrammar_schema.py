"""What of JSON Schema xgrammar enforces, and the schema said so that it does.

xgrammar 0.2.8 reads a subschema by its first keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type` and
ignores what stands next to it, `not`, `if`, `uniqueItems`, `contains`, names in `required` that are not in
`properties`, and more, with a warning on stderr at most. So it gets the schema's normal form, and every keyword that it
would ignore is refused by name. Some are said in other words; where that leaves out valid values (never: lets in
invalid ones) it says "narrowed" below. Named properties come in the schema's order, others after them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from guided import regex
from guided.errors import GuidedError, InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema import string_pattern
from guided.schema.keywords import ALL_TYPES, Schema
from guided.schema.normal_form import NormalForm, normalise
from guided.schema.pointer import escape

__all__ = ["PATTERN", "Lowered", "lower"]

PATTERN = "^pattern{}$"

_OBJECT = frozenset(
    (
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    )
)
_INT64 = 2**63 - 1024
"""Bounds beyond are refused: xgrammar's own check is off by what a double can't hold."""
_COUNT = 2**31 - 1
_LARGEST_MULTIPLE = 1024
_WIDEST_MULTIPLES = 10_000


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schema that xgrammar enforces all of, but for two things that its grammar has to be mended for."""

    text: str
    """JSON."""
    open_names: bool
    """Some object has named properties and may have others: xgrammar takes `{"\\u0061": ...}` for another than `a`."""
    lengths: bool
    """Some string has a minLength or a maxLength: xgrammar lets control characters into those, and no escapes."""
    patterns: list[regex.Node]
    """JSON text between quotes. Number n stands in `text` as the pattern `PATTERN.format(n)`: xgrammar's own automata
    for patterns let `(a+b)?` match `a`."""


def lower(schema: Schema) -> Lowered:
    """`schema`, said so that xgrammar enforces it.

    Raises:
        UnsupportedConstraint: the keyword and where.
        InvalidConstraint: nothing matches, or a pattern is malformed.
    """
    form = normalise(schema)
    if form.root is False:
        raise InvalidConstraint("nothing matches the schema", param="json_schema", pointer="")
    lowering = _Lowering(form)
    root = lowering.schema(form.root)
    definitions = {name: lowering.schema(definition) for name, definition in form.definitions.items()}
    text = json.dumps({**root, "$defs": definitions} if definitions else root, ensure_ascii=False)
    return Lowered(text, lowering.open_names, lowering.lengths, lowering.patterns)


class _Lowering:
    def __init__(self, form: NormalForm) -> None:
        self._form = form
        self.open_names = False
        self.lengths = False
        self.patterns: list[regex.Node] = []
        """These three: see `Lowered`."""

    def schema(self, schema: Schema) -> dict[str, Any]:
        if schema is False:
            raise UnsupportedConstraint("xgrammar can't enforce a schema that is false", param="json_schema")
        if schema is True or schema == {}:
            return {}
        for keyword in ("allOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"):
            if keyword in schema:
                raise self._refusal(schema, keyword)
        if "$ref" in schema:
            return {"$ref": schema["$ref"]}
        if "const" in schema or "enum" in schema:
            return self._finite(schema)
        if "anyOf" in schema:
            return {"anyOf": [self.schema(part) for part in schema["anyOf"]]}
        return self._typed(schema)

    def _refusal(self, schema: Schema, keyword: str, why: str = "") -> UnsupportedConstraint:
        reasons = {
            "oneOf": " with alternatives that may overlap",
            "allOf": " with parts that can't be merged",
        }
        return UnsupportedConstraint(
            f"xgrammar can't enforce {keyword!r}{why or reasons.get(keyword, '')}",
            param="json_schema",
            pointer=f"{self._form.pointer(schema)}/{escape(keyword)}",
        )

    def _empty(self, schema: Schema, why: str) -> InvalidConstraint:
        """No value satisfies `schema`: the user's mistake, unless a value of the whole can do without it."""
        kind = InvalidConstraint if schema is self._form.root else UnsupportedConstraint
        return kind(why, param="json_schema", pointer=self._form.pointer(schema))

    def _finite(self, schema: dict[str, Any]) -> dict[str, Any]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        for value in values:
            if not _is_kept(value):
                raise self._refusal(schema, "const" if "const" in schema else "enum", f" with {bounded(value, 40)}")
        return {"enum": values}

    def _typed(self, schema: dict[str, Any]) -> dict[str, Any]:
        named = schema.get("type")
        if named is None:
            # Narrowed: who writes "properties" without "type" means an object.
            named = "object" if schema.keys() <= _OBJECT else [*ALL_TYPES]
        types = [named] if isinstance(named, str) else named
        parts = [self._one_type(kind, schema) for kind in types]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _one_type(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        match kind:
            case "string":
                return self._string(schema)
            case "number" | "integer":
                return self._number(kind, schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return {"type": kind}

    # ---- strings and numbers -------------------------------------------------------------------------------------

    def _string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if most is not None:
            most = int(most) if most < _COUNT else None
        if "format" in schema:
            return self._format(schema, least, most)
        if "pattern" in schema:
            return self._patterned(schema, "pattern", schema["pattern"], least, most)
        return self._free(least, most)

    def _free(self, least: int, most: int | None) -> dict[str, Any]:
        if most == 0:
            return {"const": ""}
        lengths = {**({"minLength": least} if least else {}), **({} if most is None else {"maxLength": most})}
        self.lengths = self.lengths or bool(lengths)
        return {"type": "string", **lengths}

    def _format(self, schema: dict[str, Any], least: int, most: int | None) -> dict[str, Any]:
        name = schema["format"]
        if "pattern" in schema:
            raise self._refusal(schema, "pattern", " next to 'format'")
        if name not in string_pattern.FORMATS:
            raise self._refusal(schema, "format", f" {bounded(name, 60)!r}")
        # xgrammar's own let in the 31st of February, 00:00:61, 222.046.46.46 and quotes within JSON pointers.
        pattern = string_pattern.FORMATS[name]
        low, high = string_pattern.width(string_pattern.read(pattern))
        if low < least:
            raise self._refusal(schema, "minLength", " next to 'format'")
        if most is not None and (high is None or most < high):
            raise self._refusal(schema, "maxLength", " next to 'format'")
        return self._patterned(schema, "format", pattern, 0, None)

    def _patterned(
        self, schema: dict[str, Any], keyword: str, pattern: str, least: int, most: int | None
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": self._read(schema, keyword, pattern, least, most)}

    def _read(self, schema: dict[str, Any], keyword: str, pattern: str, least: int = 0, most: int | None = None) -> str:
        """What stands for `pattern`. What can't be read or said is refused at `keyword`."""
        node: regex.Node | None = None
        try:
            node = string_pattern.read(pattern)
            node = string_pattern.fit(node, least, most)
            try:
                node = string_pattern.in_json(node, escapes=False)
            except UnsupportedConstraint:  # only where there is no other way: see `xgrammar._ONE_CHARACTER`
                node = string_pattern.in_json(node, escapes=True)
        except GuidedError as error:
            where = f"{self._form.pointer(schema)}/{escape(keyword)}"
            fatal = node is None or schema is self._form.root  # see `_empty`
            kind = type(error) if fatal else UnsupportedConstraint
            raise kind(error.message, param="json_schema", pointer=where) from None
        self.patterns.append(node)
        return PATTERN.format(len(self.patterns) - 1)

    def _number(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        multiple = schema.get("multipleOf")
        if multiple is not None and kind == "number" and multiple == int(multiple):
            kind = "integer"  # narrowed: 5.0 is a multiple of 5 too
        bounds: dict[str, Any] = {
            keyword: schema[keyword]
            for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
            if keyword in schema
        }
        if kind == "integer":
            return self._integer(schema, bounds, multiple)
        if multiple is not None:
            raise self._refusal(schema, "multipleOf", " of numbers that are not integers")
        for keyword, bound in bounds.items():
            if abs(bound) > 1e15 or (bound and abs(bound) < 1e-6):
                raise self._refusal(schema, keyword, f" {bound}: bounds are enforced from 1e-6 to 1e15")
        return {"type": "number", **bounds}

    def _integer(self, schema: dict[str, Any], bounds: dict[str, Any], multiple: Any) -> dict[str, Any]:
        inclusive: dict[str, int] = {}
        for keyword, bound in bounds.items():
            match keyword:
                case "minimum":
                    inclusive["minimum"] = math.ceil(bound)
                case "exclusiveMinimum":
                    inclusive["minimum"] = math.floor(bound) + 1
                case "maximum":
                    inclusive["maximum"] = math.floor(bound)
                case "exclusiveMaximum":
                    inclusive["maximum"] = math.ceil(bound) - 1
            if abs(bound) > _INT64:
                raise self._refusal(schema, keyword, f" {bound}: it is beyond 64 bits")
        if len(inclusive) == 2 and inclusive["minimum"] > inclusive["maximum"]:
            raise self._empty(schema, "no integer is within the bounds")
        if multiple is None or 1 / multiple == int(1 / multiple):
            return {"type": "integer", **inclusive}
        unbounded = not inclusive or (
            len(inclusive) == 2 and inclusive["maximum"] - inclusive["minimum"] < _WIDEST_MULTIPLES
        )
        if multiple != int(multiple) or multiple > _LARGEST_MULTIPLE or not unbounded:
            raise self._refusal(schema, "multipleOf", f" {multiple} with these bounds")
        return {"type": "integer", **inclusive, "multipleOf": int(multiple)}

    # ---- arrays --------------------------------------------------------------------------------------------------

    def _array(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if "contains" in schema:
            raise self._refusal(schema, "contains")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise self._refusal(schema, "uniqueItems")
        lowered: dict[str, Any] = {"type": "array"}
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        closed = next((index for index, item in enumerate(prefix) if item is False), None)
        if most is not None and most < len(prefix):
            closed = most if closed is None else min(closed, most)
        if closed is not None:
            prefix, items, most = prefix[:closed], False, None
        if items is False and not prefix:
            return {"type": "array", "maxItems": 0}
        if prefix:
            lowered["prefixItems"] = [self.schema(item) for item in prefix]
        lowered["items"] = False if items is False else self.schema(items)
        if least:  # without it any number of a tuple's last items may be missing
            lowered["minItems"] = int(least)
        if most is not None and most < _COUNT and items is not False:
            lowered["maxItems"] = int(most)
        return lowered

    # ---- objects -------------------------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        lowered: dict[str, Any] = {"type": "object"}
        rest = schema.get("additionalProperties", True)
        patterns = self._pattern_properties(schema, rest)
        properties = self._properties(schema, patterns, rest)
        names = schema.get("propertyNames", True)
        if names is not True:
            patterns, rest = self._property_names(schema, patterns, properties, rest)
            names = schema["propertyNames"] if rest is not False and not patterns else True
        if patterns:
            lowered["patternProperties"] = patterns
            rest = False  # narrowed: xgrammar would let any value under a name that matches
        allowed = {name: value for name, value in properties.items() if value is not None}
        if len(allowed) < len(properties):
            rest, names = False, True  # narrowed: a name is kept out by letting in those that are named
        if allowed:
            lowered["properties"] = allowed
        if names is not True:
            lowered["propertyNames"] = self._name(names)
        self.open_names = self.open_names or bool(allowed and (rest is not False or patterns))
        if rest is not True:
            lowered["additionalProperties"] = False if rest is False else self.schema(rest)
        if required := schema.get("required"):
            lowered["required"] = required
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema:
                lowered[keyword] = int(min(schema[keyword], _COUNT))
        return lowered

    def _properties(
        self, schema: dict[str, Any], patterns: dict[str, Any], rest: Schema
    ) -> dict[str, dict[str, Any] | None]:
        """Each named property's schema; None where it must not be there."""
        declared: dict[str, Schema] = dict(schema.get("properties", {}))
        raw = schema.get("patternProperties", {})
        for name in schema.get("required", ()):
            if name not in declared:  # only where there are patterns: see `NormalForm`
                matching = [value for pattern, value in raw.items() if self._matches(schema, pattern, name)]
                if len(matching) > 1:
                    raise self._refusal(schema, "required", f" {bounded(name, 60)!r}, which several patterns match")
                declared[name] = matching[0] if matching else rest
                if declared[name] is False:
                    raise self._empty(schema, f"{bounded(name, 60)!r} is required and not allowed")
            elif any(self._matches(schema, p, name) and raw[p] not in (True, {}, declared[name]) for p in raw):
                raise self._refusal(schema, "patternProperties", f" that match {bounded(name, 60)!r} too")
        for name in declared:
            if any(self._matches(schema, p, name) and raw[p] not in (True, {}, declared[name]) for p in raw):
                raise self._refusal(schema, "patternProperties", f" that match {bounded(name, 60)!r} too")
        return {name: None if value is False else self.schema(value) for name, value in declared.items()}

    def _pattern_properties(self, schema: dict[str, Any], rest: Schema) -> dict[str, Any]:
        raw: dict[str, Schema] = schema.get("patternProperties", {})
        if all(value in (True, {}) for value in raw.values()) and rest is True:
            return {}  # any value under any name
        kept = {pattern: value for pattern, value in raw.items() if value is not False}
        if len(kept) < len(raw) and (rest is not False or kept):
            raise self._refusal(schema, "patternProperties", " that forbid names")
        if len({json.dumps(value, sort_keys=True) for value in kept.values()}) > 1 and not _disjoint(list(kept)):
            raise self._refusal(schema, "patternProperties", " that may overlap")
        return {self._read(schema, "patternProperties", pattern): self.schema(value) for pattern, value in kept.items()}

    def _property_names(
        self, schema: dict[str, Any], patterns: dict[str, Any], properties: dict[str, Any], rest: Schema
    ) -> tuple[dict[str, Any], Schema]:
        """`propertyNames` said as `patternProperties` where xgrammar would ignore one of the two."""
        names = schema["propertyNames"]
        if rest is False and not patterns:
            self._check_names(schema, properties)
            return patterns, rest
        if patterns or names is False:
            raise self._refusal(
                schema, "propertyNames", " next to 'patternProperties'" if patterns else " that is false"
            )
        self._check_names(schema, properties)
        if rest is True:
            return patterns, rest
        if isinstance(names, dict) and names.keys() <= {"pattern", "type"} and "pattern" in names:
            return {self._read(schema, "propertyNames", names["pattern"]): self.schema(rest)}, False
        raise self._refusal(schema, "propertyNames", " next to 'additionalProperties'")

    def _name(self, names: Schema) -> dict[str, Any]:
        """`names` for strings: xgrammar would have other types as names too, if they are not excluded."""
        if isinstance(names, bool) or names.keys() & {"$ref", "anyOf", "enum", "const", "type"}:
            return self.schema(names)
        strings = {**names, "type": "string"}
        self._form.note(strings, self._form.pointer(names))
        return self.schema(strings)

    def _check_names(self, schema: dict[str, Any], properties: dict[str, Any]) -> None:
        validator = Draft202012Validator({"$defs": self._form.definitions, "allOf": [schema["propertyNames"]]})
        for name in properties:
            if not validator.is_valid(name):
                raise self._refusal(schema, "propertyNames", f" that forbids the property {bounded(name, 60)!r}")

    def _matches(self, schema: dict[str, Any], pattern: str, name: str) -> bool:
        string_pattern.read(pattern)  # what Python's `re` can't read is refused
        return re.search(pattern, name) is not None


def _disjoint(patterns: list[str]) -> bool:
    """No name matches two of `patterns`: they begin with different literals."""
    prefixes = []
    for pattern in patterns:
        found = re.match(r"\^([\w -]+)(?![*?{|])", pattern)
        if found is None or "|" in pattern:
            return False
        prefixes.append(found[1])
    return not any(
        one != other and (other.startswith(one) or one == other)
        for index, one in enumerate(prefixes)
        for place, other in enumerate(prefixes)
        if index != place
    ) and len(set(prefixes)) == len(prefixes)


def _is_kept(value: Any) -> bool:
    """xgrammar writes `value` as something equal to it (its integers have 64 bits)."""
    if isinstance(value, list):
        return all(map(_is_kept, value))
    if isinstance(value, dict):
        return all(map(_is_kept, value.values()))
    return not isinstance(value, int) or isinstance(value, bool) or abs(value) < _INT64
