"""WorkerConnection: the engine's side of one actor incarnation. It owns the incarnation's slots.

It ends with the incarnation; the next one gets a new connection. Used from the engine's thread, except `overdue`,
`retiring` and `num_open`, which the actor's supervisor uses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, encode
from numpy.typing import NDArray

from actors.channel import Channel
from actors.steps.protocol import (
    FAILED,
    FREE,
    IDLE,
    MAX_NEW_TOKENS,
    OK,
    POSITION,
    STEERED,
    Answer,
    Edit,
    Failed,
    Fill,
    Filled,
    Free,
    Open,
    Request,
    Segment,
    SlotTable,
    freed,
    in_fill_order,
)
from guided.errors import GuidedError, from_wire
from guided.pools.protocol import MAX_FORCED_TOKENS
from guided.sequence import GuidedSequence

if TYPE_CHECKING:
    from actors.processes import ProcessLocation

_decode = Decoder(Answer).decode


@dataclass(slots=True, eq=False)
class SequenceState:
    """An open sequence, as the pool knows it. The number of output tokens sent is `target & POSITION` of its slot."""

    sequence: GuidedSequence
    grammar: str
    """Key of its grammar."""
    parent_id: int | None
    """The sequence to copy the matcher of when this one is opened; None once it has been opened."""
    worker: WorkerConnection | None = None
    """The worker that it is open on. None: it is opened on one when it is next submitted."""
    slot: int = FREE
    row: int = 0
    """Its row in the latest step that looked it up."""
    changed_from: int | None = None
    """Output tokens from this position on have changed since they were sent."""
    opened_at: float = 0.0
    """`time.monotonic()` when it was opened on the worker."""
    waiting_since: float = 0.0
    """`time.monotonic()` when it began to wait for a worker; 0 if it does not wait."""
    seconds: float = 0.0
    """Estimate for its first mask on a worker: seconds that its last one took on another, or the grammar's first."""
    late_since: float = 0.0
    """`time.monotonic()` at the start of the step that its mask missed; 0 if its mask is not late."""
    quick_rows: int = 0
    """Number of consecutive masks of a straggler that did not hold up its worker."""
    quick_rows_needed: int = 16
    """After this number of them it is an ordinary sequence again."""
    suspect: bool = False
    """A worker ended while it may have been filling its mask: the next mask is filled on a worker without others."""
    deaths: int = 0
    """Number of workers that ended while they were certainly filling its mask."""
    moves: int = 0
    """Number of workers that ended while it was open there, since its last mask."""
    error: GuidedError | None = None
    """Why it is over."""

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def is_ready(self) -> bool:
        """The mask after all output tokens that were sent is in the worker's table."""
        table = self.worker.table if self.worker is not None else None
        return table is not None and bool(table.ready[self.slot] == table.target[self.slot])

    @property
    def has_answered(self) -> bool:
        """The worker has computed a mask for it."""
        return self.worker is not None and bool(self.worker.table.ready[self.slot] >= 0)

    def note_steered(self) -> None:
        """Note on the sequence whether the worker has restricted one of its masks."""
        if self.worker is not None and self.worker.table.status[self.slot] == STEERED:
            self.sequence.steered = True

    def leave(self) -> None:
        """Forget the worker. The sequence is opened again, from its whole output, when it is next submitted."""
        if self.has_answered:
            assert self.worker is not None
            self.seconds = float(self.worker.table.seconds[self.slot])
        self.worker, self.slot, self.parent_id, self.changed_from = None, FREE, None, None


class StepOutputs:
    """The outputs of a step's sequences, row by row."""

    def __init__(self, sequences: Sequence[GuidedSequence]) -> None:
        self.tokens = [sequence.output_token_ids for sequence in sequences]
        self.lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        self.last = np.fromiter([tokens[-1] if tokens else 0 for tokens in self.tokens], np.int32, len(self.tokens))
        """The newest token of each; 0 if there is none."""


