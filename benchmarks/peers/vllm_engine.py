"""vLLM's whole engine, guided in one way, in a process of its own: `python -m benchmarks.peers.vllm_engine WAY MODEL`.

WAY is `unguided`, `own:BACKEND` (vLLM's structured outputs), `plugin:ray` or `plugin:inline` (ours). It reads requests
as lines of JSON, a batch a line, and answers each line with one: what it generated, and how long that took. Imports
nothing that vLLM's environment lacks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

__all__ = ["PLUGIN"]

PLUGIN = "guided.integrations.vllm.processor:GuidedLogitsProcessor"
MAX_MODEL_LEN = 1024


def engine(way: str, model: str, dummy: bool, max_num_seqs: int) -> Any:
    """vLLM's `LLM`: its engine core is a process of its own."""
    from vllm import LLM

    kind, _, backend = way.partition(":")
    options: dict[str, Any] = {}
    if kind == "own":
        options["structured_outputs_config"] = {"backend": backend, "disable_any_whitespace": True}
    if kind == "plugin":
        options["logits_processors"] = [PLUGIN]
        options["additional_config"] = {"guided": {"pool": backend, **({"num_actors": 2} if backend == "ray" else {})}}
    if dummy:
        options["load_format"] = "dummy"
    return LLM(
        model=model,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **options,
    )


def params(way: str, request: dict[str, Any]) -> Any:
    """Sampling parameters of one request: `max_tokens`, `seed`, and at most one of `json`, `regex`."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    usual = {"max_tokens": request["max_tokens"], "temperature": request["temperature"], "seed": request["seed"]}
    kind = way.partition(":")[0]
    constraint = {name: request[name] for name in ("json", "regex") if name in request}
    if kind == "unguided":
        return SamplingParams(**usual, ignore_eos=True)
    if kind == "own":
        return SamplingParams(**usual, structured_outputs=StructuredOutputsParams(**constraint))
    extra = {"regex": request["regex"]} if "regex" in request else {"json_schema": request["json"]}
    if "json_schema" in extra:
        extra["whitespace_pattern"] = ""
    return SamplingParams(**usual, extra_args={**extra, "backend": "llguidance"})


def main() -> None:
    way, model, dummy, max_num_seqs = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = engine(way, model, dummy == "dummy", int(max_num_seqs))
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        requests = json.loads(line)
        prompts = [request["prompt"] for request in requests]
        asked = [params(way, request) for request in requests]
        started = time.perf_counter()
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - started
        found = [
            {"text": one.text, "tokens": len(one.token_ids), "finish_reason": one.finish_reason}
            for one in (output.outputs[0] for output in outputs)
        ]
        answers.write(json.dumps({"seconds": seconds, "answers": found}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
