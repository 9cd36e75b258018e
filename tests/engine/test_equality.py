"""The engine's greedy output equals that of transformers, token by token, for four
model families and GPT-2."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model.loader import LoadedModel, prepare_model
from engine.sampling_params import SamplingParams

TIE = 1e-4
NEW_TOKENS = 48

SIZES: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        **SIZES,
        intermediate_size=96,
        num_key_value_heads=2,
        max_position_embeddings=128,
    ),
    "qwen3": Qwen3Config(
        **SIZES,
        intermediate_size=96,
        num_key_value_heads=1,
        head_dim=24,
        max_position_embeddings=128,
    ),
    "opt": OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=48, max_position_embeddings=128
    ),
    "mistral": MistralConfig(
        **SIZES,
        intermediate_size=96,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=13,
    ),
    "gpt2": GPT2Config(
        vocab_size=640, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=96
    ),
}


@dataclass
class Pair:
    """The same weights twice: transformers' own, and prepared for the engine."""

    reference: Any
    loaded: LoadedModel
    known: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)

    def expected(self, prompt: list[int]) -> tuple[list[int], int]:
        """transformers' greedy continuation, and how many of its tokens were decided
        clearly."""
        if tuple(prompt) not in self.known:
            self.known[tuple(prompt)] = self._generated(prompt)
        return self.known[tuple(prompt)]

    def _generated(self, prompt: list[int]) -> tuple[list[int], int]:
        result = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        clear = 0
        for scores in result.scores:
            best = scores[0].topk(2).values
            if best[0] - best[1] < TIE:
                break
            clear += 1
        return result.sequences[0, len(prompt) :].tolist(), clear


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast
) -> Pair:
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[request.param])
    config.bos_token_id, config.eos_token_id = (
        tiny_tokenizer.bos_token_id,
        tiny_tokenizer.eos_token_id,
    )
    config.pad_token_id = tiny_tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    return Pair(reference, prepare_model(model, tiny_tokenizer))


def prompts(count: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [
        torch.randint(6, 600, (length,), generator=generator).tolist()
        for length in lengths
    ]


def greedy(**others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, **others)


def check(pair: Pair, many: list[list[int]], outputs: list[list[list[int]]]) -> None:
    decided = 0
    for prompt, tokens in zip(many, outputs, strict=True):
        expected, clear = pair.expected(prompt)
        for one in tokens:
            assert one[:clear] == expected[:clear]
            if clear == len(expected):
                assert one == expected
        decided += clear
    assert decided > 0.8 * NEW_TOKENS * len(many), (
        "too many ties for this to show anything"
    )


def test_prefilled_in_chunks_and_scored(pair: Pair) -> None:
    many = prompts()
    config = EngineConfig(
        max_num_seqs=4,
        block_size=4,
        max_num_batched_tokens=11,
        num_blocks=60,
        max_model_len=120,
    )
    llm = LLM(pair.loaded, config=config)
    wanted = [
        greedy(n=1 + index % 2, prompt_logprobs=3 if index % 2 else None)
        for index in range(len(many))
    ]
    found = llm.generate(many, wanted, use_tqdm=False)
    assert llm.engine.stats.steps > NEW_TOKENS + sum(map(len, many)) // 11
    check(pair, many, [[one.token_ids for one in output.outputs] for output in found])
    for prompt, params, output in zip(many, wanted, found, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        expected = pair.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        first, *others = output.prompt_logprobs or ()
        assert first is None
        assert len(others) == len(prompt) - 1
        for row, token, entries in zip(expected, prompt[1:], others, strict=False):
            assert entries is not None
            assert entries[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
            best = [
                one.logprob
                for one in sorted(entries.values(), key=lambda one: one.rank)
            ]
            assert best[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_preempted_and_with_n(pair: Pair) -> None:
    many = prompts()
    config = EngineConfig(
        max_num_seqs=16, block_size=4, num_blocks=34, max_model_len=96
    )
    llm = LLM(pair.loaded, config=config)
    found = llm.generate(
        many, [greedy(n=1 + index % 3) for index in range(len(many))], use_tqdm=False
    )
    assert llm.engine.scheduler.num_preemptions > 3, (
        "the pool was meant to be too small"
    )
    assert [len(output.outputs) for output in found] == [1, 2, 3, 1, 2, 3, 1]
    check(pair, many, [[one.token_ids for one in output.outputs] for output in found])
    assert llm.engine.blocks.num_free == 34
