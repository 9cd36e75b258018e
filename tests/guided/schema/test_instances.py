"""Tests of the validation of listed values."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft3Validator, Draft202012Validator

from guided.errors import UnsupportedConstraint
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
        ({"multipleOf": 1.5}, 2**64, False),
        ({"multipleOf": 0.1}, 0.3, True),
        ({"format": "date"}, "2020-02-30", False),
        ({"format": "date"}, "2020-02-29", True),
        ({"format": "date"}, 1, True),
        ({"format": "company-id"}, "anything", True),
    ],
)
def test_patterns_and_formats(schema: dict[str, Any], value: Any, valid: bool) -> None:
    assert enforcing(Draft202012Validator)(schema).is_valid(value) is valid
    draft3 = {keyword.replace("multipleOf", "divisibleBy"): rule for keyword, rule in schema.items()}
    assert enforcing(Draft3Validator)(draft3).is_valid(value) is valid


def test_a_format_that_can_t_be_checked_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match="regex"):
        enforcing(Draft202012Validator)({"format": "regex"}).is_valid("a")
