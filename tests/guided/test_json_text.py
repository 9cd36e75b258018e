"""JSON is measured before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided.json_text import MAX_NUMBER_LENGTH, JsonError, JsonTooLarge, loads

DOCUMENTS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.sampled_from('a\\"[]{},:1é狐\ud800\n ')),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.text(st.sampled_from('a\\",]'), max_size=4), inner, max_size=4
        ),
    ),
    max_leaves=30,
)


def size(document: Any) -> tuple[int, int]:
    """Values, and levels of brackets."""
    if not isinstance(document, dict | list):
        return 1, 0
    inner = [
        size(each)
        for each in (document.values() if isinstance(document, dict) else document)
    ]
    return 1 + sum(values for values, _ in inner), 1 + max(
        (depth for _, depth in inner), default=0
    )


def read(text: str | bytes, max_values: int = 10**6, max_nesting: int = 100) -> Any:
    return loads(text, max_values=max_values, max_nesting=max_nesting)


@given(DOCUMENTS, st.sampled_from([None, 1]), st.booleans())
def test_well_formed_text_is_read_as_by_python(
    document: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    assert read(text) == json.loads(text)
    if ascii_only:
        assert read(text.encode()) == json.loads(text)


@given(DOCUMENTS)
def test_limits_are_exact(document: Any) -> None:
    text = json.dumps(document)
    values, depth = size(document)
    # an empty container counts as one that has a value
    empty = text.count("[]") + text.count("{}")
    read(text, values + empty, max(depth, 1))
    if depth:
        with pytest.raises(JsonTooLarge, match=f"deeper than {depth - 1} levels"):
            read(text, max_nesting=depth - 1)
    if values > 1:
        with pytest.raises(JsonTooLarge, match=f"more than {values - 1} values"):
            read(text, values - 1)


def test_strings_are_not_measured() -> None:
    for tail in (
        r'\"[[[[",[0]]',
        r'\\",[[0]]]',
        r'\\\\\"[[[",12345678]',
        "9" * 200 + '",12345678]',
    ):
        text = '["x' + tail
        assert read(text, max_nesting=3) == json.loads(text)
    with pytest.raises(JsonTooLarge, match="deeper"):
        read(r'["x\\",[[[0]]]]', max_nesting=3)
    with pytest.raises(JsonTooLarge, match="a number"):
        read("9" * (MAX_NUMBER_LENGTH + 1))
    assert read("9" * MAX_NUMBER_LENGTH) == int("9" * MAX_NUMBER_LENGTH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1,]", "at character"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        (b'"\xff"', "not UTF-8"),
        ('["a"]'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf[]", "BOM"),
    ],
)
def test_what_is_not_json(text: str | bytes, message: str) -> None:
    with pytest.raises(JsonError, match=message) as caught:
        read(text)
    assert not isinstance(caught.value, JsonTooLarge)


@pytest.mark.parametrize(
    "piece", ["[", "{", '{"a":', "0,", '"",', '\\"', '"', "[],", "9"]
)
def test_large_texts_are_refused_without_parsing(piece: str) -> None:
    with pytest.raises(JsonError):
        read("[" + piece * 1_000_000, max_values=1000)
