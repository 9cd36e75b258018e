"""decode_step: one step of a decode loop with a `GuidedProcessor`. `docs/embedding.md`
shows its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from guided.processors.guided_processor import GuidedProcessor
from guided.processors.logit_post_processor import ApplyReport
from guided.sequence import GuidedSequence

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class DecodeStep:
    """The result of one step."""

    tokens: list[int]
    """The sampled token of each logits row. Ignore those of failed and late
    sequences."""
    report: ApplyReport
    """The report about the sequences that failed or are late."""
    ended: list[int] = field(default_factory=list)
    """Ids of sequences that sampled a stop token. It is not appended. Do not decode
    them again."""


def decode_step(
    processor: GuidedProcessor,
    sequences: Sequence[GuidedSequence],
    forward: Callable[[], torch.Tensor],
    sample: Callable[[torch.Tensor], Sequence[int]],
    logits_rows: Sequence[int] | None = None,
    deadline: float | None = None,
) -> DecodeStep:
    """Prepare the masks, run the forward pass, apply the masks, sample, and append the
    tokens to the outputs.

    Args:
        sequences: the constrained sequences of the batch, with lists as
            `output_token_ids`.
        forward: returns the logits, float `[rows, >= padded_vocab_size]`. The masks are
            computed meanwhile.
        sample: returns one token for each logits row.
        logits_rows: the logits row of each sequence. None: row i for sequence i.
        deadline: seconds to wait for masks after the forward pass. A sequence without a
            mask by then is late: decode it again when `processor.decided` returns it.
            None: wait for every mask.

    Tokens of failed and late sequences are not appended. If the pool looks ahead
    (`forced_tokens`), the forced tokens are appended too, so an output may grow by
    several tokens.
    """
    if logits_rows is None:
        logits_rows = range(len(sequences))
    processor.prepare(sequences, logits_rows)
    logits = forward()
    report = processor.apply(logits, deadline)
    step = DecodeStep([int(token) for token in sample(logits)], report)
    for row, sequence in zip(logits_rows, sequences, strict=True):
        if (
            sequence.sequence_id not in report.failed
            and sequence.sequence_id not in report.late
        ):
            _append(processor, sequence, [step.tokens[row]], step)
    edits = processor.edits(sequences)
    for sequence in sequences:
        if sequence.sequence_id in edits:
            _append(processor, sequence, edits[sequence.sequence_id].append, step)
    return step


def _append(
    processor: GuidedProcessor,
    sequence: GuidedSequence,
    tokens: Sequence[int],
    step: DecodeStep,
) -> None:
    """Append to the output, up to a stop token."""
    for token in tokens:
        if token in processor.vocabulary.stop_token_ids:
            step.ended.append(sequence.sequence_id)
            return
        cast("list[int]", sequence.output_token_ids).append(token)
