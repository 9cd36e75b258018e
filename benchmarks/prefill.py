"""Measure the prefill of prompts in the engine and in transformers' `generate`, in CPU
seconds of one thread.

`python -m benchmarks.prefill` makes a random model like Qwen3 (hidden 1,024, 12 layers,
151,936 tokens; 1.3 GB twice).
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.config import EngineConfig
from engine.default_model import checkpoint_path
from engine.llm import LLM
from engine.model.loader import prepare_model
from engine.sampling_params import SamplingParams

TOKENS = 24


def main() -> None:
    """Print the least time of several runs, and their ratio, for 8 and 32 prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    loaded = prepare_model(model, AutoTokenizer.from_pretrained(checkpoint_path()))
    engine = LLM(
        loaded,
        pool="inline",
        config=EngineConfig(max_model_len=64, enable_prefix_caching=False),
    )
    torch.set_num_threads(1)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for count in (8, 32):
        ids = torch.randint(6, 600, (count, TOKENS))
        ours, theirs = [], []
        for _ in range(args.runs):
            started = time.process_time()
            engine.generate(ids.tolist(), params, use_tqdm=False)
            ours.append(time.process_time() - started)
            started = time.process_time()
            with torch.inference_mode():
                reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=1,
                    do_sample=False,
                )
            theirs.append(time.process_time() - started)
        ratio = min(ours) / min(theirs)
        print(
            f"{count} prompts: engine {min(ours):.2f} s, transformers {min(theirs):.2f} s, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
