"""The decode loop of the measurements: every way of masking gets the same rows, forward pass and clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.peers.rows import Document, Rows, RunningSequence


class SleepingForward:
    """A forward pass that takes a fixed time and no CPU, like one on a GPU. It always returns the same tensor.

    `end` is `time.perf_counter()` at the end of the forward pass.
    """

    def __init__(self, batch: int, width: int, seconds: float) -> None:
        self._seconds = seconds
        self._logits = torch.zeros(batch, width)
        self.end = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        """Make the logits of these tokens finite: the rows will sample them in the next step."""
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
    """Time of the kernel that writes -inf, which is device work."""
    kernel_cpu: float = 0.0
    """CPU seconds of this process in the kernel."""
    late: set[int] = field(default_factory=set)
    """Rows that wait for a late mask, and must not be sampled in this step."""
    again: int = 0
    """Number of rows that were late before, and were computed again in this step."""


class Way(Protocol):
    """A way of masking."""

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        """Compile the documents' constraints. Returns the documents that this way rejects: name -> reason."""

    def begin(self) -> None:
        """Prepare for a new run. No sequence is open."""

    def open(self, sequence: RunningSequence) -> None:
        """Add a sequence to the batch, in its row."""

    def close(self, sequence: RunningSequence) -> None:
        """Remove a sequence."""

    def step(self, sequences: Sequence[RunningSequence], forward: SleepingForward) -> tuple[torch.Tensor, Times]:
        """Run one decode step of the batch: forward pass and masks. Returns the masked logits."""

    def sampled(self, sequences: Sequence[RunningSequence], tokens: Sequence[int]) -> float:
        """Take the sampled tokens of the step, before they are appended. Returns the seconds that it took."""


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
    """The same for the row with pinned documents."""
    late: list[int] = field(default_factory=list)
    """Number of rows that were not sampled, because their mask was late."""
    again: list[int] = field(default_factory=list)
    """Number of rows that were computed again after a late mask."""
    refused: list[str] = field(default_factory=list)
    """Documents that were abandoned because the mask forbade their next token."""


class Run:
    """Rows that run step by step. `steps` may be called several times."""

    def __init__(self, way: Way, rows: Rows, forward: SleepingForward) -> None:
        self._way, self._rows, self._forward = way, rows, forward
        self._last_token: dict[int, float] = {}
        self._clock = 0.0
        for sequence in rows.sequences:
            way.open(sequence)

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
        rows = self._rows
        tokens = rows.next_tokens()
        self._forward.feed(tokens)
        cpu, started = time.process_time(), time.perf_counter()
        logits, times = self._way.step(rows.sequences, self._forward)
        sampling = self._way.sampled(rows.sequences, tokens)
        step, cpu = time.perf_counter() - started, time.process_time() - cpu
        self._clock += step  # the clock excludes the benchmark's own work between steps
        samples.step.append(step)
        samples.exposed.append(times.exposed + sampling)
        samples.hidden.append(times.hidden)
        samples.kernel.append(times.kernel)
        samples.cpu.append(cpu - times.kernel_cpu)
        samples.late.append(len(times.late))
        samples.again.append(times.again)
        allowed = _allowed(logits, tokens)
        for sequence, fine in zip(list(rows.sequences), allowed, strict=True):
            if sequence.row not in times.late:
                self._append(sequence, fine, samples)

    def _append(self, sequence: RunningSequence, fine: bool, samples: Samples) -> None:
        """Append the token of a sequence that was just sampled."""
        if not fine:
            samples.refused.append(f"{sequence.document.name} at {len(sequence.output)}")
        self._note(sequence, self._clock, samples)
        fresh = self._rows.advance(sequence) if fine else self._rows.restart(sequence)
        if fresh is not None:
            self._last_token.pop(sequence.id, None)
            self._way.close(sequence)
            self._way.open(fresh)

    def _note(self, sequence: RunningSequence, now: float, samples: Samples) -> None:
        last = self._last_token.get(sequence.id)
        if last is not None:
            (samples.slow_latency if sequence.row in self._rows.pinned else samples.latency).append(now - last)
        self._last_token[sequence.id] = now

    def close(self) -> None:
        for sequence in self._rows.sequences:
            self._way.close(sequence)


def _allowed(logits: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether the masked logits allow it."""
    index = torch.arange(len(tokens), device=logits.device), torch.tensor(tokens, device=logits.device)
    fine: list[bool] = (logits[index] != float("-inf")).tolist()
    return fine
