"""guidance: both models. Their grammars come as `guided_grammar` and
`structured_outputs`, or as `ebnf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import guidance
import pytest
from guidance.models import experimental


@pytest.fixture(params=["VLLMModel", "SglangModel"])
def write(
    request: pytest.FixtureRequest, model_of: Callable[..., Any], shared: dict[str, Any]
) -> Callable[[Any], dict[str, Any]]:
    def run(answer: Any) -> Any:
        model = model_of(
            "guidance", {"VLLMModel": getattr(experimental, request.param)}
        )
        with guidance.user():
            model += shared["TEXT"]
        with guidance.assistant():
            model += answer
        return model

    return run


def test_values(write: Callable[[Any], Any], shared: dict[str, Any]) -> None:
    age = guidance.gen("age", regex="[0-9]{2}")
    city = guidance.select(["Lisbon", "Hamburg"], name="city")
    answer = write("age: " + age + ", city: " + city)
    assert (answer["age"], answer["city"]) == ("47", "Hamburg")
    person = write(guidance.json("person", schema=shared["Person"]))["person"]
    assert shared["Person"].model_validate_json(person) == shared["PERSON"]
