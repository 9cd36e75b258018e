"""The normal form of a JSON Schema: the same meaning with fewer combinations of keywords.

Grammar libraries read the first keyword that they know in a subschema and ignore its neighbours. The normal form merges
neighbours, `allOf` and `$ref` with siblings into one subschema where that is exact, so that an adapter can see what its
library would ignore and refuse it by name.

In normal form (always draft 2020-12):

- there are no annotations, unknown keywords, or keywords without effect (a `minLength` on an integer);
- `$ref` is "#/$defs/<name>" and has no siblings, nor have `anyOf`, `oneOf`, `enum` and `const`;
- `not`, `if`, `dependentSchemas` and `oneOf` are an `anyOf` without them where that is exact (`complement.py`): of `if`
  and `then`, or `else` and what `if` does not allow; of each alternative without what the others allow;
- a `$dynamicRef` is a `$ref` to a definition for the dynamic scope;
- no part is without a finite instance (`finite.py`), and formats are those of the specification;
- every name in `required` is in `properties`, unless there are `patternProperties`;
- tuples are `prefixItems`, and exclusive bounds are numbers;
- `allOf` remains only where merging was not exact (`not`, `if`, two patterns, recursion, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import zip_longest
from math import lcm
from typing import Any

from jsonschema import Draft202012Validator

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.schema import string_pattern
from guided.schema.complement import only_closes, violations
from guided.schema.finite import FiniteInstances
from guided.schema.graph import Node, SchemaGraph, closure
from guided.schema.implication import covers, same
from guided.schema.instances import enforcing
from guided.schema.keywords import (
    GREATEST,
    LEAST,
    OF_TYPE,
    Schema,
    clean,
    cleaned,
    common_types,
    name_required,
    types_of,
)
from guided.schema.metaschema import Dialect
from guided.schema.unevaluated import unevaluated

_MAX_MERGES = 5_000
_MAX_ALTERNATIVES = 64
_MAX_MERGED_DEFINITIONS = 50
_MAX_DEFINITIONS = 10_000
_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
_Scope = tuple[tuple[str, int], ...]


_NO_SIBLINGS = {"$ref", "$schema", "$comment", "$defs", "default", "definitions", "description", "examples", "title"}
"""Keywords without an effect next to `$ref`."""


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class _Inexact(Exception):
    """Two subschemas can't be merged without a change of meaning."""


class _Recursive(_Inexact):
    """A definition is needed within itself."""


@dataclass(slots=True)
class NormalForm:
    """A schema in normal form; `root` refers to `definitions` as "#/$defs/<name>"."""

    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    disjoint: Callable[[Schema, Schema], bool] = lambda left, right: False
    """Whether it is certain that no value satisfies both."""
    _origins: dict[int, tuple[Schema, str]] = field(default_factory=dict)
    """By `id`; the reference to the subschema prevents another use of the `id`."""

    def pointer(self, schema: Schema) -> str:
        """Return the JSON pointer of `schema` in the user's document; "" if it is not known."""
        return self._origins.get(id(schema), (None, ""))[1]

    def note(self, schema: Schema, pointer: str) -> None:
        """Record that `schema` came from `pointer`, unless it already has a pointer."""
        if pointer and not self.pointer(schema):
            self._origins[id(schema)] = (schema, pointer)

    def note_copy(self, original: Schema, copy: Schema) -> None:
        """Record that `copy` came from where `original` did."""
        self.note(copy, self.pointer(original))

    def target(self, schema: dict[str, Any]) -> Schema:
        """Return the target of a `$ref` in normal form."""
        return self.definitions[schema["$ref"].removeprefix("#/$defs/")]


def normalise(schema: Schema, *, rewrite: bool = True) -> NormalForm:
    """Return the normal form of a schema that `guided.schema.document.parse` returned.

    Args:
        rewrite: replace `not`, `if`, `dependentSchemas` and overlapping `oneOf` by alternatives where that is exact.

    Raises:
        InvalidConstraint: a pattern that had to be matched is not a regular expression.
        UnsupportedConstraint: the schema is too deeply recursive.
    """
    if isinstance(schema, bool):
        return NormalForm(schema)
    return _normalised(json.dumps(schema), rewrite)


