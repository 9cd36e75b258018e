"""Reports on constraints without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from byte_vocabulary import BYTES

from engine.default_model import checkpoint_path
from guided.backends import Backends
from guided.check.check import check, check_all, kind_of, vocabulary_of
from guided.errors import InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"not": {"type": "string"}},
        "f": {"type": "string", "format": "semver"},
    },
    "required": ["f"],
}


@pytest.fixture(scope="module")
def backends() -> Backends:
    return Backends(BYTES)


def test_an_accepted_schema(backends: Backends) -> None:
    report = check("x.json", json.dumps(SCHEMA), backends, samples=3)
    assert (report.accepted, report.backend, report.kind) == (
        True,
        "llguidance",
        "JSON schema",
    )
    assert report.not_enforced == ["/properties/f/format"]
    assert report.least_tokens == len('{"f":""}') + 1
    assert report.compile_seconds > 0
    assert len(set(report.samples)) > 1
    for sample in report.samples:
        jsonschema.validate(json.loads(sample), SCHEMA)


def test_a_refused_schema_has_a_pointer_and_the_reasons_of_all(
    backends: Backends,
) -> None:
    report = check("x.regex", "a(?!a)b", backends)
    assert not report.accepted
    assert set(report.refusals) == {"llguidance", "xgrammar"}
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": "a(?!a)"}},
    }
    report = check("x.json", json.dumps(schema), backends)
    assert (report.accepted, report.checked) == (True, ["/properties/x/pattern"])
    assert not check("x.json", '{"type": "nosuch"}', backends).accepted


def test_a_regex(backends: Backends) -> None:
    report = check("-", "a{2}[0-9]\n", backends, samples=2, backend="outlines")
    assert (report.kind, report.backend, report.least_tokens) == (
        "regex",
        "outlines",
        4,
    )
    assert all(re.fullmatch("aa[0-9]", sample) for sample in report.samples)
    again = [
        check("-", "[a-z]{9}", backends, samples=2, seed=5).samples for _ in range(2)
    ]
    assert again[0] == again[1]


def test_the_notation_of_a_grammar_is_named(backends: Backends) -> None:
    report = check("-", 'root ::= "a" | "(" root ")"', backends, samples=1)
    assert (report.kind, report.backend) == ("GBNF grammar", "xgrammar")
    assert check("-", 'start: "a" start | "b"', backends).kind == "Lark grammar"


def test_a_caret_points_at_the_fault_in_a_grammar(backends: Backends) -> None:
    lines = check("-", 'start: digit+\ndigit: "1" ] "2"\n', backends).error.splitlines()
    assert "line 2, column 12" in lines[0]
    assert lines[-1].index("^") == lines[-2].index("]")


def test_a_constraint_that_takes_too_long_is_refused() -> None:
    [late] = check_all([("slow.json", json.dumps(SCHEMA))], BYTES, seconds=1e-4)
    assert not late.accepted
    assert "time limit" in late.error
    assert [
        report.backend for report in check_all([("-", "a{2}")], BYTES, seconds=100)
    ] == ["llguidance"]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", "", "json_schema"),
        ("a.lark", "", "grammar"),
        ("a.GBNF", "", "grammar"),
        ("a.regex", '{"type": "object"}', "regex"),
        ("-", ' {"type": "object"}', "json_schema"),
        ("-", "true", "json_schema"),
        ("-", 'start: "a"', "grammar"),
        ("a.txt", "?start.2: x", "grammar"),
        ("-", "[a-z]+://x", "regex"),
    ],
)
def test_the_kind_is_found(name: str, text: str, kind: str) -> None:
    assert kind_of(name, text) == kind


def test_the_vocabulary_of_a_model(tmp_path: Path, mistral_data: Path) -> None:
    assert vocabulary_of(checkpoint_path()) == vocabulary_of(
        checkpoint_path() / "tokenizer.json"
    )
    with pytest.raises(InvalidRequest, match="neither"):
        vocabulary_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="can't be read"):
        vocabulary_of(tmp_path)
