"""The code of docs/clients.md, as it stands there, against a real server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import PAGE

RESULTS = {
    "openai": {"person", "called", "answered"},
    "openai-agents": {"person"},
    "instructor": {"person"},
    "pydantic-ai": {"person", "native"},
    "langchain-openai": {"person"},
    "litellm": {"person"},
    "outlines": {"person"},
}
"""Sections, and the variables that are persons in the end."""


def test_every_section_is_tested(page: dict[str, str]) -> None:
    assert page.keys() == {"shared", *RESULTS}


@pytest.mark.parametrize("section", RESULTS)
def test_section(section: str, page: dict[str, str], shared: dict[str, Any]) -> None:
    names = dict(shared)
    exec(compile(page[section], str(PAGE), "exec"), names)
    for name in RESULTS[section]:
        assert isinstance(names[name], shared["Person"]), name
    if section == "langchain-openai":
        shared["Person"].model_validate(names["called"])
    if section == "outlines":
        assert re.fullmatch("20[0-9]{2}", names["year"])
