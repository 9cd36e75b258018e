"""An engine over the tiny model, and its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_runs import finish as finish

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, TokenTexts
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.step.sequence import Sequence, SequenceGroup
from guided.pools.inline import InlinePool
from guided.pools.protocol import MaskPool
from guided.vocabulary import Vocabulary

MakeEngine = Callable[..., LLMEngine]
TEXTS = TokenTexts(Vocabulary((b"", b"a"), (0,), frozenset({0}), 2), tokenizer=[])


@pytest.fixture
def make_engine(tiny_model: LoadedModel) -> Callable[..., LLMEngine]:
    """An engine over the tiny model; keywords are `EngineConfig`'s, and `pool`."""

    def make(pool: MaskPool | None = None, **config: Any) -> LLMEngine:
        config.setdefault("max_model_len", 128)
        return LLMEngine(
            tiny_model,
            EngineConfig(**config),
            pool or InlinePool(tiny_model.vocabulary),
        )

    return make


def new_sequence(
    params: SamplingParams, prompt: list[int], index: int = 0, seed: int = 5
) -> Sequence:
    """A sequence without an engine. It has no model: its stop token is 0."""
    sequence = Sequence(
        index, params, prompt, seed=seed, detokenizer=Detokenizer(TEXTS, params)
    )
    SequenceGroup("r", [sequence], params, max_length=1000, stop_ids=frozenset({0}))
    return sequence


def run(
    engine: LLMEngine, requests: dict[str, tuple[Any, SamplingParams]]
) -> dict[str, RequestOutput]:
    """All requests to their ends, together."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    return finish(engine)
