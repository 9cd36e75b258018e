"""Checkpoints as they are published: several files, quantized weights, chat templates,
several stop tokens, images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import FAMILIES, save
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.llm import LLM
from engine.model.attention import UnsupportedModelError
from engine.model.loader import check_model, load_model
from engine.sampling_params import SamplingParams
from engine.server.process import _sampling_defaults
from engine.server.request.bodies import Message
from engine.server.request.prompts import encode_chat

BY_TITLE = {family.title: family for family in FAMILIES}
LLAVA_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def checkpoint(
    title: str, path: Path, tokenizer: PreTrainedTokenizerFast, **config: Any
) -> str:
    """Save a family's checkpoint, with other values in its config.json."""
    save(BY_TITLE[title].make(), path, tokenizer)
    change(path / "config.json", **config)
    return str(path)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_several_files_and_one_that_is_missing(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = BY_TITLE["Qwen 3"].make()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer.save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    loaded = load_model(str(tmp_path), device="cpu")
    torch.testing.assert_close(
        loaded.body.layers[1].mlp.up_proj.weight,
        model.model.layers[1].mlp.up_proj.weight,
    )
    weights = load_file(files[-1])
    removed = sorted(weights)[-1]
    save_file(
        {name: weight for name, weight in weights.items() if name != removed},
        files[-1],
        {"format": "pt"},
    )
    with pytest.raises(
        UnsupportedModelError, match=f"its files lack 1 weights, such as {removed}"
    ):
        load_model(str(tmp_path), device="cpu")


def test_stop_tokens_and_sampling_defaults(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    name = checkpoint("Llama 3", tmp_path, tiny_tokenizer)
    change(
        tmp_path / "generation_config.json",
        eos_token_id=[9, 5],
        temperature=0.7,
        top_k=20,
        do_sample=True,
    )
    assert set(load_model(name, device="cpu").vocabulary.stop_token_ids) == {1, 5, 9}
    assert _sampling_defaults(name, None) == {"temperature": 0.7, "top_k": 20}


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
def test_text_of_a_model_with_images(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, file: str
) -> None:
    name = checkpoint("LLaVA", tmp_path, tiny_tokenizer)
    (tmp_path / "chat_template.jinja").unlink()
    content = (
        LLAVA_TEMPLATE
        if file.endswith("jinja")
        else json.dumps({"chat_template": LLAVA_TEMPLATE})
    )
    (tmp_path / file).write_text(content)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor"})
    )
    loaded = load_model(name, device="cpu")
    assert {parameter.device.type for parameter in loaded.body.parameters()} == {"cpu"}
    context: Any = SimpleNamespace(
        llm=SimpleNamespace(tokenizer=loaded.tokenizer), max_characters=1000
    )
    ids = encode_chat(context, [Message(role="user", content="Hi")])
    assert loaded.tokenizer.decode(ids) == "<|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ({"quant_method": "awq", "bits": 4}, "pip install gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, "pip install optimum"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "pip install compressed-tensors",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "pip install -U bitsandbytes",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "transformers does not read such weights",
        ),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_quantized_weights_are_refused_with_what_to_install(
    method: dict[str, Any],
    needs: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    name = checkpoint("Llama 3", tmp_path, tiny_tokenizer, quantization_config=method)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    reason = rf"LlamaForCausalLM can't be served: its weights are quantized \({method['quant_method']}\).*{needs}"
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model(name)


def test_fp8_weights_are_converted_on_a_cpu(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    method = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
    name = checkpoint("Qwen 3", tmp_path, tiny_tokenizer, quantization_config=method)
    [file] = tmp_path.glob("*.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for key, weight in load_file(file).items():
        stored[key] = weight
        if key.endswith("_proj.weight"):
            blocks = weight.unfold(0, 16, 16).unfold(1, 16, 16).abs().amax((2, 3)) / 448
            scale = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
            stored[key] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = blocks
    save_file(stored, file, {"format": "pt"})
    loaded = load_model(name, device="cpu", dtype="float32")
    expected = BY_TITLE["Qwen 3"].make().model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(
        loaded.body.layers[0].mlp.up_proj.weight, expected, rtol=0.07, atol=0.01
    )


def test_mxfp4_weights_are_converted_on_a_cpu(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    name = checkpoint(
        "gpt-oss",
        tmp_path,
        tiny_tokenizer,
        quantization_config={"quant_method": "mxfp4"},
    )
    [file] = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for key in [key for key in stored if key.endswith("_proj") and "experts" in key]:
        experts, inner, outer = stored.pop(key).shape
        blocks = torch.randint(
            256,
            (experts, outer, -(-inner // 32), 16),
            generator=generator,
            dtype=torch.uint8,
        )
        stored[f"{key}_blocks"] = blocks
        stored[f"{key}_scales"] = torch.full(blocks.shape[:3], 123, dtype=torch.uint8)
    save_file(stored, file, {"format": "pt"})
    loaded = load_model(name, device="cpu", dtype="float32")
    codes = stored["model.layers.0.mlp.experts.gate_up_proj_blocks"][0, 0, 0]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 16
    values = torch.cat([values, -values])
    expected = torch.stack(
        [values[(codes & 15).long()], values[(codes >> 4).long()]], 1
    ).flatten()
    torch.testing.assert_close(
        loaded.body.layers[0].mlp.experts.gate_up_proj[0, :, 0], expected
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "of_next_year"}, "transformers has no code of its own for it"),
        (
            {"model_type": "custom", "auto_map": {"AutoConfig": "code.Config"}},
            "transformers has no code of its own for it",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "no head that generates text",
        ),
        (
            {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
            "does not support other attention backends",
        ),
        (
            {"model_type": "inkling_text", "architectures": ["InklingForCausalLM"]},
            "its layers need get_mask_sizes",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "not a causal language model",
        ),
        (
            {"model_type": "doge", "architectures": ["DogeForCausalLM"]},
            "DogeAttention passes attention_mask",
        ),
    ],
    ids=["unknown", "own-code", "classifier", "bloom", "cache", "encoder", "mask"],
)
def test_what_is_refused_is_refused_without_weights(
    config: dict[str, Any],
    reason: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    name = checkpoint("Llama 3", tmp_path, tiny_tokenizer)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**written, **config}))
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*docs/vllm.md"):
        check_model(name)


@pytest.mark.parametrize(
    ("length", "factors"),
    [(64, "short_factor"), (65, "long_factor"), (None, "long_factor")],
)
def test_the_context_chooses_the_factors_of_longrope(
    length: int | None,
    factors: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    family = BY_TITLE["Phi-4-mini"]
    name = checkpoint(family.title, tmp_path, tiny_tokenizer)
    loaded = load_model(name, device="cpu", max_model_len=length)
    assert loaded.max_model_len == (length or 256)
    rope = family.text["rope_parameters"]
    expected = 1 / (torch.tensor(rope[factors]) * 1e4 ** (torch.arange(4) / 4))
    torch.testing.assert_close(loaded.body.rotary_emb.inv_freq, expected)
    with pytest.raises(ValueError, match="max_model_len is 300"):
        load_model(name, device="cpu", max_model_len=300)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("length", "factors"), [(64, "short_factor"), (None, "long_factor")]
)
def test_longrope_is_the_same_beside_a_long_sequence(
    length: int | None,
    factors: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    name = checkpoint("Phi-4-mini", tmp_path, tiny_tokenizer)
    llm = LLM(load_model(name, device="cpu", max_model_len=length), pool="inline")
    short = list(range(10, 30))
    long = list(range(10, 70))
    params = SamplingParams(
        temperature=0.0, max_tokens=3 if length else 30, ignore_eos=True, logprobs=5
    )
    alone, beside = (
        llm.generate(prompts, params, use_tqdm=False)[0].outputs[0]
        for prompts in ([short], [short, long])
    )
    assert beside.token_ids == alone.token_ids
    rope = BY_TITLE["Phi-4-mini"].text["rope_parameters"]
    config = AutoConfig.from_pretrained(name)
    for kept in ("short_factor", "long_factor"):
        config.rope_parameters[kept] = rope[factors]
    reference = AutoModelForCausalLM.from_pretrained(
        name, config=config, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = reference(torch.tensor([short + alone.token_ids])).logits
    expected = logits[0, len(short) - 1 : -1].log_softmax(-1)
    for output in (alone, beside):
        for row, entries in zip(expected, output.logprobs, strict=True):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
