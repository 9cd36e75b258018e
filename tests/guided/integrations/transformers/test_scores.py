"""What the logits processor does to the scores, also next to other processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from transformers_generation import CONSTRAINTS, PROMPTS, Replaying, inputs

from guided.constraint import Constraint
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.vocabulary import Vocabulary


class Recording(LogitsProcessor):
    """Keeps copies of the scores."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_raw_logits_and_scores_that_are_kept_do_not_change(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast, mode: dict[str, Any]
) -> None:
    batch = inputs(tiny_tokenizer, ["2024-10-11 and "] if "prompt_lookup_num_tokens" in mode else PROMPTS)
    constraints = CONSTRAINTS if len(batch["input_ids"]) > 1 else CONSTRAINTS[1:2]
    found, recording = [], Recording()
    with GuidedLogitsProcessor(vocabulary, constraints) as subject:
        for processor in (subject, Replaying(vocabulary, constraints, batch["input_ids"].shape[1])):
            torch.manual_seed(1)
            result = model.generate(
                **batch,
                **mode,
                logits_processor=[recording, processor],
                max_new_tokens=20,
                return_dict_in_generate=True,
                output_logits=True,
                output_scores=True,
            )
            found.append(result)
    ours, replayed = found
    if "prompt_lookup_num_tokens" not in mode:
        for raw, seen in zip(ours.logits, recording.scores, strict=False):
            assert torch.equal(raw.log_softmax(-1) if "num_beams" in mode else raw, seen)
    assert len(ours.logits) == len(ours.scores) > 5
    for one, other in zip(ours.logits, replayed.logits, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    for one, other in zip(ours.scores, replayed.scores, strict=True):
        assert torch.equal(one, other)


def test_tokens_that_other_processors_forbid(vocabulary: Vocabulary) -> None:
    a = vocabulary.encode("a")[0]
    scores = torch.randn(2, vocabulary.padded_vocab_size)
    scores[:, a] = -torch.inf
    with GuidedLogitsProcessor(vocabulary, [Constraint.regex("a"), Constraint.regex("(?s:.)*")]) as subject:
        masked = subject(torch.tensor([[1], [2]]), scores.clone())
        assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
        assert masked[1].isfinite().sum() > 300
        assert masked[1, a].isneginf() or masked[1, a] <= -1e4
        subject.reset()
        scores[:] = -torch.inf
        masked = subject(torch.tensor([[1], [2]]), scores)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
    assert masked[1].isfinite().sum() > 300


def test_a_row_that_ended_early_is_allowed_stop_tokens_only(vocabulary: Vocabulary) -> None:
    """`stop_strings` end a row in the middle of its constraint: `generate()` pads it."""
    prompt = torch.tensor([[7], [8]])
    a = vocabulary.encode("a")[0]
    padding = min(vocabulary.special_token_ids - set(vocabulary.stop_token_ids))
    with GuidedLogitsProcessor(vocabulary, Constraint.regex("a{9}")) as subject:
        scores = torch.zeros(2, vocabulary.padded_vocab_size)
        subject(prompt, scores)
        for column in ([[a], [a]], [[padding], [a]], [[padding], [a]]):
            prompt = torch.cat([prompt, torch.tensor(column)], dim=1)
            masked = subject(prompt, scores)
        assert masked[0].isfinite().nonzero().flatten().tolist() == sorted(vocabulary.stop_token_ids)
        assert masked[1, a].isfinite()
