"""JSON Schema for xgrammar: the schema rewritten so that xgrammar enforces all of it.

xgrammar 0.2.8 reads a subschema by its first keyword of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, `type`. It
ignores the keywords next to it, `not`, `if`, `uniqueItems`, `contains`, names in `required` that are not in
`properties`, and more. So it gets the canonical form, without the keywords that it enforces in part only. Where
something is replaced that excludes valid values, a comment says "narrowed". Named properties are generated in the
schema's order, others after them.
"""

from __future__ import annotations

import json
from typing import Any

from guided.backends.schema_lowering import ArrayShape, SchemaLowering, counts
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.regex import tree as regex
from guided.regex.parser import parse_search
from guided.schema import string_pattern
from guided.schema.formats import FORMATS
from guided.schema.keywords import Schema, numbers_in
from guided.schema.numbers import pattern_of

_INT64 = 2**63 - 1024
"""Larger integers are refused: xgrammar's own check misses those that a double can't represent."""
_COUNT = 2**31 - 1


class XGrammarLowering(SchemaLowering):
    """Lowers one schema, except for three mistakes in xgrammar's grammar, which `xgrammar.py` corrects."""

    library = "xgrammar"

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(constraint)
        self.open_names = False
        """Some object has named properties and may have others: xgrammar treats `{"\\u0061": ...}` as a name other
        than `a`."""
        self.lengths = False
        """Some string has a minLength or a maxLength: xgrammar allows control characters in those, and no escapes."""
        self.rules: dict[str, regex.Node] = {}
        """Rules for JSON text: between quotes (`pattern_0`), as xgrammar's own automata for patterns let `(a+b)?` match
        `a`, or of a number (`number_1`). In the lowered schema each is a string with the pattern `^pattern_0$`."""

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        for value in numbers_in(values):
            if isinstance(value, int) and abs(value) >= _INT64:
                raise self.refusal(schema, keyword, f" with {bounded(value, 40)}")
        return {"enum": values}

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        least = int(schema.get("minLength", 0))
        most = schema.get("maxLength")
        if most is not None and most < _COUNT:
            most = int(most)
        else:
            most = None
        if "pattern" in schema and "format" in schema:
            raise self.refusal(schema, "pattern", " next to 'format'")
        keyword = next((keyword for keyword in ("pattern", "format") if keyword in schema), None)
        if keyword is not None:
            # xgrammar's own formats allow the 31st of February, 00:00:61, 222.046.46.46 and quotes in JSON pointers.
            if keyword == "pattern":
                pattern = schema["pattern"]
            else:
                pattern = FORMATS[schema["format"]]
            return self._of_pattern(schema, keyword, pattern, least, most)
        if most == 0:
            return {"const": ""}
        lengths = counts("minLength", least, "maxLength", most)
        self.lengths = self.lengths or bool(lengths)
        return {"type": "string", **lengths}

    def _of_pattern(
        self, schema: dict[str, Any], keyword: str, pattern: str, least: int, most: int | None
    ) -> dict[str, Any]:
        """Lower strings with a match of `pattern`, which `keyword` demands."""
        try:
            node = string_pattern.fit(parse_search(pattern), least, most)
            try:  # escapes make masks slow: see `xgrammar._corrected`
                text = string_pattern.in_json(node, escapes=False)
            except UnsupportedConstraint:
                text = string_pattern.in_json(node, escapes=True)
        except InvalidConstraint as error:
            raise self.at_keyword(error, schema, keyword) from None
        return self._rule("pattern", text)

    def _rule(self, kind: str, node: regex.Node) -> dict[str, Any]:
        """Add a rule for `node`, and return the schema that stands for it."""
        name = f"{kind}_{len(self.rules)}"
        self.rules[name] = node
        return {"type": "string", "pattern": f"^{name}$"}

    def numeric(self, schema: dict[str, Any], kind: str) -> dict[str, Any]:
        numbers = self.numbers(schema, kind)
        if "multipleOf" not in schema:
            return {"type": kind, **numbers.bounds()}
        node = pattern_of(numbers)
        if node is None:
            raise self.refusal(schema, "multipleOf", f" {bounded(schema['multipleOf'], 40)}")
        return self._rule("number", node)

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        prefix, items, least, most = shape
        if items is False and not prefix:
            return {"type": "array", "maxItems": 0}
        lowered: dict[str, Any] = {"type": "array"}
        if prefix:
            lowered["prefixItems"] = [self.lower(item) for item in prefix]
        if items is False:
            lowered["items"] = False
        else:
            lowered["items"] = self.lower(items)
        if most is None or most >= _COUNT or items is False:
            most = None
        # Without `minItems`, xgrammar lets any number of a tuple's last items be missing.
        return lowered | counts("minItems", least, "maxItems", most)

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required = schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        for keyword in ("patternProperties", "propertyNames", "maxProperties"):
            if keyword in schema:
                raise self.refusal(schema, keyword)
        if schema.get("minProperties", 0) > len(required):
            raise self.refusal(schema, "minProperties")
        properties: dict[str, Schema] = dict(schema.get("properties", {}))
        properties |= {name: rest for name in required if name not in properties}
        allowed = {name: self.lower(value) for name, value in properties.items() if value is not False}
        is_escaped = any(json.dumps(name, ensure_ascii=False)[1:-1] != name for name in properties)
        if is_escaped or len(allowed) < len(properties):
            rest = False  # narrowed: xgrammar would allow any value under these names
        self.open_names = self.open_names or bool(allowed and rest is not False)
        lowered: dict[str, Any] = {"type": "object"}
        if allowed:
            lowered["properties"] = allowed
        if rest is not True:
            if rest is False:
                lowered["additionalProperties"] = False
            else:
                lowered["additionalProperties"] = self.lower(rest)
        if required:
            lowered["required"] = required
        return lowered
