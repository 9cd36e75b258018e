"""A real server process, and the code of docs/clients.md.

Each folder is an environment of `make test-clients`: the pins of some packages exclude
each other.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def pytest_configure() -> None:
    # no other addresses
    os.environ |= {
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    os.environ |= {
        "CREWAI_DISABLE_TELEMETRY": "true",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
    }
    os.environ |= {"OTEL_SDK_DISABLED": "true"}


@pytest.fixture(scope="session")
def sections() -> dict[str, str]:
    """Return the Python code of each section of the page. That of "shared" precedes the
    others."""
    headings = re.split(
        r"^## (.+)\n", "## shared\n" + PAGE.read_text(), flags=re.MULTILINE
    )[1:]
    texts = zip(headings[::2], headings[1::2], strict=True)
    return {
        heading: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        for heading, text in texts
    }


@pytest.fixture(scope="session")
def shared(sections: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What the examples share: `URL` (of a real server), `MODEL`, `KEY`, `TEXT` and
    `Person`. `PERSON` is in `TEXT`.

    Agents with the tool `get_weather` are asked `QUESTION`, and end with `ANSWER`.
    """
    names: dict[str, Any] = {"__name__": "clients"}
    exec(compile(sections["shared"], str(PAGE), "exec"), names)
    names["PERSON"] = names["Person"](name="Anna Weber", age=47, city="Hamburg")
    names |= {
        "QUESTION": "What is the weather in Lisbon?",
        "ANSWER": "Sunny in Lisbon.",
    }
    with serving("--pool", "inline", GUIDED_API_KEY="sesame") as server:
        yield {**names, "URL": f"{server.url}/v1", "KEY": "sesame"}


@pytest.fixture(scope="session")
def check_section(
    sections: dict[str, str], shared: dict[str, Any]
) -> Callable[[str], None]:
    """Run the code of a section, as it stands in the page, and compare what it prints
    with the lines after `# >`."""

    def check(section: str) -> None:
        code = sections[section]
        stated = re.findall(r"^# > (.*)$", code, re.MULTILINE)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), dict(shared))
        assert printed.getvalue().splitlines() == stated
        assert stated

    return check


@pytest.fixture(scope="session")
def model_of(shared: dict[str, Any]) -> Callable[..., Any]:
    """Evaluate the code for a package in the table at the end of the page, with the
    names that it imports."""

    def evaluate(package: str, names: dict[str, Any]) -> Any:
        [code] = re.findall(
            rf"^\| {package} \| `(.*?)`", PAGE.read_text(), re.MULTILINE
        )
        return eval(code, {**shared, **names})

    return evaluate


@pytest.fixture(scope="session")
def get_weather() -> Callable[[str], str]:
    """The tool of the agents."""

    def get_weather(city: str) -> str:
        """Return the weather.

        Args:
            city: Its name.
        """
        return f"sunny in {city}"

    return get_weather
