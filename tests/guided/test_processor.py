from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from faulty_pool import FaultyPool
from scripted_grammar import STOP, ScriptedBackends

from guided.constraint import Constraint
from guided.errors import BackendError
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, StepMasks
from guided.processor import FIRST_MASK_SECONDS, DecodeStep, GuidedProcessor, decode_step
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

WIDTH = 40
VOCABULARY = Vocabulary(
    token_bytes=(b"</s>", *(bytes([97 + index]) for index in range(20))),
    stop_token_ids=(STOP,),
    special_token_ids=frozenset({STOP}),
    padded_vocab_size=WIDTH,
)


def processor(fail_at: int | None = None) -> GuidedProcessor:
    return GuidedProcessor(InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at)))  # type: ignore[arg-type]


def allowed(logits: torch.Tensor, row: int) -> list[int]:
    return torch.isfinite(logits[row]).nonzero().flatten().tolist()


def test_a_failed_row_allows_a_stop_token_only() -> None:
    pool = InlinePool(VOCABULARY, ScriptedBackends(VOCABULARY, fail_at=1))  # type: ignore[arg-type]
    subject = GuidedProcessor(pool)
    subject.initialize("bad", Constraint.choice(["12"]))
    subject.initialize("good", Constraint.choice(["345"]))
    rows = [GuidedSequence("bad", 1, []), GuidedSequence("good", 2, [])]
    subject.prepare(rows)
    assert not subject.apply(torch.zeros(2, WIDTH)).failed
    subject.prepare([GuidedSequence("bad", 1, [1]), GuidedSequence("good", 2, [3, 4])])
    logits = torch.zeros(2, WIDTH)
    report = subject.apply(logits)
    assert list(report.failed) == [1]
    assert isinstance(report.failed[1], BackendError)
    assert allowed(logits, 0) == [STOP]
    assert allowed(logits, 1) == [5]
    assert pool.status().workers[0].open_sequences == 1, "the failed one is closed"


