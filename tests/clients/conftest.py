"""A real server process, and the code of docs/clients.md.

Each folder is an environment of `make test-clients`: the pins of some packages exclude each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def pytest_configure() -> None:
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no other addresses
    os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}


def code(section: str) -> str:
    """Return the Python code of a section of the page. That of "shared" precedes each of the others."""
    sections = re.split(r"^## (.+)\n", "## shared\n" + PAGE.read_text(), flags=re.MULTILINE)[1:]
    text = sections[sections.index(section) + 1]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.fixture(scope="session")
def shared() -> Iterator[dict[str, Any]]:
    """What the examples share: `URL` (of a real server), `MODEL`, `KEY`, `TEXT` and `Person`."""
    names: dict[str, Any] = {"__name__": "clients"}
    exec(compile(code("shared"), str(PAGE), "exec"), names)
    with serving("--pool", "inline", GUIDED_API_KEY="sesame") as server:
        yield {**names, "URL": f"{server.url}/v1", "KEY": "sesame"}


@pytest.fixture(scope="session")
def run_section(shared: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Run the code of a section, as it stands in the page. Returns its variables."""

    def run(section: str) -> dict[str, Any]:
        names = dict(shared)
        exec(compile(code(section), str(PAGE), "exec"), names)
        return names

    return run
