"""JSON Schema, before any grammar library sees it: is it one, does it hang together, and what is where.

`parse` refuses what is no schema, with a JSON pointer and the keyword; `walk_keywords` visits the schema positions that
take part in validation, for the adapters' tables of what their library enforces; `close_objects` closes objects.

Nothing here recurses (a document's nesting is limited, the interpreter's stack too) and nothing is ever fetched.
Regular expressions are only measured: their syntax is judged where they are compiled, in a process that may be killed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from guided.errors import MAX_ECHO, ConstraintTooLarge, InvalidConstraint, bounded
from guided.limits import Limits
from guided.schema.graph import Position, SchemaGraph
from guided.schema.metaschema import Dialect
from guided.schema.pointer import ancestor, escape

__all__ = ["close_objects", "parse", "walk_keywords"]

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)
"""Possessive and with an optional closing quote: linear time on any text."""

_BOUNDS = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
    ("minimum", "maximum"),
)


def parse(schema: Mapping[str, Any] | bool | str, limits: Limits, param: str) -> dict[str, Any] | bool:
    """`schema` (an object, a boolean, or either as JSON text) as a document that is a valid JSON Schema.

    The dialect is `$schema`'s, 2020-12 where there is none that is known. Objects of the caller are not changed.

    Raises:
        InvalidConstraint: not JSON (duplicate keys, NaN, NUL and lone surrogates included), not a schema, a `$ref` to
            something outside the document or to nothing, an endless `$ref` loop, or nothing could ever match.
        ConstraintTooLarge: over one of `limits`.
    """
    try:
        return _parse(schema, limits, param)
    except InvalidConstraint as error:
        if error.pointer is not None:
            error.pointer = ancestor(bounded(error.pointer, len(error.pointer) * 10), MAX_ECHO)
        raise


def _parse(schema: Mapping[str, Any] | bool | str, limits: Limits, param: str) -> dict[str, Any] | bool:
    document = _loads(schema, limits, param) if isinstance(schema, str) else schema
    if isinstance(document, Mapping) and not isinstance(document, dict):
        document = dict(document)
    if not isinstance(document, dict | bool):
        raise InvalidConstraint(
            f"a JSON schema is an object or a boolean, not {_json_type(document)}", param=param, pointer=""
        )
    _check_values(document, limits, param)
    if document is False:
        raise InvalidConstraint("the schema is false: nothing matches it", param=param, pointer="")
    if isinstance(document, dict):
        dialect = Dialect.of(document)
        graph = SchemaGraph.build(document, lambda position: _check_subschema(position, dialect, limits, param), param)
        graph.refuse_endless_references(param)
        _check_alternatives(graph, limits, param)
    return document


def walk_keywords(schema: dict[str, Any] | bool) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Every keyword that takes part in validation: `(pointer of the keyword, keyword, value, its subschema)`.

    Starts at the root, goes through applicators and local `$ref`s, visits each subschema once. Contents of `enum`,
    `const`, `default` and `examples` are not schemas; a `$defs` entry that nothing refers to takes no part. `schema` is
    one that `parse` returned.
    """
    if isinstance(schema, dict):
        for node in SchemaGraph.build(schema, lambda _: None, "json_schema").reachable():
            for keyword, value in node.schema.items():
                yield f"{node.pointer}/{escape(keyword)}", keyword, value, node.schema


