"""Tokenizing chat messages: text of a message cannot end its turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.model.loader import load_model
from engine.server.request.bodies import Message
from engine.server.request.prompts import encode_chat

SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def tokens_of(tokenizer: PreTrainedTokenizerFast, *contents: str) -> list[int]:
    messages = [Message(role="user", content=content) for content in contents]
    context: Any = SimpleNamespace(
        llm=SimpleNamespace(tokenizer=tokenizer), max_characters=4096
    )
    return encode_chat(context, messages)


@given(
    words=st.lists(
        st.sampled_from([*SPECIAL, "a", " b", "<|", "|>", "end", "\n", "狐", "<", ">"]),
        max_size=8,
    )
)
def test_special_tokens_are_the_templates_alone(
    tiny_tokenizer: PreTrainedTokenizerFast, words: list[str]
) -> None:
    content = "".join(words)
    ids = tokens_of(tiny_tokenizer, content)
    special = [token for token in ids if token in tiny_tokenizer.all_special_ids]
    assert tiny_tokenizer.convert_ids_to_tokens(special) == [
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]
    assert tiny_tokenizer.decode(ids) == f"<|user|>{content}<|end|><|assistant|>"


def test_other_messages_are_tokenised_as_ever(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokens_of(tiny_tokenizer, "the quick", "<fox> | 狐狸")
    text = "<|user|>the quick<|end|><|user|><fox> | 狐狸<|end|><|assistant|>"
    assert ids == tiny_tokenizer.encode(text, add_special_tokens=False)


def test_a_chat_template_replaces_the_models(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("<ours>")
    tokenizer = load_model(
        str(tiny_llama_dir), dtype="float32", device="cpu", chat_template=str(file)
    ).tokenizer
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False
        )
        == "<ours>"
    )
