"""Tiny checkpoints of the model families that people serve, with scalars and layers as
published ones have.

`python -m tests.support.model_families` writes the table of docs/models.md.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model import gathered_attention
from engine.model.attention import UnsupportedModelError
from engine.model.gathered_attention import Scores, Span
from engine.model.loader import LoadedModel, load_model
from engine.sampling_params import SamplingParams

VOCAB = 640
TIE = 1e-4
"""Difference of the two best logits from which on rounding cannot change the order."""
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTURE: dict[str, Any] = {
    **EXPERTS,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
FULL_AND_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 9.0],
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True)
class Family:
    """A family of docs/models.md.

    Args:
        title: the name that users know.
        text: arguments of the configuration of the language model.
        others: arguments of the configuration of the whole, of a model with encoders.
    """

    title: str
    model_type: str
    text: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] | None = None
    group: str = "attention"

    @property
    def entry(self) -> str:
        """The family's name in docs/models.md."""
        return f"{self.title} (`{self.model_type}`)"

    def config(self) -> PretrainedConfig:
        """Make the configuration."""
        text = {
            **SMALL,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            **copy.deepcopy(self.text),
        }
        if self.others is None:
            return AutoConfig.for_model(self.model_type, **text)
        return AutoConfig.for_model(
            self.model_type, text_config=text, **copy.deepcopy(self.others)
        )

    def make(self) -> Any:
        """Make a model with random weights."""
        torch.manual_seed(5)
        factory: Any = (
            AutoModelForCausalLM if self.others is None else AutoModelForImageTextToText
        )
        model = factory.from_config(
            self.config(), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() > 1 and "A_log" not in key:
                    parameter.normal_(0, 0.2)
                elif "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "sinks" in key:
                    parameter.normal_(1.0, 0.5)
        return model


def save(model: Any, path: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    """Save a checkpoint. Returns its path."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def describe(model: LoadedModel, layers: Iterable[tuple[Scores, Span]]) -> str:
    """Say what a served model needs, from what its layers pass to the attention."""
    scores, spans = zip(*layers, strict=True) if layers else ((), ())
    kinds = (
        {kind for kind, *_ in model.layout.shapes}
        if model.layout is not None
        else set()
    )
    needs = {
        "full attention": Span() in spans,
        "sliding windows": any(span.length and not span.is_chunk for span in spans),
        "chunks": any(span.is_chunk for span in spans),
        "soft cap of scores": any(score.softcap for score in scores),
        "sinks": any(score.sinks is not None for score in scores),
        "recurrent states": "recurrent" in kinds,
        "convolution states": "conv" in kinds,
        "whole prompts": model.layout is not None and not model.layout.resumes,
        "logits by its own forward": not isinstance(model.head, torch.nn.Linear),
    }
    return ", ".join(name for name, applies in needs.items() if applies)


FAMILIES = [
    Family(
        "Llama 3",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Family(
        "Llama, dynamic RoPE",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    Family("Mistral", "mistral", {"sliding_window": 8}),
    Family("Ministral", "ministral", {"head_dim": 8, **FULL_AND_SLIDING}),
    Family(
        "Ministral 3",
        "ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    Family(
        "Qwen 2",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    Family("Qwen 3", "qwen3", {"head_dim": 16}),
    Family("Gemma", "gemma", {"head_dim": 16}),
    Family(
        "Gemma 2",
        "gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 20,
            **FULL_AND_SLIDING,
        },
    ),
    Family("Gemma 3", "gemma3_text", {"head_dim": 16, **FULL_AND_SLIDING}),
    Family(
        "Gemma 4",
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "final_logit_softcapping": 2.0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Family(
        "Gemma 4 E",
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "final_logit_softcapping": 2.0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 8,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Family(
        "Gemma 3n",
        "gemma3n_text",
        {
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 2.0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "intermediate_size": [48] * 4,
        },
    ),
    Family(
        "VaultGemma",
        "vaultgemma",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            **FULL_AND_SLIDING,
        },
    ),
    Family(
        "Granite 3",
        "granite",
        {
            "logits_scaling": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
    ),
    Family("Command R", "cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    Family("Command R7B", "cohere2", {"logit_scale": 0.3, **FULL_AND_SLIDING}),
    Family("Phi 2", "phi", {"partial_rotary_factor": 0.5}),
    Family("Phi 3", "phi3", {"sliding_window": 8}),
    Family(
        "Phi-4-mini",
        "phi3",
        {
            "partial_rotary_factor": 1.0,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
        },
    ),
    Family("OLMo", "olmo", {"clip_qkv": 0.7}),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", FULL_AND_SLIDING),
    Family("SmolLM 3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("StarCoder 2", "starcoder2", {"sliding_window": 8}),
    Family("GPT-2", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    Family("GPT-NeoX, Pythia", "gpt_neox", {"rotary_pct": 0.5}),
    Family("StarCoder", "gpt_bigcode"),
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 24}),
    Family("GLM 4", "glm", {"head_dim": 8}),
    Family("GLM 4 (0414)", "glm4", {"head_dim": 8}),
    Family("EXAONE 4", "exaone4", FULL_AND_SLIDING),
    Family("ERNIE 4.5", "ernie4_5", {"head_dim": 16}),
    Family("HunYuan", "hunyuan_v1_dense", {"head_dim": 16}),
    Family("Seed-OSS", "seed_oss", {"head_dim": 16}),
    Family("Apertus", "apertus"),
    Family("Arcee", "arcee"),
    Family("Helium", "helium", {"head_dim": 8}),
    Family("Nemotron", "nemotron", {"partial_rotary_factor": 0.5}),
    Family("nanochat", "nanochat", {"final_logit_softcapping": 2.0}),
    Family("BitNet", "bitnet"),
    Family("CWM", "cwm", {"head_dim": 8, **FULL_AND_SLIDING}),
    Family("Persimmon", "persimmon", {"partial_rotary_factor": 0.5}),
    Family("StableLM", "stablelm", {"partial_rotary_factor": 0.5}),
    Family("Bloom", "bloom", {"n_head": 4, "n_layer": 2}),
    Family("Falcon", "falcon"),
    Family("GPT-J", "gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    Family("MPT", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    Family(
        "CodeGen", "codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    ),
    Family(
        "XGLM",
        "xglm",
        {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
    ),
    Family("Mixtral", "mixtral", EXPERTS, group="mixtures"),
    Family(
        "Qwen 2 MoE",
        "qwen2_moe",
        {
            **MIXTURE,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        group="mixtures",
    ),
    Family("Qwen 3 MoE", "qwen3_moe", {**MIXTURE, "head_dim": 16}, group="mixtures"),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy"},
        group="mixtures",
    ),
    Family("DeepSeek V3", "deepseek_v3", LATENT, group="mixtures"),
    Family(
        "GLM 4.5",
        "glm4_moe",
        {**LATENT, "head_dim": 8, "use_qk_norm": True},
        group="mixtures",
    ),
    Family("MiniMax M2", "minimax_m2", {**EXPERTS, "head_dim": 16}, group="mixtures"),
    Family("OLMoE", "olmoe", {**EXPERTS, "clip_qkv": 0.7}, group="mixtures"),
    Family(
        "Phi-3.5-MoE",
        "phimoe",
        {**EXPERTS, "sliding_window": 8, "lm_head_bias": True},
        group="mixtures",
    ),
    Family(
        "Granite 3 MoE",
        "granitemoe",
        {
            **EXPERTS,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
        group="mixtures",
    ),
    Family(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
        },
        group="mixtures",
    ),
    Family(
        "HunYuan MoE",
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
        group="mixtures",
    ),
    Family(
        "dots.llm1",
        "dots1",
        {**LATENT, "head_dim": 8, **FULL_AND_SLIDING, "n_shared_experts": 1},
        group="mixtures",
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {**EXPERTS, "intermediate_size": 32, "head_dim": 16, **FULL_AND_SLIDING},
        group="mixtures",
    ),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
        },
        group="mixtures",
    ),
    Family(
        "Gemma 3 (vision)",
        "gemma3",
        {"head_dim": 16, **FULL_AND_SLIDING},
        {
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "mm_tokens_per_image": 4,
        },
        group="mixtures",
    ),
    Family(
        "Gemma 4 (vision)",
        "gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "final_logit_softcapping": 2.0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {
            "vision_config": {
                **VISION,
                "head_dim": 8,
                "num_key_value_heads": 2,
                "global_head_dim": 8,
            },
            "audio_config": None,
        },
        group="mixtures",
    ),
    Family(
        "Qwen 3 VL",
        "qwen3_vl",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        {"vision_config": QWEN_VISION},
        group="mixtures",
    ),
    Family(
        "Qwen 2.5 VL",
        "qwen2_5_vl",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        },
        {"vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]}},
        group="mixtures",
    ),
    Family(
        "Mistral Small 3",
        "mistral3",
        {"model_type": "mistral", "head_dim": 8},
        {"vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}},
        group="mixtures",
    ),
    Family(
        "InternVL 3",
        "internvl",
        {"model_type": "qwen2"},
        {"vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
        group="mixtures",
    ),
    Family(
        "LLaVA",
        "llava",
        {"model_type": "llama"},
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "vision_feature_layer": -1,
        },
        group="mixtures",
    ),
    Family(
        "SmolVLM",
        "smolvlm",
        {"model_type": "llama"},
        {"vision_config": VISION},
        group="mixtures",
    ),
    Family(
        "Llama 4",
        "llama4",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
        },
        {
            "vision_config": {
                **VISION,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            }
        },
        group="mixtures",
    ),
    Family(
        "Qwen 3.5 (vision)",
        "qwen3_5",
        {**DELTA},
        {"vision_config": QWEN_VISION},
        group="recurrent",
    ),
    Family(
        "Qwen 3.5 MoE (vision)",
        "qwen3_5_moe",
        {**DELTA, **MIXTURE},
        {"vision_config": QWEN_VISION},
        group="recurrent",
    ),
    Family("Qwen 3.5", "qwen3_5_text", DELTA, group="recurrent"),
    Family("Qwen 3.5 MoE", "qwen3_5_moe_text", {**DELTA, **MIXTURE}, group="recurrent"),
    Family("Qwen 3 Next", "qwen3_next", {**DELTA, **MIXTURE}, group="recurrent"),
    Family(
        "Granite 4",
        "granitemoehybrid",
        {
            **MAMBA2,
            **ALTERNATING,
            **EXPERTS,
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
        group="recurrent",
    ),
    Family(
        "LFM 2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        group="recurrent",
    ),
    Family(
        "Falcon H1",
        "falcon_h1",
        {**MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "head_dim": 16},
        group="recurrent",
    ),
    Family(
        "Nemotron H",
        "nemotron_h",
        {
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
        group="recurrent",
    ),
    Family(
        "Jamba",
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
        },
        group="recurrent",
    ),
]

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- families -->\n"
END = "<!-- end -->"
REFUSED = "**refused**"
NEW_TOKENS = 12
MAX_LENGTH = 64
PROMPTS = [
    [7],
    [37 * place % 600 + 6 for place in range(21)],
    [91 * place % 600 + 6 for place in range(33)],
]


def serve(
    family: Family, path: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[Any, list[list[int]], str]:
    """Return transformers' model, the engine's outputs, and what the family needs, for
    docs/models.md."""
    model = family.make()
    with mock.patch.object(
        gathered_attention, "_prefill", wraps=gathered_attention._prefill
    ) as prefill:
        try:
            loaded = load_model(
                save(model, path, tokenizer),
                device="cpu",
                dtype="float32",
                max_model_len=MAX_LENGTH,
            )
        except UnsupportedModelError as error:
            reason = str(error).partition("can't be served: ")[2].partition(". ")[0]
            return model, [], f"{REFUSED}: {reason}"
    # Chunks of prompts, decodes of different lengths, and a sequence that waits for a
    # place.
    config = EngineConfig(
        max_num_seqs=2,
        block_size=4,
        max_num_batched_tokens=11,
        max_model_len=MAX_LENGTH,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    outputs = LLM(loaded, pool="inline", config=config).generate(
        PROMPTS, params, use_tqdm=False
    )
    needs = describe(loaded, [call.args[-2:] for call in prefill.call_args_list])
    return model, [output.outputs[0].token_ids for output in outputs], needs


def check(model: Any, prompt: list[int], tokens: list[int]) -> int:
    """Compare with transformers' own generation. Returns how many tokens were decided
    clearly."""
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = result.sequences[0, len(prompt) :].tolist()
    margins = [-logits[0].topk(2).values.diff().item() for logits in result.logits]
    clear = next(
        (place for place, margin in enumerate(margins) if margin < TIE), len(expected)
    )
    assert tokens[:clear] == expected[:clear]
    assert clear < len(expected) or tokens == expected
    return clear


def check_family(
    family: Family, path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Compare the engine's greedy outputs with transformers', and what it needs with
    docs/models.md."""
    model, outputs, needs = serve(family, path, tokenizer)
    assert documented_needs()[family.entry] == needs
    clear = sum(
        check(model, prompt, tokens)
        for prompt, tokens in zip(PROMPTS, outputs, strict=False)
    )
    assert not outputs or clear > 20, "too many ties for this to show anything"


def cases(group: str) -> list[Any]:
    """Return the families of a group, as parameters of a test."""
    return [
        pytest.param(family, id=family.title)
        for family in FAMILIES
        if family.group == group
    ]


def documented_needs() -> dict[str, str]:
    """Return what each family needs according to docs/models.md, by `Family.entry`."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    needs_by_entry = {}
    for row in table.splitlines()[2:]:
        needs, entries = row.strip("| ").split(" | ")
        needs_by_entry.update(dict.fromkeys(entries.split("; "), needs))
    return needs_by_entry


def write_table() -> None:
    """Write the table of docs/models.md: a row for the families that need the same."""
    from tests.conftest import tiny_tokenizer

    tokenizer = tiny_tokenizer.__wrapped__()  # type: ignore[attr-defined]
    entries: dict[str, list[str]] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as path:
            needs = serve(family, Path(path), tokenizer)[2]
        entries.setdefault(needs, []).append(family.entry)
    rows = ["| needs | family (`model_type`) |", "|---|---|"]
    rows += [f"| {needs} | {'; '.join(names)} |" for needs, names in entries.items()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join([*rows, END])
    PAGE.write_text(f"{before}{BEGIN}{table}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_table()
