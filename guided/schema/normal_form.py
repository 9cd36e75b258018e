"""The normal form of a JSON Schema: the same meaning with fewer combinations of keywords.

Grammar libraries read the first keyword that they know in a subschema and ignore its neighbours. The normal form merges
neighbours, `allOf` and `$ref` with siblings into one subschema where that is exact, so that an adapter can see what its
library would ignore and refuse it by name.

In normal form (always draft 2020-12):

- there are no annotations, unknown keywords, or keywords without effect (a `minLength` on an integer);
- `$ref` is "#/$defs/<name>" and has no siblings, nor have `anyOf`, `oneOf`, `enum` and `const`;
- `oneOf` is an `anyOf` if its alternatives exclude each other;
- every name in `required` is in `properties`, unless there are `patternProperties`;
- tuples are `prefixItems`, and exclusive bounds are numbers;
- `allOf` remains only where merging was not exact (`not`, `if`, two patterns, recursion, ...).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from math import lcm
from typing import Any

from jsonschema import Draft202012Validator

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.schema.graph import Node, SchemaGraph
from guided.schema.instances import enforcing
from guided.schema.keywords import GREATEST, LEAST, OF_TYPE, Schema, clean, common_types, types_of
from guided.schema.metaschema import Dialect

_MAX_MERGES = 20_000
_MAX_ALTERNATIVES = 64


_NO_SIBLINGS = {"$ref", "$schema", "$comment", "$defs", "default", "definitions", "description", "examples", "title"}
"""Keywords without an effect next to `$ref`."""


class _Inexact(Exception):
    """Two subschemas can't be merged without a change of meaning."""


@dataclass(slots=True)
class NormalForm:
    """A schema in normal form; `root` refers to `definitions` as "#/$defs/<name>"."""

    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    _origins: dict[int, tuple[Schema, str]] = field(default_factory=dict)
    """By `id`; the reference to the subschema prevents another use of the `id`."""

    def pointer(self, schema: Schema) -> str:
        """Return the JSON pointer of `schema` in the user's document; "" if it is not known."""
        return self._origins.get(id(schema), (None, ""))[1]

    def note(self, schema: Schema, pointer: str) -> None:
        """Record that `schema` came from `pointer`, unless it already has a pointer."""
        self._origins.setdefault(id(schema), (schema, pointer))

    def target(self, schema: dict[str, Any]) -> Schema:
        """Return the target of a `$ref` in normal form."""
        return self.definitions[schema["$ref"].removeprefix("#/$defs/")]


def normalise(schema: Schema) -> NormalForm:
    """Return the normal form of a schema that `guided.schema.document.parse` returned.

    Raises:
        InvalidConstraint: a pattern that had to be matched is not a regular expression.
        UnsupportedConstraint: the schema is too deeply recursive.
    """
    if isinstance(schema, bool):
        return NormalForm(schema)
    try:
        return _Normaliser(schema).run()
    except re.error as error:
        raise InvalidConstraint(f"a pattern is malformed: {error}", param="json_schema") from None
    except RecursionError:
        raise UnsupportedConstraint("the schema is too deeply recursive", param="json_schema") from None
    except OverflowError:
        raise UnsupportedConstraint("the schema has numbers that are too large", param="json_schema") from None


def refuse_mixed_dialects(graph: SchemaGraph, dialect: Dialect) -> None:
    """Refuse a document with parts in another dialect than `dialect`, its own, if they would mean something else in it.

    Raises:
        UnsupportedConstraint: with the pointer of the part's `$schema`.
    """
    for node in graph.nodes():
        part = node
        while "$schema" not in part.schema and part.parent is not None:
            part = part.parent
        own = Dialect.of(part.schema) if "$schema" in part.schema else dialect
        differs = own.siblings_of_ref_count != dialect.siblings_of_ref_count
        has_siblings = "$ref" in node.schema and bool(node.schema.keys() - _NO_SIBLINGS)
        if own.is_draft3 != dialect.is_draft3 or (differs and has_siblings):
            raise UnsupportedConstraint(
                "a '$schema' that differs from the document's can't be enforced",
                param="json_schema",
                pointer=f"{part.pointer}/$schema",
            )


