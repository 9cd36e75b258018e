"""What of JSON Schema outlines-core enforces, and the regex that it makes of the schema.

outlines_core 0.2.14 turns a schema into one regular expression and reads a subschema by its first keyword of
`properties`, `allOf`, `anyOf`, `oneOf`, `prefixItems`, `enum`, `const`, `$ref`, `type`. It ignores bounds of numbers,
counts of properties, `patternProperties`, `uniqueItems` and more, pastes patterns between quotes as they are, drops
properties where a reference goes too deep, and writes some alternatives without parentheses. So it gets the schema's
normal form with references written out, and what it would ignore is refused by name; strings and numbers with
conditions of their own are made here and put in place of a mark. Its objects hold the properties that are named and no
others.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jsonschema import Draft202012Validator
from outlines_core.json_schema import build_regex_from_schema

from guided import regex
from guided.errors import GuidedError, InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema import number_pattern, string_pattern
from guided.schema.keywords import ALL_TYPES, Schema
from guided.schema.normal_form import NormalForm, normalise
from guided.schema.pointer import escape

__all__ = ["to_regex"]

_ANY: dict[str, Any] = {"anyOf": [{}]}
"""Any value, a few levels deep. `{}` alone comes without parentheses."""
_MARK = 7_310_000_000_000_000
"""The first of the numbers that stand for a regex of ours while outlines builds the whole."""
_MAX_SUBSCHEMAS = 5_000
_ANYTHING = regex.Repeat(regex.Chars(regex.UNIVERSE), 0, None)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LARGEST_BOUND = 10**12
"""outlines' time doubles with every digit: 7 s on 600 tokens for 20."""
_LONGEST_WITH_ESCAPES = 8
"""... and with every character where one of them may be an escape, too."""
_MOST_CHARACTERS = 10_000
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
"""outlines' own wants a sign in every exponent."""


def to_regex(schema: Schema, whitespace: str | None) -> str:
    """A regex for JSON text that `schema` allows.

    Args:
        whitespace: what may stand between tokens, a regex; outlines' default (a space, or none) where None.

    Raises:
        UnsupportedConstraint: the keyword and where.
        InvalidConstraint: nothing matches, or a pattern is malformed.
    """
    form = normalise(schema)
    if form.root is False:
        raise InvalidConstraint("nothing matches the schema", param="json_schema", pointer="")
    lowering = _Lowering(form)
    document = json.dumps(lowering.schema(form.root), ensure_ascii=False)
    marks = re.compile(rf"{_MARK // 10**9}[0-9]{{9}}")
    if len(marks.findall(document)) > len(lowering.marked):
        raise UnsupportedConstraint(f"outlines: the schema may not hold numbers from {_MARK} on", param="json_schema")
    try:
        built: str = build_regex_from_schema(document, whitespace)
    except ValueError as error:
        raise UnsupportedConstraint(f"outlines refuses the schema: {bounded(error)}", param="json_schema") from None
    return marks.sub(lambda found: f"(?:{lowering.marked[int(found[0]) - _MARK]})", built)


