"""The processor of an engine's steps over a pool: rows that fail or are late, misuse,
and `decode_step`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch
from byte_vocabulary import LETTERS, STOP
from fake_device import FakeDevice, fake_device
from faulty_pool import FaultyPool

from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import BackendError
from guided.pools.inline import InlinePool
from guided.pools.protocol import StepMasks
from guided.processors.decode_step import DecodeStep, decode_step
from guided.processors.guided_processor import GuidedProcessor
from guided.processors.late_masks import FIRST_MASK_SECONDS
from guided.processors.logit_post_processor import ApplyReport
from guided.sequence import GuidedSequence

WIDTH = LETTERS.padded_vocab_size


def allowed(logits: torch.Tensor, row: int) -> list[int]:
    return torch.isfinite(logits[row]).nonzero().flatten().tolist()


def test_a_failed_row_allows_a_stop_token_only() -> None:
    pool = FaultyPool(LETTERS)
    pool.fails = lambda sequence_id, position: (sequence_id, position) == (1, 1)
    subject = GuidedProcessor(pool)
    subject.initialize("bad", Constraint.choice(["ab"]))
    subject.initialize("good", Constraint.choice(["cde"]))
    rows = [GuidedSequence("bad", 1, []), GuidedSequence("good", 2, [])]
    subject.prepare(rows)
    assert not subject.apply(torch.zeros(2, WIDTH)).failed
    rows = [GuidedSequence("bad", 1, [1]), GuidedSequence("good", 2, [3, 4])]
    subject.prepare(rows)
    logits = torch.zeros(2, WIDTH)
    report = subject.apply(logits)
    assert list(report.failed) == [1]
    assert isinstance(report.failed[1], BackendError)
    assert allowed(logits, 0) == [STOP]
    assert allowed(logits, 1) == [5]
    assert pool.status().workers[0].open_sequences == 1, "the failed one is closed"


@pytest.mark.parametrize(
    ("rows", "looks", "deadline", "late"),
    [(1, 5, 0.0, []), (1, 1 << 30, 0.0, [7]), (2, 5, 0.001, [7]), (1, 5, None, [])],
    ids=[
        "until one is decided",
        "0.1 s at most",
        "not if another row can be sampled",
        "not without a deadline",
    ],
)
def test_waits_for_the_first_mask(
    rows: int, looks: int, deadline: float | None, late: list[int]
) -> None:
    pool = FaultyPool(LETTERS)
    pool.delay = lambda sequence_id, position: looks
    subject = GuidedProcessor(pool)
    subject.initialize("r", Constraint.choice(["ab"]))
    subject.prepare([GuidedSequence("r", 7, [])])
    started = time.monotonic()
    assert subject.apply(torch.zeros(rows, WIDTH), deadline).late == late
    assert looks == 5 or time.monotonic() - started >= FIRST_MASK_SECONDS


class RecordedPool(InlinePool):
    """Notes the calls, also those of a device's events. All rows are late in the first
    `late` collects."""

    def __init__(self, device: FakeDevice, late: int = 0) -> None:
        super().__init__(LETTERS)
        device.on_event = self._note
        self._late = late
        self.calls: list[str] = []
        self.deadlines: list[float | None] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)

    def submit(
        self, sequences: Sequence[GuidedSequence], batch: int | None = None
    ) -> None:
        self.calls.append("submit")
        super().submit(sequences, batch)

    def free(self, sequence_ids: Collection[int]) -> None:
        self.calls.append("free")
        super().free(sequence_ids)

    def collect(self, deadline: float | None = None) -> StepMasks:
        self.deadlines.append(deadline)
        return (
            StepMasks(late=[0])
            if len(self.deadlines) <= self._late
            else super().collect(deadline)
        )


def applied(
    pool: RecordedPool, device: FakeDevice, deadline: float | None
) -> tuple[GuidedProcessor, ApplyReport]:
    subject = GuidedProcessor(pool)
    subject.initialize("r", Constraint.choice(["ab"]))
    subject.prepare([GuidedSequence("r", 7, [])])
    return subject, subject.apply(device.tensor(torch.zeros(2, WIDTH)), deadline)


def test_masks_are_not_overwritten_before_the_kernel_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_device(monkeypatch) as device:
        pool = RecordedPool(device)
        subject, _ = applied(pool, device, None)
        subject.prepare([GuidedSequence("r", 7, [1])])
        subject.apply(device.tensor(torch.zeros(2, WIDTH)))
        subject.free("r")
    step = ["submit", "record", "synchronize"]
    assert pool.calls == [*step, *step, "free"]


@pytest.mark.parametrize(
    ("late", "busy", "late_rows", "looks", "last"),
    [
        (3, 1000, [], 4, None),
        (1000, 3, [7], 4, 0.25),
        (0, 0, [], 1, None),
        (4, 3, [], 4, 0.25),
    ],
    ids=[
        "masks before the forward pass",
        "masks after the deadline",
        "masks at once",
        "masks before the deadline",
    ],
)
def test_the_deadline_counts_from_the_end_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
    late: int,
    busy: int,
    late_rows: list[int],
    looks: int,
    last: float | None,
) -> None:
    """Masks that are there before it are applied without a wait for the device."""
    with fake_device(monkeypatch) as device:
        device.busy = busy
        pool = RecordedPool(device, late)
        _, report = applied(pool, device, 0.25)
    assert report.late == late_rows
    assert pool.deadlines[looks:] == ([] if last is None else [last])
    assert pool.deadlines[:looks] == [0.0] * looks
    assert "synchronize" not in pool.calls
    assert len(device.launched) == 1


@pytest.mark.parametrize(
    ("others", "late"), [(0, []), (9, [7])], ids=["all are late", "one of ten is late"]
)
def test_a_batch_waits_less_than_its_late_rows_lose(
    others: int, late: list[int]
) -> None:
    class SlowPool(InlinePool):
        def collect(self, deadline: float | None = None) -> StepMasks:
            time.sleep(0.001)
            return (
                StepMasks(late=[0])
                if time.monotonic() < ready_at
                else super().collect(deadline)
            )

    subject = GuidedProcessor(SlowPool(LETTERS))
    subject.initialize("r", Constraint.choice(["ab"]))
    rows = [GuidedSequence("r", 7 + number, []) for number in range(1 + others)]
    subject.prepare(rows)
    ready_at = time.monotonic() + 0.1
    masks = np.zeros((len(rows), words(WIDTH)), np.int32)
    assert subject.collect(masks, 0.0, patience=0.5).late == late
    assert (time.monotonic() < ready_at) == bool(late)


def test_misuse_is_an_error() -> None:
    pool = FaultyPool(LETTERS)
    subject = GuidedProcessor(pool)
    for request_id in ("a", "b"):
        subject.initialize(request_id, Constraint.choice(["ab"]))
    pool.hold_compiles = True
    subject.initialize("slow", Constraint.choice(["ab"]))
    good = GuidedSequence("a", 1, [])
    subject.prepare([good])
    with pytest.raises(ValueError, match="39 columns"):
        subject.apply(torch.zeros(1, WIDTH - 1))
    subject.apply(torch.zeros(1, WIDTH))
    for wrong, message in (
        ([GuidedSequence("b", 1, [])], "belongs to request 'a'"),
        ([GuidedSequence("b", 2, []), GuidedSequence("b", 2, [])], "twice"),
        ([good, GuidedSequence("unknown", 3, [])], "'unknown' is not initialized"),
        ([good, GuidedSequence("slow", 3, [])], "'slow' is still being compiled"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.prepare(wrong)
    subject.prepare([good])
    logits = torch.zeros(1, WIDTH)
    subject.apply(logits)
    assert allowed(logits, 0) == [1]
    with pytest.raises(RuntimeError, match="without prepare"):
        subject.collect(np.zeros((1, 2), np.int32))
    subject.free("a")
    with pytest.raises(ValueError, match="'a' is not initialized"):
        subject.prepare([good])


def test_masks_can_be_collected_instead_of_applied() -> None:
    pool = FaultyPool(LETTERS)
    pool.fails = lambda sequence_id, position: sequence_id == 1
    subject = GuidedProcessor(pool)
    subject.initialize("a", Constraint.choice(["ab"]))
    subject.initialize("b", Constraint.choice(["cd"]))
    subject.prepare([GuidedSequence("b", 2, []), GuidedSequence("a", 1, [1])], [3, 1])
    bitmask = np.full((4, 2), -1, np.int32)
    report = subject.collect(bitmask)
    assert list(report.failed) == [1]
    assert bitmask[3].tolist() == [1 << 3, 0]
    assert bitmask[1].tolist() == [1 << STOP, 0], (
        "a failed row allows a stop token only"
    )
    assert (bitmask[[0, 2]] == -1).all()


class Loop:
    """Two constrained sequences in rows 0 and 2, and a row without a constraint between
    them."""

    def __init__(self, pool: InlinePool) -> None:
        self.processor = GuidedProcessor(pool)
        self.processor.initialize("r", Constraint.regex("(abc|xyz)")).result()
        self.sequences = [GuidedSequence("r", 0, []), GuidedSequence("r", 1, [])]

    @property
    def texts(self) -> list[bytes]:
        return [
            LETTERS.decode(list(sequence.output_token_ids))
            for sequence in self.sequences
        ]

    def step(self, *preferred: int, deadline: float | None = None) -> DecodeStep:
        """Decode. Row i prefers `preferred[i]`."""

        def forward() -> torch.Tensor:
            logits = torch.zeros(3, WIDTH)
            logits[[0, 1, 2], list(preferred)] = 5.0
            return logits

        return decode_step(
            self.processor,
            self.sequences,
            forward,
            lambda logits: logits.argmax(-1).tolist(),
            [0, 2],
            deadline,
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


def test_a_forward_pass_that_fails_leaves_the_processor_usable() -> None:
    loop = Loop(InlinePool(LETTERS))

    def forward() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        decode_step(loop.processor, loop.sequences, forward, lambda logits: [], [0, 2])
    loop.step(24, 7, 1)
    assert loop.texts == [b"x", b"a"]
