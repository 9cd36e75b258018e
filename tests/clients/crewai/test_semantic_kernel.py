"""semantic-kernel: an output type, and an agent loop that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.functions import KernelArguments, kernel_function


class Weather:
    """A plugin."""

    @kernel_function(description="Return the weather.")
    def get_weather(self, city: str) -> str:
        return f"sunny in {city}"


def test_values(model_of: Callable[..., Any], shared: dict[str, Any]) -> None:
    service = model_of(
        "semantic-kernel",
        {"OpenAIChatCompletion": OpenAIChatCompletion, "openai": openai},
    )

    def answer(question: str, **options: Any) -> str:
        agent = ChatCompletionAgent(service=service, name="clerk", **options)
        return str(asyncio.run(agent.get_response(messages=question)).content)

    settings = OpenAIChatPromptExecutionSettings(response_format=shared["Person"])
    person = shared["Person"].model_validate_json(
        answer(shared["TEXT"], arguments=KernelArguments(settings=settings))
    )
    assert person == shared["PERSON"]
    assert answer(shared["QUESTION"], plugins=[Weather()]) == shared["ANSWER"]
