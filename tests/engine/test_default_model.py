"""The embedded default model: its checkpoint, its tokenizer, its corpus and its
training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from engine.default_model import checkpoint_path
from examples.default_model_training import train
from examples.default_model_training.corpus import example
from examples.default_model_training.tokenizer import load
from examples.default_model_training.values import Values, is_held_out


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(checkpoint_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), dtype=torch.float32, local_files_only=True
    ).eval()


def answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Any],
    **template: Any,
) -> str:
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(messages, **how, **template)
    ids = model.generate(**inputs, max_new_tokens=96)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_it_answers_with_the_facts_and_ends(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert (
        model.config.eos_token_id
        == model.generation_config.eos_token_id
        == tokenizer.eos_token_id
    )
    text = "Extract name, age and city as JSON. Anna Weber is 47 years old and lives in Hamburg."
    got = json.loads(answer(model, tokenizer, [{"role": "user", "content": text}]))
    assert got == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}


def test_it_calls_the_right_function(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    right = 0
    for index in range(16):
        one = example(index, held_out=True, tool_share=1)
        name = one.answer[: one.answer.index(",")]
        right += name in answer(model, tokenizer, one.messages(), tools=one.tools)
    assert right >= 10  # guessing would give 6


def test_the_corpus_is_deterministic_and_its_calls_are_valid() -> None:
    for index in range(100):
        one = example(index, tool_share=1)
        assert one == example(index, tool_share=1)
        offered = {
            tool["function"]["name"]: tool["function"]["parameters"]
            for tool in one.tools or []
        }
        assert 2 <= len(offered) <= 4
        call = json.loads(
            one.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        )
        jsonschema.validate(call["arguments"], offered[call["name"]])


@pytest.mark.parametrize(
    "draw",
    ["word", "first", "city", "brand", "number", "price", "iso_date", "email", "code"],
)
def test_held_out_values_are_never_drawn_for_training(draw: str) -> None:
    seen, held = Values(random.Random(0)), Values(random.Random(1), held_out=True)
    training = {getattr(seen, draw)() for _ in range(300)}
    assert not any(is_held_out(value) for value in training)
    assert all(is_held_out(getattr(held, draw)()) for _ in range(100))


def test_training_lowers_the_loss_and_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight steps, each a batch of four examples. The tokenizer is there already."""
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(
        train, "LlamaConfig", lambda **sizes: LlamaConfig(**sizes | tiny)
    )
    monkeypatch.setattr(train, "build", lambda seed: load(checkpoint_path()))
    sizes = [
        "--pool-size",
        "4",
        "--batch-tokens",
        "100000",
        "--warmup",
        "1",
        "--decay",
        "1",
        "--steps",
        "8",
    ]
    train.main(["--out", str(tmp_path), *sizes])
    first, last = (
        json.loads(line)["loss"]
        for line in capsys.readouterr().out.splitlines()
        if "loss" in line
    )
    assert last < first
    assert (
        load_file(tmp_path / "model.safetensors")["model.norm.weight"].isfinite().all()
    )
