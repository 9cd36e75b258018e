"""Random sets of functions with nested schemas, and a random model: a call is one of them and valid, or no call at all.

`--hypothesis-profile fuzz` runs 500 sets.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from benchmarks.random_constraints.schemas import random_schema
from benchmarks.random_constraints.validation import problem
from guided.tools.formats import TOOL_FORMATS, ToolFormat

SETTINGS = settings(
    max_examples=max(1, settings.default.max_examples // 4),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
SHORT = ToolFormat(call=("<{name}>", "</>"), trigger="<", marks=("?",))
"""Its calls begin with one frequent token, so the random model makes calls of its own accord."""
REFUSALS = {
    *("invalid_constraint", "unsupported_constraint", "constraint_too_large", "constraint_compile_timeout"),
    "context_length_exceeded",  # the functions are part of the prompt
}


def random_tools(source: random.Random) -> list[dict[str, Any]]:
    tools = []
    for number in range(source.randint(1, 5)):
        while (schema := random_schema(source).value).get("type", "object") != "object" or len(schema) < 2:
            pass
        tools.append({"type": "function", "function": {"name": f"f{number}", "parameters": schema}})
    return tools


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_each_call_is_valid(
    client_with: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setitem(TOOL_FORMATS, "short", SHORT)
    formats = ["short"] if choice == "auto" else [*TOOL_FORMATS]
    clients = {name: client_with(tool_format=name) for name in formats}
    begin = clients["short"].app.state.context.engine.tokenizer.encode("<", add_special_tokens=False)  # type: ignore[attr-defined]
    seen: Counter[str] = Counter()

    @SETTINGS
    @given(st.integers(0, 2**32), st.sampled_from(formats))
    def check(seed: int, name: str) -> None:
        source = random.Random(seed)
        tools = random_tools(source)
        body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, "tool_choice": choice, "seed": seed}
        body |= {"max_tokens": 200, "logit_bias": {begin[0]: 5}}
        while (answer := clients[name].post("/v1/chat/completions", json=body)).status_code == 400:
            error = answer.json()["error"]
            assert error["code"] in REFUSALS, error
            at = re.fullmatch(r"tools(?:\[(\d)\]\.function\.parameters)?", error["param"])
            assert at, error
            del tools[int(at[1] or 0)]  # a schema without any value is found with all others: it may be another one
            seen["refused schemas"] += 1
            if not tools:
                return
        if answer.status_code == 500:  # a keyword that is checked, not enforced
            assert answer.json()["error"]["code"] == "constraint_not_met", answer.text
            seen["not met"] += 1
            return
        assert answer.status_code == 200, answer.text
        [each] = answer.json()["choices"]
        message, finished = each["message"], each["finish_reason"] == "tool_calls"
        seen[each["finish_reason"]] += 1
        assert SHORT.trigger not in (message["content"] or "") or name != "short"
        calls = message.get("tool_calls", [])
        for call in calls if finished else calls[:-1]:
            function = call["function"]
            schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == function["name"])
            assert problem(function["arguments"], {**schema, "type": "object"}) is None, (schema, function)
            seen["valid calls"] += 1

    check()
    print(dict(seen))
    assert seen["valid calls"]
