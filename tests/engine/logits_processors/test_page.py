"""The example of the page runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.logits_processors import SamplingParams
from engine.model_loader import LoadedModel
from guided.errors import InvalidRequest

PAGE = Path(__file__).parents[3] / "docs" / "logits-processors.md"


def test_the_example_of_the_page(tiny_model: LoadedModel) -> None:
    processor, script = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"model": tiny_model}
    exec(compile(processor, str(PAGE), "exec"), names)
    exec(compile(script, str(PAGE), "exec"), names)
    tokens = names["output"].outputs[0].token_ids
    assert len(tokens) > 1
    assert len({*tokens}) == len(tokens)
    llm = names["LLM"](tiny_model, logits_processors=[names["NeverTwice"]])
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    [without] = llm.generate("Twice: ", SamplingParams(**greedy), use_tqdm=False)
    assert len({*without.outputs[0].token_ids}) < 60, "left alone, it says some twice"
    [with_it] = llm.generate("Twice: ", SamplingParams(**greedy, extra_args={"never_twice": 1}), use_tqdm=False)
    assert len({*with_it.outputs[0].token_ids}) == 60
    with pytest.raises(InvalidRequest, match="never_twice is 0 or 1"):
        llm.generate("Twice: ", SamplingParams(extra_args={"never_twice": 2}), use_tqdm=False)
    llm.shutdown()
