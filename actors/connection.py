"""WorkerConnection: the engine's side of one actor incarnation, and the sequences that
are open there."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.protocol import (
    ACTIVITIES,
    EDIT,
    FREE,
    IDLE,
    POSITION,
    Channel,
    Edit,
    Failed,
    Fill,
    Free,
    Indices,
    Int32s,
    Int64s,
    Open,
    Request,
    SlotTable,
    Unload,
    freed,
)
from guided.errors import GuidedError, bounded, from_wire
from guided.pools.grammar_cache import LeastRecentlyUsed
from guided.pools.protocol import Grammar
from guided.processors.pinned_masks import unpin_masks
from guided.sequence import GuidedSequence

_decode = Decoder(Failed).decode


@dataclass(slots=True, eq=False)
class SequenceState:
    """An open sequence, as the pool knows it. The number of output tokens sent is
    `target & POSITION` of its slot."""

    sequence: GuidedSequence
    grammar: Grammar
    worker: WorkerConnection | None = None
    """The worker that it is open on. None: it is opened on one when it is next
    submitted."""
    slot: int = FREE
    number: int = 0
    """Number of its grammar on that worker."""
    waits_until: float = math.inf
    """`time.monotonic()` at which it fails if no worker can take it. Infinite: it does
    not wait for one."""
    replays: int = 0
    """Number of workers that ended while they were busy with it."""
    error: GuidedError | None = None
    """Why it is over."""

    @property
    def is_ready(self) -> bool:
        """The mask after all output tokens that were sent is in the worker's table."""
        if self.worker is None:
            return False
        return bool(
            self.worker.table.ready[self.slot] == self.worker.table.target[self.slot]
        )

    @property
    def has_answered(self) -> bool:
        """The worker has computed a mask for it."""
        return self.worker is not None and bool(self.worker.table.ready[self.slot] >= 0)

    def has_waited(self, seconds: float) -> bool:
        """Begin to wait for a worker, if that has not begun. Returns whether it began
        at least `seconds` ago."""
        now = time.monotonic()
        self.waits_until = min(self.waits_until, now + seconds)
        return now >= self.waits_until

    def fail(self, error: GuidedError) -> None:
        """Note why it is over, unless it was over before."""
        self.error = self.error or error

    def leave(self) -> None:
        """Forget the worker. The sequence is opened again, from its whole output, when
        it is next submitted."""
        self.worker = None
        self.slot = FREE


class Work(NamedTuple):
    """The activity of a thread of a worker at its last heartbeat (`SlotTable.mark`)."""

    wall: float
    """Seconds from its beginning until the heartbeat; negative if it began later."""
    seconds: float
    """Seconds of these in which the thread did not wait for a CPU."""
    cpu: float
    """Seconds of these in which the thread ran."""
    phase: Literal["fill", "load", "import"]
    subject: int
    """The slot that it fills, or the number of the grammar that it loads."""


def last_tokens(sequences: Sequence[GuidedSequence]) -> tuple[Int32s, Int64s]:
    """Return the newest output token of each sequence (0 if there is none), and the
    lengths of the outputs."""
    outputs = [sequence.output_token_ids for sequence in sequences]
    last = np.fromiter(
        [tokens[-1] if tokens else 0 for tokens in outputs], np.int32, len(outputs)
    )
    return last, np.fromiter(map(len, outputs), np.int64, len(outputs))


