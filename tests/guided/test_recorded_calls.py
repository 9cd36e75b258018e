"""Outputs of models as `canitoolcall` recorded them: 95 % of all, and 90 % of each
family, are read as it expects.

The others are calls that no mask allows (a missing end of a parameter, arguments before
the name), or `max_tokens` cut them: OpenAI's API has the part of a call that was
written.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from guided.constraint import Constraint
from guided.tools.formats import REASONING_FORMATS, Calls, Function, tool_format
from guided.tools.output_parser import OutputParser

FORMATS = {
    "DeepSeek-V3-0324": ("deepseek_r1", "think"),
    "DeepSeek-V3.1": ("deepseek_v3_1", "think"),
    "DeepSeek-V3.2": ("deepseek_v3_2", "think"),
    "DeepSeek-V4-Flash": ("deepseek_v4", "think"),
    "DeepSeek-V4.1-Flash": ("deepseek_v4_1", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "Kimi-K2": ("kimi", "think"),
    "Llama-3": ("llama", ""),
    "Llama-4": ("llama_4", ""),
    "gemma-4": ("gemma_4", "gemma_4"),
    "Magistral-Small-2506": ("tekken", "think"),
    "Mistral-7B-Instruct-v0.3": ("mistral", "mistral"),
    "mistralai/": ("tekken", "mistral"),
    "gpt-oss": ("harmony", "harmony"),
    "GLM": ("glm_4_7", "think"),
    "Qwen3.": ("qwen_3_5", "think"),
    "Qwen3-Coder": ("qwen_3_5", "think"),
    "Qwen3-": ("hermes", "think"),
}
"""Part of a model's name -> its formats of calls and of thoughts. The first one
counts."""


def read(
    fixture: Any, prompt: str, formats: tuple[str, str], step: int
) -> dict[str, Any]:
    """Return what the parser reads of an output that grows by `step` characters each
    time."""
    tools, reasoning = tool_format(formats[0]), REASONING_FORMATS.get(formats[1])
    assert tools is not None
    thinking = reasoning is not None and prompt.rstrip().endswith(
        reasoning.begin.rstrip()
    )
    if (
        reasoning is not None
        and prompt.rstrip().endswith(reasoning.end)
        and not (reasoning.answer or reasoning.finish)
    ):
        reasoning = None
    described = [tool["function"] for tool in fixture.tools]
    functions = [
        Function(each["name"], Constraint.json_schema(each.get("parameters") or {}))
        for each in described
    ]
    anywhere = Calls(tools, functions, required=False, parallel=True).anywhere(
        reasoning
    )
    parser = OutputParser(
        reasoning,
        thinking=thinking,
        tools=tools,
        functions=functions,
        anywhere=anywhere,
    )
    output = fixture.raw_output
    pieces = [
        piece
        for end in range(step, len(output), step)
        for piece in parser.feed(output[:end], finished=False)
    ]
    texts: dict[str, str] = defaultdict(str)
    calls: list[list[str]] = []
    for piece in pieces + parser.feed(output, finished=True):
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.index][1] += piece.text
        else:
            texts[piece.kind] += piece.text
    return {
        "content": texts["text"].strip(),
        "reasoning": texts["reasoning"].strip(),
        "calls": calls,
    }


def is_expected(found: dict[str, Any], expected: Any) -> bool:
    try:
        calls = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    except ValueError:
        return False
    texts = [
        (text or "").strip() for text in (expected.content, expected.reasoning_content)
    ]
    wanted = [(call.name, dict(call.arguments)) for call in expected.tool_calls]
    return [found["content"], found["reasoning"]] == texts and calls == wanted


def test_recorded_outputs_are_read_as_expected() -> None:
    recorded = pytest.importorskip("canitoolcall.fixtures")
    families = recorded.load_families()
    counts: dict[str, list[bool]] = defaultdict(list)
    for fixture in recorded.load_fixtures():
        model = fixture.models[0]
        formats = next(
            (found for part, found in FORMATS.items() if part in model), None
        )
        if fixture.expected is None:
            continue
        assert formats is not None, model
        default = families[fixture.family].reference_for(model)
        prompt = (
            fixture.generation_prompt
            or (default and default.default_generation_prompt)
            or ""
        )
        whole = read(fixture, prompt, formats, len(fixture.raw_output) + 1)
        assert read(fixture, prompt, formats, 1) == whole, fixture.id
        counts[fixture.family].append(is_expected(whole, fixture.expected))
    shares = {family: sum(found) / len(found) for family, found in counts.items()}
    everything = [is_read for found in counts.values() for is_read in found]
    print({family: f"{sum(found)} of {len(found)}" for family, found in counts.items()})
    print(f"{sum(everything)} of {len(everything)}")
    assert len(shares) == 9
    assert min(shares.values()) >= 0.9, shares
    assert sum(everything) >= 0.95 * len(everything)
