"""crewai: an answer with an output model."""

from __future__ import annotations

from typing import Any

import crewai


def test_response_model(shared: dict[str, Any]) -> None:
    address = {"base_url": shared["URL"], "api_key": shared["KEY"]}
    model = crewai.LLM(f"openai/{shared['MODEL']}", **address, max_tokens=200)
    person = model.call(shared["TEXT"], response_model=shared["Person"])
    assert person == shared["PERSON"]
