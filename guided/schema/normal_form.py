"""The normal form of a JSON Schema: the same meaning with fewer combinations of keywords.

Grammar libraries read the first keyword that they know in a subschema and ignore its neighbours. The normal form merges
neighbours, `allOf` and `$ref` with siblings into one subschema where that is exact, so that an adapter can see what its
library would ignore and refuse it by name.

In normal form (always draft 2020-12):

- there are no annotations, unknown keywords, or keywords without effect (a `minLength` on an integer);
- `$ref` is "#/$defs/<name>" and has no siblings, nor have `anyOf`, `oneOf`, `enum` and `const`;
- `not`, `if`, `dependentSchemas` and `oneOf` are replaced by an `anyOf` where that is exact (`combination.py`). For
  `if`: `if` and `then`, or the complement of `if` and `else`. For `oneOf`: each alternative without values of others;
- a `$dynamicRef` is a `$ref` to a definition for the dynamic scope;
- no part is without a finite instance (`finite.py`), and formats are those of the specification;
- every name in `required` is in `properties`, unless there are `patternProperties`;
- tuples are `prefixItems`, and exclusive bounds are numbers;
- `allOf` remains only where merging was not exact (`not`, `if`, two patterns, recursion, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.schema.combination import Combinations, with_valid_values
from guided.schema.definitions import Definitions, Inexact
from guided.schema.dynamic_scope import DynamicScope
from guided.schema.finite import exclude_infinite
from guided.schema.form import NormalForm, reference
from guided.schema.graph import REFERENCES, Node, SchemaGraph, closure, read_graph
from guided.schema.keywords import Schema, all_of, clean, listed, name_required
from guided.schema.metaschema import Dialect
from guided.schema.own_keywords import has_schema, outline, own_keywords
from guided.schema.unevaluated import UNEVALUATED, closed, closed_apart, depends_on_value, evaluating, unevaluated

_MAX_DEFINITIONS = 10_000
_NO_SIBLINGS = {"$ref", "$schema", "$comment", "$defs", "default", "definitions", "description", "examples", "title"}
"""Keywords without an effect next to `$ref`."""
_CONDITIONS = {"not", "disallow", "if", "dependentRequired", "dependentSchemas", "dependencies"}


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
    return _normalised(json.dumps(schema, ensure_ascii=False, separators=(",", ":")), rewrite)


@lru_cache(maxsize=4)  # each backend that is tried asks for it
def _normalised(text: str, rewrite: bool) -> NormalForm:
    try:
        return _Normaliser(read_graph(text), rewrite).run()
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
    """Reads one document."""

    def __init__(self, graph: SchemaGraph, rewrite: bool) -> None:
        document = self._root = graph.root.schema
        self._graph = graph
        self._nodes = {id(node.schema): node for node in graph.nodes()}
        self._dialect = Dialect.of(document)
        refuse_mixed_dialects(graph, self._dialect)
        self._validator = self._dialect.validator(document)
        self._scope = DynamicScope(graph)
        self._names: dict[tuple[Any, ...], str] = {}
        """Names of definitions, by the subschema and the dynamic scope in which it is reached."""
        self._form = NormalForm(True)
        self._definitions = Definitions(self._form.definitions)
        self._rewrite = rewrite
        self._evaluating = evaluating(graph)
        self._combine = Combinations(self._form, self._definitions, keep_described=bool(self._evaluating))
        self._narrowed = False
        """Some part excludes values that its schema allows, so it may not be negated."""

    def run(self) -> NormalForm:
        form = self._form
        form.root = self._normal(self._root)
        self._definitions.build_all()
        exclude_infinite(form)
        form.disjoint = self._combine.disjoint
        form.root = name_required(form.root, form.note_copy)
        for name, schema in form.definitions.items():
            form.definitions[name] = name_required(schema, form.note_copy)
        return form

    def _normal(self, schema: Any) -> Schema:
        if not isinstance(schema, dict):
            return bool(schema)
        node = self._nodes[id(schema)]
        with self._scope.within(node):
            rest = {keyword: self._normal(value) for keyword, value in unevaluated(node).items()}
            conjuncts = list(self._conjuncts(node))
            if rest:
                result = self._closed(node, conjuncts, rest)
            else:
                result = self._conjunction([*conjuncts, *self._conditions(node)])
        self._form.note(result, node.pointer)
        return result

    def _has_siblings(self, schema: dict[str, Any]) -> bool:
        return "$ref" not in schema or self._dialect.siblings_of_ref_count

    def _conjuncts(self, node: Node) -> Iterator[Schema]:
        """Yield what `node` requires, each in normal form, apart from `_conditions`."""
        schema = node.schema
        alone = not self._has_siblings(schema)
        values = None if alone else listed(schema)
        if values is not None:
            yield with_valid_values(schema, values, self._validator_of(node))
            return
        targets = {keyword: target for keyword, target in node.same if keyword in REFERENCES}
        own_at = "properties" if "properties" in schema else next(iter(schema), "")
        for keyword in schema if not alone else ["$ref"]:  # their order is the order of generation
            if keyword in node.boolean:
                yield node.boolean[keyword]
            elif keyword in targets:
                yield reference(self._name(self._scope.target(keyword, node, targets[keyword])))
            elif keyword in ("allOf", "extends"):
                for part in schema[keyword] if isinstance(schema[keyword], list) else [schema[keyword]]:
                    yield self._normal(part)
            elif keyword == "anyOf":
                yield self._combine.any_of([self._normal(part) for part in schema[keyword]])
            elif keyword == "oneOf":
                parts = [self._normal(part) for part in schema[keyword]]
                alternatives = self._combine.one_of(parts, negate=self._may_negate(node, "oneOf"))
                self._refuse_narrowed(node, keyword)
                yield alternatives
            elif keyword == "type" and has_schema(schema["type"]):
                yield self._any_type(schema["type"])
            if keyword == own_at and not alone:
                yield own_keywords(schema, self._normal, self._dialect)

    def _validator_of(self, node: Node) -> Any:
        """Return a validator for instances of one subschema."""
        # With "$schema", `evolve` would take the package's own class.
        schema = {name: value for name, value in node.schema.items() if name != "$schema"}
        resolver = self._graph.resolver(node)
        return self._validator.evolve(schema=schema, **({} if resolver is None else {"_resolver": resolver}))

    def _is_negatable(self, node: Node, *keywords: str) -> bool:
        """Whether the normal form of subschemas certainly allows all of their values: see `unevaluated.closed`."""
        parts = [child for name, child in node.same if name in keywords]
        return not self._evaluating or not any(one.schema.keys() & UNEVALUATED for one in closure(parts))

    def _refuse_narrowed(self, node: Node, keyword: str) -> None:
        """Refuse a keyword that excludes values of its subschemas, if their normal form allows fewer than they do."""
        if self._narrowed and not self._is_negatable(node, keyword):
            raise UnsupportedConstraint(
                f"{keyword!r} can't be enforced over 'unevaluatedProperties' or 'unevaluatedItems' with alternatives",
                param="json_schema",
                pointer=f"{node.pointer}/{keyword}",
            )

    def _may_negate(self, node: Node, *keywords: str) -> bool:
        """Whether conditions may be rewritten. Not if the properties named by the result would count as evaluated."""
        return self._rewrite and id(node) not in self._evaluating and self._is_negatable(node, *keywords)

    def _conditions(self, node: Node) -> Iterator[Schema]:
        """Yield the conditions that are rewritten as alternatives; each as it is where that is not exact."""
        schema, combine = node.schema, self._combine
        if schema.keys().isdisjoint(_CONDITIONS) or not self._has_siblings(schema) or listed(schema) is not None:
            return
        yield from self._negations(node, self._may_negate(node, "not", "disallow"))
        if "if" in schema and schema.keys() & {"then", "else"}:
            parts = {name: self._normal(schema.get(name, True)) for name in ("if", "then", "else")}
            yield _rewritten(parts, self._may_negate(node, "if"), partial(combine.either, *parts.values()))
        yield from self._dependencies(schema)

    def _negations(self, node: Node, rewrite: bool) -> Iterator[Schema]:
        for keyword in ("not", "disallow"):
            if keyword in node.schema:
                value = node.schema[keyword]
                excluded = self._normal(value) if keyword == "not" else self._any_type(value)
                self._refuse_narrowed(node, keyword)
                yield _rewritten({"not": excluded}, rewrite, partial(self._combine.complement, excluded))

    def _dependencies(self, schema: dict[str, Any]) -> Iterator[Schema]:
        keywords = ("dependentRequired", "dependentSchemas", "dependencies")
        for name, needed in (pair for keyword in keywords for pair in schema.get(keyword, {}).items()):
            names = [needed] if isinstance(needed, str) else needed  # one name in draft 3
            then = clean({"required": names}) if isinstance(names, list) else self._normal(names)
            dependent = partial(self._combine.where_present, name, then)
            yield _rewritten({"dependentSchemas": {name: then}}, self._rewrite, dependent)

    def _any_type(self, options: Any) -> Schema:
        """Return any of some types, which are names, or schemas in draft 3."""
        types = options if isinstance(options, list) else [options]
        return self._combine.any_of(
            self._normal(option) if isinstance(option, dict) else clean({"type": option}) for option in types
        )

    def _conjunction(self, conjuncts: list[Schema]) -> Schema:
        """Combine all of the conditions; those that can't be merged stay under `allOf`."""
        merged, apart = self._merged(conjuncts)
        return all_of(merged, *apart)

    def _merged(self, conjuncts: list[Schema]) -> tuple[Schema, list[Schema]]:
        """Merge all that can be merged; return also those that can't."""
        merged: Schema = True
        apart: list[Schema] = []
        for conjunct in conjuncts:
            try:
                merged = self._combine.merge(merged, conjunct)
            except Inexact:
                apart.append(conjunct)
        return merged, apart

    def _closed(self, node: Node, conjuncts: list[Schema], rest: dict[str, Schema]) -> Schema:
        """Combine what `node` requires with `unevaluatedProperties` and `unevaluatedItems`, which are `rest`.

        Neither `not` nor an `if` that does not hold evaluates anything, so these are combined afterwards.
        """
        schema = node.schema
        conjuncts = [*conjuncts, *self._dependencies(schema)]
        close = partial(
            closed, rest=rest, definitions=self._definitions, validator=self._validator_of(node) if rest else None
        )
        excluded = list(self._negations(node, self._rewrite and self._is_negatable(node, "not", "disallow")))
        if "if" not in schema:
            return self._conjunction([self._close(conjuncts, rest, close), *excluded])
        condition, then, otherwise = (self._normal(schema.get(name, True)) for name in ("if", "then", "else"))
        try:
            if not (self._rewrite and self._is_negatable(node, "if")):
                raise Inexact
            failed = self._combine.complement(condition)
        except Inexact:
            raise depends_on_value(node, next(iter(rest))) from None
        return self._combine.any_of(
            [
                self._conjunction([self._close([*conjuncts, condition, then], rest, close), *excluded]),
                self._conjunction([self._close([*conjuncts, otherwise], rest, close), failed, *excluded]),
            ]
        )

    def _close(self, conjuncts: list[Schema], rest: dict[str, Schema], close: Callable[[Schema], Schema]) -> Schema:
        """Combine `conjuncts`. `close` applies `rest` to the properties and items that they don't evaluate."""
        merged, apart = self._merged(conjuncts)
        if merged is False or any(part is False for part in apart):
            return False
        if not apart or all(value is True for value in rest.values()):
            result = close(merged)
            self._narrowed = self._narrowed or (isinstance(result, dict) and "anyOf" in result)
            return all_of(result, *apart)
        alternatives = apart[0].get("oneOf", []) if len(apart) == 1 and isinstance(apart[0], dict) else []
        one = closed_apart(merged, alternatives, self._combine, close)
        return all_of(merged, *apart, rest) if one is None else one  # kept: what is evaluated is not known

    def _name(self, target: Node) -> str:
        """Return the name of the definition for a subschema in the present dynamic scope."""
        scope = self._scope.current
        key = (id(target), *sorted((anchor, id(node)) for anchor, node in scope.items()))
        name = self._names.setdefault(key, f"d{len(self._names)}")
        if len(self._names) > _MAX_DEFINITIONS:
            raise UnsupportedConstraint("the dynamic references have too many targets", param="json_schema")
        self._definitions.declare(name, lambda: self._build(target, scope), lambda: self._outline(target.schema))
        return name

    def _build(self, node: Node, scope: dict[str, Node]) -> Schema:
        with self._scope.within(node, scope):
            return self._normal(node.schema)

    def _outline(self, schema: dict[str, Any]) -> Schema:
        if not self._has_siblings(schema):
            return True
        return outline(schema, is_draft3=self._dialect.is_draft3)


def _rewritten(schema: dict[str, Any], rewrite: bool, rewritten: Callable[[], Schema]) -> Schema:
    """Return what `rewritten` returns, or `schema` itself where that is not exact, or not wanted."""
    if rewrite:
        with suppress(Inexact):
            return rewritten()
    return clean(schema)
