"""outlines: `from_openai` with schemas, `from_vllm` with every type that it has."""

from __future__ import annotations

import re
from typing import Any, Literal

import openai
import outlines
import pytest


@pytest.fixture
def client(shared: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=shared["URL"], api_key=shared["KEY"], max_retries=0)


def test_what_vllm_has_besides(client: openai.OpenAI, shared: dict[str, Any]) -> None:
    model = outlines.from_vllm(client, shared["MODEL"])
    assert model("Which color?", Literal["red", "green"]) in ("red", "green")
    assert re.fullmatch("[ab]{4}", model("Which?", outlines.regex("[ab]{4}")))
    assert model("Yes or no?", outlines.cfg('start: "yes" | "no"')) in ("yes", "no")
    pieces = list(model.stream(shared["TEXT"], shared["Person"]))
    assert len(pieces) > 1
    shared["Person"].model_validate_json("".join(pieces))  # the schema allows more properties
