"""Measure decode steps of vLLM with random weights, in vLLM's environment. Reads a task
from the standard input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

WARM_UP = 8
"""Tokens of a row that are not counted, with the prefill."""


def seconds(
    llm: Any, task: dict[str, Any], rows: int, guided: bool, tokens: int
) -> float:
    """Return the seconds of `rows` requests with `tokens` tokens each."""
    params = []
    for row in range(rows):
        outputs = StructuredOutputsParams(json=task["schemas"][row]) if guided else None
        params.append(
            SamplingParams(
                max_tokens=tokens,
                seed=row,
                ignore_eos=not guided,
                structured_outputs=outputs,
            )
        )
    begun = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in task["prompts"][:rows]],
        params,
        use_tqdm=False,
    )
    return time.perf_counter() - begun


def main() -> None:
    task = json.load(sys.stdin)
    begun = time.perf_counter()
    llm = LLM(load_format="dummy", **task["options"])
    started = round(time.perf_counter() - begun, 2)
    found = []
    for rows in task["rows"]:
        for guided in (False, True):
            seconds(llm, task, rows, guided, WARM_UP)  # compiles the grammars
            few = seconds(llm, task, rows, guided, WARM_UP)
            many = seconds(llm, task, rows, guided, WARM_UP + task["steps"])
            rate = rows * task["steps"] / (many - few)
            way = "vLLM, guided" if guided else "vLLM"
            found.append(
                {
                    "rows": rows,
                    "way": way,
                    "tokens_per_second": round(rate, 1),
                    "start_seconds": started,
                }
            )
    Path(task["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
