"""Guided decoding from a script: `python examples/offline.py [MODEL]`. Each prompt has
its own constraint.

The masks are computed in Ray actors, which start with the first constraint: some 5 s,
and 1.2 GB of memory. `pool="inline"` computes them in this process, without isolation.
"""

from __future__ import annotations

import sys
from typing import Any

from engine import LLM, SamplingParams
from engine.default_model import checkpoint_path

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "Extract name, age and city as JSON. Anna Weber is 47 years old and lives in Hamburg.",
        {"json_schema": PERSON},
    ),
    (
        "The meeting takes place on 2031-05-17 in Oslo. Extract the date.",
        {"regex": r"\d{4}-\d{2}-\d{2}"},
    ),
    (
        "Classify the sentiment: positive, negative. The hotel is wonderful.",
        {"choice": ["positive", "negative"]},
    ),
    (
        "Write 4 plus 3 as an expression.",
        {"grammar": 'root ::= [1-9] (" " [-+] " " [1-9])+'},
    ),
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(checkpoint_path())
    messages = [[{"role": "user", "content": prompt}] for prompt, _ in REQUESTS]
    params = [
        SamplingParams(temperature=0, max_tokens=100, **constraint)
        for _, constraint in REQUESTS
    ]
    with LLM(model) as llm:
        for output in llm.chat(messages, params):
            print(f"{output.backend}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
