"""The parts of a schema that have to be guarded, and the superset of the schema that the grammar library gets.

A schema is guarded only if no text leads into a dead end: each veto leaves another continuation, by the size of the
domains or by the combinations that are left. Anything else keeps its keyword, which the library then refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema.validators import extend

from guided.errors import UnsupportedConstraint
from guided.guard import domains
from guided.guard.rules import ArrayRule, ObjectRule, equal_texts, texts_of
from guided.guard.text import Frame, Rule
from guided.schema import string_pattern
from guided.schema.form import NormalForm
from guided.schema.implication import covers
from guided.schema.keywords import Schema, map_parts, parts_of
from guided.schema.metaschema import Dialect, identity
from guided.schema.normal_form import normalise

_ITEM_CONDITIONS = ("uniqueItems", "contains", "minContains", "maxContains")
_COMBINED = ("anyOf", "oneOf", "allOf")
"""Keywords with parts that apply to the same value."""
_KEPT_APART = ("$ref", "enum", "const", *_COMBINED)
_KEPT_WHOLE = frozenset(("propertyNames", "not", "if", "then", "else", "dependentSchemas"))
"""Keywords that are left to the library."""


@dataclass(frozen=True)
class Plan:
    """How one constraint is guarded."""

    superset: str | None = None
    """The schema for the library, as JSON text. None: the constraint itself; the guard only forbids duplicate keys."""
    planner: _Planner | None = None
    validator: Any = None
    """Checks the complete document."""
    few_names: re.Pattern[str] | None = None
    """Matches property names that some object may run out of."""
    ending_names: re.Pattern[str] | None = None
    """Matches property names that may not be the beginning of a longer name."""

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords that are guarded."""
        if self.planner is None or self.superset is None:
            return ()
        form = self.planner.form
        return tuple(sorted(set(keywords([form.root, form.definitions])) - set(keywords(json.loads(self.superset)))))

    def runs_out(self, frame: Frame | None) -> bool:
        """Whether an object may run out of names for its properties."""
        return frame is not None and bool(_matching(self.few_names, frame.keys))

    def ending_keys(self, frame: Frame) -> list[str]:
        """Return the keys of an object after which a key that begins like them may have to end."""
        return _matching(self.ending_names, frame.keys)

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


@lru_cache(maxsize=8)  # each library that is tried asks for it
def plan_superset(source: str) -> Plan | None:
    """Return the plan for a schema (JSON text) that a library can't enforce; None if the guard can't either."""
    document = json.loads(source)
    if isinstance(document, bool):
        return None
    try:
        planner = _Planner(normalise(document), narrowed='"unevaluated' in source)
        superset = planner.superset()
    except (_Unguarded, UnsupportedConstraint):
        return None
    return Plan(json.dumps(superset, ensure_ascii=False), planner, _final_validator(document))


def _final_validator(document: dict[str, Any]) -> Any:
    """Return a validator that ignores `format`, because the libraries read formats differently."""
    kind: Any = type(Dialect.of(document).validator(document))
    return extend(kind, {"format": lambda *_: None})(document)  # type: ignore[no-untyped-call]


class _Unguarded(Exception):
    """The guard can't enforce the schema."""


@dataclass(slots=True)
class _Leaf:
    """An alternative without `$ref` and `anyOf`: the part for the library, and the part for the guard."""

    base: dict[str, Any]
    items: dict[str, Any]
    """`uniqueItems`, `contains` and its counts."""
    counts: tuple[int, int | None]
    """The minimum and maximum number of properties."""
    required: list[str]
    """Properties that every alternative for the same text requires."""


