"""Patterns of JSON Schema mean what they mean to JavaScript without the flag `u`."""

from __future__ import annotations

import pytest
from byte_vocabulary import BYTES

from guided.backends import Backends
from guided.constraint import Constraint
from guided.errors import InvalidConstraint
from guided.schema import string_pattern
from guided.schema.document import parse
from guided.schema.ecma import translate
from guided.schema.validation import Validator

BACKENDS = Backends(BYTES)
TEXTS: list[str] = [
    "a-b.c@d-e",
    "a@",
    "-_ ",
    "a",
    "-",
    "5",
    "b",
    "/",
    "--",
    ".",
    "]",
    "x",
    "xa",
    "x{a",
    "{12}",
    "{}",
    "a{,2}",
    "aa",
    "aabb",
    "ab",
    "a]",
    "}a{",
    "[",
    "&~",
    "~ab",
    "\\",
    "\b",
    "B",
    "\u0000",
    "\u0001",
    "\u0007",
    "\n",
    "J",
    '_-"<e\u00e9',
    "_<e-",
    "x4",
    "u00",
    "/$",
    "${A_B}",
    "$A",
    "%",
    "0",
    "_",
    "p",
]
ANNEX_B: list[tuple[str, list[str]]] = [
    (r"^[\w-\.]+@[\w-]+$", ["a-b.c@d-e"]),
    (r"^[\s-_]+$", ["-_ ", "-", "--", "\n", "_"]),
    (r"^[a-\d]$", ["a", "-", "5", "0"]),
    (r"^[--/]+$", ["-", "/", "--", "."]),
    (r"^\x{a", ["x{a"]),
    (r"^{\d+}$", ["{12}"]),
    (r"^a{,2}$", ["a{,2}"]),
    (r"^a{1,}b{2}$", ["aabb"]),
    (r"^a]$", ["a]"]),
    (r"^}a{$", ["}a{"]),
    (r"^[[]$", ["["]),
    (r"^[a&&b~~]+$", ["a", "b", "aa", "aabb", "ab", "&~", "~ab"]),
    (r"^[\b]$", ["\b"]),
    (r"^[\B]$", ["B"]),
    (r"^\0$", ["\u0000"]),
    (r"^[\0-\07]$", ["\u0000", "\u0001", "\u0007"]),
    (r"^\cJ$", ["\n"]),
    (r"^[\1-\7\101-\102]$", ["B", "\u0001", "\u0007"]),
    (r"^\c{2}$|^[\c/\_]$", ["/", "\\", "_"]),
    (r"^[\c1\c_%\c]$", ["\\", "%"]),
    (r"^[\cA-\cJ]$", ["\b", "\u0001", "\u0007", "\n"]),
    (r"^\_\-\"\<\e\é$", ['_-"<e\u00e9']),
    (r"^[\_\-\<\e]+$", ["-", "--", "_<e-", "_"]),
    (r"^\x4$", ["x4"]),
    (r"^\u00$", ["u00"]),
    (r"^\a$", ["a"]),
    (r"^\/\$$", ["/$"]),
    (r"^\${[A-Z_]+}$", ["${A_B}"]),
    (r"^[%-\w]$", ["a", "-", "5", "b", "x", "B", "J", "%", "0", "_", "p"]),
    (r"^\p$", ["p"]),
]
"""Pattern -> those of `TEXTS` for which `new RegExp(pattern).test(text)` is true in
Node 20."""


@pytest.mark.parametrize(("pattern", "matching"), ANNEX_B)
def test_the_mask_and_the_check_read_annex_b(pattern: str, matching: list[str]) -> None:
    written = translate(pattern)
    validator = Validator({"pattern": written})
    assert [text for text in TEXTS if string_pattern.matches(written, text)] == matching
    assert [text for text in TEXTS if validator.violation(text) is None] == matching
    assert translate(written) == written


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[a-z0-9_-]{1,63}$",
        r"^[-+.\w]*\.[^\s\]]+?$",
        r"^(?=.*\d)(?!x)(?:a|b){2,}$",
        r"^\p{L}\u{41}\u0041\x41\t\b[\p{Lu}\-\]]$",
        r"^(?<year>\d{4})\k<year>(x)\2$",
        r"^\^\$\.\*\+\?\(\)\[\]\{\}\|\/\\$",
    ],
)
def test_what_is_valid_with_the_flag_u_stays(pattern: str) -> None:
    assert translate(pattern) == pattern


def test_surrogates_and_any_character_as_javascript_writes_them() -> None:
    assert (
        translate(r"^[\ud83d\ude00-\ud83d\ude4f][^]$")
        == "^[\U0001f600-\U0001f64f][\\s\\S]$"
    )


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "a**", r"x\A", r"x\Z", "[]", "a\\", "x{2,1}", "[b-a]"]
)
def test_what_is_malformed_or_an_anchor_elsewhere_stays_refused(pattern: str) -> None:
    assert translate(pattern) == pattern
    with pytest.raises(InvalidConstraint):
        BACKENDS["llguidance"].compile(
            Constraint.json_schema(
                {"type": "string", "pattern": pattern}, strict_schema=True
            )
        )


def test_every_pattern_of_a_document_is_translated() -> None:
    schema = {
        "patternProperties": {r"^[\w-:]$": {"pattern": "^{a}"}},
        "properties": {"pattern": {"not": {"pattern": r"\_"}}},
        "const": {"pattern": "{"},
    }
    assert parse(schema, "json_schema", []) == {
        "patternProperties": {r"^[\w\-:]$": {"pattern": r"^\{a\}"}},
        "properties": {"pattern": {"not": {"pattern": "_"}}},
        "const": {"pattern": "{"},
    }
