"""One exchange with the model: what was said, and the answer."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Call:
    """A function call."""

    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """Return the call as the chat template writes it."""
        return f"<tool_call>\n{json.dumps(asdict(self), ensure_ascii=False)}\n</tool_call>"


@dataclass
class Example:
    """One exchange. `turns` alternates user and assistant texts and ends with the user's."""

    turns: list[str]
    answer: str
    system: str | None = None
    chat: bool = True
    tools: list[dict[str, Any]] | None = None
    """The functions that the request offers."""
    call: Call | None = None
    """The model has called a function already, with this result."""
    result: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """The prompt as chat messages."""
        roles = ("user", "assistant")
        messages: list[dict[str, Any]] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.turns)]
        if self.call is not None:
            call = {"id": "call_1", "type": "function", "function": asdict(self.call)}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": self.result})
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages


def dumped(value: Any, style: str, spaces: random.Random | None = None) -> str:
    """JSON in one of three styles; with `spaces`, blanks and newlines are strewn in, at most three at a place."""
    if spaces is not None:
        text = json.dumps(value, ensure_ascii=False)

        def wider(match: re.Match[str]) -> str:
            more = "".join(spaces.choice("  \n") for _ in range(spaces.randint(1, 3)))
            return match[0] if match[0].startswith('"') or spaces.random() < 0.6 else match[0] + more

        return re.sub(r'"[^"]*"|, |: |[\[{]|(?<=[^\s,:])(?=[\]}])', wider, text)
    if style == "compact":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2 if style == "indented" else None)


def schema_of(value: Any, keyword: str = "object") -> dict[str, Any]:
    """The strict JSON Schema of a value: every key required, nothing else allowed."""
    if isinstance(value, dict):
        properties = {k: schema_of(v) for k, v in value.items()}
        return {"type": keyword, "properties": properties, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": names[type(value)]}