def test_rows_of_requests_that_are_not_ready_are_refused() -> None:
    class SlowPool(InlinePool):
        hold = False

        def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
            return Future() if self.hold else super().compile(constraint, backends)

    pool = SlowPool(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
    subject = GuidedProcessor(pool)
    subject.initialize("r", Constraint.choice(["12"]))
    good = GuidedSequence("r", 1, [])
    with pytest.raises(ValueError, match="'unknown' is not initialized"):
        subject.prepare([good, GuidedSequence("unknown", 2, [])])
    pool.hold = True
    subject.initialize("slow", Constraint.choice(["12"]))
    with pytest.raises(ValueError, match="'slow' is still being compiled"):
        subject.prepare([good, GuidedSequence("slow", 2, [])])
    subject.prepare([good])
    logits = torch.zeros(1, WIDTH)
    subject.apply(logits)
    assert allowed(logits, 0) == [1]
    subject.free("r")
    with pytest.raises(ValueError, match="'r' is not initialized"):
        subject.prepare([good])


class LatePool(InlinePool):
    """An inline pool in which all rows are late until `decided` was called `looks` times."""

    def __init__(self, looks: int) -> None:
        super().__init__(VOCABULARY, ScriptedBackends(VOCABULARY))  # type: ignore[arg-type]
        self.looks = looks
        self.deadlines: list[float | None] = []

    def collect(self, deadline: float | None = None) -> StepMasks:
        self.deadlines.append(deadline)
        count = len(self._step)
        step = super().collect(deadline)
        return StepMasks(late=list(range(count))) if self.looks > 0 else step

    def decided(self) -> list[int]:
        self.looks -= 1
        return [99] if self.looks <= 0 else []  # of this step, or of an earlier one


@pytest.mark.parametrize(
    ("rows", "looks", "deadline", "deadlines"),
    [(1, 5, 0.0, [0.0, 0.0]), (1, 1 << 30, 0.0, [0.0, 0.0]), (2, 5, 0.001, [0.001]), (1, 5, None, [None])],
    ids=["until one is decided", "0.1 s at most", "not if another row can be sampled", "not without a deadline"],
)
def test_waits_for_the_first_mask(rows: int, looks: int, deadline: float | None, deadlines: list[float | None]) -> None:
    pool = LatePool(looks)
    subject = GuidedProcessor(pool)
    subject.initialize("r", Constraint.choice(["12"]))
    subject.prepare([GuidedSequence("r", 7, [])])
    started = time.monotonic()
    report = subject.apply(torch.zeros(rows, WIDTH), deadline)
    assert pool.deadlines == deadlines
    assert report.late == ([] if pool.looks <= 0 else [7])
    assert (time.monotonic() - started >= FIRST_MASK_SECONDS) == (looks > 5)


def test_misuse_is_an_error() -> None:
    subject = processor()
    for request_id in ("a", "b"):
        subject.initialize(request_id, Constraint.choice(["12"]))
    subject.prepare([GuidedSequence("a", 1, [])])
    with pytest.raises(ValueError, match="39 columns"):
        subject.apply(torch.zeros(1, WIDTH - 1))
    subject.apply(torch.zeros(1, WIDTH))
    with pytest.raises(ValueError, match="belongs to request 'a'"):
        subject.prepare([GuidedSequence("b", 1, [])])
    with pytest.raises(ValueError, match="twice"):
        subject.prepare([GuidedSequence("b", 2, []), GuidedSequence("b", 2, [])])
    subject.prepare([GuidedSequence("b", 2, [])])


def test_a_grammar_is_released_once_it_is_compiled() -> None:
    released: list[Grammar] = []

    class SlowPool(InlinePool):
        pending: Future[Grammar] = Future()

        def compile(self, constraint: Constraint, backends: Sequence[str]) -> Future[Grammar]:
            return self.pending

        def release(self, grammar: Grammar) -> None:
            released.append(grammar)

        def free(self, sequence_ids: Collection[int]) -> None:
            assert not sequence_ids

    pool = SlowPool(VOCABULARY)
    subject = GuidedProcessor(pool)
    subject.initialize("r", Constraint.choice(["1"]))
    subject.free("r")
    assert released == []
    grammar = Grammar("k", "llguidance", Constraint.choice(["1"]))
    pool.pending.set_result(grammar)
    assert released == [grammar]


def test_masks_can_be_collected_instead_of_applied() -> None:
    subject = processor(fail_at=1)
    subject.initialize("a", Constraint.choice(["12"]))
    subject.initialize("b", Constraint.choice(["34"]))
    subject.prepare([GuidedSequence("b", 2, []), GuidedSequence("a", 1, [1])], [3, 1])
    bitmask = np.full((4, 2), -1, np.int32)
    report = subject.collect(bitmask)
    assert list(report.failed) == [1]
    assert bitmask[3].tolist() == [1 << 3, 0]
    assert bitmask[1].tolist() == [1 << STOP, 0], "a failed row allows a stop token only"
    assert (bitmask[[0, 2]] == -1).all()
    with pytest.raises(RuntimeError, match="without prepare"):
        subject.collect(bitmask)


LETTERS = Vocabulary((b"</s>", *(bytes([97 + index]) for index in range(26))), (0,), frozenset({0}), 32)


class Loop:
    """Two constrained sequences in rows 0 and 2, and a row without a constraint between them."""

    def __init__(self, pool: InlinePool) -> None:
        self.processor = GuidedProcessor(pool)
        self.processor.initialize("r", Constraint.regex("(abc|xyz)")).result()
        self.sequences = [GuidedSequence("r", 0, []), GuidedSequence("r", 1, [])]

    @property
    def texts(self) -> list[bytes]:
        return [LETTERS.decode(list(sequence.output_token_ids)) for sequence in self.sequences]

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
    loop = Loop(InlinePool(LETTERS))
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
    loop = Loop(InlinePool(LETTERS, forced_tokens=True))
    loop.step(24, 7, 1)
    assert loop.step(25, 7, 2).ended == [0, 1]
    assert loop.texts == [b"xyz", b"abc"]


def test_tokens_of_late_and_failed_sequences_are_not_appended() -> None:
    pool = FaultyPool(LETTERS)
    pool.delay = lambda sequence_id, position: int(sequence_id == 0)
    pool.fails = lambda sequence_id, position: sequence_id == 1
    loop = Loop(pool)
    step = loop.step(24, 7, 1, deadline=0.0)
    assert step.report.late == [0]
    assert set(step.report.failed) == {1}
    assert loop.texts == [b"", b""]


def test_a_forward_pass_that_fails_leaves_the_processor_usable() -> None:
    loop = Loop(InlinePool(LETTERS))

    def forward() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        decode_step(loop.processor, loop.sequences, forward, lambda logits: [], [0, 2])
    loop.step(24, 7, 1)
    assert loop.texts == [b"x", b"a"]
