"""Loading custom processors, and the errors when one cannot be loaded."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize(
    ("base", "method", "signature"),
    [
        (sample.DummyLogitsProcessor, "__init__", "self, vllm_config, device, is_pin_memory"),
        (sample.DummyLogitsProcessor, "validate_params", "cls, sampling_params"),
        (sample.DummyLogitsProcessor, "is_argmax_invariant", "self"),
        (sample.DummyLogitsProcessor, "update_state", "self, batch_update"),
        (sample.DummyLogitsProcessor, "apply", "self, logits"),
        (sample.RevisedBias, "add_request", "self, req_info"),
        (sample.RevisedBias, "remove_request", "self, req_pdx"),
        (sample.RevisedBias, "update_state", "self, index_mapping, token_ids, seq_lens"),
    ],
)
def test_a_wrong_signature_is_refused(base: type[LogitsProcessor], method: str, signature: str) -> None:
    def wrong(self: Any, one: Any, two: Any) -> None: ...

    processor = type("Wrong", (base,), {method: wrong})
    with pytest.raises(ValueError, match=re.escape(f"Wrong needs the method {method}({signature})")):
        load_classes(EngineConfig(logits_processors=(processor,)))


@pytest.mark.parametrize(("method", "signature"), [("apply", "self, logits"), ("remove_request", "self, req_pdx")])
def test_a_missing_method_is_refused(method: str, signature: str) -> None:
    methods = {name: value for name, value in vars(sample.RevisedBias).items() if name != method}
    processor = type("Incomplete", (LogitsProcessor,), methods)
    with pytest.raises(ValueError, match=re.escape(f"Incomplete needs the method {method}({signature})")):
        load_classes(EngineConfig(logits_processors=(processor,)))


def test_static_and_class_methods_are_accepted() -> None:
    class Lenient(sample.DummyLogitsProcessor):
        @staticmethod
        def is_argmax_invariant() -> bool:  # type: ignore[override]
            return False

        @classmethod
        def apply(cls, logits: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
            return logits

    assert load_classes(EngineConfig(logits_processors=(Lenient,))) == [Lenient]


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
