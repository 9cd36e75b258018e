"""Hypothesis strategies for random constraints of all kinds: valid (those of `benchmarks.random_outputs`), nearly valid
and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from benchmarks.random_constraints.languages import Case, random_choice, random_grammar, random_regex
from benchmarks.random_constraints.schemas import random_schema

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
_ODD_KEYWORDS = st.sampled_from(
    ["$id", "$anchor", "$schema", "$ref", "$dynamicRef", "format", "nullable", "items", "nonesuch", "definitions"]
)


def mostly(usual: SearchStrategy[Any], rare: SearchStrategy[Any], of: int = 12) -> SearchStrategy[Any]:
    """Draw from `rare` about once in `of` draws, otherwise from `usual`."""
    return st.integers(1, of).flatmap(lambda drawn: rare if drawn == of else usual)


def broken(texts: SearchStrategy[str]) -> SearchStrategy[str]:
    """Draw texts with a piece removed, inserted or replaced."""
    pieces = st.one_of(st.sampled_from(list("()[]{}|*+?.^$\\/\"'<>:=#%~-,;&!\n\0 ")), st.text(max_size=4))

    def damage(text: str, start: int, length: int, piece: str) -> str:
        start %= len(text) + 1
        return text[:start] + piece + text[start + length :]

    return st.builds(damage, texts, st.integers(0, 200), st.integers(0, 6), pieces)


def _values(make: Callable[[random.Random], Case]) -> SearchStrategy[Any]:
    return st.randoms(use_true_random=True).map(lambda source: make(source).value)


def _with_junk(schema: Any, seed: int, junk: Any, name: str) -> Any:
    """Return a schema in which one part is replaced by junk, or gets a keyword with it."""
    source, value = random.Random(seed), json.loads(json.dumps(schema))
    part = value
    while isinstance(part, dict) and part:
        key = source.choice(sorted(part))
        if source.random() < 0.3 or not isinstance(part[key], dict):
            part[source.choice([key, name])] = junk
            break
        part = part[key]
    return value


SOUND_SCHEMAS = _values(random_schema)
_JUNK_SCHEMAS = st.builds(_with_junk, SOUND_SCHEMAS, st.integers(0, 999), JUNK, _ODD_KEYWORDS)
SCHEMAS = mostly(mostly(SOUND_SCHEMAS, _JUNK_SCHEMAS, of=3), JUNK, of=30)
REGEXES = mostly(_values(random_regex), broken(_values(random_regex)), of=4)
GRAMMARS = mostly(_values(random_grammar), broken(_values(random_grammar)), of=4)
CHOICES = mostly(_values(random_choice), st.lists(TEXTS, max_size=4), of=3)

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
