"""Subschemas in normal form combined: `allOf` (`merge`), `anyOf`, `oneOf` and `not` (`complement`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from guided.schema.complement import only_closes, violations
from guided.schema.definitions import Definitions, Inexact, Recursive
from guided.schema.form import NormalForm, reference, references, target_name
from guided.schema.implication import covers, same
from guided.schema.intersection import described, intersection
from guided.schema.keywords import Schema, clean, cleaned, common_types, listed, types_of

_DESCRIBING = {
    "patternProperties",
    "additionalProperties",
    "prefixItems",
    "items",
    "contains",
    "$ref",
    "allOf",
    "oneOf",
}
_MAX_STEPS = 5_000
_MAX_ALTERNATIVES = 64
_MAX_MERGED_DEFINITIONS = 50
_DEPTH = 4
"""Levels of properties and alternatives in which two subschemas are compared."""


class Combinations:
    """Combines the subschemas of one document. All methods raise `Inexact` where no subschema expresses the result.

    Args:
        form: gets the pointers of the results.
        keep_described: an alternative that names a property or item stays beside a more general one that does not:
            for `unevaluatedProperties` and `unevaluatedItems`, only the first one has evaluated it.
    """

    def __init__(self, form: NormalForm, definitions: Definitions, *, keep_described: bool) -> None:
        self._form = form
        self._keep_described = keep_described
        self._definitions = definitions
        self._merged_names: dict[str, str] = {}
        """Names of definitions that merge two subschemas, one of them recursive, by the two as JSON text."""
        self._steps = 0

    def merge(self, left: Schema, right: Schema) -> Schema:
        """Return what both allow. The properties of `left` come first."""
        if left is False or right is False:
            return False
        if left is True or left == {} or same(left, right):
            return right
        if right is True or right == {}:
            return left
        self._count_step()
        if "$ref" in left or "$ref" in right:
            return self._merge_references(left, right)
        for one, other in ((left, right), (right, left)):
            if (values := listed(one)) is not None:
                return self._filtered(one, values, other)
        if (left.keys() | right.keys()) & {"allOf", "oneOf"}:
            raise Inexact
        for options, merge in (
            (left.get("anyOf"), lambda part: self.merge(part, right)),
            (right.get("anyOf"), lambda part: self.merge(left, part)),
        ):
            if options is not None:
                return self._few_alternatives(map(merge, options), len(options))
        result = clean(intersection(left, right, self.merge))
        self._form.note(result, self._form.pointer(left) or self._form.pointer(right))
        return result if isinstance(result, bool) else self._with_another_property(result)

    def complement(self, schema: Schema) -> Schema:
        """Return what `schema` does not allow."""
        if isinstance(schema, bool) or not schema:
            return schema is False
        if "$ref" in schema:
            with self._definitions.unfolded(target_name(schema)) as target:
                return self.complement(target)
        if schema.keys() & {"oneOf", "if", "unevaluatedProperties"}:
            raise Inexact
        if "allOf" in schema:
            return self.any_of([self.complement(part) for part in schema["allOf"]])
        if "anyOf" in schema:
            rest: Schema = True
            for part in schema["anyOf"]:
                rest = self.merge(rest, self.complement(part))
            return rest
        self._count_step()
        return self.any_of([cleaned(part) for part in violations(schema, self.complement)])

    def any_of(self, parts: Iterable[Schema]) -> Schema:
        """Return what any of `parts` allows. Never inexact."""
        possible = [part for part in parts if part is not False]
        if any(part is True or part == {} for part in possible):
            return True
        if len(possible) <= 1:
            return possible[0] if possible else False
        options: list[Schema] = []
        for part in possible:
            for option in part["anyOf"] if isinstance(part, dict) and part.keys() == {"anyOf"} else [part]:
                if len(options) <= _MAX_ALTERNATIVES:  # a longer list takes too long to compare
                    if any(self._replaces(other, option) for other in options):
                        continue
                    options = [other for other in options if not self._replaces(option, other)]
                options.append(option)
        return options[0] if len(options) == 1 else {"anyOf": options}

    def one_of(self, parts: Sequence[Schema], *, negate: bool) -> Schema:
        """Return what exactly one of `parts` allows: alternatives, or a `oneOf` where that is not exact.

        Args:
            negate: exclude the values of the others from each overlapping alternative.
        """
        possible = [part for part in parts if part is not False]
        try:
            return self.any_of(self._exclusive(possible, negate))
        except Inexact:
            return {"oneOf": possible}

    def either(self, condition: Schema, then: Schema, otherwise: Schema) -> Schema:
        """Return what `if condition then then else otherwise` allows."""
        return self.any_of([self.merge(condition, then), self.merge(self.complement(condition), otherwise)])

    def where_present(self, name: str, then: Schema) -> Schema:
        """Return what allows `then` where the property `name` is present, and anything elsewhere."""
        present, absent = clean({"required": [name]}), clean({"properties": {name: False}})
        return self.any_of([self.merge(present, then), absent])

    def disjoint(self, left: Schema, right: Schema, depth: int = _DEPTH) -> bool:
        """Whether it is certain that no value satisfies both. Never inexact."""
        left, right = self._resolved(left), self._resolved(right)
        if left is False or right is False:
            return True
        if isinstance(left, bool) or isinstance(right, bool) or depth == 0:
            return False
        for one, other in ((left, right), (right, left)):
            for keyword, combine in (("anyOf", all), ("allOf", any)):
                if keyword in one:
                    return combine(self.disjoint(part, other, depth - 1) for part in one[keyword])
            if (values := listed(one)) is not None:
                try:
                    return self._filtered(one, values, other) is False
                except Inexact:
                    return False
        if not common_types(left, right):
            return True
        if types_of(left) != {"object"} and types_of(right) != {"object"}:
            return False
        for name in dict.fromkeys((*left.get("required", ()), *right.get("required", ()))):
            with suppress(Inexact):
                if self.disjoint(described(left, name), described(right, name), depth - 1):
                    return True
        return False

    def _replaces(self, general: Schema, specific: Schema) -> bool:
        """Whether `specific` may be left out beside `general`."""
        return covers(general, specific) and not (self._keep_described and _describes_more(specific, general))

    def _count_step(self) -> None:
        """Count one merge or complement. Inexact after too many."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Inexact

    def _few_alternatives(self, parts: Iterable[Schema], count: int) -> Schema:
        """Return any of `parts`, made from `count` alternatives. Inexact if these have become too many."""
        result = self.any_of(parts)
        if isinstance(result, dict) and len(result.get("anyOf", ())) > max(count, _MAX_ALTERNATIVES):
            raise Inexact
        return result

    def _merge_references(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        """Merge two subschemas of which one is a `$ref`. A recursive one becomes a definition of its own."""
        try:
            return self._merge_unfolded(left, right)
        except Recursive:
            name = self._merged_names.setdefault(json.dumps([left, right]), f"m{len(self._merged_names)}")
            if len(self._merged_names) > _MAX_MERGED_DEFINITIONS:
                raise Inexact from None
            self._definitions.declare(name, lambda: self._merge_apart(left, right))
            return reference(name)

    def _merge_unfolded(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        if "$ref" in left:
            with self._definitions.unfolded(target_name(left)) as target:
                return self.merge(target, right)
        with self._definitions.unfolded(target_name(right)) as target:
            return self.merge(left, target)

    def _merge_apart(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        """Merge two subschemas of which one is a `$ref`, as a definition of its own."""
        with self._definitions.unfolded_anew():
            try:
                return self._merge_unfolded(left, right)
            except Inexact:
                return {"allOf": [left, right]}

    def _filtered(self, finite: dict[str, Any], values: list[Any], other: dict[str, Any]) -> Schema:
        """Return `finite`, an `enum` or `const` with `values`, with those that `other` allows."""
        needed = list(references(other))
        for name in needed:  # the body appends to it
            needed.extend(found for found in references(self._definitions.get(name)) if found not in needed)
        return with_valid_values(finite, values, self._form.validator(other))

    def _with_another_property(self, schema: dict[str, Any]) -> Schema:
        """Rewrite `not` with a closed object: some property is present that it does not name."""
        excluded = schema.get("not", True)
        parts = [excluded] if isinstance(excluded, bool) or "anyOf" not in excluded else excluded["anyOf"]
        closed: Any = next((part for part in parts if only_closes(part)), None)
        if closed is None:
            return schema
        others = [part for part in parts if part is not closed]
        rest = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        rest |= {"not": {"anyOf": others}} if others else {}
        self._form.note_copy(schema, rest)
        if any(name not in closed["properties"] for name in schema.get("required", ())):
            return self._with_another_property(rest)
        if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
            return schema
        names = [name for name in schema.get("properties", {}) if name not in closed["properties"]]
        return self.any_of([self.merge(rest, clean({"required": [name]})) for name in names])

    def _exclusive(self, parts: Sequence[Schema], negate: bool) -> list[Schema]:
        """Return each of `parts` without the values that another one allows."""
        found: list[Schema] = []
        for index, part in enumerate(parts):
            alone = part
            for other in (*parts[:index], *parts[index + 1 :]):
                if not self.disjoint(part, other):
                    if not negate:
                        raise Inexact
                    alone = self.merge(alone, self.complement(other))
            found.append(alone)
        return found

    def _resolved(self, schema: Schema) -> Schema:
        """Return the target of a `$ref`, or an outline of it."""
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._definitions.outline(target_name(schema))
        return True


def _describes_more(schema: Schema, other: Schema) -> bool:
    """Whether `schema` may describe a property or an item that `other` does not."""
    mine, theirs = (each if isinstance(each, dict) else {} for each in (schema, other))
    if not mine.get("properties", {}).keys() <= theirs.get("properties", {}).keys():
        return True
    return any(mine[keyword] != theirs.get(keyword) for keyword in _DESCRIBING & mine.keys())


def with_valid_values(finite: dict[str, Any], values: list[Any], validator: Any) -> Schema:
    """Return the `enum` or `const` of `finite`, which has `values`, with those that `validator` accepts."""
    valid = [value for value in values if validator.is_valid(value)]
    if not valid:
        return False
    return {"const": valid[0]} if "const" in finite else {"enum": valid}
