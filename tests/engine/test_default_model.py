"""The embedded default model: the checkpoint loads and works, and the corpus has the documented properties."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from engine.default_model import checkpoint_path
from examples.default_model_training.corpus import example
from examples.default_model_training.tokenizer import build
from examples.default_model_training.values import Values, is_held_out
from guided.vocabulary import Vocabulary

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(checkpoint_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32, local_files_only=True).eval()


def answer(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, user: str, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=96)[0, inputs["input_ids"].shape[1] :]
    assert ids[-1] == tokenizer.eos_token_id, tokenizer.decode(ids)
    return tokenizer.decode(ids, skip_special_tokens=True)


class TestCheckpoint:
    def test_is_at_most_12_megabytes(self) -> None:
        files = list(checkpoint_path().iterdir())
        assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= {
            f.name for f in files
        }
        assert sum(f.stat().st_size for f in files) <= 12 * MEGABYTE

    def test_is_a_llama_that_fits_its_tokenizer(
        self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        assert type(model).__name__ == "LlamaForCausalLM"
        assert model.config.vocab_size == len(tokenizer)
        assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id

    def test_answers_with_the_facts_and_ends(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        text = "Anna Weber is 47 years old and lives in Hamburg."
        got = json.loads(answer(model, tokenizer, f"Extract name, age and city as JSON. {text}"))
        assert got == {"name": "Anna Weber", "age": 47, "city": "Hamburg"}

    def test_calls_the_right_function(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        right = 0
        for index in range(24):
            one = example(index, held_out=True, tool_share=1)
            inputs = tokenizer.apply_chat_template(
                one.messages(), tools=one.tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = model.generate(**inputs, max_new_tokens=96)[0, inputs["input_ids"].shape[1] :]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right += one.answer[: one.answer.index(",")] in text  # up to the name
        assert right >= 15  # guessing would give 8

    def test_ends_without_a_task_it_knows(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
        assert answer(model, tokenizer, "Hello!", system="You are a helpful assistant.")


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "Łódź, 12 °C",
            "東京都 2026年",
            "Привет, мир!",
            "مرحبا",
            "नमस्ते",
            "👩‍👩‍👧 ok",
            "a\tb\r\n\n  c",
            "\u0000\x7f",
            "1234567890",
        ],
    )
    def test_round_trips_any_text(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert Vocabulary.from_tokenizer(tokenizer).decode(ids) == text.encode()

    @given(st.text(alphabet="abcdefghijklmnopqrstuvwxyzéüßжд", min_size=1, max_size=12))
    def test_a_word_has_the_same_tokens_everywhere(self, tokenizer: PreTrainedTokenizerFast, word: str) -> None:
        tokens = tokenizer.tokenize(word)
        for around in ("a {} b", '"{}"', "\n{},", "({})", '{{"k":"{}"}}'):
            text = around.format(word)
            inside = tokenizer.tokenize(text)
            assert any(inside[i : i + len(tokens)] == tokens for i in range(len(inside)))

    def test_training_builds_one_of_the_same_size(self, tokenizer: PreTrainedTokenizerFast) -> None:
        built = build(count=2000)
        assert len(built) == len(tokenizer)
        assert built.chat_template == tokenizer.chat_template

    def test_special_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|begin|>", "<|end|>", "<|pad|>")
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
        assert {"<|user|>", "<|assistant|>", "<|system|>"} <= set(tokenizer.all_special_tokens)

    def test_chat_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


class TestCorpus:
    def test_is_deterministic(self) -> None:
        for index in range(100):
            assert example(index, seed=3) == example(index, seed=3)
        assert [example(i, seed=3) for i in range(10)] != [example(i, seed=4) for i in range(10)]

    def test_the_expected_call_is_valid(self) -> None:
        for index in range(100):
            one = example(index, tool_share=1)
            offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools or []}
            assert 2 <= len(offered) <= 4
            call = json.loads(one.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            jsonschema.validate(call["arguments"], offered[call["name"]])

    @pytest.mark.parametrize(
        "draw",
        ["word", "first", "last", "city", "country", "brand", "number", "price", "iso_date", "email", "phone", "code"],
    )
    def test_held_out_values_are_never_drawn_for_training(self, draw: str) -> None:
        seen = Values(random.Random(0))
        held = Values(random.Random(1), held_out=True)
        training = {getattr(seen, draw)() for _ in range(300)}
        assert not any(is_held_out(value) for value in training)
        assert training.isdisjoint(getattr(held, draw)() for _ in range(300))
        assert all(is_held_out(getattr(held, draw)()) for _ in range(100))
