"""What the engine says about a request: after every step where it streams, and at its end."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Logprob, Sequence, SequenceGroup, SequenceStatus
from guided.errors import GuidedError

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request: seconds of `time.monotonic()`, None for what hasn't happened."""

    arrival_time: float
    compiled_time: float | None
    """Its constraint was compiled, or found in the cache."""
    first_token_time: float | None
    finished_time: float | None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n outputs so far.

    `finish_reason`: `stop`, `length` (also for a request that was ignored: `error` says why), `abort`, `error`; None
    while it runs. `stop_reason`: the stop string or stop token that ended it; None for the model's own stop tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over `token_ids`; only where `logprobs` were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """At each token: its log-probability, and the most likely alternatives', by token id."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: GuidedError | None = None

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> CompletionOutput:
        """A snapshot."""
        finished = sequence.status.is_finished
        wants_logprobs = sequence.params.logprobs is not None
        _read_text(sequence, finished)
        return cls(
            sequence.index,
            sequence.detokenizer.visible(finished),
            sequence.data.output_token_ids[:],
            sequence.cumulative_logprob if wants_logprobs else None,
            sequence.logprobs[:] if wants_logprobs else None,
            _finish_reason(sequence.status),
            sequence.stop_reason,
            sequence.error,
        )


@dataclass(slots=True)
class RequestOutput:
    """A request so far. `outputs` has all n, in order, from the first report on."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    backend: str | None = None
    """Which grammar library enforces the constraint."""
    compile_seconds: float = 0.0
    """Seconds its compilation took; 0 where it came from the cache."""
    error: GuidedError | None = None
    """Why it ended, where that was no fault of its outputs' own."""
    metrics: RequestMetrics | None = None

    @classmethod
    def from_seq_group(cls, group: SequenceGroup) -> RequestOutput:
        """A snapshot."""
        outputs = [CompletionOutput.from_sequence(sequence) for sequence in group.sequences]
        error = next((output.error for output in outputs if output.error is not None), None)
        return cls(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            outputs,
            group.is_finished,
            group.backend,
            group.compile_seconds,
            error,
            RequestMetrics(group.arrival_time, group.compiled_time, group.first_token_time, group.finished_time),
        )


def _finish_reason(status: SequenceStatus) -> str | None:
    if not status.is_finished:
        return None
    return "length" if status is SequenceStatus.FINISHED_IGNORED else str(status.value)


def _read_text(sequence: Sequence, finished: bool) -> None:
    """Bring the text up to date; the stop token that ended the sequence is no part of it, unless it was asked for."""
    if sequence.text_complete:
        return
    count = sequence.num_output_tokens
    if sequence.ended_by_stop_token and not sequence.params.include_stop_str_in_output:
        count -= 1
    sequence.detokenizer.feed(sequence.data.output_token_ids, count)
    if finished:
        sequence.detokenizer.flush()
        sequence.text_complete = True
