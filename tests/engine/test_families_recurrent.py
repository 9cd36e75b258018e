"""Each family of models with recurrent layers gives transformers' own tokens, or is
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_families import Family, cases, check_family
from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("family", cases("recurrent"))
def test_greedy_output_is_that_of_transformers(
    family: Family, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    check_family(family, tmp_path, tiny_tokenizer)