class _Lowering:
    def __init__(self, form: NormalForm) -> None:
        self._form = form
        self._open: list[str] = []
        """Names of the references that are being written out."""
        self._written = 0
        self._characters = 0
        self._times = 1
        """How often the subschema that is being lowered may occur, by the counts of arrays that it is in."""
        self.marked: list[str] = []
        """Regexes of our own; number n stands in outlines' regex as `_MARK + n`."""

    def schema(self, schema: Schema) -> dict[str, Any]:
        self._written += 1
        if self._written > _MAX_SUBSCHEMAS:
            raise UnsupportedConstraint(
                f"outlines: the schema has more than {_MAX_SUBSCHEMAS} parts once its references are written out",
                param="json_schema",
            )
        if schema is False:
            raise UnsupportedConstraint("outlines can't enforce a schema that is false", param="json_schema")
        if schema is True or schema == {}:
            return _ANY
        for keyword in ("allOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"):
            if keyword in schema:
                raise self._refusal(schema, keyword)
        if "$ref" in schema:
            return self._reference(schema)
        if "const" in schema or "enum" in schema:
            return self._finite(schema)
        if "anyOf" in schema:
            return {"anyOf": [self.schema(part) for part in schema["anyOf"]]}
        named = schema.get("type", ALL_TYPES)
        parts = [self._one_type(kind, schema) for kind in ([named] if isinstance(named, str) else named)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _refusal(self, schema: Schema, keyword: str, why: str = "") -> UnsupportedConstraint:
        reasons = {
            "oneOf": " with alternatives that may overlap",
            "allOf": " with parts that can't be merged",
        }
        return UnsupportedConstraint(
            f"outlines can't enforce {keyword!r}{why or reasons.get(keyword, '')}",
            param="json_schema",
            pointer=f"{self._form.pointer(schema)}/{escape(keyword)}",
        )

    def _empty(self, schema: Schema, why: str) -> InvalidConstraint:
        """No value satisfies `schema`: the user's mistake, unless a value of the whole can do without it."""
        kind = InvalidConstraint if schema is self._form.root else UnsupportedConstraint
        return kind(why, param="json_schema", pointer=self._form.pointer(schema))

    def _mark(self, pattern: str) -> dict[str, Any]:
        self.marked.append(pattern)
        return {"const": _MARK + len(self.marked) - 1}

    def _reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        name = schema["$ref"]
        if name in self._open:
            raise self._refusal(schema, "$ref", " that is recursive: a regex can't count levels")
        self._open.append(name)
        written = self.schema(self._form.target(schema))
        self._open.pop()
        return written

    def _finite(self, schema: dict[str, Any]) -> dict[str, Any]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        marks = []
        for value in values:
            if isinstance(value, int) and not isinstance(value, bool):
                marks.append(self._mark(str(value)))
            elif isinstance(value, list | dict):
                marks.append(self._mark(_literal(value)))
            else:
                marks.append({"const": value})
        return marks[0] if len(marks) == 1 else {"anyOf": marks}

    def _one_type(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        match kind:
            case "string":
                return self._string(schema)
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return {"type": kind}

    # ---- strings and numbers -------------------------------------------------------------------------------------

    def _string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "format" in schema and "pattern" in schema:
            raise self._refusal(schema, "pattern", " next to 'format'")
        pattern = schema.get("pattern")
        if "format" in schema:
            pattern = string_pattern.FORMATS.get(schema["format"])
            if pattern is None:
                raise self._refusal(schema, "format", f" {bounded(schema['format'], 60)!r}")
        if pattern is None and not least and most is None:
            return {"type": "string"}
        node: regex.Node | None = None
        try:
            node = _ANYTHING if pattern is None else string_pattern.read(pattern)
            node = string_pattern.fit(node, int(least), None if most is None else int(most))
            low, high = string_pattern.width(node)
            long = max(low, high or 0)
            self._count(long, schema)
            return self._mark(f'"(?:{self._content(node, long)})"')
        except GuidedError as error:
            fatal = node is None or schema is self._form.root  # see `_empty`
            kind = type(error) if fatal else UnsupportedConstraint
            keyword = next((name for name in ("format", "pattern") if name in schema), "maxLength")
            where = error.pointer or f"{self._form.pointer(schema)}/{keyword}"
            raise kind(error.message, param="json_schema", pointer=where) from None

    def _content(self, node: regex.Node, long: int) -> str:
        """`node` between quotes. Without escapes where it is long: with them outlines takes exponential time."""
        try:
            return regex.render(string_pattern.in_json(node, escapes=long <= _LONGEST_WITH_ESCAPES))
        except UnsupportedConstraint:
            return regex.render(string_pattern.in_json(node, escapes=True))

    def _count(self, characters: int, schema: Schema) -> None:
        """Each character that a length or a count asks for is a state, or several."""
        self._characters += characters * self._times
        if self._characters > _MOST_CHARACTERS:
            raise UnsupportedConstraint(
                f"outlines: lengths and counts of items come to more than {_MOST_CHARACTERS} characters",
                param="json_schema",
                pointer=self._form.pointer(schema),
            )

    def _integer(self, schema: dict[str, Any]) -> dict[str, Any]:
        multiple = schema.get("multipleOf", 1)
        if 1 / multiple != int(1 / multiple):
            raise self._refusal(schema, "multipleOf")
        lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
        highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        if not lows and not highs:
            return {"type": "integer"}
        if max(map(abs, lows + highs)) > _LARGEST_BOUND:
            keyword = next(name for name in _BOUNDS if name in schema)
            raise self._refusal(schema, keyword, f" {schema[keyword]}: bounds are enforced up to {_LARGEST_BOUND}")
        pattern = number_pattern.integers(max(lows, default=None), min(highs, default=None))
        if not pattern:
            raise self._empty(schema, "no integer is within the bounds")
        return self._mark(pattern)

    def _number(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "multipleOf" in schema:
            if schema["multipleOf"] == 1:
                return self._integer(schema)
            raise self._refusal(schema, "multipleOf")
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None and high is None:
            return self._mark(_NUMBER)
        if low is None or low < 0 or low != int(low) or (high is not None and high != int(high)):
            keyword = next(keyword for keyword in _BOUNDS if keyword in schema)
            raise self._refusal(schema, keyword, " of numbers, other than whole bounds from 0 on")
        if max(low, high or 0) > _LARGEST_BOUND:
            keyword = next(keyword for keyword in _BOUNDS if keyword in schema)
            raise self._refusal(schema, keyword, f": bounds are enforced up to {_LARGEST_BOUND}")
        above, below = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
        return self._mark(
            number_pattern.numbers(int(low), None if high is None else int(high), above=above, below=below)
        )

    # ---- arrays and objects --------------------------------------------------------------------------------------

    def _array(self, schema: dict[str, Any]) -> dict[str, Any]:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if "contains" in schema:
            raise self._refusal(schema, "contains")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise self._refusal(schema, "uniqueItems")
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        closed = next((index for index, item in enumerate(prefix) if item is False), len(prefix))
        prefix = prefix[: closed if most is None else min(closed, int(most))]
        if prefix:  # a tuple of exactly these
            if least > len(prefix):
                raise self._refusal(schema, "minItems", " beyond 'prefixItems'")
            return {"prefixItems": [self.schema(item) for item in prefix]}
        if items is False or most == 0 or schema.get("prefixItems"):
            return {"type": "array", "maxItems": 0}
        if items is True or items == {}:
            raise self._refusal(schema, "items", " that may be anything: its automaton would take minutes")
        counts = {"minItems": least} if least else {}
        if most is not None:
            counts["maxItems"] = int(most)
        times, before = max(least, int(most or 1)), self._times
        self._count(times, schema)
        self._times *= times
        lowered = self.schema(items)
        self._times = before
        return {"type": "array", "items": lowered, **counts}

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        declared: dict[str, Schema] = schema.get("properties", {})
        required = schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        if missing := next((name for name in required if name not in declared), None):
            raise self._refusal(schema, "required", f" {bounded(missing, 60)!r} next to 'patternProperties'")
        allowed: dict[str, Schema] = {name: value for name, value in declared.items() if value is not False}
        self._check_counts(schema, len(required), len(allowed) if declared or rest is False else None)
        if allowed and schema.get("maxProperties") != 0:
            self._check_names(schema, allowed)
            return {
                "type": "object",
                "properties": {_in_quotes(name): self.schema(value) for name, value in allowed.items()},
                "required": [_in_quotes(name) for name in required],
            }
        if rest is False or declared or schema.get("maxProperties") == 0:
            return {"type": "object", "maxProperties": 0}
        for keyword in ("patternProperties", "propertyNames"):
            if keyword in schema:
                raise self._refusal(schema, keyword)
        counts = {"minProperties": 1} if schema.get("minProperties") else {}
        return {"type": "object", **counts, **({} if rest is True else {"additionalProperties": self.schema(rest)})}

    def _check_counts(self, schema: dict[str, Any], fewest: int, most: int | None) -> None:
        """Counts are enforced where the properties that are named see to it."""
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        if low > fewest and not (most is None and low == 1):
            raise self._refusal(schema, "minProperties")
        if high is not None and (most is None or high < most) and high != 0:
            raise self._refusal(schema, "maxProperties")

    def _check_names(self, schema: dict[str, Any], allowed: dict[str, Schema]) -> None:
        names = Draft202012Validator({"$defs": self._form.definitions, "allOf": [schema.get("propertyNames", True)]})
        patterns: dict[str, Schema] = schema.get("patternProperties", {})
        for name, value in allowed.items():
            told = bounded(name, 60)
            if not names.is_valid(name):
                raise self._refusal(schema, "propertyNames", f" that forbids the property {told!r}")
            for pattern, other in patterns.items():
                string_pattern.read(pattern)  # what Python's `re` can't read is refused
                if other not in (True, {}, value) and re.search(pattern, name):
                    raise self._refusal(schema, "patternProperties", f" that match {told!r} too")


def _in_quotes(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal(value: Any) -> str:
    """A regex for one JSON value, written as `json.dumps` does or without spaces."""
    texts = {json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
    return "|".join(regex.render(regex.literal(text)) for text in sorted(texts))
