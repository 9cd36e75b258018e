"""Values are recognized as valid exactly where a validator of the official meta-schema finds no error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import validator_for

from guided.schema.metaschema import Dialect

URIS = (
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
    *(f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 6, 7)),
)
KEYWORDS = (
    *("$id", "id", "$anchor", "$ref", "$schema", "$comment", "$vocabulary", "type", "enum", "const", "required"),
    *("minimum", "exclusiveMinimum", "multipleOf", "divisibleBy", "minLength", "maxItems", "uniqueItems", "pattern"),
    *("items", "prefixItems", "additionalItems", "contains", "properties", "patternProperties", "propertyNames"),
    *("allOf", "anyOf", "not", "extends", "disallow", "dependencies", "dependentRequired", "dependentSchemas", "$defs"),
)
SCALARS = st.sampled_from([None, True, False, 0, 1, -1, 1.0, 1.5, "string", "any", "a", "#a", "1", "a b"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("uri", URIS)
@given(keyword=st.sampled_from(KEYWORDS), value=VALUES)
def test_agrees_with_the_official_meta_schema(uri: str, keyword: str, value: Any) -> None:
    fault = Dialect.of({"$schema": uri}).fault(keyword, value)
    validator = validator_for({"$schema": uri})
    bounds = {"minimum": 0, "maximum": 1}  # draft 3 and 4: the exclusive bounds depend on them
    if validator(validator.META_SCHEMA).is_valid({**bounds, keyword: value}):
        assert fault is None
    elif fault is None:
        # The official validator also looks into subschemas; here they are checked as keywords of their own.
        assert any(isinstance(part, dict | list) for part in (value if isinstance(value, list) else [value]))
