"""JSON Schema for xgrammar: the schema rewritten so that xgrammar enforces all of it.

xgrammar 0.2.8 reads a subschema by its first keyword of `$ref`, `const`, `enum`,
`anyOf`, `oneOf`, `allOf`, `type`. It ignores the keywords next to it, `not`, `if`,
`uniqueItems`, `contains`, names in `required` that are not in `properties`, and more.
So it gets the canonical form, without the keywords that it enforces in part only. Where
something is replaced that excludes valid values, a comment says "narrowed". Named
properties are generated in the schema's order, others after them.
"""

from __future__ import annotations

import json
from typing import Any

from guided.backends.schema_lowering import SchemaLowering, only
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.regex import tree as regex
from guided.regex.parser import parse_search
from guided.schema import string_pattern
from guided.schema.formats import FORMATS
from guided.schema.keywords import numbers_in
from guided.schema.numbers import pattern_of

_INT64 = 2**63 - 1024
"""Larger integers are refused: xgrammar's own check misses those that a double can't
represent."""
_COUNT = 2**31 - 1


class XGrammarLowering(SchemaLowering):
    """Lowers one schema, except for three mistakes in xgrammar's grammar, which
    `xgrammar.py` corrects."""

    library = "xgrammar"

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(constraint)
        self.open_names = False
        """Some object has named properties and may have others: xgrammar treats
        `{"\\u0061": ...}` as a name other than `a`."""
        self.lengths = False
        """Some string has a minLength or a maxLength: xgrammar allows control
        characters in those, and no escapes."""
        self.rules: dict[str, regex.Node] = {}
        """Rules for JSON text: between quotes (`pattern_0`), as xgrammar's own automata
        for patterns let `(a+b)?` match `a`, or of a number (`number_1`). In the lowered
        schema each is a string with the pattern `^pattern_0$`."""

    def finite(self, schema: JsonObject, keyword: str, values: list[Any]) -> JsonObject:
        for value in numbers_in(values):
            if isinstance(value, int) and abs(value) >= _INT64:
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}")
        return {"enum": values}

    def string(self, schema: JsonObject) -> JsonObject:
        if "pattern" in schema and "format" in schema:
            raise self.refusal(schema, "pattern", " next to 'format'")
        if "pattern" in schema:
            return self._of_pattern(schema, "pattern", schema["pattern"])
        if "format" in schema:
            # xgrammar's own formats allow the 31st of February, 00:00:61, 222.046.46.46
            # and quotes in JSON pointers.
            return self._of_pattern(schema, "format", FORMATS[schema["format"]])
        lengths = _counts(schema, "minLength", "maxLength")
        self.lengths = self.lengths or bool(lengths)
        return {"type": "string", **lengths}

    def _of_pattern(self, schema: JsonObject, keyword: str, pattern: str) -> JsonObject:
        """Lower strings with a match of `pattern`, which `keyword` demands."""
        try:
            node = string_pattern.fit(
                parse_search(pattern),
                schema.get("minLength", 0),
                schema.get("maxLength"),
            )
            try:  # escapes make masks slow: see `xgrammar._corrected`
                text = string_pattern.in_json(node, escapes=False)
            except UnsupportedConstraint:
                text = string_pattern.in_json(node, escapes=True)
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, keyword) from None
        return self._rule("pattern", text)

    def _rule(self, kind: str, node: regex.Node) -> JsonObject:
        """Add a rule for `node`, and return the schema that stands for it."""
        name = f"{kind}_{len(self.rules)}"
        self.rules[name] = node
        return {"type": "string", "pattern": f"^{name}$"}

    def numeric(self, schema: JsonObject, kind: str) -> JsonObject:
        numbers = self.numbers(schema, kind)
        if "multipleOf" not in schema:
            return {"type": kind, **numbers.bounds()}
        node = pattern_of(numbers)
        if node is None:
            raise self.refusal(
                schema, "multipleOf", f" {bounded(schema['multipleOf'], 40)}"
            )
        return self._rule("number", node)

    def array(self, schema: JsonObject) -> JsonObject:
        # Without `minItems`, xgrammar lets any number of a tuple's last items be
        # missing.
        lowered: JsonObject = {
            "type": "array",
            **_counts(schema, "minItems", "maxItems"),
        }
        if schema.get("prefixItems"):
            lowered["prefixItems"] = [
                self.lower(item) for item in schema["prefixItems"]
            ]
        lowered["items"] = self.part(schema.get("items", True))
        return lowered

    def object(self, schema: JsonObject) -> JsonObject:
        required = schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        for keyword in (
            "patternProperties",
            "propertyNames",
            "maxProperties",
            "minProperties",
        ):
            if keyword in schema:
                raise self.refusal(schema, keyword)
        properties: JsonObject = dict(schema.get("properties", {}))
        properties |= {name: rest for name in required if name not in properties}
        allowed = {
            name: self.lower(value)
            for name, value in properties.items()
            if value is not False
        }
        is_escaped = any(
            json.dumps(name, ensure_ascii=False)[1:-1] != name for name in properties
        )
        if is_escaped or len(allowed) < len(properties):
            rest = False  # narrowed: xgrammar would allow any value under these names
        self.open_names = self.open_names or bool(allowed and rest is not False)
        lowered: JsonObject = {"type": "object"}
        if allowed:
            lowered["properties"] = allowed
        if rest is not True:
            lowered["additionalProperties"] = self.part(rest)
        return lowered | only(schema, "required")


def _counts(schema: JsonObject, lower: str, upper: str) -> JsonObject:
    """Return the bounds of a schema that xgrammar can count to."""
    bounds = only(schema, lower, upper)
    if bounds.get(upper, 0) >= _COUNT:
        del bounds[upper]
    return bounds
