"""The automaton accepts exactly the JSON of RFC 8259."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from guided.backends.json_syntax import START, State, complete, in_number, in_string, step

DOCUMENTS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


def read(text: str, spaces: bool = True) -> bool:
    state: State | None = START
    for character in text:
        state = step(state, character, spaces) if state is not None else None
    return state is not None and complete(state)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (json.JSONDecodeError, ZeroDivisionError):
        return False
    return True


@given(DOCUMENTS, st.sampled_from([None, 1]), st.booleans())
def test_documents_are_read(document: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    assert read(text) == (r"\ud" not in text)


@given(DOCUMENTS)
def test_without_spaces(document: Any) -> None:
    compact = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    assert read(compact, spaces=False)
    assert read(json.dumps(document, ensure_ascii=False), spaces=False) == (
        json.dumps(document, ensure_ascii=False) == compact
    )


@settings(max_examples=1500)
@given(st.text(alphabet='{}[],:"\\/ue+-.019tfnrlas \n\t\x01é', max_size=7))
def test_agrees_with_pythons_parser(text: str) -> None:
    assert read(text) == (is_json(text) and text == text.strip())


def test_what_the_others_get_wrong() -> None:
    for text in ('{"a":1,}', "[1,]", "1.e5", "-", "01", "-01", '"\t"', "+1", ".5", "1e", "nul", '"\\x"', "1 ", "{,}"):
        assert not read(text), text


def test_where_it_is() -> None:
    state: State | None = ("{", "colon")
    for character in ':"a':
        assert state is not None
        state = step(state, character)
    assert state is not None
    assert in_string(state)
    assert not in_number(state)
    assert in_number(("[", "1"))
