"""Vocabularies for the library's own tests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from guided.backends import Backends
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary(tiny_tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    """600 byte-level tokens, padded to 640 logits."""
    return Vocabulary.from_tokenizer(tiny_tokenizer, padded_vocab_size=640)


@pytest.fixture(scope="session")
def backends(vocabulary: Vocabulary) -> Backends:
    return Backends(vocabulary)


@pytest.fixture(scope="session")
def mistral_data() -> Path:
    """The folder with the tokenizer files that mistral_common ships."""
    return Path(str(resources.files("mistral_common"))) / "data"
