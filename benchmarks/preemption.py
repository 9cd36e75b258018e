"""Measure what a preemption costs: `python -m benchmarks.preemption`.

A preempted sequence is computed again. Swapping would copy its blocks to main memory and back instead. Prints the time
of either for one block, and how much slower the engine is with a KV cache that holds half of what runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engine_throughput import prompts
from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.kv_cache import KVCache
from engine.llm import LLM
from engine.model_loader import LoadedModel, load_model
from engine.sampling_params import SamplingParams

BLOCK = 16


def best(run: Callable[[], object], repeat: int) -> float:
    """Return the seconds of the fastest run."""
    found: list[float] = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def copy_seconds(model: LoadedModel, repeat: int) -> float:
    """Return the time of copying a block to another one, and back."""
    cache = KVCache(model.layers, 64, BLOCK, model.dtype, model.device)
    return 2 * best(lambda: cache.copy_blocks([(0, 1)]), repeat * 20)


def recompute_seconds(model: LoadedModel, repeat: int) -> float:
    """Return the time of computing a block as part of a prefill of 256 tokens."""
    config = EngineConfig(max_model_len=512, block_size=BLOCK, enable_prefix_caching=False)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with LLM(model, config=config) as llm:
        prompt = [300 + place % 1000 for place in range(256)]
        return best(lambda: llm.generate(prompt, one, use_tqdm=False), repeat) * BLOCK / len(prompt)


def pressed(model: LoadedModel, batch: int, new_tokens: int, share: float, prefix_cache: bool) -> tuple[float, int]:
    """Return tokens/s and preemptions with a cache for a share of what a batch needs."""
    many = prompts(batch, model.vocabulary.vocab_size)
    need = sum(-(-(len(one) + new_tokens) // BLOCK) for one in many)
    config = EngineConfig(
        max_num_seqs=batch, max_model_len=256, block_size=BLOCK, num_blocks=max(16, int(need * share)),
        enable_prefix_caching=prefix_cache,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    with LLM(model, config=config) as llm:
        llm.generate(many[:1], SamplingParams(max_tokens=1), use_tqdm=False)
        seconds = best(lambda: llm.generate(many, params, use_tqdm=False), 1)
        return batch * new_tokens / seconds, llm.engine.scheduler.num_preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="checkpoint directory")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(str(args.model), device="cpu")
    copied, computed = copy_seconds(model, args.repeat), recompute_seconds(model, args.repeat)
    print(f"a block of {BLOCK} tokens: computed again {computed * 1e6:.0f} us, copied twice {copied * 1e6:.0f} us")
    for share, prefix_cache in ((1.1, True), (0.75, True), (0.5, True), (0.5, False)):
        rate, preemptions = pressed(model, args.batch, args.new_tokens, share, prefix_cache)
        cached = "with" if prefix_cache else "without"
        print(f"cache for {share:.0%}, {cached} prefix cache: {rate:.0f} tokens/s, {preemptions} preemptions")


if __name__ == "__main__":
    main()
