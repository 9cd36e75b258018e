"""The code of docs/clients.md, as it stands there. `tests/server` uses the openai package for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SECTIONS = ["openai", "anthropic", "openai-agents", "pydantic-ai", "langchain-openai", "outlines", "ollama"]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page(run_section: Callable[[str], dict[str, Any]], shared: dict[str, Any], section: str) -> None:
    names = run_section(section)
    assert isinstance(names["person"], shared["Person"])
    for other in {"called", "answered", "native"} & names.keys():
        shared["Person"].model_validate(names[other])