@lru_cache(maxsize=4)  # each backend that is tried asks for it
def _normalised(text: str, rewrite: bool) -> NormalForm:
    try:
        return _Normaliser(json.loads(text), rewrite).run()
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
    def __init__(self, document: dict[str, Any], rewrite: bool) -> None:
        self._document = document
        self._graph = SchemaGraph.build(document)
        self._nodes = {id(node.schema): node for node in self._graph.nodes()}
        self._splits_dependencies = rewrite
        # Other rewriting names properties and items, which would count as evaluated.
        self._rewrite = rewrite and not any(node.schema.keys() & _UNEVALUATED for node in self._graph.nodes())
        self._dialect = Dialect.of(document)
        refuse_mixed_dialects(self._graph, self._dialect)
        self._validator = self._dialect.validator(document)
        self._recursive_anchors = sum(bool(node.schema.get("$recursiveAnchor")) for node in self._graph.nodes())
        self._anchors: dict[int, dict[str, int]] = {}
        """By `id` of a schema resource: the `id`s of the subschemas with a `$dynamicAnchor` in it."""
        for node in self._graph.nodes():
            if isinstance(anchor := node.schema.get("$dynamicAnchor"), str):
                self._anchors.setdefault(_resource(node), {})[anchor] = id(node.schema)
        self._scope: dict[str, int] = {}
        """Of each dynamic anchor, the outermost subschema on the way to the present one."""
        self._names: dict[tuple[int, _Scope], str] = {}
        self._named: dict[str, tuple[Node, dict[str, int]]] = {}
        """Definitions: the subschema, and the dynamic scope in which it is reached."""
        self._merged_names: dict[str, str] = {}
        self._merged: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Definitions that are two subschemas merged, where one is recursive."""
        self._building: set[str] = set()
        self._unfolding: set[str] = set()
        self._merges = 0
        self._narrowed = False
        """Some part excludes values that its schema allows, so it may not be negated."""
        self._form = NormalForm(True)

    def run(self) -> NormalForm:
        self._form.root = self._normal(self._document)
        while pending := {*self._names.values(), *self._merged} - self._form.definitions.keys():
            self._definition(min(pending))
        self._exclude_infinite()
        form = self._form
        form.disjoint = lambda left, right: self._disjoint(left, right, 4)
        form.root = self._finished(form.root)
        form.definitions = {name: self._finished(schema) for name, schema in form.definitions.items()}
        return form

    def _finished(self, schema: Schema) -> Schema:
        """Return `schema` with every required name in `properties`."""
        return name_required(schema, self._form.note_copy)

    def _exclude_infinite(self) -> None:
        """Exclude the parts that have no finite instance. A model that begins one could never end it.

        Raises:
            InvalidConstraint: the whole schema has none.
        """
        form = self._form
        finite = FiniteInstances(form.definitions)
        infinite = [name for name, schema in form.definitions.items() if not finite.possible(schema)]
        if not infinite:
            return
        if form.root is not False and not finite.possible(form.root):
            at = next((pointer for name in infinite if (pointer := form.pointer(form.definitions[name]))), "")
            message = "no finite value satisfies the schema: a required part of it refers back to the whole"
            raise InvalidConstraint(message, param="json_schema", pointer=at)
        for name, schema in {**form.definitions, "": form.root}.items():
            kept = finite.without_impossible(schema)
            if isinstance(kept, dict):
                form.note(kept, form.pointer(schema))
            if name:
                form.definitions[name] = kept
            else:
                form.root = kept

    def _normal(self, schema: Any) -> Schema:
        if not isinstance(schema, dict):
            return bool(schema)
        node = self._nodes[id(schema)]
        outer = self._scope
        self._scope = {**self._anchors.get(_resource(node), {}), **outer} if self._anchors else outer
        try:
            result = self._conjunction(list(self._conjuncts(node)), unevaluated(node))
        finally:
            self._scope = outer
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
        targets = {keyword: target for keyword, target in node.same if keyword in _REFERENCES}
        own_at = "properties" if "properties" in schema else next(iter(schema), "")
        for keyword in schema if not alone else ["$ref"]:  # in this order, properties are generated
            if keyword in node.boolean:
                yield node.boolean[keyword]
            elif keyword in targets:
                yield {"$ref": f"#/$defs/{self._name(self._directed(keyword, node, targets[keyword]))}"}
            elif keyword in ("allOf", "extends"):
                for part in schema[keyword] if isinstance(schema[keyword], list) else [schema[keyword]]:
                    yield self._normal(part)
            elif keyword in ("anyOf", "oneOf"):
                parts = [self._normal(part) for part in schema[keyword]]
                yield self._alternatives(keyword, parts) if self._is_exact(keyword, node) else {"oneOf": parts}
            elif keyword == "type" and _has_schema(schema["type"]):
                yield self._any_type(schema["type"])
            if keyword == own_at and not alone:
                yield self._own(schema)
        if alone:
            return
        yield from self._conditions(schema)

    def _conditions(self, schema: dict[str, Any]) -> Iterator[Schema]:
        """Yield the conditions that are rewritten as alternatives; each as it is where that is not exact."""
        for keyword in ("not", "disallow"):
            if keyword in schema:
                excluded = self._normal(schema[keyword]) if keyword == "not" else self._any_type(schema[keyword])
                yield self._rewritten({"not": excluded}, partial(self._complement, excluded))
        if "if" in schema and schema.keys() & {"then", "else"}:
            parts = {name: self._normal(schema.get(name, True)) for name in ("if", "then", "else")}
            yield self._rewritten(parts, partial(self._either, parts["if"], parts["then"], parts["else"]))
        for name, value in (*schema.get("dependentRequired", {}).items(), *self._dependencies(schema)):
            needs = {"required": [value] if isinstance(value, str) else value}
            then = clean(needs) if isinstance(value, list | str) else self._normal(value)
            yield self._depending(name, then)

    def _depending(self, name: str, then: Schema) -> Schema:
        """Return `then` where the property `name` is present. Exact beside `unevaluatedProperties` too."""
        if self._splits_dependencies:
            with suppress(_Inexact):
                present = self._merge(clean({"required": [name]}), then)
                return self._alternatives("anyOf", [present, clean({"properties": {name: False}})])
        return clean({"dependentSchemas": {name: then}})

    def _dependencies(self, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield `dependentSchemas`, and `dependencies` (until draft 7): names, a schema, or in draft 3 one name."""
        yield from schema.get("dependentSchemas", {}).items()
        yield from schema.get("dependencies", {}).items()

    def _rewritten(self, schema: dict[str, Any], rewrite: Callable[[], Schema]) -> Schema:
        """Return what `rewrite` makes of `schema`, or `schema` itself where that is not exact."""
        try:
            return rewrite() if self._rewrite else clean(schema)
        except _Inexact:
            return clean(schema)

    def _either(self, condition: Schema, then: Schema, otherwise: Schema) -> Schema:
        """Return `if condition then then else otherwise`. Values that are not objects need no care: both are exact."""
        parts = [self._merge(condition, then), self._merge(self._complement(condition), otherwise)]
        return self._alternatives("anyOf", parts)

    def _complement(self, schema: Schema) -> Schema:
        """Return what `schema` does not allow. Raises `_Inexact` if it can't be expressed."""
        if isinstance(schema, bool) or not schema:
            return schema is False
        if "$ref" in schema:
            return self._unfold(schema, self._complement)
        if schema.keys() & {"oneOf", "if", "unevaluatedProperties"}:
            raise _Inexact
        if "allOf" in schema:
            return self._alternatives("anyOf", [self._complement(part) for part in schema["allOf"]])
        if "anyOf" in schema:
            rest: Schema = True
            for part in schema["anyOf"]:
                rest = self._merge(rest, self._complement(part))
            return rest
        self._spend()
        return self._alternatives("anyOf", [cleaned(part) for part in violations(schema, self._complement)])

    def _directed(self, keyword: str, node: Node, target: Node) -> Node:
        """Return the target of a reference in the present dynamic scope."""
        if keyword == "$dynamicRef":
            anchor = node.schema[keyword].rpartition("#")[2]
            if target.schema.get("$dynamicAnchor") == anchor:
                return self._nodes[self._scope.get(anchor, id(target.schema))]
        if keyword == "$recursiveRef" and target.schema.get("$recursiveAnchor") and self._recursive_anchors > 1:
            raise UnsupportedConstraint(
                f"{keyword!r} with several targets ('$recursiveAnchor' occurs more than once) can't be enforced: use"
                " '$ref'",
                param="json_schema",
                pointer=f"{node.pointer}/{keyword}",
            )
        return target

    def _is_exact(self, keyword: str, node: Node) -> bool:
        """Whether the alternatives are certain to be what their schemas say: see `_close_unevaluated`."""
        if keyword == "anyOf" or not self._narrowed:
            return True
        parts = [child for name, child in node.same if name == keyword]
        return not any(one.schema.keys() & _UNEVALUATED for one in closure(parts))

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
        rest = {keyword: self._normal(schema[keyword]) for keyword in _UNEVALUATED if keyword in schema}
        if not apart or all(value is True for value in rest.values()):
            merged = self._close_unevaluated(merged, schema)
        elif (closed := self._closed_apart(merged, apart, schema)) is not None:
            return closed
        else:
            apart.append(rest)  # what counts as evaluated is not known
        if merged == {}:
            merged = True
        parts = [part for part in (merged, *apart) if part is not True]
        return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True

    def _closed_apart(self, merged: Schema, apart: list[Schema], schema: dict[str, Any]) -> Schema | None:
        """Close each alternative of a `oneOf`, for objects; None if they overlap even then."""
        parts = apart[0].get("oneOf", []) if len(apart) == 1 and isinstance(apart[0], dict) else []
        closed: list[Schema] = []
        for index, part in enumerate(parts):
            with suppress(_Inexact):
                one = self._merge({"type": "object"}, self._close_unevaluated(self._merge(merged, part), schema))
                if all(self._disjoint(one, other, 4) for other in (*parts[:index], *parts[index + 1 :])):
                    closed.append(one)
        return self._alternatives("anyOf", closed) if parts and len(closed) == len(parts) else None

    def _close_unevaluated(self, merged: Schema, schema: dict[str, Any]) -> Schema:
        """Apply `unevaluatedProperties` and `unevaluatedItems` to the merged alternatives.

        Each alternative is closed separately: a value that needs two of them together is excluded (a subset).
        """
        if merged is False or not schema.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            return merged
        if merged is True:
            merged = {}
        self._narrowed = True
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
        single = ("additionalProperties", "propertyNames", "contains")
        elsewhere = ("unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas")
        for keyword, value in schema.items():
            if keyword == "type":
                own |= {} if _has_schema(value) else {"type": value}
            elif keyword in ("minimum", "maximum"):
                exclusive = f"exclusive{keyword.capitalize()}"
                own[exclusive if draft4[exclusive] is True else keyword] = value
            elif keyword in draft4 and isinstance(value, bool):
                continue
            elif keyword == "format" and value not in string_pattern.FORMATS:
                continue  # an annotation
            elif keyword in ("properties", "patternProperties"):
                own[keyword] = {key: self._normal(child) for key, child in value.items()}
            elif keyword in elsewhere:
                continue  # `_close_unevaluated`, `_conditions`
            elif keyword in single:
                own[keyword] = self._normal(value)
            elif keyword == "required" and isinstance(value, bool):
                continue  # draft 3: see below
            elif keyword == "divisibleBy" and self._dialect.is_draft3:
                own["multipleOf"] = value
            elif keyword not in ("items", "prefixItems") and any(keyword in keywords for keywords in OF_TYPE.values()):
                own[keyword] = value
        if self._dialect.is_draft3:
            named = schema.get("properties", {}).items()
            own["required"] = [name for name, part in named if isinstance(part, dict) and part.get("required") is True]
        self._own_items(schema, own)
        return clean(own)

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
        if keyword == "oneOf":
            try:
                return self._alternatives("anyOf", self._exclusive(possible))
            except _Inexact:
                return {"oneOf": possible}
        flat: list[Schema] = []
        for part in possible:
            for option in part["anyOf"] if isinstance(part, dict) and part.keys() == {"anyOf"} else [part]:
                if len(flat) <= _MAX_ALTERNATIVES:  # a longer list takes too long to compare
                    if any(covers(other, option) for other in flat):
                        continue
                    flat = [other for other in flat if not covers(option, other)]
                flat.append(option)
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def _few_alternatives(self, parts: Iterator[Schema], count: int) -> Schema:
        """Return any of `parts`, made from `count` alternatives. Raises `_Inexact` if these have become too many."""
        result = self._alternatives("anyOf", list(parts))
        if isinstance(result, dict) and len(result.get("anyOf", ())) > max(count, _MAX_ALTERNATIVES):
            raise _Inexact
        return result

    def _exclusive(self, parts: Sequence[Schema]) -> list[Schema]:
        """Return each of `parts` without the values that another one allows."""
        found: list[Schema] = []
        for index, part in enumerate(parts):
            alone = part
            for other in (*parts[:index], *parts[index + 1 :]):
                if not self._disjoint(part, other, 4):
                    if not self._rewrite:
                        raise _Inexact
                    alone = self._merge(alone, self._complement(other))
            found.append(alone)
        return found

    def _name(self, target: Node) -> str:
        name = self._names.setdefault((id(target.schema), tuple(sorted(self._scope.items()))), f"d{len(self._names)}")
        if len(self._names) > _MAX_DEFINITIONS:
            raise UnsupportedConstraint("the dynamic references have too many targets", param="json_schema")
        self._named.setdefault(name, (target, self._scope))
        return name

    def _definition(self, name: str) -> Schema:
        if name not in self._form.definitions:
            if name in self._building:
                raise _Recursive  # it can't be merged into itself
            self._building.add(name)
            try:
                merged = self._merged.get(name)
                built = self._build(name) if merged is None else self._merge_apart(*merged)
                self._form.definitions[name] = built
            finally:
                self._building.discard(name)
        return self._form.definitions[name]

    def _build(self, name: str) -> Schema:
        node, scope = self._named[name]
        outer, self._scope = self._scope, scope
        try:
            return self._normal(node.schema)
        finally:
            self._scope = outer

    def _merge_apart(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        """Merge two subschemas of which one is a `$ref`, as a definition of its own."""
        within, self._unfolding = self._unfolding, set()
        try:
            return self._merge_unfolded(left, right)
        except _Inexact:
            return {"allOf": [left, right]}
        finally:
            self._unfolding = within

    def _merge(self, left: Schema, right: Schema) -> Schema:
        """Return what both allow. Raises `_Inexact` if one subschema can't express it."""
        if left is False or right is False:
            return False
        if left is True or left == {} or same(left, right):
            return right
        if right is True or right == {}:
            return left
        self._spend()
        # The properties of `left` come first, whatever the two are.
        if "$ref" in left or "$ref" in right:
            return self._merge_references(left, right)
        for one, other in ((left, right), (right, left)):
            if "const" in one or "enum" in one:
                return self._filter(one, other)
        if (left.keys() | right.keys()) & {"allOf", "oneOf"}:
            raise _Inexact
        if "anyOf" in left:
            options = left["anyOf"]
            return self._few_alternatives((self._merge(part, right) for part in options), len(options))
        if "anyOf" in right:
            options = right["anyOf"]
            return self._few_alternatives((self._merge(left, part) for part in options), len(options))
        result = clean(self._merge_keywords(left, right))
        if isinstance(result, dict):
            self._form.note(result, self._form.pointer(left) or self._form.pointer(right))
            return self._with_another_property(result)
        return result

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
        self._form.note(rest, self._form.pointer(schema))
        if any(name not in closed["properties"] for name in schema.get("required", ())):
            return self._with_another_property(rest)
        if schema.get("additionalProperties", True) is not False or schema.get("patternProperties"):
            return schema
        names = [name for name in schema.get("properties", {}) if name not in closed["properties"]]
        return self._alternatives("anyOf", [self._merge(rest, clean({"required": [name]})) for name in names])

    def _merge_references(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        """Merge two subschemas of which one is a `$ref`. A recursive one becomes a definition of its own."""
        try:
            return self._merge_unfolded(left, right)
        except _Recursive:
            name = self._merged_names.setdefault(json.dumps([left, right]), f"m{len(self._merged_names)}")
            if len(self._merged_names) > _MAX_MERGED_DEFINITIONS:
                raise _Inexact from None
            self._merged[name] = (left, right)
            return {"$ref": f"#/$defs/{name}"}

    def _merge_unfolded(self, left: dict[str, Any], right: dict[str, Any]) -> Schema:
        if "$ref" in left:
            return self._unfold(left, lambda target: self._merge(target, right))
        return self._unfold(right, lambda target: self._merge(left, target))

    def _spend(self) -> None:
        """Count one merge or complement. Raises `_Inexact` after too many."""
        self._merges += 1
        if self._merges > _MAX_MERGES:
            raise _Inexact

    def _unfold(self, reference: dict[str, Any], use: Callable[[Schema], Schema]) -> Schema:
        """Return what `use` makes of the target of `reference`. Raises `_Inexact` within itself: it would not end."""
        name = reference["$ref"].removeprefix("#/$defs/")
        if name in self._unfolding:
            raise _Recursive
        self._unfolding.add(name)
        try:
            return use(self._definition(name))
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
            if keyword not in left or keyword not in right or same(left[keyword], right[keyword]):
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
            elif keyword == "not":
                merged[keyword] = _any_excluded(one, other)
            elif keyword == "dependentSchemas":
                merged[keyword] = {
                    name: self._merge(one.get(name, True), other.get(name, True)) for name in {**one, **other}
                }
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
            patterns = self._closed_patterns(left, right)
        merged: dict[str, Any] = {"properties": {}}
        for name in {**left.get("properties", {}), **right.get("properties", {})}:
            sides = [_described(side, name) for side in (left, right)]
            merged["properties"][name] = self._merge(*sides)
        merged["patternProperties"] = dict(patterns[0])
        for pattern, schema in patterns[1].items():
            merged["patternProperties"][pattern] = self._merge(patterns[0].get(pattern, True), schema)
        merged["additionalProperties"] = self._merge(
            left.get("additionalProperties", True), right.get("additionalProperties", True)
        )
        return merged

    def _closed_patterns(self, left: dict[str, Any], right: dict[str, Any]) -> list[dict[str, Schema]]:
        """Return the `patternProperties` of both, where only one has any: its names are additional for the other."""
        patterned, other = (left, right) if left.get("patternProperties") else (right, left)
        if other.get("patternProperties"):
            raise _Inexact
        rest = other.get("additionalProperties", True)
        for name in other.get("properties", {}):
            if _described({**patterned, "properties": {}, "additionalProperties": False}, name) is True:
                raise _Inexact  # the pattern's schema would get `rest` as well
        return [{key: self._merge(value, rest) for key, value in patterned["patternProperties"].items()}, {}]

    def _merge_items(self, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        mine, theirs = left.get("prefixItems", []), right.get("prefixItems", [])
        rest_mine, rest_theirs = left.get("items", True), right.get("items", True)
        pairs = zip_longest(mine, theirs, fillvalue=None)
        prefix = [
            self._merge(rest_mine if one is None else one, rest_theirs if other is None else other)
            for one, other in pairs
        ]
        return {"prefixItems": prefix, "items": self._merge(rest_mine, rest_theirs)}

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(32):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            name = schema["$ref"].removeprefix("#/$defs/")
            try:
                schema = self._definition(name)
            except _Inexact:
                return self._outline(name)
        return True

    def _outline(self, name: str) -> Schema:
        """Return a schema that allows at least what a definition does that isn't finished yet."""
        if name in self._merged:
            return True
        schema = self._named[name][0].schema
        if "$ref" in schema and not self._dialect.siblings_of_ref_count:
            return True
        outline: dict[str, Any] = {key: schema[key] for key in ("type", "required") if key in schema}
        named = schema.get("properties", {}).items()
        outline["properties"] = {
            key: {word: part[word] for word in ("const", "enum") if word in part}
            for key, part in named
            if isinstance(part, dict) and ("$ref" not in part or self._dialect.siblings_of_ref_count)
        }
        return True if self._dialect.is_draft3 else clean(outline)

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
        for name in dict.fromkeys((*left.get("required", ()), *right.get("required", ()))):
            with suppress(_Inexact):
                if self._disjoint(_described(left, name), _described(right, name), depth - 1):
                    return True
        return False


def _resource(node: Node) -> int:
    """Return the `id` of the schema resource that a subschema belongs to: the nearest one with an identifier."""
    while node.parent is not None and "$id" not in node.schema:
        node = node.parent
    return id(node.schema)


def _any_excluded(one: Schema, other: Schema) -> Schema:
    """Return what two `not` exclude together."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys() == {"enum"}:
        return {"enum": [*one["enum"], *other["enum"]]}
    parts = [part["anyOf"] if isinstance(part, dict) and "anyOf" in part else [part] for part in (one, other)]
    return {"anyOf": [*parts[0], *parts[1]]}


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


def _described(schema: dict[str, Any], name: str) -> Schema:
    """Return the schema for the property `name`, apart from `patternProperties`."""
    declared: dict[str, Schema] = schema.get("properties", {})
    if name in declared:
        return declared[name]
    try:
        matched = any(string_pattern.matches(pattern, name) for pattern in schema.get("patternProperties", ()))
    except InvalidConstraint:
        raise _Inexact from None
    value: Schema = True if matched else schema.get("additionalProperties", True)
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
