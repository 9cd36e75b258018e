"""JSON Schema for llguidance: the user's document, corrected where llguidance would not enforce what it says.

llguidance merges `allOf`, references and alternatives itself, so it gets the document and not the normal form (except
for draft 3, which it does not know). Corrected are:

- bounds of numbers: it takes integers that a double can't represent for their neighbours, aborts on those with more
  than 64 bits, and reads `exclusiveMinimum: 0` with `maximum: 0.25` as inclusive;
- patterns: it reads them as Rust does, and a class with all control characters also matches escaped quotes;
- `date`, `time` and `date-time`: it allows a year 0, and leap seconds in any minute;
- keywords of other drafts, which it obeys.

It counts duplicate keys for `minProperties`; this and values that it would change are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import lcm, prod
from typing import Any

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.regex import Chars
from guided.schema import string_pattern
from guided.schema.graph import Node, SchemaGraph
from guided.schema.keywords import Schema, integer_bounds, narrow_bounds
from guided.schema.metaschema import Dialect
from guided.schema.normal_form import normalise, refuse_mixed_dialects
from guided.schema.pointer import escape

_REPLACED_FORMATS = ("date", "time", "date-time")
_LARGEST = 2**63 - 1024
"""The largest double below 2^63."""
_EXACT = 2**53
"""Smaller integers are doubles."""
_MULTIPLES = 2**32
_MOST_DIGITS = 9
"""Maximum number of decimals of `multipleOf`."""
_MERGED = ("$ref", "anyOf", "oneOf", "patternProperties")
_NEXT_TO_REF = ("$ref", "$schema", "$id", "id", "$defs", "definitions")
_CONTROLS_AND_ESCAPED = regex.ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])


def corrected(schema: Schema) -> dict[str, Any]:
    """Return a schema that llguidance enforces, or refuses.

    Args:
        schema: a document of its own: it is changed.

    Raises:
        UnsupportedConstraint: llguidance would not enforce a keyword; with its pointer.
        InvalidConstraint: no value satisfies the schema, or a pattern is malformed.
    """
    if isinstance(schema, dict) and Dialect.of(schema).is_draft3:
        form = normalise(schema)
        schema = {**form.root, "$defs": form.definitions} if isinstance(form.root, dict) else form.root
    if isinstance(schema, bool):
        if not schema:
            raise InvalidConstraint("no value satisfies the schema", param="json_schema", pointer="")
        return {}
    # Options within a schema could disable enforcement.
    schema.pop("x-guidance", None)
    dialect = Dialect.of(schema)
    if "$schema" in schema:
        schema["$schema"] = dialect.uri
    graph = SchemaGraph.build(schema)
    refuse_mixed_dialects(graph, dialect)
    nodes = list(graph.reachable())
    for node in nodes:
        _correct(node, dialect)
    multiples = {multiple for node in nodes for multiple in _multiple(node)}
    if any(_merges(node.schema) for node in nodes):
        _check_multiples(multiples)
    return schema


def _refusal(node: Node, keyword: str, reason: str) -> UnsupportedConstraint:
    return UnsupportedConstraint(
        f"llguidance can't enforce {keyword!r}{reason}",
        param="json_schema",
        pointer=f"{node.pointer}/{escape(keyword)}",
    )


def _correct(node: Node, dialect: Dialect) -> None:
    """Correct one subschema, in place."""
    schema = node.schema
    if node.pointer:
        schema.pop("$schema", None)
    if "$ref" in schema and not dialect.siblings_of_ref_count:
        for keyword in [name for name in schema if name not in _NEXT_TO_REF]:
            del schema[keyword]
    if "2020-12" in dialect.uri:
        schema.pop("additionalItems", None)  # llguidance would take the schema for one of an older draft
    _correct_bounds(node)
    for keyword in ("const", "enum"):
        for value in _numbers(schema.get(keyword)):
            if abs(value) > _LARGEST or (isinstance(value, int) and int(float(value)) != value):
                raise _refusal(node, keyword, f" with {bounded(value, 40)}: it is not a double")
    _correct_patterns(node)
    if schema.get("format") in _REPLACED_FORMATS:
        pattern = _pattern(string_pattern.FORMATS[schema.pop("format")])
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    _check_counts(node)


def _correct_bounds(node: Node) -> None:
    """Replace bounds by the next ones inside that llguidance calculates with correctly.

    Narrowed: numbers have at most 64 bits; beyond 2^53, those between a bound and the next double are excluded, and
    where a bound is exclusive and an integer, the first 10^-14 or so.
    """
    schema = node.schema
    for keyword in ("minimum", "maximum"):  # draft 4
        exclusive = f"exclusive{keyword.capitalize()}"
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and keyword in schema:
            schema[exclusive] = schema.pop(keyword)
    narrow_bounds(schema)
    for sign, inclusive, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        keyword = inclusive if inclusive in schema else exclusive
        if keyword not in schema:
            continue
        bound, keeps_out = schema[keyword], keyword == exclusive
        if schema.get("type") == "integer":
            bound, keeps_out = integer_bounds(schema)[sign < 0], False
            assert bound is not None
        del schema[keyword]
        inner = _inner(bound * sign, keeps_out)
        if inner is None:
            raise _refusal(node, keyword, f" {bounded(bound, 40)}: it is beyond 64 bits")
        schema[exclusive if keeps_out and inner == bound * sign else inclusive] = inner * sign
    # llguidance calculates the next power of ten where there is no other bound.
    if schema.get("minimum", 0) >= 10**18:
        schema.setdefault("maximum", _LARGEST)
    if schema.get("maximum", 0) <= -(10**18):
        schema.setdefault("minimum", -_LARGEST)


def _inner(low: Any, exclusive: bool) -> int | float | None:
    """Return the least lower bound from `low` on that llguidance calculates with correctly; None without one."""
    if low > _LARGEST:
        return None
    if low <= -_LARGEST:
        return -_LARGEST
    if abs(low) >= _EXACT:
        found = float(low)
        after = int(math.nextafter(found, math.inf) if exclusive or found < low else found)
        return after if after <= _LARGEST else None
    if not exclusive or low < 0 or low != int(low):
        return int(low) if low == int(low) else float(low)
    digits = len(str(int(low)))
    return int(low) + 1 if digits > 14 else float(int(low) + Decimal(10) ** (digits - 15))


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _multiple(node: Node) -> set[Fraction]:
    """Return the value of `multipleOf`, which llguidance makes an integer of 32 bits by multiplying a double by ten."""
    value = node.schema.get("multipleOf")
    if value is None:
        return set()
    exact = Fraction(Decimal(str(value)))
    scaled, exponent = value, 0
    while scaled < _MULTIPLES and scaled != int(scaled):
        scaled, exponent = scaled * 10.0, exponent + 1
    if scaled >= _MULTIPLES or exponent > _MOST_DIGITS or Fraction(int(scaled), 10**exponent) != exact:
        raise _refusal(node, "multipleOf", f" {bounded(value, 40)}")
    return {exact}


def _merges(schema: dict[str, Any]) -> bool:
    """Whether llguidance merges parts of a subschema with each other."""
    return "allOf" in schema or (len(schema) > 1 and not schema.keys().isdisjoint(_MERGED))


def _check_multiples(multiples: set[Fraction]) -> None:
    """Refuse `multipleOf` values with a least common multiple beyond 32 bits: llguidance would not notice."""
    factor = lcm(*(multiple.denominator for multiple in multiples))
    if len(multiples) > 1 and prod(multiples) * factor ** len(multiples) >= _MULTIPLES:
        raise UnsupportedConstraint(
            "llguidance can't enforce these values of 'multipleOf' together", param="json_schema"
        )


def _correct_patterns(node: Node) -> None:
    """Write patterns in the common subset of regexes."""
    schema = node.schema
    try:
        keyword = "pattern"
        if keyword in schema:
            schema[keyword] = _pattern(schema[keyword])
        keyword = "patternProperties"
        if keyword in schema:
            written = {_pattern(pattern): value for pattern, value in schema[keyword].items()}
            if len(written) < len(schema[keyword]):
                raise UnsupportedConstraint("two patterns that match the same names")
            schema[keyword] = written
    except InvalidConstraint as error:
        pointer = f"{node.pointer}/{keyword}"
        raise type(error)(error.message, param="json_schema", pointer=pointer) from None


@lru_cache(maxsize=256)  # the tools of one request have many properties with the same format
def _pattern(pattern: str) -> str:
    """Return `pattern` for llguidance, without NUL in classes for which it would also write quotes."""

    def safe(chars: Chars) -> Chars:
        if regex.intersection(chars.ranges, _CONTROLS_AND_ESCAPED) == _CONTROLS_AND_ESCAPED:
            return chars
        ranges = regex.intersection(chars.ranges, regex.complement(((0, 0),)))
        if not ranges:
            raise UnsupportedConstraint("the pattern needs a NUL character, which llguidance can't write in JSON")
        return Chars(ranges)

    return f"^(?:{regex.render(regex.map_chars(string_pattern.read(pattern), safe))})$"


def _check_counts(node: Node) -> None:
    """Refuse `minProperties` where a name could occur twice: the required ones can't."""
    schema = node.schema
    least = schema.get("minProperties", 0)
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if least > 1 + len(set(schema.get("required", ()))) and not closed:
        raise _refusal(node, "minProperties", f" {least}: the same name would count twice")
