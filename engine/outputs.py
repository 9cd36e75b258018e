"""Outputs of the engine: snapshots of a request, after every step if it streams, and at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.sequence import Logprob, Sequence, SequenceGroup, SequenceStatus
from guided.errors import GuidedError
from guided.output_types import parse_as


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.monotonic()`. None: it has not happened yet."""

    arrival_time: float
    compiled_time: float | None
    """When the constraint was compiled, or found in the cache."""
    first_token_time: float | None
    finished_time: float | None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n outputs so far.

    `finish_reason` is `stop`, `length` (also if the prompt was too long: see `error`), `abort` or `error`, and None
    while the output is generated. `stop_reason` is the stop string or stop token that ended the output; it is None for
    the model's own stop tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over `token_ids`, if `logprobs` were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: its log-probability and those of the most likely alternatives, by token id."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: GuidedError | None = None
    output_type: Any = None
    """The request's `output_type`."""
    completed_early: bool = False
    """`complete` had an effect: tokens were forbidden because the rest would not have fit in `max_tokens`."""

    @property
    def parsed(self) -> Any:
        """The answer as a value of `output_type`. None: the request has no type, or the output did not end `stop`.

        Raises:
            ValueError: a validator of the type rejects the value.
        """
        if self.output_type is None or self.finish_reason != "stop":
            return None
        return parse_as(self.output_type, self.text)

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> CompletionOutput:
        """Take a snapshot."""
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
            sequence.params.output_type,
            sequence.guided is not None and sequence.guided.steered,
        )


@dataclass(slots=True)
class RequestOutput:
    """A snapshot of a request. `outputs` always has all n, in order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    backend: str | None = None
    """The grammar library that enforces the constraint."""
    compile_seconds: float = 0.0
    """Seconds of the compilation; 0 if the grammar came from the cache."""
    error: GuidedError | None = None
    """The error of the first output that has one."""
    metrics: RequestMetrics | None = None

    @classmethod
    def from_seq_group(cls, group: SequenceGroup) -> RequestOutput:
        """Take a snapshot."""
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
    """Update the text. The stop token that ended the sequence is left out, unless the request asks for it."""
    if sequence.text_complete:
        return
    count = sequence.num_output_tokens
    if sequence.ended_by_stop_token and not sequence.params.include_stop_str_in_output:
        count -= 1
    sequence.detokenizer.feed(sequence.data.output_token_ids, count)
    if finished:
        sequence.detokenizer.flush()
        sequence.text_complete = True
