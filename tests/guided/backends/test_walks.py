"""Random walks through the masks: every text that a backend allows for a schema satisfies the schema.

Schemas are small and random, with the keywords that libraries tend to ignore: tuples with counts, names with counts,
lengths and formats. A backend may refuse a schema. It may not call it unsatisfiable if another one finds a value.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided.backends import BACKENDS, Backends
from guided.backends.base import Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.vocabulary import Vocabulary

# ---- formats, as their RFCs have them, without the patterns that are under test --------------------------------------

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_UNIT = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_PCHAR = rf"(?:{_UNIT}|[:@])"
_HOST = rf"(?:\[[0-9A-Fa-fv:.]+\]|{_UNIT}*)"
_AUTHORITY = rf"//(?:(?:{_UNIT}|:)*@)?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*"
_ABSOLUTE = rf"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_PCHAR}+(?:/{_PCHAR}*)*|){_TAIL}"
_RELATIVE = rf"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:(?:{_UNIT}|@)+(?:/{_PCHAR}*)*)?){_TAIL}"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_PERIOD = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"


def _is_time(text: str) -> bool:
    return bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", text, re.ASCII)) and bool(
        datetime.time.fromisoformat(text[:8])
    ) | (text[:8] == "00:00:00")


def _is_date(text: str) -> bool:
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and datetime.date.fromisoformat(text))


FORMATS: dict[str, Callable[[str], Any]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": lambda text: _is_date(text[:10]) and text[10] in "Tt" and _is_time(text[11:]),
    "duration": lambda text: re.fullmatch(rf"P(?:\d+W|{_PERIOD}(?:{_CLOCK})?|{_CLOCK})", text, re.ASCII),
    "email": lambda text: re.fullmatch(
        rf"""(?:[\w!#$%&'*+/=?^`{{|}}~.-]+|"(?:[ !#-\[\]-~]|\\[ -~])*")@(?:{_LABEL}(?:\.{_LABEL})*|\[[\w:.]+\])""",
        text,
        re.ASCII,
    ),
    "hostname": lambda text: len(text) <= 253 and re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", text, re.ASCII),
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)) | True,
    "ipv6": lambda text: "%" not in text and ipaddress.IPv6Address(text) is not None,
    "json-pointer": lambda text: re.fullmatch(r"(?:/(?:[^/~]|~[01])*)*", text),
    "relative-json-pointer": lambda text: re.fullmatch(r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)", text),
    "uri": lambda text: re.fullmatch(_URI, text, re.ASCII),
    "uri-reference": lambda text: re.fullmatch(_URI, text, re.ASCII) or re.fullmatch(_RELATIVE, text, re.ASCII),
    "uuid": lambda text: re.fullmatch(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}", text),
}
CHECKER = jsonschema.FormatChecker(formats=())
for _name, _holds in FORMATS.items():
    CHECKER.checkers[_name] = (lambda value, holds=_holds: not isinstance(value, str) or bool(holds(value)), ValueError)


