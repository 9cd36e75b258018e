"""Loading custom processors, and the errors when one cannot be loaded."""

from __future__ import annotations

from typing import Any

import pytest
import sample_processors as sample

from engine import LLM, AsyncLLM
from engine.config import EngineConfig
from engine.logits_processors import LogitsProcessor
from engine.logits_processors.loading import load_classes
from engine.model_loader import LoadedModel
from guided.pools.inline import InlinePool


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


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_one_that_cant_be_made_stops_the_start(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    shut: list[InlinePool] = []
    monkeypatch.setattr(InlinePool, "shutdown", lambda pool: shut.append(pool))
    with pytest.raises(ValueError, match=r"CantBeMade can't be made: OSError\('no such file'\)"):
        kind(tiny_model, "inline", logits_processors=[sample.CantBeMade])
    assert len(shut) == 1, "its pool is shut down"
