"""instructor: function calls and schemas, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import instructor
import openai
import pytest


def test_the_page(check_section: Callable[[str], None]) -> None:
    check_section("instructor")


@pytest.fixture(params=["TOOLS", "JSON_SCHEMA"])
def client(request: pytest.FixtureRequest, shared: dict[str, Any]) -> Any:
    inner = openai.OpenAI(base_url=shared["URL"], api_key=shared["KEY"], max_retries=0)
    return instructor.from_openai(inner, mode=instructor.Mode[request.param])


def test_whole_and_streamed(client: Any, shared: dict[str, Any]) -> None:
    asked = {
        "model": shared["MODEL"],
        "messages": [{"role": "user", "content": shared["TEXT"]}],
        "max_retries": 0,
    }
    person = client.chat.completions.create(**asked, response_model=shared["Person"])
    assert person.model_dump() == shared["PERSON"].model_dump()
    *_, last = client.chat.completions.create_partial(
        **asked, response_model=shared["Person"]
    )
    assert last.model_dump() == person.model_dump()
