"""The decode loop that every way of masking is measured in: the same rows, the same forward pass, the same clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.peers.rows import Document, Rows, RunningSequence

__all__ = ["Forward", "Run", "Samples", "SleepingForward", "Slowness", "Times", "Way"]


class Forward(Protocol):
    """A model's forward pass on a device of its own."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Between steps: what each row will sample in the next one. Those logits must be finite."""

    def start(self) -> None:
        """Launch it; returns while it runs."""

    def wait(self) -> torch.Tensor:
        """Wait for its logits: float `[batch, padded_vocab_size]`."""

    @property
    def end(self) -> float:
        """`time.perf_counter()` at which they were there, or will be."""


class SleepingForward:
    """A forward pass that takes a set time and no CPU, as one on a GPU would. Its logits are always the same tensor."""

    def __init__(self, batch: int, width: int, seconds: float) -> None:
        self._seconds = seconds
        self._logits = torch.zeros(batch, width)
        self.end = 0.0

    def feed(self, tokens: Sequence[int]) -> None:
        self._logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0

    def start(self) -> None:
        self.end = time.perf_counter() + self._seconds

    def wait(self) -> torch.Tensor:
        remaining = self.end - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return self._logits


@dataclass
class Slowness:
    """Which rows are the slow ones, and what makes them so."""

    rows: int = 0
    """The first so many."""
    kind: str = "none"
    """What every mask of theirs does first: "sleep", "hold" (compute in C, holding the interpreter's lock), or "none":
    they are slow by themselves, or not at all."""
    seconds: float = 0.0

    def hits(self, row: int) -> bool:
        """Whether a row's masks are to be made slow."""
        return row < self.rows and self.kind != "none"


@dataclass
class Times:
    """What a step cost besides the forward pass, seconds."""

    exposed: float = 0.0
    """Mask work and waiting for masks that the forward pass did not hide."""
    outside: float = 0.0
    """All that the way added to the step, less the kernel: `exposed` and bookkeeping."""
    hidden: float = 0.0
    """Mask work (of all processes, summed) that the forward pass hid."""
    kernel: float = 0.0
    """Writing -inf: device work."""
    kernel_cpu: float = 0.0
    """CPU seconds of this process in it."""
    late: set[int] = field(default_factory=set)
    """Rows that must not be sampled in this step: parked."""


class Way(Protocol):
    """One way of masking."""

    def load(self, backend: str, documents: Sequence[Document]) -> dict[str, str]:
        """Compile the documents' constraints. Returns those that this way can't do: name -> reason."""

    def begin(self, batch: int, slow: Slowness) -> None:
        """Nothing is open; a new run comes."""

    def open(self, sequence: RunningSequence) -> None:
        """A sequence joins the batch, in its row."""

    def close(self, sequence: RunningSequence) -> None:
        """It leaves."""

    def resume(self) -> list[tuple[RunningSequence, bool]]:
        """Before a step: parked sequences that are sampled now, and whether their mask allowed the token."""

    def step(self, sequences: Sequence[RunningSequence], forward: Forward) -> tuple[torch.Tensor, Times]:
        """One decode step of a full batch: forward pass and masks. Returns the masked logits."""

    def sampled(self, sequences: Sequence[RunningSequence], tokens: Sequence[int]) -> float:
        """The tokens that the step gave; they are not appended yet. Returns the seconds that it took."""


@dataclass
class Samples:
    """Measured steps, in seconds, one entry a step."""

    step: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the engine's process, all threads, without the kernel's."""
    latency: list[float] = field(default_factory=list)
    """Seconds between two tokens of one sequence, for all rows but the slow ones."""
    slow_latency: list[float] = field(default_factory=list)
    """The same for the slow rows."""
    parked: list[int] = field(default_factory=list)
    """Rows that were parked at the end of the step."""
    refused: list[str] = field(default_factory=list)
    """Documents whose next token the mask forbade: given up, the row went on with its next one."""


class Run:
    """Rows on their way through steps; `steps` may be called again and again."""

    def __init__(self, way: Way, rows: Rows, forward: Forward, slow: Slowness) -> None:
        self._way, self._rows, self._forward, self._slow = way, rows, forward, slow
        self._last_token: dict[int, float] = {}
        self._clock = 0.0
        for sequence in rows.sequences:
            way.open(sequence)

    def steps(self, count: int, seconds: float | None = None) -> Samples:
        """Run `count` steps, or as many as begin within `seconds`: one at the least."""
        samples = Samples()
        over = math.inf if seconds is None else time.monotonic() + seconds
        for done in range(count):
            if done and time.monotonic() >= over:
                break
            self._step(samples)
        return samples

    def _step(self, samples: Samples) -> None:
        rows = self._rows
        cpu, started = time.process_time(), time.perf_counter()
        resumed = self._way.resume()
        resuming = time.perf_counter() - started
        resuming_cpu = time.process_time() - cpu
        self._clock += resuming  # what the harness does between steps takes no time
        for sequence, fine in resumed:
            self._append(sequence, fine, samples)
        tokens = rows.next_tokens()
        self._forward.feed(tokens)
        cpu, started = time.process_time(), time.perf_counter()
        logits, times = self._way.step(rows.sequences, self._forward)
        sampling = self._way.sampled(rows.sequences, tokens)
        step, cpu = time.perf_counter() - started, time.process_time() - cpu
        self._clock += step
        samples.step.append(resuming + step)
        samples.exposed.append(times.exposed + sampling)
        samples.outside.append(times.outside + sampling)
        samples.hidden.append(times.hidden)
        samples.kernel.append(times.kernel)
        samples.cpu.append(resuming_cpu + cpu - times.kernel_cpu)
        samples.parked.append(len(times.late))
        allowed = _allowed(logits, tokens)
        for sequence, fine in zip(list(rows.sequences), allowed, strict=True):
            if sequence.row not in times.late:
                self._append(sequence, fine, samples)

    def _append(self, sequence: RunningSequence, fine: bool, samples: Samples) -> None:
        """A sequence was sampled just now."""
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
            slow = sequence.row < self._slow.rows
            (samples.slow_latency if slow else samples.latency).append(now - last)
        self._last_token[sequence.id] = now

    def close(self) -> None:
        for sequence in self._rows.sequences:
            self._way.close(sequence)


def _allowed(logits: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Which of `tokens` the masked logits leave."""
    index = torch.arange(len(tokens), device=logits.device), torch.tensor(tokens, device=logits.device)
    fine: list[bool] = (logits[index] != float("-inf")).tolist()
    return fine