class _Planner:
    """Finds the rules of one schema.

    Args:
        narrowed: the normal form may allow less than the schema, so its conditions must not be rewritten again.
    """

    def __init__(self, form: NormalForm, *, narrowed: bool) -> None:
        self.form = form
        self._narrowed = narrowed
        self._leaves: dict[int, _Leaf] = {}
        """By `id` of the subschema in normal form, which `form` keeps alive."""
        self._building: set[int] = set()
        self._rules: dict[tuple[int, str], Rule | None] = {}
        self._leading: set[int] = set()
        """The `id`s of subschemas that have a rule, or contain one."""

    def superset(self) -> dict[str, Any]:
        """Return the schema for the library. Raises `_Unguarded`."""
        reachable = list(self._reachable())
        self._find_leading(reachable)
        if not self._leading or (self._narrowed and not all(map(domains.is_known, reachable))):
            raise _Unguarded
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
        """Yield the subschemas that a rule of `schema` may lead to, and those for the same value."""
        if "$ref" in schema:
            yield self.form.target(schema)
        for keyword in schema.keys() & _COMBINED:
            yield from schema[keyword]
        if leaf := self._leaf(schema):
            yield from parts_of(_without(leaf.base, _KEPT_WHOLE))

    def _find_leading(self, reachable: list[dict[str, Any]]) -> None:
        leaves = ((schema, self._leaf(schema)) for schema in reachable)
        grown = {id(schema) for schema, leaf in leaves if leaf and (leaf.items or leaf.counts != (0, None))}
        while grown:
            self._leading |= grown
            others = (schema for schema in reachable if id(schema) not in self._leading)
            grown = {id(schema) for schema in others if any(id(one) in self._leading for one in self._inner(schema))}

    def _refuse_ambiguous(self, schema: dict[str, Any]) -> None:
        """Refuse parts for the same type with different rules: the text may not say which one it follows."""
        for kind in ("object", "array"):
            for keyword in schema.keys() & _COMBINED:
                parts = [part for part in schema[keyword] if self._of_kind(part, kind)]
                if len(parts) > 1 and any(id(part) in self._leading for part in parts):
                    leaves = [self._leaf(one) for part in parts for one in self._of_kind(part, kind)]
                    known = [leaf for leaf in leaves if leaf is not None]
                    if len(known) < len(leaves):
                        raise _Unguarded
                    if any(leaf.items or leaf.counts != (0, None) for leaf in known):
                        self._check_same(known, keyword)
                    for members in _members(known):
                        self._check_members(members)

    def _check_same(self, leaves: list[_Leaf], keyword: str) -> None:
        """Refuse parts with rules that differ in more than required properties without a condition."""
        required = [set(leaf.base.get("required", ())) for leaf in leaves]
        shared, first = set.intersection(*required), leaves[0]
        for leaf in leaves:
            same = [(_without(one.base, {"required"}), one.items, one.counts) for one in (first, leaf)]
            differs = leaf.counts != (0, None) and set.union(*required) != shared
            if keyword != "anyOf" or same[0] != same[1] or differs:
                raise _Unguarded
            leaf.required = sorted(shared)

    def _check_members(self, members: list[Schema]) -> None:
        """Refuse schemas for the same property or item, if one of them could exclude what a rule leaves."""
        leading = next((member for member in members if id(member) in self._leading), None)
        if leading is not None and not all(member is False or covers(member, leading) for member in members):
            raise _Unguarded

    def _of_kind(self, schema: Schema, kind: str) -> list[Schema]:
        """Return the subschemas without `$ref` and combinations that may describe a value of a type."""
        return [one for one in self.form.alternatives(schema, _COMBINED) if kind in domains.kinds(one)]

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
        if (items or counts != (0, None)) and not domains.is_known(schema):
            raise _Unguarded
        if items:
            self._check_items(base, items)
        if counts != (0, None):
            self._check_counts(base, *counts)
        return _Leaf(base, items, counts, base.get("required", []))

    def _check_counts(self, base: dict[str, Any], least: int, most: int | None) -> None:
        """Refuse minimum and maximum numbers of properties that could lead into a dead end."""
        required, patterns = base.get("required", []), base.get("patternProperties", {})
        is_open = base.get("additionalProperties", True) is not False
        many = any(domains.endless_pattern(pattern) and one is not False for pattern, one in patterns.items())
        named = base.get("properties", {}).values()
        known = sum(one is not False for one in named)
        is_open = is_open and known == len(named)  # xgrammar excludes a name only by allowing no others
        names = domains.at_least(self, base.get("propertyNames", True), domains.MANY)
        if least > known and not (names and (is_open or many)):
            raise _Unguarded
        if (most is not None and len(required) > most) or (
            patterns and not set(required) <= {*base.get("properties", {})}
        ):
            raise _Unguarded

    def _check_items(self, base: dict[str, Any], items: dict[str, Any]) -> None:
        """Refuse conditions on items that could lead into a dead end. Normalises `items`, in place."""
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
            if not all(domains.at_least(self, one, 1) for one in prefix):
                raise _Unguarded
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
        """Return a subschema without the conditions that the guard enforces."""
        leaf = self._leaf(schema)
        if isinstance(schema, dict) and not schema.keys().isdisjoint(_COMBINED):
            return map_parts(schema, self._stripped)
        if leaf is None:
            return schema
        values = map_parts(_without(leaf.base, _KEPT_WHOLE), self._stripped)
        return {**leaf.base, **values} if isinstance(values, dict) else values

    def rule(self, schema: Schema, first: int) -> Rule | None:
        """Return the rule of a container that `schema` describes."""
        if id(schema) not in self._leading:
            return None
        kind = "object" if first == ord("{") else "array"
        key = id(schema), kind
        if key not in self._rules:
            parts = [one for one in self._of_kind(schema, kind) if id(one) in self._leading]
            leaves = [leaf for leaf in map(self._leaf, parts) if leaf is not None]
            make = self._object_rule if kind == "object" else self._array_rule
            self._rules[key] = make(leaves) if leaves else None
        return self._rules[key]

    def _first_rule(self, schemas: Iterable[Schema], first: int) -> Rule | None:
        return next(filter(None, (self.rule(schema, first) for schema in schemas)), None)

    def _object_rule(self, leaves: list[_Leaf]) -> ObjectRule:
        def member(name: str, first: int) -> Rule | None:
            return self._first_rule((_property(leaf.base, name) for leaf in leaves), first)

        base = leaves[0].base
        order = [name for name, schema in base.get("properties", {}).items() if schema is not False]
        is_open = base.get("additionalProperties", True) is not False or bool(base.get("patternProperties"))
        return ObjectRule(member, order, leaves[0].required, is_open, leaves[0].counts)

    def _array_rule(self, leaves: list[_Leaf]) -> ArrayRule:
        def member(index: int, first: int) -> Rule | None:
            return self._first_rule((_item(leaf.base, index) for leaf in leaves), first)

        base, items = leaves[0].base, leaves[0].items
        prefix, rest = base.get("prefixItems", []), base.get("items", True)
        schemas = [*prefix, *([] if rest is False else [rest])]
        endless = [domains.endless(self, one) for one in schemas]
        kinds = {kind for one in schemas for part in domains.resolved(self, one) for kind in domains.kinds(part)}
        is_limited = items.get("uniqueItems") or items.get("maxContains") is not None
        known = [domains.finite(self, one) for one in (*prefix, rest)] if is_limited else [None]
        contains = self.form.validator(items["contains"]).is_valid if "contains" in items else None
        equal, listed = equal_texts(value for one in known for value in one or ()), items.get("listed", ())
        return ArrayRule(
            member,
            bool(items.get("uniqueItems")),
            frozenset.intersection(*endless) if schemas else frozenset(),
            all(endless) and kinds <= {"string", "array", "object"},
            tuple(None if one is None else texts_of(one, equal) for one in known),
            equal,
            contains,
            int(items.get("minContains", 1)) if contains else 0,
            None if items.get("maxContains") is None else int(items["maxContains"]),
            texts_of(listed, equal_texts(listed)),
        )


