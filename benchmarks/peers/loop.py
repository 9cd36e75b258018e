"""The decode loop of the measurements: every way of masking gets the same rows, forward
pass and clocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.peers.rows import Document, RunningSequence


class SleepingForward:
    """A forward pass of a fixed time without CPU, like a pass on a GPU. It always
    returns the same tensor.

    `end` is `time.perf_counter()` at the end of the forward pass.
    """

    def __init__(self, batch: int, width: int, seconds: float) -> None:
        self._seconds = seconds
        self._logits = torch.zeros(batch, width)
        self.end = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        """Make the logits of these tokens finite: the rows will sample them in the next
        step."""
        self._logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0

    def start(self) -> None:
        """Launch the forward pass. Returns while it runs."""
        self.end = time.perf_counter() + self._seconds

    def wait(self) -> torch.Tensor:
        """Wait for the logits: float `[batch, padded_vocab_size]`."""
        remaining = self.end - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return self._logits


@dataclass
class Times:
    """Times of a step without the forward pass, in seconds."""

    exposed: float = 0.0
    """Mask work, and waiting for masks, outside the forward pass."""
    hidden: float = 0.0
    """Mask work during the forward pass, summed over all processes."""
    kernel: float = 0.0
    """Time of the kernel that writes -inf, which is device work. It runs on one thread
    here."""
    late: set[int] = field(default_factory=set)
    """Rows that wait for a late mask, and must not be sampled in this step."""
    again: int = 0
    """Number of rows that were late before, and were computed again in this step."""


class Way:
    """A way of masking. The base class runs only the forward pass, without masks."""

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        """Compile the documents' constraints. Returns the documents that this way
        rejects: name -> reason."""
        return {}

    def begin(self) -> None:
        """Prepare for a new run. No sequence is open."""

    def open(self, sequence: RunningSequence) -> None:
        """Add a sequence to the batch, in its row."""

    def close(self, sequence: RunningSequence) -> None:
        """Remove a sequence."""

    def step(
        self, sequences: Sequence[RunningSequence], forward: SleepingForward
    ) -> tuple[torch.Tensor, Times]:
        """Run one decode step of the batch: forward pass and masks. Returns the masked
        logits."""
        forward.start()
        return forward.wait(), Times()

    def sampled(
        self, sequences: Sequence[RunningSequence], tokens: Sequence[int]
    ) -> float:
        """Take the sampled tokens of the step, before they are appended. Returns the
        seconds of this call."""
        return 0.0


@dataclass
class Samples:
    """Measured steps, one entry per step, in seconds."""

    step: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the engine's process, all threads, without the kernel."""
    latency: list[float] = field(default_factory=list)
    """Seconds between two tokens of a sequence, for all rows except a pinned one."""
    slow_latency: list[float] = field(default_factory=list)
    """Seconds between two tokens of the row with pinned documents."""
    again: list[int] = field(default_factory=list)
    """Number of rows that were computed again after a late mask."""
    refused: list[str] = field(default_factory=list)
    """Documents that were abandoned because the mask forbade their next token."""

    def extend(self, more: Samples) -> None:
        """Append other samples."""
        for name, values in vars(more).items():
            getattr(self, name).extend(values)


class Run:
    """A batch in which every row writes one document after the other without end.
    `steps` may be called several times.

    Row r takes the documents r, r + batch, r + 2 batch, ... and starts again after the
    last one. A row therefore depends only on its own steps, and all ways of masking get
    the same rows.

    Args:
        stop: the stop token.
        pinned: documents for the first row instead.
    """

    def __init__(
        self,
        way: Way,
        documents: Sequence[Document],
        batch: int,
        stop: int,
        forward: SleepingForward,
        pinned: Sequence[Document] = (),
    ) -> None:
        self._way, self._stop, self._forward, self._has_pinned = (
            way,
            stop,
            forward,
            bool(pinned),
        )
        self._streams = [_stream(documents, row, batch) for row in range(batch)]
        if pinned:
            self._streams[0] = _stream(pinned, 0, 1)
        self._ids = itertools.count()
        self._clock = 0.0
        self._sequences = [self._open(row) for row in range(batch)]

    def _open(self, row: int) -> RunningSequence:
        sequence = RunningSequence(next(self._ids), row, next(self._streams[row]))
        self._way.open(sequence)
        return sequence

    def steps(self, count: int, seconds: float | None = None) -> Samples:
        """Run up to `count` steps, as many as start within `seconds`, at least one."""
        samples = Samples()
        over = math.inf if seconds is None else time.monotonic() + seconds
        for done in range(count):
            if done and time.monotonic() >= over:
                break
            self._step(samples)
        return samples

    def _step(self, samples: Samples) -> None:
        sequences = list(self._sequences)
        tokens = [sequence.next_token(self._stop) for sequence in sequences]
        self._forward.feed(tokens)
        cpu, started = time.process_time(), time.perf_counter()
        logits, times = self._way.step(sequences, self._forward)
        sampling = self._way.sampled(sequences, tokens)
        step, cpu = time.perf_counter() - started, time.process_time() - cpu
        self._clock += step  # the clock excludes the benchmark's own work between steps
        samples.step.append(step)
        samples.exposed.append(times.exposed + sampling)
        samples.hidden.append(times.hidden)
        samples.kernel.append(times.kernel)
        samples.cpu.append(cpu - times.kernel)
        samples.again.append(times.again)
        allowed = _allowed(logits, tokens)
        for sequence, token, fine in zip(sequences, tokens, allowed, strict=True):
            if sequence.row not in times.late:
                self._append(sequence, token, fine, samples)

    def _append(
        self, sequence: RunningSequence, token: int, fine: bool, samples: Samples
    ) -> None:
        """Append the sampled token of a sequence. At the end, or if the mask forbade
        it, begin the next document."""
        if not fine:
            samples.refused.append(
                f"{sequence.document.name} at {len(sequence.output)}"
            )
        if sequence.sampled_at is not None:
            is_pinned = self._has_pinned and sequence.row == 0
            (samples.slow_latency if is_pinned else samples.latency).append(
                self._clock - sequence.sampled_at
            )
        sequence.sampled_at = self._clock
        if fine and len(sequence.output) < len(sequence.document.tokens):
            sequence.output.append(token)
        else:
            self._way.close(sequence)
            self._sequences[sequence.row] = self._open(sequence.row)

    def close(self) -> None:
        for sequence in self._sequences:
            self._way.close(sequence)


def _stream(documents: Sequence[Document], row: int, batch: int) -> Iterator[Document]:
    for index in itertools.count(row, batch):
        yield documents[index % len(documents)]


def _allowed(logits: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether the masked logits allow it."""
    index = (
        torch.arange(len(tokens), device=logits.device),
        torch.tensor(tokens, device=logits.device),
    )
    fine: list[bool] = (logits[index] != float("-inf")).tolist()
    return fine
