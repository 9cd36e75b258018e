"""A tiny model, its vocabulary and an inline pool, for the logits processor in
`generate()`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from guided.pools.inline import InlinePool
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()


@pytest.fixture(scope="module")
def vocabulary(
    tiny_tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> Vocabulary:
    return Vocabulary.from_tokenizer(tiny_tokenizer, model.config.vocab_size)


@pytest.fixture
def pool(vocabulary: Vocabulary) -> Iterator[InlinePool]:
    pool = InlinePool(vocabulary)
    yield pool
    pool.shutdown()
