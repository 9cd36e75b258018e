"""What has to be guarded of a schema, and the superset of it that the grammar library gets.

A schema is guarded only if no text leads into a dead end: each veto leaves another continuation, by the size of the
domains or by the combinations that are left. Anything else keeps its keyword, which the library then refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema.validators import extend

from guided.errors import UnsupportedConstraint
from guided.guard import domains
from guided.guard.rules import ArrayRule, ObjectRule, minified
from guided.guard.text import Rule
from guided.schema import string_pattern
from guided.schema.form import NormalForm
from guided.schema.keywords import Schema
from guided.schema.metaschema import Dialect, identity
from guided.schema.normal_form import normalise

_ITEM_CONDITIONS = ("uniqueItems", "contains", "minContains", "maxContains")
_CONDITIONS = ("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_KEPT_APART = ("$ref", "anyOf", "enum", "const")


@dataclass(frozen=True)
class Plan:
    """How one constraint is guarded."""

    superset: str | None = None
    """The schema for the library, as JSON text; None: the constraint itself, in which no key may come twice."""
    planner: _Planner | None = None
    validator: Any = None
    """Checks the complete document."""
    has_few_names: bool = False
    """Some object may run out of names for its properties."""

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords that are guarded."""
        if self.planner is None or self.superset is None:
            return ()
        form = self.planner.form
        return tuple(sorted(set(keywords([form.root, form.definitions])) - set(keywords(json.loads(self.superset)))))

    def root(self, first: int) -> Rule | None:
        """Return the rule of a document that begins with the byte `first`."""
        return None if self.planner is None else self.planner.rule(self.planner.form.root, first)


def keywords(schema: Any) -> Iterator[str]:
    """Yield the keywords in a document that rewriting or the guard can replace."""
    if isinstance(schema, dict):
        yield from schema.keys() & REPLACEABLE
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from keywords(value)


