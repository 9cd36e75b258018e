"""What has to be guarded of a schema, and the superset of it that the grammar library gets.

A schema is guarded only if no text leads into a dead end: each veto leaves another continuation, by the size of the
domains or by the combinations that are left. Anything else keeps its keyword, which the library then refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from guided.errors import UnsupportedConstraint
from guided.guard import domains
from guided.guard.rules import ArrayRule, ObjectRule, Table, Values, minified
from guided.guard.text import Rule
from guided.schema import string_pattern
from guided.schema.graph import SchemaGraph
from guided.schema.instances import enforcing
from guided.schema.keywords import ALL_TYPES, Schema
from guided.schema.metaschema import Dialect, identity
from guided.schema.normal_form import NormalForm, normalise

_MAX_ROWS = 1024
_CONDITIONS = ("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas")
_ITEM_CONDITIONS = ("uniqueItems", "contains", "minContains", "maxContains")
_LOGIC = {"not", "if", "then", "else", "oneOf", "anyOf", "allOf", "dependentRequired", "dependentSchemas"}
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


def repeats_keys(document: dict[str, Any] | bool) -> bool:
    """Whether some object may have keys that the schema does not name, so that a library could repeat them."""
    if isinstance(document, bool):
        return document
    return any(_is_open(node.schema) for node in SchemaGraph.build(document).reachable())


def has_few_names(document: dict[str, Any] | bool) -> bool:
    """Whether some object may have no other names than a few, which are not listed as `properties`."""
    if isinstance(document, bool):
        return False
    for node in SchemaGraph.build(document).reachable():
        names = node.schema.get("propertyNames", True)
        few = isinstance(names, dict) and not (names.keys() <= {"type", "minLength", "pattern"})
        patterns = [*node.schema.get("patternProperties", {})]
        patterns += [names["pattern"]] if isinstance(names, dict) and "pattern" in names else []
        if few or not all(map(domains.endless_pattern, patterns)):
            return True
    return False


def _is_open(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "object")
    if "enum" in schema or "const" in schema:
        return False
    if "object" in types or (isinstance(types, list) and any(not isinstance(one, str) for one in types)):
        applied = schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
        if applied and not schema.keys() & {"properties", "patternProperties", "additionalProperties"}:
            return False  # as open as what it applies
        return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    anything = (schema.get(keyword, {}) for keyword in ("items", "additionalItems"))
    return "array" in types and (any(one is True for one in anything) or "items" not in schema)


@lru_cache(maxsize=8)  # one library after the other is tried
def plan_superset(source: str) -> Plan | None:
    """Return the plan for a schema (JSON text) that a library can't enforce; None if the guard can't either."""
    document = json.loads(source)
    if isinstance(document, bool):
        return None
    for rewrite in (True, False):  # rewritten conditions are alternatives, which the guard may not tell apart
        try:
            planner = _Planner(normalise(document, rewrite=rewrite))
            superset = planner.superset()
        except (_Unguarded, UnsupportedConstraint):
            continue
        return Plan(json.dumps(superset, ensure_ascii=False), planner, _final_validator(document))
    return None


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
    tables: list[Table]
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
            if leaf is not None and (leaf.tables or leaf.items or leaf.counts != (0, None)):
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
                self._check_similar([one for part in parts for one in domains.alternatives(self, part)])

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
            names = {name for table in leaf.tables for name in table.columns}
            bounded_size = leaf.base.keys() & {"minProperties", "maxProperties"}
            same = [
                (
                    _without_required(one.base),
                    one.items,
                    [(table.columns, table.classes, table.rows) for table in one.tables],
                )
                for one in (first, leaf)
            ]
            if same[0] != same[1] or not names.isdisjoint(set.union(*required) - shared) or bounded_size:
                raise _Unguarded
            leaf.required = sorted(shared)

    def _admits(self, schema: Schema, kind: str) -> bool:
        return any(kind in domains.kinds(part) for part in domains.resolved(self, schema))

    def target(self, schema: dict[str, Any]) -> Schema:
        """See `domains.Definitions`."""
        return self.form.target(schema)

    def base(self, schema: dict[str, Any]) -> dict[str, Any]:
        """See `domains.Definitions`."""
        leaf = None if id(schema) in self._building else self._leaf(schema)
        return schema if leaf is None else leaf.base

    def _leaf(self, schema: Schema) -> _Leaf | None:
        """Split a subschema that is no reference, alternatives or values. Raises `_Unguarded`."""
        if isinstance(schema, bool) or any(name in schema for name in _KEPT_APART):
            return None
        if id(schema) not in self._leaves:
            self._building.add(id(schema))
            self._leaves[id(schema)] = self._guarded(*self._split(schema))
            self._building.discard(id(schema))
        return self._leaves[id(schema)]

    def _split(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what the library gets, and the conditions on the same value."""
        base: dict[str, Any] | None = None
        conditions: list[dict[str, Any]] = []
        for part in schema.get("allOf", [schema]):
            if isinstance(part, dict) and "$ref" in part:
                part = self.form.target(part)
            if isinstance(part, bool):
                continue
            if part.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
                raise _Unguarded
            if "allOf" in schema and any(name in part for name in ("allOf", *_KEPT_APART)):
                if "anyOf" not in part:
                    raise _Unguarded
                conditions.append(part)
                continue
            conditions += _conditions(part)
            rest = {name: value for name, value in part.items() if name not in _CONDITIONS}
            if rest and base:
                raise _Unguarded
            base = rest or base
        return base or {}, conditions

    def _guarded(self, base: dict[str, Any], conditions: list[dict[str, Any]]) -> _Leaf:
        items = {name: base[name] for name in _ITEM_CONDITIONS if name in base}
        base = {name: value for name, value in base.items() if name not in _ITEM_CONDITIONS}
        if items:
            self._check_items(base, items)
        groups = _groups([(self._names(condition), condition) for condition in conditions])
        counts = int(base.get("minProperties", 0)), base.get("maxProperties")
        base = {name: value for name, value in base.items() if name not in ("minProperties", "maxProperties")}
        if counts != (0, None):
            self._check_counts(base, *counts)
        if not groups:
            return _Leaf(base, [], items, counts, base.get("required", []))
        if counts != (0, None) or base.keys() & {"patternProperties", "propertyNames"}:
            raise _Unguarded
        base = self._restricted_type(base, conditions)
        tables = [self._table(base, names, condition) for names, condition in groups]
        return _Leaf(base, tables, items, counts, base.get("required", []))

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

    def _restricted_type(self, base: dict[str, Any], conditions: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a copy without the types that the conditions forbid. (They describe nothing but objects.)"""
        values: dict[str, Any] = {"null": None, "boolean": True, "array": [], "number": 0.5, "integer": 1, "string": ""}
        validator = self._validator({"allOf": conditions})
        kinds = [kind for kind in domains.kinds(base) if kind == "object" or validator.is_valid(values[kind])]
        numbers = "number" in domains.kinds(base) and validator.is_valid(0.5) != validator.is_valid(1)
        if not kinds or numbers:
            raise _Unguarded
        return {**base, "type": kinds} if len(kinds) < len(ALL_TYPES) else dict(base)

    def _validator(self, schema: Schema) -> Any:
        return enforcing(Draft202012Validator)({"$defs": self.form.definitions, "allOf": [schema]})

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
        both = self._validator({"allOf": [items["contains"], rest]})
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

    def _names(self, condition: Schema, depth: int = 8) -> list[str]:
        """Return the properties that a condition on an object is about. Raises `_Unguarded`."""
        if isinstance(condition, bool):
            return []
        if not depth or not condition.keys() <= {*_LOGIC, "type", "properties", "required", "$ref"}:
            raise _Unguarded
        names = [*condition.get("properties", {}), *condition.get("required", [])]
        for child in condition.get("properties", {}).values():
            self._check_classes(child, depth)
        for name, required in condition.get("dependentRequired", {}).items():
            names += [name, *required]
        for name, child in condition.get("dependentSchemas", {}).items():
            names += [name, *self._names(child, depth - 1)]
        for child in _operands(condition):
            names += self._names(child, depth - 1)
        if "$ref" in condition:
            names += self._names(self.form.target(condition), depth - 1)
        return [*dict.fromkeys(names)]

    def _check_classes(self, schema: Schema, depth: int) -> None:
        """Refuse a condition on a property's value that depends on more than listed values. Raises `_Unguarded`."""
        if isinstance(schema, bool):
            return
        if not depth or not schema.keys() <= {"const", "enum", "not", "anyOf", "allOf", "oneOf", "type", "$ref"}:
            raise _Unguarded
        if any(isinstance(value, dict | list) for value in domains.listed(schema) or ()):
            raise _Unguarded
        for child in _operands(schema):
            self._check_classes(child, depth - 1)
        if "$ref" in schema:
            self._check_classes(self.form.target(schema), depth - 1)

    def _table(self, base: dict[str, Any], names: list[str], condition: Schema) -> Table:
        classes = {name: self._classes(base, name, condition) for name in names}
        columns = [
            [*([] if name in base.get("required", ()) else [-1]), *range(len(column))]
            for name, column in classes.items()
        ]
        size = 1
        for column in columns:
            size *= len(column)
        if not 0 < size <= _MAX_ROWS:
            raise _Unguarded
        validator = self._validator(condition)
        rows = []
        for row in product(*columns):
            value = {name: classes[name][number][1] for name, number in zip(classes, row, strict=True) if number >= 0}
            if validator.is_valid(value):
                rows.append(row)
        if not rows:
            raise _Unguarded
        return Table({name: [one for one, _ in column] for name, column in classes.items()}, rows)

    def _classes(self, base: dict[str, Any], name: str, condition: Schema) -> list[tuple[Values, Any]]:
        """Return the classes of a property's values that a condition tells apart, each with a value of it."""
        schema = base.get("properties", {}).get(name, base.get("additionalProperties", True))
        parts = [part for part in self._parts(condition, name) if part not in (True, {})]
        if schema is False:
            return []
        if not parts:
            return [(Values(None), None)]
        checks = [self._validator(part) for part in parts]
        valid = self._validator(schema)
        mentioned = {identity(value): value for part in parts for value in self._mentioned(part)}
        known = domains.finite(self, schema)
        values = {identity(value): value for value in known or ()} | (mentioned if known is None else {})
        groups: dict[tuple[bool, ...], list[Any]] = {}
        for value in values.values():
            if valid.is_valid(value):
                groups.setdefault(tuple(check.is_valid(value) for check in checks), []).append(value)
        classes = [(Values(tuple(group)), group[0]) for group in groups.values()]
        if known is None:
            others = [
                value
                for value in domains.samples(self, schema)
                if identity(value) not in values and valid.is_valid(value)
            ]
            if len({tuple(check.is_valid(value) for check in checks) for value in others}) > 1:
                raise _Unguarded  # a condition on the type
            if others:
                classes.append((Values(None), others[0]))
            else:
                raise _Unguarded
        return classes

    def _parts(self, condition: Schema, name: str) -> Iterator[Schema]:
        """Yield what a condition says about the value of a property."""
        if isinstance(condition, dict):
            if name in condition.get("properties", {}):
                yield condition["properties"][name]
            for child in [*_operands(condition), *condition.get("dependentSchemas", {}).values()]:
                yield from self._parts(child, name)
            if "$ref" in condition:
                yield from self._parts(self.form.target(condition), name)

    def _mentioned(self, schema: Schema) -> Iterator[Any]:
        if isinstance(schema, dict):
            yield from domains.listed(schema) or ()
            for child in _operands(schema):
                yield from self._mentioned(child)
            if "$ref" in schema:
                yield from self._mentioned(self.form.target(schema))

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

        def endless(name: str) -> frozenset[int]:
            return domains.endless(self, properties.get(name, rest))

        order = [name for name, schema in properties.items() if schema is not False]
        is_open = rest is not False or bool(patterns)
        return ObjectRule(member, order, leaf.required, is_open, leaf.tables, leaf.counts, endless)

    def _array_rule(self, leaf: _Leaf) -> ArrayRule:
        base, items = leaf.base, leaf.items
        prefix, rest = base.get("prefixItems", []), base.get("items", True)
        schemas = [*prefix, *([] if rest is False else [rest])]
        endless = [domains.endless(self, one) for one in schemas]
        kinds = {kind for one in schemas for part in domains.resolved(self, one) for kind in domains.kinds(part)}
        known = domains.finite(self, rest) if not prefix and items.get("uniqueItems") else None
        contains = self._validator(items["contains"]).is_valid if "contains" in items else None
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


def _conditions(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions of a subschema, each as a schema of its own."""
    found: list[dict[str, Any]] = []
    for keyword in ("not", "oneOf"):
        if keyword in schema:
            found.append({keyword: schema[keyword]})
    if "if" in schema:
        found.append({name: schema[name] for name in ("if", "then", "else") if name in schema})
    for keyword in ("dependentRequired", "dependentSchemas"):
        found += [{keyword: {name: value}} for name, value in schema.get(keyword, {}).items()]
    return found


def _operands(schema: dict[str, Any]) -> Iterator[Schema]:
    """Yield the subschemas that a condition combines."""
    yield from (schema[name] for name in ("not", "if", "then", "else") if name in schema)
    yield from (part for name in ("oneOf", "anyOf", "allOf") for part in schema.get(name, ()))


def _groups(conditions: list[tuple[list[str], dict[str, Any]]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Join the conditions that have properties in common."""
    groups: list[tuple[list[str], list[dict[str, Any]]]] = []
    for names, condition in conditions:
        shared = [group for group in groups if not set(group[0]).isdisjoint(names)]
        merged = [*dict.fromkeys([*(name for group in shared for name in group[0]), *names])]
        groups = [group for group in groups if group not in shared]
        groups.append((merged, [*(one for group in shared for one in group[1]), condition]))
    return [(names, {"allOf": parts}) for names, parts in groups]