class _Normaliser:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._graph = SchemaGraph.build(document)
        self._nodes = {id(node.schema): node for node in self._graph.nodes()}
        self._dialect = Dialect.of(document)
        refuse_mixed_dialects(self._graph, self._dialect)
        self._validator = self._dialect.validator(document)
        self._anchors = Counter(
            (anchor, node.schema[anchor])
            for node in self._graph.nodes()
            for anchor in ("$dynamicAnchor", "$recursiveAnchor")
            if node.schema.get(anchor)
        )
        self._names: dict[int, str] = {}
        self._building: set[str] = set()
        self._unfolding: set[str] = set()
        self._merges = 0
        self._form = NormalForm(True)

    def run(self) -> NormalForm:
        self._form.root = self._normal(self._document)
        while pending := [id_ for id_, name in self._names.items() if name not in self._form.definitions]:
            self._definition(self._names[pending[0]])
        return self._form

    def _normal(self, schema: Any) -> Schema:
        if not isinstance(schema, dict):
            return bool(schema)
        node = self._nodes[id(schema)]
        result = self._conjunction(list(self._conjuncts(node)), schema)
        if isinstance(result, dict):
            self._form.note(result, node.pointer)
        return result

    def _conjuncts(self, node: Node) -> Iterator[Schema]:
        """Yield the conditions of `node`, each in normal form."""
        schema = node.schema
        alone = "$ref" in schema and not self._dialect.siblings_of_ref_count
        if ("enum" in schema or "const" in schema) and not alone:
            yield self._finite(schema)
            return
        for keyword, target in node.same:
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                self._refuse_overridden(keyword, node, target)
                yield {"$ref": f"#/$defs/{self._name(target)}"}
        if alone:
            return
        yield self._own(schema)
        if _has_schema(schema.get("type")):
            yield self._any_type(schema["type"])
        for keyword in ("allOf", "extends"):
            parts = schema.get(keyword, [])
            for part in parts if isinstance(parts, list) else [parts]:
                yield self._normal(part)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield self._alternatives(keyword, [self._normal(part) for part in schema[keyword]])

    def _refuse_overridden(self, keyword: str, node: Node, target: Node) -> None:
        """Refuse a dynamic reference that an outer schema may direct to another target."""
        anchor = keyword.replace("Ref", "Anchor")
        if self._anchors[anchor, target.schema.get(anchor)] > 1:
            raise UnsupportedConstraint(
                f"{keyword!r} with several targets ({anchor!r} occurs more than once) can't be enforced: use '$ref'",
                param="json_schema",
                pointer=f"{node.pointer}/{keyword}",
            )

    def _any_type(self, options: Any) -> Schema:
        """Return any of some types, which are names, or schemas in draft 3."""
        listed = options if isinstance(options, list) else [options]
        parts = [self._normal(option) if isinstance(option, dict) else clean({"type": option}) for option in listed]
        return self._alternatives("anyOf", parts)

    def _conjunction(self, conjuncts: list[Schema], schema: dict[str, Any]) -> Schema:
        """Combine all of `conjuncts`; those that can't be merged stay under `allOf`."""
        merged: Schema = True
        apart: list[Schema] = []
        for conjunct in conjuncts:
            try:
                merged = self._merge(merged, conjunct)
            except _Inexact:
                apart.append(conjunct)
        if merged is False or any(part is False for part in apart):
            return False
        merged = self._close_unevaluated(merged, schema)
        return {"allOf": [merged, *apart]} if apart else merged

    def _close_unevaluated(self, merged: Schema, schema: dict[str, Any]) -> Schema:
        """Apply `unevaluatedProperties` and `unevaluatedItems` to the merged alternatives.

        Each alternative is closed separately: a value that needs two of them together is excluded (a subset).
        """
        if merged is False or not schema.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            return merged
        if merged is True:
            merged = {}
        if "anyOf" in merged:
            return {"anyOf": [self._close_unevaluated(part, schema) for part in merged["anyOf"]]}
        if "$ref" in merged:
            try:
                return self._close_unevaluated(self._definition(merged["$ref"].removeprefix("#/$defs/")), schema)
            except _Inexact:
                return {"allOf": [merged, {"unevaluatedProperties": False}]}
        if "enum" in merged or "const" in merged:
            return merged
        for keyword, standing in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema:
                value = self._normal(schema[keyword])
                if value is not True and standing not in merged:
                    merged = {**merged, standing: value}
        return merged

    def _own(self, schema: dict[str, Any]) -> Schema:
        """Return the keywords of `schema` itself, without applicators to the same value and finite values."""
        own: dict[str, Any] = {}
        draft4 = {name: schema.get(name) for name in ("exclusiveMinimum", "exclusiveMaximum")}
        single = ["additionalProperties", "propertyNames", "contains", "not", "if"]
        single += ["then", "else"] if "if" in schema else []
        for keyword, value in schema.items():
            if keyword == "type":
                own |= {} if _has_schema(value) else {"type": value}
            elif keyword in ("minimum", "maximum"):
                exclusive = f"exclusive{keyword.capitalize()}"
                own[exclusive if draft4[exclusive] is True else keyword] = value
            elif keyword in draft4 and isinstance(value, bool):
                continue
            elif keyword in ("properties", "patternProperties", "dependentSchemas"):
                own[keyword] = {key: self._normal(child) for key, child in value.items()}
            elif keyword in ("unevaluatedProperties", "unevaluatedItems"):
                continue  # `_close_unevaluated`
            elif keyword in single:
                own[keyword] = self._normal(value)
            elif keyword == "disallow":
                own["not"] = self._any_type(value)
            elif keyword == "required" and isinstance(value, bool):
                continue  # draft 3: see below
            elif keyword == "divisibleBy" and self._dialect.is_draft3:
                own["multipleOf"] = value
            elif keyword == "dependencies":
                self._split_dependencies(value, own)
            elif keyword not in ("items", "prefixItems") and any(keyword in keywords for keywords in OF_TYPE.values()):
                own[keyword] = value
        if self._dialect.is_draft3:
            named = schema.get("properties", {}).items()
            own["required"] = [name for name, part in named if isinstance(part, dict) and part.get("required") is True]
        self._own_items(schema, own)
        return clean(own)

    def _split_dependencies(self, dependencies: dict[str, Any], own: dict[str, Any]) -> None:
        """Split `dependencies` (until draft 7) by type: names or a schema. Draft 3 allows a single name."""
        for key, value in dependencies.items():
            if isinstance(value, list | str):
                own.setdefault("dependentRequired", {})[key] = [value] if isinstance(value, str) else value
            else:
                own.setdefault("dependentSchemas", {})[key] = self._normal(value)

    def _own_items(self, schema: dict[str, Any], own: dict[str, Any]) -> None:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):  # a tuple, up to draft 2019-09
            prefix, items = items, schema.get("additionalItems", True)
        own["prefixItems"] = [self._normal(part) for part in prefix]
        own["items"] = self._normal(items)

    def _finite(self, schema: dict[str, Any]) -> Schema:
        """Return `enum` or `const` without the values that its neighbours forbid."""
        validator = self._validator.evolve(schema={name: value for name, value in schema.items() if name != "const"})
        return _valid_values(schema, validator)

    def _alternatives(self, keyword: str, parts: list[Schema]) -> Schema:
        possible = [part for part in parts if part is not False]
        if not possible:
            return False
        if keyword == "anyOf" and any(part is True or part == {} for part in possible):
            return True
        if len(possible) == 1:
            return possible[0]
        if keyword == "oneOf" and not self._exclusive(possible):
            return {"oneOf": possible}
        flat: list[Schema] = []
        for part in possible:
            flat += part["anyOf"] if isinstance(part, dict) and part.keys() == {"anyOf"} else [part]
        return {"anyOf": flat}

    def _name(self, target: Node) -> str:
        return self._names.setdefault(id(target.schema), f"d{len(self._names)}")

    def _definition(self, name: str) -> Schema:
        if name not in self._form.definitions:
            if name in self._building:
                raise _Inexact  # recursive: it can't be merged into itself
            self._building.add(name)
            try:
                target = next(id_ for id_, named in self._names.items() if named == name)
                self._form.definitions[name] = self._normal(self._nodes[target].schema)
            finally:
                self._building.discard(name)
        return self._form.definitions[name]

    def _merge(self, left: Schema, right: Schema) -> Schema:
        """Return what both allow. Raises `_Inexact` if one subschema can't express it."""
        if left is False or right is False:
            return False
        if left is True or left == {} or left == right:
            return right
        if right is True or right == {}:
            return left
        self._merges += 1
        if self._merges > _MAX_MERGES:
            raise _Inexact
        for one, other in ((left, right), (right, left)):
            if "$ref" in one:
                return self._merge_into(one["$ref"].removeprefix("#/$defs/"), other)
        for one, other in ((left, right), (right, left)):
            if "const" in one or "enum" in one:
                return self._filter(one, other)
            if one.keys() & {"allOf", "oneOf"}:
                raise _Inexact
        for one, other in ((left, right), (right, left)):
            if "anyOf" in one:
                if len(one["anyOf"]) * len(other.get("anyOf", [0])) > _MAX_ALTERNATIVES:
                    raise _Inexact
                return self._alternatives("anyOf", [self._merge(part, other) for part in one["anyOf"]])
        result = clean(self._merge_keywords(left, right))
        if isinstance(result, dict):
            self._form.note(result, self._form.pointer(left) or self._form.pointer(right))
        return result

    def _merge_into(self, name: str, other: Schema) -> Schema:
        if name in self._unfolding:
            raise _Inexact  # recursive: unfolding would not end
        self._unfolding.add(name)
        try:
            return self._merge(self._definition(name), other)
        finally:
            self._unfolding.discard(name)

    def _filter(self, finite: dict[str, Any], other: dict[str, Any]) -> Schema:
        needed = _references(other)
        for name in needed:
            self._definition(name)
            if name in self._building:
                raise _Inexact
            needed.extend(found for found in _references(self._form.definitions[name]) if found not in needed)
        validator = enforcing(Draft202012Validator)(
            {**other, "$defs": {name: self._form.definitions[name] for name in needed}}
        )
        return _valid_values(finite, validator)

    def _merge_keywords(self, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        merged = self._merge_objects(left, right) | self._merge_items(left, right)
        done = {"properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
        for keyword in [name for name in {**left, **right} if name not in done]:
            if keyword not in left or keyword not in right or left[keyword] == right[keyword]:
                if keyword in ("then", "else", "if") and "if" in left and "if" in right:
                    raise _Inexact
                merged[keyword] = left.get(keyword, right.get(keyword))
                continue
            one, other = left[keyword], right[keyword]
            if keyword == "type":
                merged["type"] = common_types(left, right)
            elif keyword in GREATEST:
                merged[keyword] = max(one, other)
            elif keyword in LEAST:
                merged[keyword] = min(one, other)
            elif keyword == "required":
                merged[keyword] = [*one, *(name for name in other if name not in one)]
            elif keyword == "uniqueItems":
                merged[keyword] = one or other
            elif keyword == "propertyNames":
                merged[keyword] = self._merge(one, other)
            elif keyword == "multipleOf" and isinstance(one, int) and isinstance(other, int):
                merged[keyword] = lcm(one, other)
            else:
                raise _Inexact
        return merged

    def _merge_objects(self, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        if not (set(_DECLARATIONS) & left.keys() and set(_DECLARATIONS) & right.keys()):
            return {name: source[name] for source in (left, right) for name in _DECLARATIONS if name in source}
        patterns = [side.get("patternProperties", {}) for side in (left, right)]
        open_ended = all(side.get("additionalProperties", True) is True for side in (left, right))
        if any(patterns) and not open_ended and patterns[0] != patterns[1]:
            raise _Inexact
        merged: dict[str, Any] = {"properties": {}}
        for name in {**left.get("properties", {}), **right.get("properties", {})}:
            sides = [side.get("properties", {}).get(name, _additional(side, name)) for side in (left, right)]
            merged["properties"][name] = self._merge(*sides)
        merged["patternProperties"] = dict(patterns[0])
        for pattern, schema in patterns[1].items():
            merged["patternProperties"][pattern] = self._merge(patterns[0].get(pattern, True), schema)
        merged["additionalProperties"] = self._merge(
            left.get("additionalProperties", True), right.get("additionalProperties", True)
        )
        return merged

    def _merge_items(self, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        mine, theirs = left.get("prefixItems", []), right.get("prefixItems", [])
        rest_mine, rest_theirs = left.get("items", True), right.get("items", True)
        pairs = zip_longest(mine, theirs, fillvalue=None)
        prefix = [
            self._merge(rest_mine if one is None else one, rest_theirs if other is None else other)
            for one, other in pairs
        ]
        return {"prefixItems": prefix, "items": self._merge(rest_mine, rest_theirs)}

    def _exclusive(self, parts: Sequence[Schema]) -> bool:
        """Whether it is certain that no value satisfies two of `parts`."""
        return all(self._disjoint(left, right, 4) for left, right in combinations(parts, 2))

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            try:
                schema = self._definition(schema["$ref"].removeprefix("#/$defs/"))
            except _Inexact:
                return True
        return True

    def _disjoint(self, left: Schema, right: Schema, depth: int) -> bool:
        left, right = self._resolved(left), self._resolved(right)
        if left is False or right is False:
            return True
        if isinstance(left, bool) or isinstance(right, bool) or depth == 0:
            return False
        for one, other in ((left, right), (right, left)):
            if "anyOf" in one:
                return all(self._disjoint(part, other, depth - 1) for part in one["anyOf"])
            if "allOf" in one:
                return any(self._disjoint(part, other, depth - 1) for part in one["allOf"])
            if "const" in one or "enum" in one:
                try:
                    return self._filter(one, other) is False
                except _Inexact:
                    return False
        if not common_types(left, right):
            return True
        if types_of(left) != {"object"} and types_of(right) != {"object"}:
            return False
        shared = set(left.get("required", ())) & set(right.get("required", ()))
        mine, theirs = left.get("properties", {}), right.get("properties", {})
        if any(self._disjoint(mine[name], theirs[name], depth - 1) for name in shared):
            return True
        return any(
            one.get("additionalProperties") is False
            and not one.get("patternProperties")
            and any(name not in one.get("properties", {}) for name in other.get("required", ()))
            for one, other in ((left, right), (right, left))
        )


def _has_schema(types: Any) -> bool:
    """Whether a list of types contains a schema (draft 3)."""
    return isinstance(types, list) and any(isinstance(option, dict) for option in types)


def _valid_values(finite: dict[str, Any], validator: Any) -> Schema:
    """`const` or `enum` with only the values that `validator` accepts."""
    if "const" in finite:
        return {"const": finite["const"]} if validator.is_valid(finite["const"]) else False
    values = [value for value in finite["enum"] if validator.is_valid(value)]
    return {"enum": values} if values else False


_DECLARATIONS = ("properties", "patternProperties", "additionalProperties")


def _additional(schema: dict[str, Any], name: str) -> Schema:
    """Return the schema for a property that `schema` does not name."""
    if schema.get("patternProperties"):
        raise _Inexact  # a pattern may match `name`, depending on the library's dialect
    value: Schema = schema.get("additionalProperties", True)
    return value


def _references(schema: Schema) -> list[str]:
    """Return the names of the definitions that a subschema in normal form refers to."""
    found: list[str] = []
    todo: list[Any] = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found.append(value["$ref"].removeprefix("#/$defs/"))
            todo.extend(child for key, child in value.items() if key not in ("enum", "const"))
        elif isinstance(value, list):
            todo.extend(value)
    return found