def close_objects(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """A copy in which each object schema with `properties` that says nothing on other ones has none.

    Left open are schemas that are only part of what describes their object: those under `allOf`, `if`, `then`, `else`,
    `not`, `dependentSchemas`, those next to such a keyword or next to `$ref`, and alternatives (`anyOf`, `oneOf`) whose
    parent has `properties` itself. `additionalProperties: false` doesn't see what its neighbours declare, so it would
    forbid their properties there.
    """
    document: dict[str, Any] | bool = json.loads(json.dumps(schema))
    if isinstance(document, dict):
        graph = SchemaGraph.build(document, lambda _: None, "json_schema")
        partial = graph.partial_descriptions()
        for node in graph.nodes():
            silent = not node.schema.keys() & {"additionalProperties", "unevaluatedProperties"}
            if silent and isinstance(node.schema.get("properties"), dict) and id(node.schema) not in partial:
                node.schema["additionalProperties"] = False
    return document


def _loads(text: str, limits: Limits, param: str) -> Any:
    if len(text) > limits.max_constraint_bytes:
        raise ConstraintTooLarge(
            f"the JSON schema is {len(text)} characters long; the limit is {limits.max_constraint_bytes} bytes",
            param=param,
        )
    _check_text_nesting(text, limits, param)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except ValueError as error:  # JSONDecodeError, and what the two hooks raise
        raise InvalidConstraint(f"the JSON schema is not valid JSON: {bounded(error)}", param=param) from None


def _check_text_nesting(text: str, limits: Limits, param: str) -> None:
    """`json.loads` recurses once a bracket: count them first."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        first = text[found.start()]
        if first in "[{":
            depth += 1
            if depth > limits.max_nesting:
                raise _too_deep(limits, param, None)
        elif first in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in set(names[:index]))
        raise ValueError(f"the key {bounded(twice, 80)!r} stands twice in one object")
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_values(document: Any, limits: Limits, param: str) -> None:
    """Every value is JSON; nothing is nested too deep. Children are visited in document order, without recursion."""
    stack: list[tuple[Any, str, int]] = [(document, "", 0)]
    size = 0
    """No more than the document's bytes. Counted along the way: objects that are shared may hide any number."""
    while stack:
        value, pointer, depth = stack.pop()
        size += 2 + (len(value) if isinstance(value, str) else 0)  # a digit or a bracket, and a comma
        if isinstance(value, dict):
            size += sum(len(key) + 3 for key in value if isinstance(key, str))
        if size > limits.max_constraint_bytes:
            raise ConstraintTooLarge(
                f"the JSON schema is longer than the limit of {limits.max_constraint_bytes} bytes", param=param
            )
        if isinstance(value, str):
            _check_string(value, pointer, param)
        elif isinstance(value, dict | list | tuple):
            if depth >= limits.max_nesting:
                raise _too_deep(limits, param, pointer)
            if isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise InvalidConstraint(f"the key {bounded(key)} is not a string", param=param, pointer=pointer)
                    _check_string(key, pointer, param)
                children = [(child, f"{pointer}/{escape(key)}", depth + 1) for key, child in value.items()]
            else:
                children = [(child, f"{pointer}/{index}", depth + 1) for index, child in enumerate(value)]
            stack.extend(reversed(children))
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidConstraint(f"{value} is not a JSON number", param=param, pointer=pointer)
        elif value is not None and not isinstance(value, int):
            raise InvalidConstraint(f"{type(value).__name__} is not a JSON value", param=param, pointer=pointer)


def _check_string(text: str, pointer: str, param: str) -> None:
    if "\x00" in text:
        raise InvalidConstraint("a NUL character, which no backend can take", param=param, pointer=pointer)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidConstraint("a lone surrogate is not valid Unicode", param=param, pointer=pointer) from None


def _too_deep(limits: Limits, param: str, pointer: str | None) -> ConstraintTooLarge:
    return ConstraintTooLarge(
        f"the JSON schema is nested deeper than {limits.max_nesting} levels", param=param, pointer=pointer
    )


def _check_subschema(position: Position, dialect: Dialect, limits: Limits, param: str) -> None:
    """One subschema by itself: each keyword's value by the dialect's meta-schema, then limits and contradictions."""
    schema, pointer = position
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidConstraint(
            f"a schema is an object or a boolean, not {_json_type(schema)}", param=param, pointer=pointer
        )
    for keyword, value in schema.items():
        fault = dialect.fault(keyword, value)
        if fault is not None:
            raise InvalidConstraint(
                f"{keyword!r} is not valid: {fault.message}{_suggestion(keyword, value)}",
                param=param,
                pointer=f"{pointer}/{escape(keyword)}{fault.inside}",
            )
    _check_patterns(schema, pointer, limits, param)
    _check_sizes(schema, pointer, limits, param)
    if "/not/" not in f"{pointer}/":  # what never matches is fine where the point is not to match
        _check_satisfiable(schema, pointer, param)


def _suggestion(keyword: str, value: Any) -> str:
    if keyword != "type" or not isinstance(value, str):
        return ""
    known = ("string", "number", "integer", "boolean", "object", "array", "null")
    near = difflib.get_close_matches(value, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_patterns(schema: dict[str, Any], pointer: str, limits: Limits, param: str) -> None:
    if isinstance(schema.get("pattern"), str):
        limits.check_regex(schema["pattern"], param, f"{pointer}/pattern")
    named = schema.get("patternProperties")
    for pattern in named if isinstance(named, dict) else ():
        limits.check_regex(pattern, param, f"{pointer}/patternProperties/{escape(pattern)}")


def _check_sizes(schema: dict[str, Any], pointer: str, limits: Limits, param: str) -> None:
    options = schema.get("enum")
    if isinstance(options, list) and len(options) > limits.max_enum:
        raise ConstraintTooLarge(
            f"'enum' has {len(options)} values; the limit is {limits.max_enum}", param=param, pointer=f"{pointer}/enum"
        )
    # Lower bounds have to be generated, one token each at the least. Upper bounds are often a mere "large" (65,535,
    # a million) and are left to the library.
    for keyword in ("minLength", "minItems", "minProperties", "minContains"):
        value = schema.get(keyword)
        if isinstance(value, int | float) and value > limits.max_repetition:
            raise ConstraintTooLarge(
                f"{keyword!r} is {value}; the limit is {limits.max_repetition}",
                param=param,
                pointer=f"{pointer}/{keyword}",
            )


def _check_alternatives(graph: SchemaGraph, limits: Limits, param: str) -> None:
    count = 0
    for node in graph.nodes():
        for keyword in ("anyOf", "oneOf"):
            options = node.schema.get(keyword)
            count += len(options) if isinstance(options, list) else 0
            if count > limits.max_alternatives:
                raise limits.too_many_alternatives(param, f"{node.pointer}/{keyword}")


def _check_satisfiable(schema: dict[str, Any], pointer: str, param: str) -> None:
    """Contradictions that stand next to each other. Deeper ones are the library's to find."""
    for keyword in ("enum", "type"):
        if schema.get(keyword) == []:
            raise InvalidConstraint(
                f"{keyword!r} is empty: nothing matches it", param=param, pointer=f"{pointer}/{keyword}"
            )
    for low, high in _BOUNDS:
        least, most = schema.get(low), schema.get(high)
        if least is not None and most is not None and _is_number(least) and _is_number(most) and least > most:
            raise InvalidConstraint(
                f"{low!r} {least} is greater than {high!r} {most}: nothing matches both",
                param=param,
                pointer=f"{pointer}/{low}",
            )
    parts = schema.get("allOf")
    if isinstance(parts, list) and any(part is False for part in parts):
        raise InvalidConstraint(
            "'allOf' holds false: nothing matches it", param=param, pointer=f"{pointer}/allOf/{parts.index(False)}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_type(value: object) -> str:
    names = {
        type(None): "null",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "an unknown value" if not isinstance(value, bool) else "a boolean")
