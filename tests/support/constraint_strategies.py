"""Hypothesis strategies for random constraints of all kinds: valid, nearly valid and broken."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from guided.backends import BACKENDS

BACKEND_NAMES = ("auto", *BACKENDS)
NAMES = st.sampled_from(["a", "b", "name", "", "a/b", "~0", "é", "x" * 40, "$ref", "type"])
TEXTS = st.one_of(
    st.sampled_from(["a", "ab", "", " ", '"', "\\", "\n", "{", "é", "🦖", "\x7f", "null", "1"]), st.text(max_size=8)
)
NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([0, 1, -1, 1.5, -0.0, 1e-3, 1e300, 10**20, 2**63, 0.1]),
    st.floats(allow_nan=False, allow_infinity=False),
)
JUNK: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration", "nonesuch")


def mostly(usual: SearchStrategy[Any], rare: SearchStrategy[Any], of: int = 12) -> SearchStrategy[Any]:
    """Draw from `rare` about once in `of` draws, otherwise from `usual`."""
    return st.integers(1, of).flatmap(lambda drawn: rare if drawn == of else usual)


def broken(texts: SearchStrategy[str]) -> SearchStrategy[str]:
    """Draw texts with a piece removed, doubled, inserted or replaced."""
    pieces = st.one_of(st.sampled_from(list("()[]{}|*+?.^$\\/\"'<>:=#%~-,;&!\n\0 ")), st.text(max_size=4))

    def damage(text: str, start: int, length: int, piece: str, way: str) -> str:
        start = start % (len(text) + 1)
        cut = text[start : start + length]
        middle = {"cut": "", "double": cut * 2, "put": piece + cut, "replace": piece}[way]
        return text[:start] + middle + text[start + length :]

    ways = st.sampled_from(["cut", "double", "put", "replace"])
    return st.builds(damage, texts, st.integers(0, 200), st.integers(0, 6), pieces, ways)


# Regular expressions.

_ATOMS = st.one_of(
    st.sampled_from(
        [
            *"abz019 _.",
            *(rf"\{each}" for each in 'dDwWsSnrtbB.*+?()[]{}|^$/"'),
            "[a-z]",
            "[^a-z]",
            "[^\\n]",
            "[]a]",
            r"[\d_-]",
            "[é-ü]",
            r"\u00e9",
            r"\x41",
            r"\p{L}",
            "^",
            "$",
            "é",
            "🦖",
            ".",
            "(?=a)",
            "(?<=a)",
            r"(a)\1",
            "(?i)",
            "(?:)",
            "[]",
            "[z-a]",
            r"\k",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=2),
)
_COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{2,}", "{,2}", "{0}", "*?", "++", "{3,1}", "{12}", "{0,60}"])
SOUND_REGEXES: SearchStrategy[str] = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, _COUNTS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(_ATOMS, _COUNTS).map("".join),
        inner.map(lambda part: f"({part})"),
        inner.map(lambda part: f"(?P<n>{part})"),
    ),
    max_leaves=8,
)
REGEXES = mostly(SOUND_REGEXES, broken(SOUND_REGEXES), of=4)


# JSON schemas.


def _keywords(inner: SearchStrategy[Any]) -> dict[str, SearchStrategy[Any]]:
    many = st.dictionaries(NAMES, inner, max_size=3)
    some = st.lists(inner, min_size=1, max_size=3)
    small = st.integers(0, 6)
    return {
        "type": st.one_of(
            st.sampled_from(TYPES), st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
        ),
        "enum": st.lists(JUNK, min_size=1, max_size=4),
        "const": JUNK,
        "properties": many,
        "patternProperties": st.dictionaries(SOUND_REGEXES, inner, max_size=2),
        "additionalProperties": inner,
        "unevaluatedProperties": inner,
        "propertyNames": inner,
        "required": st.lists(NAMES, max_size=3, unique=True),
        "minProperties": small,
        "maxProperties": small,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": many,
        "items": inner,
        "prefixItems": some,
        "additionalItems": inner,
        "unevaluatedItems": inner,
        "contains": inner,
        "minContains": small,
        "minItems": small,
        "maxItems": small,
        "uniqueItems": st.booleans(),
        "minLength": small,
        "maxLength": st.integers(0, 40),
        "pattern": REGEXES,
        "format": st.sampled_from(FORMATS),
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.1, 1e-9, 7, 10**30]),
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "$ref": st.sampled_from(
            ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/nonesuch", "#a", "http://x/y", "%"]
        ),
        "$defs": many,
        "$id": st.sampled_from(["http://x/y", "urn:a", "#"]),
        "$anchor": st.sampled_from(["a", "1", ""]),
        "$schema": st.sampled_from(["http://json-schema.org/draft-07/schema#", "http://nonesuch/"]),
        "title": TEXTS,
        "default": JUNK,
        "nullable": st.booleans(),
        "nonesuch": JUNK,
    }


def _objects(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
    keywords = _keywords(inner)

    def filled(names: list[str]) -> SearchStrategy[Any]:
        return st.fixed_dictionaries({name: mostly(keywords[name], JUNK, of=25) for name in names})

    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(filled)


_LEAVES = st.one_of(
    st.sampled_from(TYPES).map(lambda name: {"type": name}), st.booleans(), st.just({}), st.just({"$ref": "#/$defs/a"})
)
SCHEMAS: SearchStrategy[Any] = mostly(st.recursive(_LEAVES, _objects, max_leaves=8), JUNK, of=30)


# Grammars.

_RULES = ("root", "a", "b", "item-list")
_GBNF_ATOMS = st.one_of(
    st.sampled_from(['"a"', '"ab"', '""', r'"\""', r'"\n"', r'"\x41"', "[a-z]", "[^a]", "[]", "[^\\n]*", ".", '"é"']),
    st.sampled_from([*_RULES, "nonesuch"]),
)
_LARK_ATOMS = st.one_of(
    st.sampled_from(
        ['"a"', '"ab"', '""', '"a"i', "/[a-z]+/", "/a|b/i", "/(/", '"a".."f"', "%json{}", '%json {"type": "null"}', "T"]
    ),
    st.sampled_from(["start", "a", "b", "nonesuch", "<|end|>"]),
)


def _bodies(atoms: SearchStrategy[str], counts: list[str]) -> SearchStrategy[str]:
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(" ".join),
            st.lists(inner, min_size=2, max_size=3).map(" | ".join),
            st.tuples(inner, st.sampled_from(counts)).map(lambda pair: f"({pair[0]}){pair[1]}"),
        ),
        max_leaves=5,
    )


def _grammars(start: str, names: list[str], define: str, bodies: SearchStrategy[str]) -> SearchStrategy[str]:
    rules = st.lists(st.tuples(st.sampled_from(names), bodies), max_size=3)
    first = bodies.map(lambda body: (start, body))
    whole = st.tuples(first, rules).map(lambda drawn: [drawn[0], *drawn[1]])
    return whole.map(lambda drawn: "\n".join(f"{name} {define} {body}" for name, body in drawn))


GBNF = _grammars("root", list(_RULES), "::=", _bodies(_GBNF_ATOMS, ["*", "+", "?", "{2}", "{0,3}", "{2,}"]))
LARK = _grammars(
    "start", ["start", "a", "b", "T", "_x", "?a"], ":", _bodies(_LARK_ATOMS, ["*", "+", "?", "~2", "~0..3"])
)
_SOUND_GRAMMARS = st.one_of(GBNF, LARK)
GRAMMARS = mostly(_SOUND_GRAMMARS, broken(_SOUND_GRAMMARS), of=4)

CHOICES = mostly(st.lists(TEXTS, max_size=4), st.lists(st.text(), max_size=4), of=3)
WHITESPACE = st.one_of(st.none(), st.sampled_from(["", " ?", r"\s*", "[ \\n]{0,3}", "("]), REGEXES)

_CONTENTS = st.one_of(
    st.builds(lambda pattern: {"type": "regex", "pattern": pattern}, REGEXES),
    st.builds(lambda texts: {"type": "choice", "choice": texts}, CHOICES),
    st.builds(lambda schema: {"type": "json_schema", "json_schema": schema}, SCHEMAS),
    st.just({"type": "any_text"}),
    JUNK,
)
_TAGS = st.builds(
    lambda begin, content, end: {"type": "tag", "begin": begin, "content": content, "end": end}, TEXTS, _CONTENTS, TEXTS
)
STRUCTURAL_TAGS = st.builds(lambda form: {"type": "structural_tag", "format": form}, st.one_of(_TAGS, _CONTENTS))

FIELDS: dict[str, SearchStrategy[Any]] = {
    "json_schema": SCHEMAS,
    "json_object": st.just(True),
    "regex": REGEXES,
    "choice": CHOICES,
    "grammar": GRAMMARS,
    "structural_tag": STRUCTURAL_TAGS,
}
"""Kind -> values of its request field."""