REPLACEABLE = frozenset(
    [
        *("not", "if", "then", "else", "oneOf", "allOf", "uniqueItems", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
        *("$dynamicRef", "$recursiveRef"),
    ]
)
"""Keywords that rewriting or the guard can replace."""


@lru_cache(maxsize=8)  # one library after the other is tried
def plan_superset(source: str) -> Plan | None:
    """Return the plan for a schema (JSON text) that a library can't enforce; None if the guard can't either."""
    document = json.loads(source)
    if isinstance(document, bool):
        return None
    try:
        planner = _Planner(normalise(document))
        superset = planner.superset()
    except (_Unguarded, UnsupportedConstraint):
        return None
    return Plan(json.dumps(superset, ensure_ascii=False), planner, _final_validator(document))


def _final_validator(document: dict[str, Any]) -> Any:
    """Return a validator without `format`, of which the libraries have their own ideas."""
    kind: Any = type(Dialect.of(document).validator(document))
    return extend(kind, {"format": lambda *_: None})(document)  # type: ignore[no-untyped-call]


class _Unguarded(Exception):
    """The guard can't enforce the schema."""


@dataclass(slots=True)
class _Leaf:
    """An alternative without `$ref` and `anyOf`: what the library gets of it, and what is left to guard."""

    base: dict[str, Any]
    items: dict[str, Any]
    """`uniqueItems`, `contains` and its counts."""
    counts: tuple[int, int | None]
    """The minimum and maximum number of properties."""
    required: list[str]
    """Properties that every alternative for the same text requires."""


class _Planner:
    def __init__(self, form: NormalForm) -> None:
        self.form = form
        self._leaves: dict[int, _Leaf] = {}
        """By `id` of the subschema in normal form, which `form` keeps alive."""
        self._building: set[int] = set()
        self._rules: dict[tuple[int, bool], Rule] = {}
        self._leading: set[int] = set()
        """The `id`s of subschemas with a rule in them."""

    def superset(self) -> dict[str, Any]:
        """Return the schema for the library. Raises `_Unguarded`."""
        reachable = list(self._reachable())
        self._find_leading(reachable)
        for schema in reachable:
            self._refuse_ambiguous(schema)
        if self.form.root is False:
            raise _Unguarded
        root = self._stripped(self.form.root)
        definitions = {name: self._stripped(one) for name, one in self.form.definitions.items()}
        return {**(root if isinstance(root, dict) else {}), "$defs": definitions}

    def _reachable(self) -> Iterator[dict[str, Any]]:
        seen: set[int] = set()
        todo: list[Schema] = [self.form.root]
        while todo:
            schema = todo.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                todo.extend(self._inner(schema))

    def _inner(self, schema: dict[str, Any]) -> Iterator[Schema]:
        """Yield the subschemas to which a rule may lead, and those for the same value."""
        if "$ref" in schema:
            yield self.form.target(schema)
        elif "anyOf" in schema:
            yield from schema["anyOf"]
        elif leaf := self._leaf(schema):
            yield from leaf.base.get("properties", {}).values()
            yield from leaf.base.get("patternProperties", {}).values()
            yield from leaf.base.get("prefixItems", [])
            yield from (leaf.base[name] for name in ("additionalProperties", "items") if name in leaf.base)

    def _find_leading(self, reachable: list[dict[str, Any]]) -> None:
        users: dict[int, list[int]] = {}
        todo: list[int] = []
        for schema in reachable:
            for inner in self._inner(schema):
                users.setdefault(id(inner), []).append(id(schema))
            leaf = self._leaf(schema)
            if leaf is not None and (leaf.items or leaf.counts != (0, None)):
                todo.append(id(schema))
        while todo:
            one = todo.pop()
            if one not in self._leading:
                self._leading.add(one)
                todo += users.get(one, [])

    def _refuse_ambiguous(self, schema: dict[str, Any]) -> None:
        """Refuse alternatives of the same type with different rules: the text may not say which one it follows."""
        for kind in ("object", "array") if "anyOf" in schema else ():
            parts = [part for part in schema["anyOf"] if self._admits(part, kind)]
            if len(parts) > 1 and any(id(part) in self._leading for part in parts):
                self._check_similar([one for part in parts for one in self.form.alternatives(part)])

    def _check_similar(self, parts: list[Schema]) -> None:
        """Refuse alternatives that differ in more than required properties without a condition."""
        leaves = [self._leaf(part) for part in parts]
        first = leaves[0]
        if first is None or any(leaf is None for leaf in leaves):
            raise _Unguarded
        required = [set(leaf.base.get("required", ())) for leaf in leaves if leaf is not None]
        shared = set.intersection(*required)
        for leaf in leaves:
            assert leaf is not None
            same = [(_without_required(one.base), one.items, one.counts) for one in (first, leaf)]
            if same[0] != same[1] or (leaf.counts != (0, None) and set.union(*required) != shared):
                raise _Unguarded
            leaf.required = sorted(shared)

    def _admits(self, schema: Schema, kind: str) -> bool:
        return any(kind in domains.kinds(part) for part in domains.resolved(self, schema))

    def base(self, schema: dict[str, Any]) -> dict[str, Any]:
        """See `domains.Bases`."""
        leaf = None if id(schema) in self._building else self._leaf(schema)
        return schema if leaf is None else leaf.base

    def _leaf(self, schema: Schema) -> _Leaf | None:
        """Split a subschema that is no reference, alternatives or values. Raises `_Unguarded`."""
        if isinstance(schema, bool):
            return None
        if not schema.keys().isdisjoint(_KEPT_APART):
            return None
        if not schema.keys().isdisjoint(_CONDITIONS):
            raise _Unguarded  # rewriting could not replace them
        if id(schema) not in self._leaves:
            self._building.add(id(schema))
            self._leaves[id(schema)] = self._split(schema)
            self._building.discard(id(schema))
        return self._leaves[id(schema)]

    def _split(self, schema: dict[str, Any]) -> _Leaf:
        items = {name: schema[name] for name in _ITEM_CONDITIONS if name in schema}
        counts = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        guarded = {*_ITEM_CONDITIONS, "minProperties", "maxProperties"}
        base = {name: value for name, value in schema.items() if name not in guarded}
        if items:
            self._check_items(base, items)
        if counts != (0, None):
            self._check_counts(base, *counts)
        return _Leaf(base, items, counts, base.get("required", []))

    def _check_counts(self, base: dict[str, Any], least: int, most: int | None) -> None:
        """Refuse numbers of properties that could lead into a dead end."""
        required, patterns = base.get("required", []), base.get("patternProperties", {})
        is_open = base.get("additionalProperties", True) is not False
        many = any(domains.endless_pattern(pattern) and one is not False for pattern, one in patterns.items())
        known = sum(one is not False for one in base.get("properties", {}).values())
        if "propertyNames" in base or (least > known and not (is_open or many)):
            raise _Unguarded
        if (most is not None and len(required) > most) or (
            patterns and not set(required) <= {*base.get("properties", {})}
        ):
            raise _Unguarded

    def _check_items(self, base: dict[str, Any], items: dict[str, Any]) -> None:
        """Refuse what could lead into a dead end. Normalises `items`, in place."""
        least, most = int(base.get("minItems", 0)), base.get("maxItems")
        prefix, rest = base.get("prefixItems", []), base.get("items", True)
        if items.get("uniqueItems"):
            for index in range(least):
                if not domains.at_least(self, prefix[index] if index < len(prefix) else rest, index + 1):
                    raise _Unguarded
        if "contains" not in items:
            items.pop("minContains", None)
            items.pop("maxContains", None)
            return
        wanted, upper = int(items.get("minContains", 1)), items.get("maxContains")
        both = self.form.validator({"allOf": [items["contains"], rest]})
        if wanted:
            found = {
                identity(value)
                for schema in (items["contains"], rest)
                for value in domains.samples(self, schema)
                if both.is_valid(value)
            }
            if most is not None or len(found) < (wanted if items.get("uniqueItems") else 1):
                raise _Unguarded
        if upper is not None:
            values = domains.finite(self, items["contains"])
            if values is None or wanted > upper or least > upper:
                raise _Unguarded
            items["listed"] = values

    def _stripped(self, schema: Schema) -> Schema:
        """Return what the library gets of a subschema."""
        if isinstance(schema, dict) and "anyOf" in schema:
            return {"anyOf": [self._stripped(part) for part in schema["anyOf"]]}
        leaf = self._leaf(schema)
        if leaf is None:
            return schema
        result = dict(leaf.base)
        for keyword in ("properties", "patternProperties"):
            if keyword in result:
                result[keyword] = {name: self._stripped(one) for name, one in result[keyword].items()}
        for keyword in ("additionalProperties", "items"):
            if keyword in result:
                result[keyword] = self._stripped(result[keyword])
        if "prefixItems" in result:
            result["prefixItems"] = [self._stripped(one) for one in result["prefixItems"]]
        return result

    def rule(self, schema: Schema, first: int) -> Rule | None:
        """Return the rule of a container that `schema` describes."""
        kind = "object" if first == ord("{") else "array"
        while isinstance(schema, dict) and not schema.keys().isdisjoint(("$ref", "anyOf")):
            if "$ref" in schema:
                schema = self.form.target(schema)
            else:
                schema = next((part for part in schema["anyOf"] if self._admits(part, kind)), True)
        if id(schema) not in self._leading or isinstance(schema, bool):
            return None
        key = id(schema), kind == "object"
        if key not in self._rules:
            leaf = self._leaf(schema)
            assert leaf is not None
            self._rules[key] = self._object_rule(leaf) if kind == "object" else self._array_rule(leaf)
        return self._rules[key]

    def _object_rule(self, leaf: _Leaf) -> ObjectRule:
        base = leaf.base
        properties, rest = base.get("properties", {}), base.get("additionalProperties", True)
        patterns = base.get("patternProperties", {})

        def member(name: str, first: int) -> Rule | None:
            schema = properties.get(name)
            if schema is None:
                schema = next((one for pattern, one in patterns.items() if string_pattern.matches(pattern, name)), rest)
            return self.rule(schema, first)

        order = [name for name, schema in properties.items() if schema is not False]
        is_open = rest is not False or bool(patterns)
        return ObjectRule(member, order, leaf.required, is_open, leaf.counts)

    def _array_rule(self, leaf: _Leaf) -> ArrayRule:
        base, items = leaf.base, leaf.items
        prefix, rest = base.get("prefixItems", []), base.get("items", True)
        schemas = [*prefix, *([] if rest is False else [rest])]
        endless = [domains.endless(self, one) for one in schemas]
        kinds = {kind for one in schemas for part in domains.resolved(self, one) for kind in domains.kinds(part)}
        known = domains.finite(self, rest) if not prefix and items.get("uniqueItems") else None
        contains = self.form.validator(items["contains"]).is_valid if "contains" in items else None
        return ArrayRule(
            lambda index, first: self.rule(prefix[index] if index < len(prefix) else rest, first),
            bool(items.get("uniqueItems")),
            frozenset.intersection(*endless) if schemas else frozenset(),
            all(endless) and kinds <= {"string", "array", "object"},
            None if known is None else frozenset(map(minified, known)),
            contains,
            int(items.get("minContains", 1)) if contains else 0,
            None if items.get("maxContains") is None else int(items["maxContains"]),
            frozenset(map(minified, items.get("listed", ()))),
        )


def _without_required(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "required"}
