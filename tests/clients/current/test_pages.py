"""The code of docs/clients.md prints what the page says. `tests/server` uses the openai
package for more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SECTIONS = [
    "openai",
    "anthropic",
    "openai-agents",
    "pydantic-ai",
    "langchain-openai",
    "outlines",
    "ollama",
]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page(check_section: Callable[[str], None], section: str) -> None:
    check_section(section)


def test_all_sections_are_run(sections: dict[str, str]) -> None:
    in_other_environments = {"instructor", "litellm"}
    assert {*SECTIONS} | in_other_environments == {*sections} - {"shared", "Others"}
