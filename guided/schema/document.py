"""JSON Schema documents, checked before any grammar library gets them.

Nothing here recurses in Python (the nesting is limited, but so is the stack), and
nothing is fetched. Regular expressions are only measured: their syntax is checked where
they are compiled, in a process that may be killed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache, reduce
from itertools import count, islice
from operator import getitem
from typing import Any

from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from guided.errors import (
    ConstraintTooLarge,
    InvalidConstraint,
    UnsupportedConstraint,
    bounded,
)
from guided.json_text import JsonError, JsonObject, JsonTooLarge, loads
from guided.limits import LIMITS
from guided.schema.formats import FORMATS
from guided.schema.graph import Node, SchemaGraph, closure
from guided.schema.keywords import (
    KEYWORDS,
    OPENING,
    at,
    escape,
    listed,
    shortened,
    types_of,
)
from guided.schema.spelling import rewrite, tidy, upgrade
from guided.schema.validation import TUPLES, Validator, draft_of, fault

_Check = Callable[[Node, str], None]
"""Checks a subschema in a draft."""
MAX_NOTES = 500
"""Maximum number of notes about one constraint."""
_MAX_UNKNOWN = 500
"""Maximum number of unknown keywords that are compared with those of JSON Schema: 80 µs
each."""
_ANNOTATIONS = {
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
}
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""Matches an escaped NUL character in a JSON text."""
_MAX_READ = 200_000
"""Number of characters that `relaxed` reads, which reads a schema once for each fault;
a large one eight times."""
_SINCE_2020 = {"$schema", "prefixItems", "$dynamicRef", "$dynamicAnchor"}
"""Keywords of a schema that does not write tuples as draft 7 does."""
_EXACT = re.compile(r"(?<!/properties)(?<!/\$defs)/(if|not|oneOf|contains)/")
"""Matches the pointers of subschemas that must not allow more: the whole would allow
less then."""
_NOT_ENFORCED = ("$comment", "not enforced")
_ANY_VALUE = dict([_NOT_ENFORCED])
"""What `relaxed` puts in the place of a subschema."""
_TYPE_NAMES = {
    type(None): "null",
    str: "a string",
    int: "a number",
    float: "a number",
    list: "an array",
}


def parse(
    schema: Mapping[str, Any] | bool | str,
    param: str,
    notes: list[str],
    *,
    strict: bool = False,
) -> JsonObject | bool:
    """Return `schema` (an object, a boolean, or either as JSON text) as a document that
    is a valid JSON Schema.

    The dialect is that of `$schema`; 2020-12 if there is none or it is unknown. The
    caller's objects are not changed.

    Args:
        notes: gets pointers to keywords that are not enforced: unknown formats, and
            misspelt ones, with a remark.
        strict: refuse unknown formats.

    Raises:
        UnsupportedConstraint: an unknown format, if `strict`.
        InvalidConstraint: not JSON (this includes duplicate keys, NaN, NUL and lone
            surrogates), not a schema, a `$ref` out of the document or to nothing, an
            endless `$ref` loop, or a schema that no value can satisfy.
        ConstraintTooLarge: over one of the limits.
    """
    try:
        return _parse(_read(schema), notes, strict)
    except InvalidConstraint as error:
        error.param = param
        if error.pointer is not None:
            error.pointer = shortened(error.pointer)
        raise


def relaxed(schema: Mapping[str, Any], refused: Iterable[str], notes: list[str]) -> Any:
    """Return the schema as `parse` does, with any value in the place of the smallest
    subschemas at fault.

    Args:
        refused: JSON pointers of faults that a library found in the schema.
        notes: gets pointers to keywords that are not enforced, as in `parse`, and to
            the subschemas at fault.
    """
    faults = list(refused)
    with suppress(InvalidConstraint):
        for tries in count():
            document: Any = _read(schema)
            if tries >= 8 + _MAX_READ // len(str(document)):
                break
            for fault in faults:
                _free(document, fault)  # raises if the whole schema is at fault
            try:
                return _parse(document, notes, False, _check_values)
            except InvalidConstraint as error:
                faults.append(error.pointer or "")
    any_value = dict(_ANY_VALUE)
    if schema.get("type") == "object":
        any_value["type"] = "object"
    return _parse(any_value, notes, False)


