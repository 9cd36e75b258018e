"""A real server process, and the address and schema that the tests of all packages use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # warnings of the packages
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no other addresses


@pytest.fixture(scope="session")
def page() -> dict[str, str]:
    """The Python code of each section of the page. That of "shared" precedes each of the others."""
    sections = re.split(r"^## (.+)\n", "## shared\n" + PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = zip(sections[::2], sections[1::2], strict=True)
    return {name: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for name, text in found}


@pytest.fixture(scope="session")
def shared(page: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What the examples share: `URL` (of a real server), `MODEL`, `KEY`, `TEXT` and `Person`."""
    names: dict[str, Any] = {"__name__": "clients"}
    exec(compile(page["shared"], str(PAGE), "exec"), names)
    with serving("--pool", "inline", GUIDED_API_KEY="sesame") as server:
        yield {**names, "URL": f"{server.url}/v1", "KEY": "sesame"}