def problem(text: str, schema: Any) -> str | None:
    """Return why `text` does not satisfy `schema`."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    error = next(validator(schema, format_checker=CHECKER).iter_errors(document), None)
    return None if error is None else str(error.message)


def walk(matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, limit: int = 70) -> str | None:
    """Generate random allowed tokens, preferring short ones and whitespace; None if the walk does not end."""
    text, row = b"", np.empty(words(vocabulary.padded_vocab_size), dtype=np.int32)
    for _ in range(limit):
        accepting = matcher.is_accepting()
        row.fill(-1)
        matcher.fill_bitmask(row)
        allowed = np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)
        assert accepting or len(allowed), text
        if accepting and (not len(allowed) or generator.random() < 0.5):
            return text.decode()
        closing = [token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],']
        blank = [token for token in allowed if not vocabulary.token_bytes[token].strip()]
        draw = generator.random()
        chosen = closing if closing and draw < 0.5 else blank if blank and draw < 0.7 else allowed
        token = int(generator.choice(list(chosen)))
        matcher.accept_tokens([token])
        text += vocabulary.token_bytes[token]
    return None


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Backends:
    return Backends(vocabulary)


NULL, BOOLEAN, INTEGER = {"type": "null"}, {"type": "boolean"}, {"type": "integer"}
EMPTY_OBJECT = {"type": "object", "required": ["zz"], "additionalProperties": False}
KNOWN: list[Any] = [
    {"type": "array", "prefixItems": [NULL, BOOLEAN], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [NULL, BOOLEAN], "items": INTEGER, "minItems": 1},
    {"type": "array", "prefixItems": [NULL, BOOLEAN], "items": INTEGER, "minItems": 2, "maxItems": 3},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [NULL, BOOLEAN], "minItems": 2},
    {"type": "array", "items": NULL, "minItems": 3, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": NULL, "minItems": 1, "maxItems": 2}, "minItems": 2},
    {"type": "array", "items": {"anyOf": [NULL, {"type": "array", "items": NULL, "minItems": 2}]}, "maxItems": 2},
    {"anyOf": [{"type": "array", "items": NULL, "minItems": 2}, {"type": "array", "items": BOOLEAN, "maxItems": 1}]},
    {"type": "object", "properties": {"a": NULL, "b": NULL}, "maxProperties": 0},
    {"type": "object", "properties": {"a": NULL, "b": NULL}, "maxProperties": 1},
    {"type": "object", "properties": {"a": NULL, "b": NULL}, "minProperties": 1, "additionalProperties": False},
    {"type": "string", "maxLength": 0},
    {"type": "string", "maxLength": 1},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "pattern": "^(a+b)?$"},
    {"type": "string", "pattern": "^\\n\\t$"},
    {"type": "string", "pattern": '^["\\\\]$'},
    {"type": "string", "pattern": "^$"},
    {"type": "array", "maxItems": 0, "items": EMPTY_OBJECT},
    {"type": "array", "items": {"type": "integer", "minimum": 1.2, "maximum": 1.8}},
    {"type": "array", "items": {"type": "string", "pattern": "^a$", "minLength": 2}},
    {"type": "integer", "minimum": 1e20},
    {"type": "string", "minLength": 40, "maxLength": 60},
    *({"type": "string", "format": name} for name in FORMATS),
]


def hold(backends: Backends, vocabulary: Vocabulary, schema: Any, seed: int, walks: int) -> None:
    """Check that every backend enforces `schema` or refuses it."""
    invalid, found = [], []
    for backend in BACKENDS:
        try:
            grammar = backends[backend].compile(Constraint.json_schema(schema))
        except UnsupportedConstraint as refusal:
            assert "Error" not in refusal.message, refusal  # noqa: PT017 -- an unexpected exception
            continue
        except InvalidConstraint:
            invalid.append(backend)
            continue
        generator = random.Random(seed)
        for _ in range(walks):
            text = walk(grammar.matcher(), vocabulary, generator)
            if text is not None:
                found.append((backend, text))
                assert problem(text, schema) is None, (backend, text, problem(text, schema))
    assert not (invalid and found), (invalid, found)


@pytest.mark.parametrize("schema", KNOWN, ids=lambda schema: json.dumps(schema)[:60])
def test_what_once_went_wrong(backends: Backends, vocabulary: Vocabulary, schema: Any) -> None:
    hold(backends, vocabulary, schema, 5, 12)


COUNTS = st.integers(0, 3)
LEAVES = st.one_of(
    st.sampled_from(
        [NULL, BOOLEAN, INTEGER, {"type": "number"}, {"type": "string"}, {"const": "x"}, {"enum": [1, "a"]}]
    ),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNTS, "maxLength": COUNTS}),
    st.sampled_from(["^a(b+c)?$", "^[ab]{2}$", "x", "^\\\\?n$", "^(a|b*)c|d$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from([*FORMATS]).map(lambda name: {"type": "string", "format": name}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": st.integers(-3, 12), "exclusiveMaximum": st.sampled_from([0, 2.5, 9, 120])},
    ),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")}, optional={"items": inner, "minItems": COUNTS, "maxItems": COUNTS}
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
            optional={"items": st.one_of(st.just(False), inner), "minItems": COUNTS, "maxItems": COUNTS},
        ),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, min_size=1, max_size=2),
                "required": names,
                "additionalProperties": st.one_of(st.just(False), inner),
                "minProperties": COUNTS,
                "maxProperties": COUNTS,
            },
        ),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts}),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(LEAVES, _containers, max_leaves=4), seed=st.integers(0, 99))
def test_random_schemas(backends: Backends, vocabulary: Vocabulary, schema: Any, seed: int) -> None:
    hold(backends, vocabulary, schema, seed, 3)