def _free(document: JsonObject, fault: str) -> None:
    """Put any value in the place of the smallest subschema around a JSON pointer that
    may allow more.

    Raises:
        InvalidConstraint: this is the whole document.
    """
    nodes: list[Node] = []
    with suppress(InvalidConstraint):  # a reference leads to nothing
        SchemaGraph(document, nodes.append)
    places = {node.pointer(): node for node in nodes}
    # The name of a pattern property may be at fault, whatever its schema allows.
    while (
        fault not in places
        or places[fault].schema == _ANY_VALUE
        or _EXACT.search(f"{fault}/")
    ):
        fault = fault.rpartition("/")[0]
    node = places[fault]
    if node.parent is None:
        raise InvalidConstraint("the whole schema is at fault", pointer="")
    *names, name = node.path
    reduce(getitem, names, node.parent.schema)[name] = dict(_ANY_VALUE)


def _check_values(node: Node, draft: str) -> None:
    """Check a subschema, and that one of the values that it lists has a type that it
    names."""
    _check_subschema(node, draft)
    values = listed(node.schema)
    if values and "type" in node.schema:
        types = Validator({"type": node.schema["type"]})
        if all(map(types.violation, values)):
            raise InvalidConstraint(
                "no listed value has the type", pointer=node.pointer()
            )


def closed_objects(document: JsonObject | bool) -> tuple[str, ...]:
    """Return the JSON pointers of subschemas that name properties and do not say
    whether there are others.

    At most `MAX_NOTES`.
    """
    if isinstance(document, bool):
        return ()
    pointers: list[str] = []
    for node in SchemaGraph(document).nodes():
        is_negated = node.path[:1] in (("if",), ("not",))
        if (
            "properties" in node.schema
            and not is_negated
            and OPENING.isdisjoint(node.schema)
        ):
            pointers.append(shortened(node.pointer()))
    return tuple(pointers[:MAX_NOTES])


def _parse(
    document: Any, notes: list[str], strict: bool, check: _Check | None = None
) -> JsonObject | bool:
    """Check a document, and bring it into the form that `parse` returns. The document
    is changed."""
    if not isinstance(document, dict | bool):
        raise InvalidConstraint(
            f"a JSON schema is an object or a boolean, not {_TYPE_NAMES[type(document)]}",
            pointer="",
        )
    if document is False:
        raise InvalidConstraint(
            "the schema is false: no value satisfies it", pointer=""
        )
    if document is True:
        return True
    schemas = tidy(document)
    if _NUL.search(json.dumps(document)):
        raise InvalidConstraint("a NUL character, which no backend can take")
    has_tuples = any(isinstance(schema.get("items"), list) for schema in schemas)
    has_tuples = has_tuples and all(map(_SINCE_2020.isdisjoint, schemas))
    if has_tuples:
        document["$schema"] = TUPLES
    draft = draft_of(document)
    if re.search("draft-0[0-3]", str(document.get("$schema", ""))):
        message = "drafts before draft 4 are not supported: use draft 4 or a later one"
        raise InvalidConstraint(message, pointer="/$schema")
    is_old = "draft-0" in draft
    if is_old and any(str(schema.get("$ref")).startswith(draft) for schema in schemas):
        document.setdefault("definitions", {})[draft] = deepcopy(
            REGISTRY.contents(draft)
        )
    graph = SchemaGraph(document, lambda node: (check or _check_subschema)(node, draft))
    graph.refuse_endless_references()
    _check_alternatives(graph)
    notes += islice(_not_enforced(document, graph, strict, has_tuples), MAX_NOTES)
    for node in graph.nodes():
        if is_old:
            upgrade(node.schema, draft)
        rewrite(node.schema)
        if node is not graph.root:
            node.schema.pop("$schema", None)  # parts are read in the document's draft
    if is_old:
        document["$schema"] = TUPLES
    return document


def _read(schema: Mapping[str, Any] | bool | str) -> Any:
    """Return a schema, or its JSON text, as new objects."""
    try:
        text = schema
        if isinstance(schema, Mapping):
            text = dict(schema)
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False, allow_nan=False)
        limit = LIMITS.max_constraint_bytes
        if len(text) > limit:
            raise ConstraintTooLarge(
                f"the JSON schema is {len(text)} characters long; the limit is {limit} bytes"
            )
        document = loads(
            text, max_values=LIMITS.max_values, max_nesting=LIMITS.max_schema_nesting
        )
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise InvalidConstraint("a lone surrogate is not valid Unicode") from None
    except RecursionError:
        raise ConstraintTooLarge("the JSON schema is nested too deep") from None
    except JsonTooLarge as error:
        raise ConstraintTooLarge(f"the JSON schema is too large: {error}") from None
    except JsonError as error:
        raise InvalidConstraint(f"the JSON schema is not valid JSON: {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidConstraint(
            f"the JSON schema is not JSON: {bounded(error)}"
        ) from None
    return document


