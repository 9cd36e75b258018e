"""After sampling: post-processors that append, roll back or stop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.errors import BackendError
from guided.pools.inline import InlinePool
from guided.processors.logit_post_processor import (
    ApplyReport,
    LogitPostProcessor,
    SampledEdit,
)
from guided.sequence import GuidedSequence
from tests.engine.conftest import run

PROMPT = "As JSON: "


@pytest.fixture
def engine_with(tiny_model: LoadedModel) -> Callable[..., LLMEngine]:
    def make(other: Any = None, **config: Any) -> LLMEngine:
        pool = InlinePool(tiny_model.vocabulary)
        return LLMEngine(
            tiny_model, EngineConfig(max_model_len=128, **config), pool, other
        )

    return make


class Own(LogitPostProcessor):
    """A post-processor of an application's own. It changes outputs as told."""

    all_rows = False

    def __init__(
        self, decide: Callable[[list[int]], SampledEdit | None], max_rollback: int = 0
    ) -> None:
        self.decide = decide
        self.max_rollback = max_rollback

    def prepare(
        self, sequences: Sequence[GuidedSequence], *rows: Any, **named: Any
    ) -> None:
        self.sequences = sequences

    def edits(
        self, sequences: Sequence[GuidedSequence], samples: Any = ()
    ) -> dict[int, SampledEdit]:
        decided = {
            each.sequence_id: self.decide(list(each.output_token_ids))
            for each in sequences
        }
        return {name: edit for name, edit in decided.items() if edit is not None}


REGEX = "[0-9]{20}"
DIGITS = SamplingParams(
    regex=REGEX, temperature=0.0, max_tokens=30, logprobs=1, frequency_penalty=0.5
)


def test_after_a_rollback_a_sequence_takes_another_way(
    engine_with: Callable[..., LLMEngine],
) -> None:
    """It takes the last four tokens back once, and replaces the first of them: no
    output shows them."""
    expected = run(engine_with(), {"r": (PROMPT, DIGITS)})["r"].outputs[0]
    done: list[list[int]] = []

    def decide(output: list[int]) -> SampledEdit | None:
        if len(output) < 9 or done:
            return None
        done.append(output)
        return SampledEdit(
            rollback=4, append=[next(one for one in digits if one != output[5])]
        )

    engine = engine_with(Own(decide, max_rollback=4), block_size=4)
    digits = [engine.model.vocabulary.encode(digit)[0] for digit in "12"]
    engine.add_request("r", PROMPT, DIGITS)
    shown: list[list[int]] = []
    while engine.has_unfinished:
        shown += [output.outputs[0].token_ids for output in engine.step()]
    *_, last = shown
    assert done == [expected.token_ids[:9]]
    assert last[:5] == expected.token_ids[:5]
    assert last[5] != expected.token_ids[5]
    assert all(last[: len(one)] == one for one in shown), "what was shown stays"
    assert re.fullmatch(REGEX, engine.model.vocabulary.decode(last).decode())
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_after_a_rollback_the_same_tokens_have_the_same_logprobs(
    engine_with: Callable[..., LLMEngine],
) -> None:
    expected = run(engine_with(), {"r": (PROMPT, DIGITS)})["r"].outputs[0]
    places = [3, 9, 16]

    def decide(output: list[int]) -> SampledEdit | None:
        if places and len(output) == places[0]:
            return SampledEdit(rollback=places.pop(0) // 3 + 1)
        return None

    found = run(engine_with(Own(decide, 9), block_size=4), {"r": (PROMPT, DIGITS)})[
        "r"
    ].outputs[0]
    places = [3, 9, 16]
    error = run(engine_with(Own(decide, 1), block_size=4), {"r": (PROMPT, DIGITS)})[
        "r"
    ].error
    assert "2 tokens to roll back; the limit is 1" in str(error)
    assert found.token_ids == expected.token_ids
    assert found.cumulative_logprob == pytest.approx(
        expected.cumulative_logprob, abs=1e-3
    )
    assert len(found.logprobs or ()) == len(found.token_ids)


@pytest.mark.parametrize("appended", [[300], [300, 301]])
@pytest.mark.parametrize("place", [1, 4])
def test_what_replaces_the_sampled_token_is_scored(
    engine_with: Callable[..., LLMEngine], appended: list[int], place: int
) -> None:
    """In the first row and in later ones, like the same tokens in a prompt; and without
    log-probabilities."""
    names = ("scored", "plain", "also")

    def decide(output: list[int]) -> SampledEdit | None:
        return (
            SampledEdit(rollback=1, append=appended)
            if len(output) == place and 300 not in output
            else None
        )

    own = Own(decide, max_rollback=1)
    own.all_rows = True
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=count)
        for count in (0, None, 0)
    ]
    asked = {
        name: (f"{PROMPT}{name}", one) for name, one in zip(names, greedy, strict=True)
    }
    found = run(engine_with(own), asked)
    tokens = {name: output.outputs[0].token_ids for name, output in found.items()}
    engine = engine_with()
    for name, output in found.items():
        assert tokens[name][place - 1 :][: len(appended)] == appended
        whole = output.prompt_token_ids + tokens[name]
        scored = run(
            engine, {"r": (whole, SamplingParams(max_tokens=1, prompt_logprobs=0))}
        )["r"].prompt_logprobs
        own_scores = [
            entry.own
            for entry in (scored or [])[-len(tokens[name]) :]
            if entry is not None
        ]
        if name != "plain":
            logprobs = output.outputs[0].logprobs or []
            assert [
                entry.own for entry in logprobs if entry is not None
            ] == pytest.approx(own_scores, abs=1e-3)
        rest = SamplingParams(temperature=0.0, max_tokens=6 - place - len(appended) + 1)
        begin = output.prompt_token_ids + tokens[name][: place - 1 + len(appended)]
        assert (
            begin + run(engine, {"r": (begin, rest)})["r"].outputs[0].token_ids == whole
        )


def test_edits_of_sequences_that_got_no_token_are_ignored(
    engine_with: Callable[..., LLMEngine], tiny_model: LoadedModel
) -> None:
    """A failed row and a beam are among the prepared sequences. Only outputs can be
    changed."""
    digit = tiny_model.vocabulary.encode("7")

    class Failing(Own):
        def apply(
            self, logits: torch.Tensor, *options: Any, **named: Any
        ) -> ApplyReport:
            failed = [
                each.sequence_id
                for each in self.sequences
                if each.request_id == "failed"
            ]
            return ApplyReport(dict.fromkeys(failed, BackendError("no mask")))

    own = Failing(
        lambda output: SampledEdit(append=digit) if len(output) == 4 else None
    )
    requests = {
        "failed": (PROMPT, DIGITS),
        "beams": (
            PROMPT,
            SamplingParams(
                regex=REGEX, temperature=0.0, n=2, use_beam_search=True, max_tokens=30
            ),
        ),
        "edited": (PROMPT, DIGITS),
    }
    engine = engine_with(own)
    found = run(engine, requests)
    expected = run(engine_with(), {"beams": requests["beams"]})["beams"]
    assert isinstance(found["failed"].error, BackendError)
    assert [one.token_ids for one in found["beams"].outputs] == [
        one.token_ids for one in expected.outputs
    ]
    assert found["edited"].outputs[0].token_ids[4] == digit[0]
    assert engine.stats.forced_tokens == 1
    assert re.fullmatch(REGEX, found["edited"].outputs[0].text)