def _matching(names: re.Pattern[str] | None, keys: Collection[bytes]) -> list[str]:
    if names is None:
        return []
    return [name for key in keys if names.fullmatch(name := key.decode("utf-8", "surrogatepass"))]


def _without(schema: dict[str, Any], keywords: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in keywords}


def _property(base: dict[str, Any], name: str) -> Schema:
    """Return the schema of the property `name` of an object."""
    named: dict[str, Schema] = base.get("properties", {})
    matching = (
        one for pattern, one in base.get("patternProperties", {}).items() if string_pattern.matches(pattern, name)
    )
    return named[name] if name in named else next(matching, base.get("additionalProperties", True))


def _item(base: dict[str, Any], index: int) -> Schema:
    """Return the schema of an item of an array."""
    prefix: list[Schema] = base.get("prefixItems", [])
    rest: Schema = base.get("items", True)
    return prefix[index] if index < len(prefix) else rest


def _members(leaves: list[_Leaf]) -> Iterator[list[Schema]]:
    """Yield the schemas that several parts have for the same property or item."""
    bases = [leaf.base for leaf in leaves]
    for name in {name: None for base in bases for name in base.get("properties", ())}:
        yield [_property(base, name) for base in bases]
    patterns = {pattern: None for base in bases for pattern in base.get("patternProperties", ())}
    rests = [base.get("additionalProperties", True) for base in bases]
    for pattern in patterns:
        yield [base.get("patternProperties", {}).get(pattern, rest) for base, rest in zip(bases, rests, strict=True)]
    yield rests
    for index in range(1 + max(len(base.get("prefixItems", ())) for base in bases)):
        yield [_item(base, index) for base in bases]