def _check_subschema(node: Node, draft: str) -> None:
    """Check one subschema alone, and its limits."""
    schema = node.schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        message = f"a schema is an object or a boolean, not {_TYPE_NAMES[type(schema)]}"
        raise InvalidConstraint(message, pointer=node.pointer())
    if node.parent is None:
        tidy(schema)
        if wrong := fault(schema, draft):
            raise InvalidConstraint(wrong[0], pointer=node.pointer(*wrong[1]))
    _check_sizes(schema, node)


def _check_sizes(schema: JsonObject, node: Node) -> None:
    options = schema.get("enum")
    if isinstance(options, list) and len(options) > LIMITS.max_enum:
        message = f"'enum' has {len(options)} values; the limit is {LIMITS.max_enum}"
        raise ConstraintTooLarge(message, pointer=node.pointer("enum"))
    # A lower bound must be generated, at least one token each. Upper bounds are often
    # just a large number (65,535, a million) and are left to the library.
    limit = LIMITS.max_repetition
    for keyword in ("minLength", "minItems", "minProperties", "minContains"):
        value = schema.get(keyword)
        if isinstance(value, int | float) and value > limit:
            message = f"{keyword!r} is {value}; the limit is {limit}"
            raise ConstraintTooLarge(message, pointer=node.pointer(keyword))
    for place, pattern in node.patterns():
        try:
            LIMITS.check_regex(pattern, "json_schema")
        except ConstraintTooLarge as error:
            error.pointer = place
            raise


def _check_alternatives(graph: SchemaGraph) -> None:
    number = 0
    for node in graph.nodes():
        for keyword, _ in node.same:
            number += keyword in ("anyOf", "oneOf")
            if number > LIMITS.max_alternatives:
                raise LIMITS.too_many_alternatives("json_schema", node.pointer(keyword))


def _not_enforced(
    document: JsonObject, graph: SchemaGraph, strict: bool, has_tuples: bool
) -> Iterator[str]:
    """Yield unknown formats of strings, probably misspelt keywords, a root without any
    keyword of JSON Schema, and with `has_tuples` those of draft 7."""
    if document.keys().isdisjoint(KEYWORDS) and (doubt := _doubt(document)):
        yield f" (no keyword of JSON Schema restricts this document{doubt})"
        return
    unknown_keywords = 0
    for node in closure([graph.root]):  # those that take part in validation
        for keyword, value in node.schema.items():
            if (keyword, value) == _NOT_ENFORCED:
                yield shortened(node.pointer())
            elif keyword == "items" and isinstance(value, list) and has_tuples:
                yield f"{shortened(node.pointer(keyword))} (read as draft 7's tuple: since 2020-12 'prefixItems')"
            elif keyword == "format":
                if value not in FORMATS and "string" in types_of(node.schema):
                    if strict:
                        message = (
                            f"the format {bounded(value, 60)!r} is not in the "
                            "specification, so it can't be enforced"
                        )
                        raise UnsupportedConstraint(
                            message, pointer=node.pointer(keyword)
                        )
                    yield shortened(node.pointer(keyword))
            elif keyword not in KEYWORDS:
                unknown_keywords += 1
                if unknown_keywords <= _MAX_UNKNOWN and (meant := _meant(keyword)):
                    yield f"{shortened(node.pointer(keyword))} (did you mean {meant!r}?)"


def _doubt(document: JsonObject) -> str:
    """Return what a document without restrictions may be instead of a schema. Empty:
    probably a schema of any value."""
    for place in ("$defs", "definitions", "components/schemas"):
        named = None
        with suppress(LookupError, TypeError, ValueError):
            named = at(document, f"/{place}")
        if isinstance(named, dict) and named:
            reference = json.dumps(
                f"#/{place}/{bounded(escape(next(iter(named))), 60)}",
                ensure_ascii=False,
            )
            return (
                f': choose one of its schemas, as with "$ref": {reference} at its root'
            )
    unknown = [name for name in document if name not in _ANNOTATIONS]
    if not unknown:
        return ""
    name = json.dumps(bounded(unknown[0], 60), ensure_ascii=False)
    return f': it looks like an instance, not like a schema; did you mean {{"properties": {{{name}: ...}}}}?'


@lru_cache(maxsize=4096)
def _meant(keyword: str) -> str:
    """Return the keyword that `keyword` probably is a misspelling of; empty if there is
    none."""
    if len(keyword) > 30 or keyword.startswith(("_", "x-")):
        return ""
    names = KEYWORDS - {"not", "if", "then", "else"}  # "note" is none of these
    return next(iter(difflib.get_close_matches(keyword, names, n=1, cutoff=0.85)), "")