class StepPart:
    """The rows of a step that are filled by one worker.

    Args:
        rows: int `[n]`: their positions in the step.
        slots: int `[n]`: their slots.
        states: the sequences of all rows of the step, by position.
    """

    def __init__(
        self,
        worker: WorkerConnection,
        rows: NDArray[np.intp],
        slots: NDArray[np.intp],
        states: Sequence[SequenceState | None],
    ) -> None:
        self.worker = worker
        self.table = worker.table
        self.rows = rows
        self.slots = slots
        self.target = self.table.target[slots]
        """int64 `[n]`: the version that each row's mask is wanted for."""
        self.ready: NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        self.missing = len(rows)
        """Rows that are not ready, as of the last `look`."""
        self._states = states
        self._fill: Fill | None = None

    def look(self) -> int:
        """Compare the versions; return how many masks are missing."""
        self.ready = self.table.ready[self.slots] == self.target
        self.missing = 0 if self.ready.all() else len(self.ready) - int(np.count_nonzero(self.ready))
        return self.missing

    def states(self, where: NDArray[np.bool_]) -> dict[int, SequenceState]:
        """Return the sequences of some rows, by position in the step.

        Args:
            where: bool `[n]`.
        """
        found = ((row, self._states[row]) for row in self.rows[where].tolist())
        return {row: state for row, state in found if state is not None}

    def send_tokens(self, tokens: NDArray[np.int32]) -> None:
        """Write one new token per row and request the next masks. All masks of the previous step are ready.

        Args:
            tokens: int32 `[rows of the whole step]`.
        """
        self.worker.begin_asking()
        self.target += 1
        self.table.tokens[self.slots, 0] = tokens[self.rows]
        self.table.target[self.slots] = self.target
        self.worker.asked[self.slots] = self.target
        if self._fill is None or not self.worker.shared:
            self._fill = self.worker.fill(self.slots)
        else:
            self.worker.queue(self._fill)

    def send_outputs(self, outputs: StepOutputs) -> None:
        """Send the new tokens of each row's output, and request the masks that were not requested yet."""
        table, slots = self.table, self.slots
        self.target = table.target[slots]
        new = outputs.lengths[self.rows] - (self.target & POSITION)
        written = (new == 1) & (table.ready[slots] == self.target)
        if written.all():
            self.send_tokens(outputs.last)
            return
        table.tokens[slots[written], 0] = outputs.last[self.rows[written]]
        for index in np.flatnonzero(~written & (new != 0)).tolist():
            written[index] = self._write(index, int(new[index]), outputs.tokens[self.rows[index]])
        if written.any():
            slots = slots[written]
            self.worker.begin_asking()
            table.target[slots] += new[written]
            self.worker.asked[slots] = table.target[slots]
            self.worker.fill(slots)
        self.target = table.target[self.slots]

    def _write(self, index: int, new: int, tokens: Sequence[int]) -> bool:
        """Write several new tokens into the table and return True. If that is impossible, send a message.

        Args:
            new: how many tokens are new; negative if the output has become shorter.
            tokens: the output.
        """
        slot = self.slots[index]
        if 1 <= new <= MAX_NEW_TOKENS and self.table.ready[slot] == self.target[index]:
            self.table.tokens[slot, :new] = tokens[-new:]
            return True
        state = self._states[self.rows[index]]
        if state is not None:
            self.worker.edit(state, len(tokens))
        return False

    def remove(self, where: NDArray[np.bool_]) -> None:
        """Drop rows that this worker will not fill.

        Args:
            where: bool `[n]`.
        """
        kept = ~where
        self.rows, self.slots, self.target = self.rows[kept], self.slots[kept], self.target[kept]
        self.ready, self._fill = self.ready[kept], None
        self.missing = len(self.ready) - int(np.count_nonzero(self.ready))


