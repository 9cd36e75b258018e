"""Loading custom processors, and the errors when one cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sample_processors as sample

from engine import LLM, AsyncLLM, base_llm
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.logits_processors import LogitsProcessor
from engine.logits_processors.loading import load_classes
from engine.model_loader import LoadedModel
from guided.pools.inline import InlinePool
from guided.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sample_processors", "sample_processors can't be loaded: .*give it as module:Class"),
        ("sample_processors:", "module:Class"),
        ("no_such_module:It", "no_such_module:It can't be loaded: ModuleNotFoundError"),
        ("sample_processors:Nobody", "sample_processors:Nobody can't be loaded: AttributeError"),
        ("sample_processors:logger", "is not a subclass of engine.logits_processors.LogitsProcessor"),
        ("sample_processors:SamplingParams", "is not a subclass"),
        (dict, "is not a subclass"),
    ],
)
def test_what_is_no_processor_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_classes(EngineConfig(logits_processors=(given,)))


@pytest.mark.parametrize("method", ["apply", "remove_request"])
def test_a_missing_method_is_refused(method: str) -> None:
    methods = {name: value for name, value in vars(sample.RevisedBias).items() if name != method}
    processor = type("Incomplete", (LogitsProcessor,), methods)
    with pytest.raises(ValueError, match=f"Incomplete needs the method {method}"):
        load_classes(EngineConfig(logits_processors=(processor,)))


def test_one_that_can_t_be_made_stops_the_start(make_engine: Callable[..., LLMEngine]) -> None:
    with pytest.raises(ValueError, match=r"CantBeMade can't be made: OSError\('no such file'\)"):
        make_engine(logits_processors=(sample.CantBeMade,))


def test_where_the_engine_doesn_t_start_its_pool_is_shut_down(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[InlinePool] = []
    shut: list[InlinePool] = []

    def opening(choice: str, vocabulary: Vocabulary, *others: Any) -> InlinePool:
        opened.append(InlinePool(vocabulary))
        return opened[-1]

    monkeypatch.setattr(base_llm, "open_pool", opening)
    monkeypatch.setattr(InlinePool, "shutdown", lambda pool: shut.append(pool))
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match="CantBeMade"):
            kind(tiny_model, logits_processors=[sample.CantBeMade])
    assert len(opened) == 2
    assert shut == opened
