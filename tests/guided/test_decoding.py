"""`decode_step`: one step of a loop, with a row without a constraint, late, failed and ended rows."""

from __future__ import annotations

import pytest
import torch
from faulty_pool import FaultyPool

from guided.constraint import Constraint
from guided.pools.inline import InlinePool
from guided.processor import DecodeStep, GuidedProcessor, decode_step
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(26))),
    stop_token_ids=(0,),
    special_token_ids=frozenset({0}),
    padded_vocab_size=32,
)


class Loop:
    """Two constrained sequences in rows 0 and 2, and a row without a constraint between them."""

    def __init__(self, pool: FaultyPool | InlinePool) -> None:
        self.processor = GuidedProcessor(pool)
        self.processor.initialize("r", Constraint.regex("(abc|xyz)")).result()
        self.sequences = [GuidedSequence("r", 0, []), GuidedSequence("r", 1, [])]

    @property
    def texts(self) -> list[bytes]:
        return [VOCABULARY.decode(list(sequence.output_token_ids)) for sequence in self.sequences]

    def step(self, *preferred: int, deadline: float | None = None) -> DecodeStep:
        """Decode. Row i prefers `preferred[i]`."""

        def forward() -> torch.Tensor:
            logits = torch.zeros(3, 32)
            logits[[0, 1, 2], list(preferred)] = 5.0
            return logits

        return decode_step(
            self.processor, self.sequences, forward, lambda logits: logits.argmax(-1).tolist(), [0, 2], deadline
        )


def test_tokens_are_masked_and_appended() -> None:
    loop = Loop(InlinePool(VOCABULARY))
    step = loop.step(24, 7, 9)
    assert step.tokens == [24, 7, 1]
    assert loop.texts == [b"x", b"a"]
    assert not step.ended
    loop.step(25, 7, 2)
    loop.step(26, 7, 3)
    step = loop.step(7, 7, 7)
    assert loop.texts == [b"xyz", b"abc"]
    assert step.tokens == [0, 7, 0]
    assert step.ended == [0, 1]


def test_tokens_without_an_alternative_are_appended_at_once() -> None:
    loop = Loop(InlinePool(VOCABULARY, forced_tokens=True))
    loop.step(24, 7, 1)
    assert loop.step(25, 7, 2).ended == [0, 1]
    assert loop.texts == [b"xyz", b"abc"]


def test_tokens_of_late_and_failed_sequences_are_not_appended() -> None:
    pool = FaultyPool(VOCABULARY)
    pool.delay = lambda sequence_id, position: int(sequence_id == 0)
    pool.fails = lambda sequence_id, position: sequence_id == 1
    loop = Loop(pool)
    step = loop.step(24, 7, 1, deadline=0.0)
    assert step.report.late == [0]
    assert set(step.report.failed) == {1}
    assert loop.texts == [b"", b""]


def test_a_forward_pass_that_fails_leaves_the_processor_usable() -> None:
    loop = Loop(InlinePool(VOCABULARY))

    def forward() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        decode_step(loop.processor, loop.sequences, forward, lambda logits: [], [0, 2])
    loop.step(24, 7, 1)
    assert loop.texts == [b"x", b"a"]
