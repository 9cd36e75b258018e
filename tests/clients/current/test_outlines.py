"""outlines: `from_vllm` and `from_sglang`, which have a field of its own for grammars,
with every type."""

from __future__ import annotations

import re
from typing import Any, Literal

import openai
import outlines
import pytest


@pytest.fixture
def client(shared: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=shared["URL"], api_key=shared["KEY"], max_retries=0)


@pytest.mark.filterwarnings("ignore:SGLang grammar-based")
@pytest.mark.parametrize("make", [outlines.from_vllm, outlines.from_sglang])
def test_all_types(client: openai.OpenAI, shared: dict[str, Any], make: Any) -> None:
    model = make(client, shared["MODEL"])
    assert model("Which color?", Literal["red", "green"]) in ("red", "green")
    assert re.fullmatch("[ab]{4}", model("Which?", outlines.regex("[ab]{4}")))
    assert model("Yes or no?", outlines.cfg('start: "yes" | "no"')) in ("yes", "no")
    pieces = list(model.stream(shared["TEXT"], shared["Person"]))
    assert len(pieces) > 1
    person = shared["Person"].model_validate_json("".join(pieces))
    assert person == shared["PERSON"]