class StepPart:
    """The rows of a step that are filled by one worker: their positions in the step,
    and their sequences."""

    def __init__(
        self, worker: WorkerConnection, rows: Mapping[int, SequenceState]
    ) -> None:
        self.worker = worker
        self.table = worker.table
        self.states = np.array(list(rows.values()), object)
        self.rows = np.array(list(rows), np.intp)
        self.slots = np.array([state.slot for state in rows.values()], np.intp)
        self.target = self.table.target[self.slots]
        """int64 `[n]`: the version that each row's mask is wanted for."""
        self.ready: NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        self._fill = _fill(self.slots)

    def look(self) -> Iterable[tuple[int, SequenceState]]:
        """Compare the versions; return the rows without a mask."""
        self.ready = self.table.ready[self.slots] == self.target
        if self.ready.all():
            return ()
        return zip(
            self.rows[~self.ready].tolist(), self.states[~self.ready], strict=True
        )

    def select(self, kept: NDArray[np.bool_]) -> None:
        """Keep some of the rows."""
        for name in ("states", "rows", "slots", "target", "ready"):
            setattr(self, name, getattr(self, name)[kept])

    def send_outputs(self, last: Int32s, lengths: Int64s) -> None:
        """Send the new tokens of each row's output, and request the masks that were not
        requested yet.

        Args:
            last, lengths: `[rows of the whole step]`, see `last_tokens`.
        """
        table = self.table
        slots = self.slots
        rows = self.rows
        fill = self._fill
        target = table.target[slots]
        new = lengths[rows] - (target & POSITION)
        usual = (new == 1) & (table.ready[slots] == target)
        # seldom: in the usual case each operation counts, because the engine waits for
        # it
        if not usual.all():
            for index in np.flatnonzero(~usual & (new != 0)).tolist():
                self.worker.edit(self.states[index])
            slots = slots[usual]
            rows = rows[usual]
            fill = _fill(slots)
        if len(slots):
            table.tokens[slots] = last[rows]
            table.target[slots] += 1
            self.worker.requests.append(fill)
        self.target = table.target[self.slots]


