"""What the logits processor does to the scores, also next to other processors."""

from __future__ import annotations

import torch

from guided.constraint import Constraint
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.vocabulary import Vocabulary


def test_tokens_that_other_processors_forbid(vocabulary: Vocabulary) -> None:
    a = vocabulary.encode("a")[0]
    scores = torch.randn(2, vocabulary.padded_vocab_size)
    scores[:, a] = -torch.inf
    with GuidedLogitsProcessor(
        vocabulary, [Constraint.regex("a"), Constraint.regex("(?s:.)*")]
    ) as subject:
        before = scores.clone()
        masked = subject(torch.tensor([[1], [2]]), scores)
        assert torch.equal(scores, before), "`generate()` may return them"
        assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
        assert masked[1].isfinite().sum() > 300
        assert masked[1, a].isneginf() or masked[1, a] <= -1e4
        subject.reset()
        scores[:] = -torch.inf
        masked = subject(torch.tensor([[1], [2]]), scores)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
    assert masked[1].isfinite().sum() > 300


def test_a_row_that_ended_early_is_allowed_stop_tokens_only(
    vocabulary: Vocabulary,
) -> None:
    """`stop_strings` end a row in the middle of its constraint: `generate()` pads
    it."""
    prompt = torch.tensor([[7], [8]])
    a = vocabulary.encode("a")[0]
    padding = min(vocabulary.special_token_ids - set(vocabulary.stop_token_ids))
    with GuidedLogitsProcessor(vocabulary, Constraint.regex("a{9}")) as subject:
        scores = torch.zeros(2, vocabulary.padded_vocab_size)
        subject(prompt, scores)
        for column in ([[a], [a]], [[padding], [a]], [[padding], [a]]):
            prompt = torch.cat([prompt, torch.tensor(column)], dim=1)
            masked = subject(prompt, scores)
        assert masked[0].isfinite().nonzero().flatten().tolist() == sorted(
            vocabulary.stop_token_ids
        )
        assert masked[1, a].isfinite()
