"""Loading custom processors, and the errors when one cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import sample_processors as sample

from engine import LLM, AsyncLLM, base_llm
from engine.llm_engine import LLMEngine
from engine.logits_processors import loading
from engine.logits_processors.loading import GROUP, load_classes
from engine.model_loader import LoadedModel
from guided.inline import InlinePool
from guided.vocabulary import Vocabulary


def test_by_qualified_name_and_as_classes_in_order() -> None:
    given = ["sample_processors:MyMinP", sample.DummyLogitsProcessor, "sample_processors:RevisedBias"]
    assert load_classes(given) == [sample.MyMinP, sample.DummyLogitsProcessor, sample.RevisedBias]


def test_entry_points_come_first_and_only_those_of_our_group(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("b", "sample_processors:MyBias", GROUP),
        EntryPoint("a", "sample_processors:MyMinP", GROUP),
        EntryPoint("c", "sample_processors:RevisedBias", "vllm.logits_processors"),
    ]

    def installed(*, group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(loading, "entry_points", installed)
    assert load_classes([sample.RevisedMinP]) == [sample.MyMinP, sample.MyBias, sample.RevisedMinP]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sample_processors", "'sample_processors' is not a logits processor: give it as module:Class"),
        ("sample_processors:", "module:Class"),
        ("no_such_module:It", "no_such_module:It can't be loaded: ModuleNotFoundError"),
        ("sample_processors:Nobody", "sample_processors:Nobody can't be loaded: AttributeError"),
        ("sample_processors:logger", "is not a subclass of engine.logits_processors.LogitsProcessor"),
        ("sample_processors:SamplingParams", "is not a subclass"),
        (dict, "is not a subclass"),
    ],
)
def test_what_is_none_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_classes([given])


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
