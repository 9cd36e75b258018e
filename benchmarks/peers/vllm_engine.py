"""Run vLLM's whole engine with one kind of guidance, as a child process of `benchmarks.vllm_plugin` and
`benchmarks.engine_throughput`.

The arguments are WAY, MODEL, `dummy` or `real` weights, the batch size, and the type of the weights. WAY is `unguided`,
`own:BACKEND` (vLLM's structured outputs) or `switch:POOL` (with `GUIDED_VLLM=1`).
A command is a list of requests, and its answer is what the engine generated and the time that it took. Imports only
what vLLM's environment has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks.child_process import answer_writer

MAX_MODEL_LEN = 1024


def engine(way: str, model: str, dummy: bool, max_num_seqs: int, dtype: str) -> Any:
    """Return vLLM's `LLM`. Its engine core is another process."""
    kind, _, backend = way.partition(":")
    if kind == "switch":
        os.environ["GUIDED_VLLM"] = "1"
    from vllm import LLM

    options: dict[str, Any] = {}
    if kind in ("own", "switch"):
        named = backend if kind == "own" else "guidance"
        options["structured_outputs_config"] = {"backend": named, "disable_any_whitespace": True}
    if kind == "switch":
        options["additional_config"] = {"guided": {"pool": backend, **({"num_actors": 2} if backend == "ray" else {})}}
    if dummy:
        options["load_format"] = "dummy"
    return LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **options,
    )


def params(way: str, request: dict[str, Any]) -> Any:
    """Return the sampling parameters of a request: `max_tokens`, `seed`, and at most one of `json` and `regex`."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    usual = {"max_tokens": request["max_tokens"], "temperature": request["temperature"], "seed": request["seed"]}
    constraint = {name: request[name] for name in ("json", "regex") if name in request}
    if way == "unguided":
        return SamplingParams(**usual, ignore_eos=True)
    return SamplingParams(**usual, structured_outputs=StructuredOutputsParams(**constraint))


def main() -> None:
    way, model, dummy, max_num_seqs, dtype = sys.argv[1:]
    write = answer_writer()
    llm = engine(way, model, dummy == "dummy", int(max_num_seqs), dtype)
    write({"ready": True})
    for line in sys.stdin:
        requests = json.loads(line)
        prompts = [request["prompt"] for request in requests]  # text, or {"prompt_token_ids": ...}
        sampling = [params(way, request) for request in requests]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        found = [
            {"text": one.text, "tokens": len(one.token_ids), "finish_reason": one.finish_reason}
            for one in (output.outputs[0] for output in outputs)
        ]
        write({"seconds": seconds, "answers": found})


if __name__ == "__main__":
    main()