class WorkerConnection:
    """Sends requests to a worker, reads its answers, and owns its slots.

    Args:
        index: which of the pool's actors.
        segment: the memory of the table.
        shared: the worker has mapped `segment`. If not, lines travel in messages.
        installed: keys of the grammars that the actor has; updated while it lives.
    """

    look_ahead = False
    """Ask for forced tokens. Set by the dispatcher."""

    def __init__(
        self,
        index: int,
        incarnation: int,
        location: ProcessLocation,
        channel: Channel,
        segment: Segment,
        shared: bool,
        installed: Collection[str],
    ) -> None:
        self.index = index
        self.incarnation = incarnation
        self.location = location
        self.installed = installed
        self.shared = shared
        self.table: SlotTable = segment.table
        self.asked = np.full(len(self.table.target), FREE, np.int64)
        """`[slots]`: what `ready` becomes once the worker has handled everything that was sent."""
        self.sequences: dict[int, SequenceState] = {}
        """The open sequences, by slot."""
        self.stragglers: set[SequenceState] = set()
        """Sequences that are here because they hold up others. The worker is a slow lane while there are any."""
        self.reserved_for: SequenceState | None = None
        """The only sequence that may be here: a suspect."""
        self.retiring = False
        """It is ended once it is empty: new sequences go elsewhere if they can. Set by the supervisor."""
        self._channel = channel
        self._segment = segment
        self._wake, self._busy, self._since, self._seconds = (
            self.table.mark[name] for name in ("wake", "busy", "since", "seconds")
        )
        self._seconds_taken = 0.0
        # Last freed, first used: few pages of the segment are ever touched.
        self._free_slots = list(range(len(self.asked) - 1, -1, -1))
        self._leaving: list[int] = []
        """Freed slots that the worker may not have handled yet."""
        self._frees: list[int] = []
        """Slots to be freed by the next frame."""
        self._requests: list[Request] = []
        """The next frame."""
        self._pending_since = 0.0
        """`time.monotonic()` of the first frame after the worker had answered everything."""
        self._last_asked = 0.0
        """`time.monotonic()` of the last frame that changed `asked`."""
        self._asking = self._was_idle = False
        """`_asking`: the next frame changes `asked`. `_was_idle`: before that, the worker had answered everything."""
        self._progress = 0.0
        """Without shared memory: `time.monotonic()` of the worker's last answer."""
        self._stuck_when_read = 0.0
        """Without shared memory: `stuck_seconds` when the engine last read the answers."""
        self._unanswered: deque[NDArray[np.intp]] = deque()
        """Without shared memory: slots in the order in which the worker fills them."""

    @property
    def socket(self) -> Any:
        """The socket or descriptor to poll for answers."""
        return self._channel.socket

    @property
    def num_open(self) -> int:
        """Sequences that are open on the worker."""
        return len(self.sequences)

    # slots

    def has_slot(self) -> bool:
        """Return whether a sequence can be opened now."""
        if not self._free_slots and self._leaving:
            handled = self.asked == self.table.ready
            self._free_slots += [slot for slot in self._leaving if handled[slot]]
            self._leaving = [slot for slot in self._leaving if not handled[slot]]
        return bool(self._free_slots)

    def open(self, state: SequenceState, parent: SequenceState | None) -> None:
        """Open a sequence in a free slot, with the whole output that it has now."""
        slot = self._free_slots.pop()
        tokens = list(state.sequence.output_token_ids)
        self.sequences[slot] = state
        state.worker, state.slot = self, slot
        parent_slot = parent.slot if parent is not None and parent.worker is self else None
        version = self._next_version(slot, len(tokens))
        sequence = state.sequence
        known = sequence.request_id, sequence.budget, state.seconds
        self.queue(Open(slot, version, state.grammar, parent_slot, tokens, *known))
        state.parent_id = None

    def edit(self, state: SequenceState, start: int) -> None:
        """Send a sequence's output in a message, because it changed or does not fit in the table: from position `start`
        on, or from the first token that the worker does not know, whichever comes first."""
        known = int(self.table.target[state.slot]) & POSITION
        start = min(start, known, len(state.sequence.output_token_ids))
        tokens = list(state.sequence.output_token_ids[start:])
        self.queue(Edit(state.slot, self._next_version(state.slot, start + len(tokens)), start, tokens))

    def _next_version(self, slot: int, length: int) -> int:
        """Request the mask after an output that is sent in a message. Returns the output's version."""
        version = (int(self.table.target[slot]) | POSITION) + 1 + length
        self.begin_asking()
        self.table.target[slot] = self.asked[slot] = version
        if not self.shared:
            self._unanswered.append(np.array([slot]))
        return version

    def free(self, state: SequenceState) -> None:
        """Close a sequence's matcher with the next frame. Its slot is reused once the worker has confirmed it."""
        del self.sequences[state.slot]
        self.stragglers.discard(state)
        if self.reserved_for is state:
            self.reserved_for = None
        if any(isinstance(request, Open) and request.slot == state.slot for request in self._requests):
            self._requests = [request for request in self._requests if getattr(request, "slot", None) != state.slot]
            self._free_slots.append(state.slot)  # its `Open` was never sent
            self.asked[state.slot] = self.table.ready[state.slot]
        else:
            self._frees.append(state.slot)
        state.leave()

    # frames

    def queue(self, request: Request) -> None:
        """Add a request to the next frame."""
        self._requests.append(request)

    def fill(self, slots: NDArray[np.intp]) -> Fill:
        """Add a request to fill `slots` to the next frame. Returns it. The caller has set their columns and `asked`."""
        if self.shared:
            request = Fill(slots.astype(np.int32).tobytes(), look_ahead=self.look_ahead)
        else:
            slots = in_fill_order(slots, self.table)
            self._unanswered.append(slots)
            target, tokens = self.table.target[slots], self.table.tokens[slots]
            request = Fill(slots.astype(np.int32).tobytes(), target.tobytes(), tokens.tobytes(), self.look_ahead)
        self.queue(request)
        return request

    def pack(self) -> bytes:
        """Encode the next frame; empty if there is nothing to send."""
        if self._frees:
            self.begin_asking()
            self.asked[self._frees] = freed(self.table.target[self._frees])
            self._requests.insert(0, Free(self._frees))  # first, so that it does not wait for the masks
            self._leaving += self._frees
            self._frees = []
        if not self._requests:
            return b""
        frame = encode(self._requests)
        self._requests = []
        return frame

    def begin_asking(self) -> None:
        """Note, before `asked` changes for the next frame, whether the worker has answered everything."""
        if not self._asking:
            self._asking = True
            # With shared memory: the worker has become idle since the last frame. This is cheaper than `is_idle`.
            idle_again = self._busy[0] == IDLE and self._since[0] >= self._last_asked
            self._was_idle = bool(idle_again) if self.shared else self.is_idle
            if self._was_idle:
                self._pending_since = time.monotonic()

    def send(self, frame: bytes, now: float) -> None:
        """Send a packed frame; never blocks."""
        if self._asking:
            self._asking = False
            self._last_asked = now
            if self._was_idle:
                self._pending_since = now
        self._channel.send(frame)

    def request_wakeup(self) -> None:
        """Have the worker send a message once it has filled what it was asked for."""
        self._wake[0] = 1
        self._channel.push()

    def receive(self) -> Iterator[tuple[SequenceState, GuidedError]]:
        """Read the answers that have arrived; yield the sequences that the worker failed."""
        while (frame := self._channel.receive()) is not None:
            self._progress = time.monotonic()
            try:
                answer: Answer = _decode(frame)
                if isinstance(answer, Filled):
                    self._take_lines(answer)
                    continue
            except (msgspec.MsgspecError, ValueError, IndexError):
                continue  # not a worker's answer: if rows stay missing, the supervisor ends the worker
            if self._is_current(answer):
                if not self.shared:
                    self.table.status[answer.slot] = FAILED
                error = from_wire(answer.error)
                error.add_note(f"on mask worker {self.index}, pid {self.location.pid}")
                yield self.sequences[answer.slot], error
        if not self.shared:
            unfilled = self._unfilled_slots()
            while self._unanswered and not unfilled[self._unanswered[0]].any():
                self._unanswered.popleft()
            self._stuck_when_read = self.stuck_seconds(time.monotonic())

    def _is_current(self, failed: Failed) -> bool:
        """Return whether a failure is about the sequence that holds the slot now."""
        return failed.slot in self.sequences and failed.version == self.table.target[failed.slot]

    def _take_lines(self, lines: Filled) -> None:
        """Copy the lines that came with a message."""
        if self.shared or not lines.slots:
            return
        slots = np.frombuffer(lines.slots, np.int32)
        ready = np.frombuffer(lines.ready, np.int64)
        filled = ready >= 0
        masks = self.table.mask[slots[filled]]
        masks.reshape(-1)[np.frombuffer(lines.changed, np.int32)] = np.frombuffer(lines.mask, np.int32)
        self.table.mask[slots[filled]] = masks
        if lines.forced:
            self.table.forced[slots] = np.frombuffer(lines.forced, np.int32).reshape(len(slots), MAX_FORCED_TOKENS)
        self.table.seconds[slots] = np.frombuffer(lines.seconds, np.float32)
        self._seconds[0] = lines.total
        self.table.status[slots[~filled]] = OK
        self.table.status[np.frombuffer(lines.steered, np.int32)] = STEERED
        self.table.ready[slots] = ready

    # progress

    def take_seconds(self) -> float:
        """Return the seconds that masks have taken since the last call."""
        total = float(self._seconds[0])
        taken, self._seconds_taken = total - self._seconds_taken, total
        return taken

    def overdue(self, seconds: float) -> bool:
        """Return whether the worker has slots to fill and has made no progress for `seconds`. From any thread.

        Without shared memory, this is the state when the engine last read the answers, so that answers which arrive
        during a forward pass count as progress.
        """
        return (self.stuck_seconds(time.monotonic()) if self.shared else self._stuck_when_read) > seconds

    def stuck_seconds(self, now: float) -> float:
        """Return the seconds since the worker's last progress, or since it got work; 0 if it has nothing to fill."""
        if not self._unfilled_slots().any():
            return 0.0
        progress = float(self._since[0]) if self.shared else self._progress
        return max(0.0, now - max(progress, self._pending_since))

    def is_responsive(self, now: float, seconds: float) -> bool:
        """Return whether the worker has made progress within the last `seconds`, or has nothing to fill."""
        return (self.shared and now - float(self._since[0]) <= seconds) or self.stuck_seconds(now) <= seconds

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Return whether the worker lives, has something to fill, and has made no progress for `seconds`."""
        return not self.is_responsive(now, seconds) and not (self.shared and self.location.is_ending())

    @property
    def is_idle(self) -> bool:
        """The worker has answered everything."""
        return not self._unfilled_slots().any()

    def busy_with(self) -> SequenceState | None:
        """Return the sequence that the worker is filling, or seems to be."""
        if self.shared:
            slot = int(self._busy[0])
        else:
            unfilled = self._unfilled_slots()
            slot = next((slot for slots in self._unanswered for slot in slots.tolist() if unfilled[slot]), IDLE)
        state = self.sequences.get(slot)
        return None if state is None or state.is_ready else state

    def suspects(self) -> set[SequenceState]:
        """Return the sequences that the worker may have been filling when its last answer came.

        With shared memory, the worker's mark names one sequence, or none. Without, these are all sequences that it has
        not answered for, because an answer may have been on its way.
        """
        if self.shared:
            state = self.busy_with()
            return set() if state is None else {state}
        unfilled = np.flatnonzero(self._unfilled_slots()).tolist()
        return {self.sequences[slot] for slot in unfilled if slot in self.sequences}

    def _unfilled_slots(self) -> NDArray[np.bool_]:
        """Return a bool array `[slots]`: the worker was asked for a mask, or to free the slot, and has not done so."""
        unfilled: NDArray[np.bool_] = (self.asked != self.table.ready) & (self.table.status != FAILED)
        return unfilled

    def close(self) -> None:
        """Close the connection and drop the memory. Idempotent."""
        self._channel.close()
        self._segment.close()


def send_all(workers: Collection[WorkerConnection]) -> None:
    """Send every worker its next frame, one right after the other: a worker that wakes up may take this CPU."""
    packed = [(worker, frame) for worker in workers if (frame := worker.pack())]
    now = time.monotonic()
    for worker, frame in packed:
        worker.send(frame, now)
