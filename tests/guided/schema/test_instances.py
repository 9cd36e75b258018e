"""Tests of the validation of listed values."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft3Validator, Draft202012Validator

from guided.schema.instances import enforcing


@pytest.mark.parametrize(
    ("schema", "value", "valid"),
    [
        ({"pattern": "^a$"}, "a", True),
        ({"pattern": "^a$"}, "a\n", False),
        ({"pattern": "^\\d$"}, "٣", False),
        ({"pattern": "^.$"}, "\u2028", False),
        ({"pattern": "^\\s$"}, "\ufeff", True),
        ({"pattern": "^[[]]$"}, "[]", True),
        ({"pattern": "^a$"}, 1, True),
        ({"patternProperties": {"^\\d$": False}}, {"٣": 1}, True),
        ({"patternProperties": {"^[[a]$": {"type": "string"}}}, {"[": 1}, False),
        ({"patternProperties": {"^\\d$": {}}, "additionalProperties": False}, {"3": 1}, True),
        ({"patternProperties": {"^\\d$": {}}, "additionalProperties": False}, {"٣": 1}, False),
        ({"multipleOf": 1.5}, 2**64, False),
        ({"multipleOf": 0.1}, 0.3, True),
        ({"format": "date"}, "2020-02-30", False),
        ({"format": "date"}, "2020-02-29", True),
        ({"format": "date"}, 1, True),
        ({"format": "company-id"}, "anything", True),
        ({"format": "regex"}, "^(a|[b-]+)*$", True),
        ({"format": "regex"}, "a**", False),
        ({"format": "regex"}, "(a", False),
        ({"format": "iri-reference"}, "/straße?q=1", True),
        ({"format": "iri"}, "/straße", False),
        ({"format": "uri-reference"}, "https://example.com/a", True),
        ({"format": "uri-template"}, "/users/{id}{?q,page*}", True),
        ({"format": "uri-template"}, "/users/{id", False),
        ({"format": "idn-email"}, "jörg@example.com", True),
        ({"format": "idn-hostname"}, "münchen.example", True),
        ({"format": "idn-hostname"}, "mün chen", False),
    ],
)
def test_patterns_and_formats(schema: dict[str, Any], value: Any, valid: bool) -> None:
    assert enforcing(Draft202012Validator)(schema).is_valid(value) is valid
    draft3 = {keyword.replace("multipleOf", "divisibleBy"): rule for keyword, rule in schema.items()}
    assert enforcing(Draft3Validator)(draft3).is_valid(value) is valid
