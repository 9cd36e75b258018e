"""Scoring of tokens that are not sampled, where their log-probabilities are wanted:
prompts, and forced tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.runner import ModelRunner
from engine.step.logprobs import ranked_logprobs
from engine.step.prefills import Chunk
from engine.step.scheduler import Batch

_SCORED_ROWS = 256
"""Maximum number of tokens that are scored at once: each takes a row of logits."""


def score_tokens(batch: Batch, hidden: Tensor, runner: ModelRunner) -> None:
    """Record the log-probabilities of the tokens of prefills that have none and need
    some.

    Args:
        hidden: the hidden states of the step, `[tokens, hidden]`.
    """
    for chunk in batch.prefills:
        for first, last in chunk.unscored():
            for begin in range(first, last, _SCORED_ROWS):
                _score(chunk, begin, min(last, begin + _SCORED_ROWS), hidden, runner)


def _score(
    chunk: Chunk, first: int, last: int, hidden: Tensor, runner: ModelRunner
) -> None:
    """Score tokens `first` to `last` of a chunk's sequence, all of its prompt or all of
    its output."""
    sequence = chunk.sequences[0]
    predicting = chunk.row - chunk.start - 1
    rows = list(range(predicting + first, predicting + last))
    logprobs = runner.compute_logits(runner.select(hidden, rows)).log_softmax(-1)
    tokens = torch.tensor(sequence.span(first, last), device=hidden.device)
    is_prompt = first < len(sequence.prompt_token_ids)
    if is_prompt:
        count = sequence.params.prompt_logprobs
    else:
        count = sequence.params.logprobs
    entries = ranked_logprobs(logprobs, tokens, [count or 0] * len(tokens))
    if is_prompt:
        sequence.group.prompt_logprobs += entries
        return
    for place, entry in enumerate(entries, first - len(sequence.prompt_token_ids)):
        sequence.record.add_score(entry, place)