class WorkerConnection:
    """Sends requests to a worker, reads its answers, and owns its slots. For one
    incarnation, and one thread.

    Args:
        name: of the worker, for messages.
        max_cache_bytes: size of the grammars that the worker keeps (see
            `LeastRecentlyUsed`).
    """

    def __init__(
        self,
        name: str,
        pid: int,
        channel: Channel,
        table: SlotTable,
        max_cache_bytes: int,
        is_remote: bool = False,
    ) -> None:
        self.name = name
        self.pid = pid
        self.is_remote = is_remote
        """The worker is on another node. What it is busy with is known up to a second
        later."""
        self.channel = channel
        self.table = table
        self.sequences: dict[int, SequenceState] = {}
        """The open sequences, by slot."""
        self._loaded = LeastRecentlyUsed[int](max_cache_bytes)
        """Numbers of the grammars that the worker has, by key. One that is sent again
        gets a new number."""
        self._count = count()
        self.requests: list[Request] = []
        """The next frame."""

    def free_slot(self) -> int | None:
        """Return the lowest free slot: a GPU reads those without a copy. None: no
        sequence can be opened now."""
        table = self.table
        free = np.flatnonzero((table.target < 0) & (table.target == table.ready))
        return int(free[0]) if len(free) else None

    def open(self, state: SequenceState) -> None:
        """Open a sequence in a free slot, with the whole output that it has now."""
        slot = self.free_slot()
        assert slot is not None
        sequence = state.sequence
        grammar = state.grammar
        tokens = list(sequence.output_token_ids)
        number = self._loaded.get(grammar.key)
        if number is None:
            number = next(self._count)
            self.channel.send(grammar.dumped, is_grammar=True)
            left = self._loaded.add(grammar.key, number, grammar.nbytes)
            if left:
                self.requests.append(Unload(left))
        state.number = number
        self.sequences[slot] = state
        state.worker = self
        state.slot = slot
        state.waits_until = math.inf
        version = self._next_version(slot, len(tokens))
        opening = (
            slot,
            version,
            number,
            tokens,
            sequence.request_id,
            sequence.budget,
            sequence.final,
        )
        self.requests.append(Open(*opening))

    def cut(self, state: SequenceState, length: int) -> None:
        """Have the worker forget output tokens after the first `length` ones."""
        if length < int(self.table.target[state.slot]) & POSITION:
            self.edit(state, length)

    def edit(self, state: SequenceState, length: int = POSITION) -> None:
        """Send the part of a sequence's output that the worker may not know in a
        message, up to `length` tokens."""
        output = state.sequence.output_token_ids
        end = min(len(output), length)
        filled = max(0, int(self.table.ready[state.slot])) & POSITION
        sent = int(self.table.target[state.slot]) & POSITION
        start = min(filled, sent, end)
        self.requests.append(
            Edit(
                state.slot,
                self._next_version(state.slot, end),
                start,
                list(output[start:end]),
            )
        )

    def _next_version(self, slot: int, length: int) -> int:
        """Request the mask after an output that is sent in a message. Returns the
        output's version."""
        target = int(self.table.target[slot])
        if target < 0:
            edits = ~target
        else:
            edits = target // EDIT
        version = (edits + 1) * EDIT + length
        self.table.target[slot] = version
        return version

    def free(self, state: SequenceState) -> None:
        """Close a sequence's matcher with the next frame. Its slot is reused once the
        worker has confirmed it."""
        slot = state.slot
        del self.sequences[slot]
        self.table.target[slot] = freed(int(self.table.target[slot]))
        self.requests.append(Free(slot))
        state.leave()

    def request_wakeup(self) -> None:
        """Have the worker send a message once it has filled what it was asked for."""
        self.table.wake[0] = 1
        self.channel.push()

    def receive(self) -> None:
        """Read the answers that have arrived."""
        # if all rows are late, no step sends the rest of a large frame
        self.channel.push()
        while (frame := self.channel.receive()) is not None:
            try:
                answer = _decode(frame)
            except msgspec.MsgspecError:
                # empty, or not a worker's: if rows stay missing, the supervisor ends
                # the worker
                continue
            state = self.sequences.get(answer.slot)
            if state is not None and answer.version == self.table.target[state.slot]:
                error = from_wire(answer.error)
                error.add_note(f"on {self.name}")
                state.fail(error)
                key = state.grammar.key
                # Perhaps its grammar was not loaded, for a passing lack of memory: the
                # next sequence loads it again.
                if not state.has_answered and self._loaded.get(key) == state.number:
                    self.requests.append(Unload([self._loaded.remove(key)]))

    def work(self) -> list[Work]:
        """Return what each busy thread of the worker does, what began last first. From
        any thread."""
        mark = self.table.mark[0]
        busy = mark["busy"].tolist()
        beat = float(mark["beat"])
        walls = (beat - mark["since"]).tolist()
        works = [
            Work(wall, wall - waited, ran, phase, subject)
            for phase, subject, wall, (ran, waited) in zip(
                ACTIVITIES, busy, walls, mark["times"].tolist(), strict=True
            )
            if subject != IDLE
        ]
        return sorted(works)

    def concerned(self, works: Iterable[Work]) -> list[SequenceState]:
        """Return the sequences without a mask that threads are busy with. From any
        thread."""
        threads = {(work.phase == "fill", work.subject) for work in works}
        states = [
            state for state in list(self.sequences.values()) if not state.is_ready
        ]
        filled = [state for state in states if (True, state.slot) in threads]
        return filled + [
            state
            for state in states
            if (False, state.number) in threads and not state.has_answered
        ]

    def described(self, work: Work, silent: float) -> str:
        """Return a text about what a thread is busy with, for the log. From any thread.

        Args:
            silent: seconds since the last heartbeat.
        """
        text = f"; {work.phase}: {work.cpu:.1f} s of CPU in {max(0.0, work.wall) + silent:.1f} s"
        for state in self.concerned([work]):
            sequence = state.sequence
            constraint = state.grammar.constraint
            text += f", sequence {sequence.sequence_id} of request {sequence.request_id}, constraint {constraint.key}"
            return text + f": {bounded(constraint.source, 200)!r}"
        return text

    def close(self) -> None:
        """Close the connection. Idempotent."""
        unpin_masks(self.table.mask)
        self.channel.close()


def _fill(slots: Indices) -> Fill:
    return Fill(slots.astype(np.int32).tobytes())


def send_all(workers: Collection[WorkerConnection]) -> None:
    """Send every worker its next frame, one right after the other: a worker that wakes
    up may take this CPU."""
    frames = [
        (worker, encode(worker.requests)) for worker in workers if worker.requests
    ]
    for worker, frame in frames:
        worker.requests = []
        worker.channel.send(frame)
