"""Outputs of the engine: snapshots of a request after every step if the request
streams, and at its end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from engine.step.logprobs import TokenLogprobs
from engine.step.record import MaskDetails
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus
from guided.errors import GuidedError
from guided.fields.output_types import parse_as

Logprobs = list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic()`. None: the event has not
    happened yet."""

    arrival_time: float
    compiled_time: float | None
    """The time when the constraint was compiled, or found in the cache."""
    first_token_time: float | None
    finished_time: float | None


@dataclass(slots=True)
class CompletionOutput:
    """A snapshot of one of the n outputs of a request."""

    index: int
    """Index of the sequence in its group. Outputs are sorted by log-probability, or
    drawn (`resample`)."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over `token_ids`, if `logprobs`, beam search, or an `n` or `best_of` above 1
    were requested."""
    logprobs: Logprobs | None = None
    """The log-probabilities of each token and of its most likely alternatives, by token
    id."""
    finish_reason: str | None = None
    """`stop`, `length` (also if the prompt was too long: see `error`), `abort` or
    `error`. None: not finished."""
    ends_with_stop_token: bool = False
    """Whether the last of `token_ids` is a stop token, which is not in the text."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the output; None for the model's own
    stop tokens."""
    error: GuidedError | None = None
    output_type: Any = None
    """The request's `output_type`."""
    completed_early: bool = False
    """Whether `complete` has forbidden tokens because the rest would not have fit in
    `max_tokens`."""
    mask_details: MaskDetails | None = None
    """Details of the masks of `token_ids`, if the request asked for them."""
    vetoes: dict[str, int] = field(default_factory=dict)
    """Checked keyword -> number of times that tokens were taken back because they
    violated it."""

    @property
    def has_stopped(self) -> bool:
        """Whether the output is complete: it has ended, and neither `max_tokens` nor an
        error cut it off."""
        return self.finish_reason == "stop"

    @property
    def parsed(self) -> Any:
        """The output as a value of `output_type` if it ended with `stop`, else None.
        Raises the `ValueError` of a validator."""
        if self.output_type is None or not self.has_stopped:
            return None
        return parse_as(self.output_type, self.text)

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> CompletionOutput:
        """Take a snapshot of a sequence."""
        params = sequence.params
        finished = sequence.is_finished()
        output = sequence.output_token_ids
        record = sequence.record
        view = sequence.view
        wants_logprobs = params.logprobs is not None
        has_sum = params.needs_logprobs or params.use_beam_search
        if finished:
            held_back = 0
        else:
            held_back = sequence.held_back
        count = max(0, sequence.num_output_tokens - held_back)
        # the log-probabilities of forced tokens come with the next step
        if wants_logprobs:
            count = min(count, len(record.logprobs))
        if params.mask_details and not finished:
            count = min(count, record.num_scored(len(output)))
        text = _read_text(sequence, finished, count)
        if held_back:  # the search for stop strings has read tokens that are held back
            text = text[: len(sequence.detokenizer.text_of(output[:count]))]
        details = None
        if params.mask_details and record.details is not None:
            details = record.details.first(count)
            if view is not None and view.mask_seconds is not None:
                details.mask_seconds = view.mask_seconds
        return cls(
            sequence.index,
            text,
            output[:count],
            record.cumulative_logprob if has_sum else None,
            [*record.logprobs[:count]] if wants_logprobs else None,
            SequenceStatus.get_finished_reason(sequence.status),
            _hides_stop_token(sequence),
            _stop_reason(sequence),
            sequence.error,
            params.output_type,
            view is not None and view.steered,
            details,
            dict(record.vetoes),
        )


@dataclass(slots=True)
class RequestOutput:
    """A snapshot of a request. `outputs` has the `n` most likely sequences, or the
    beams with the best scores, the best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    backend: str | None = None
    """The grammar library that enforces the constraint."""
    not_enforced: tuple[str, ...] = ()
    """The parts of the schema that are not enforced: see
    `guided.Constraint.not_enforced`."""
    checked: tuple[str, ...] = ()
    """JSON pointers of keywords that are checked when the output ends, not enforced by
    the mask."""
    closed: tuple[str, ...] = ()
    """JSON pointers of objects that have only the properties that the schema names."""
    compile_seconds: float = 0.0
    """Duration of the compilation in seconds; 0 if the grammar came from the cache."""
    error: GuidedError | None = None
    """The error that ended the request."""
    metrics: RequestMetrics | None = None
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of each prompt token, if requested; None for the first.
    Complete at the first output token."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that were found in the prefix cache. None: the prompt is
    not computed yet."""
    effective_samples: float | None = None
    """Effective number of the `best_of` outputs, with `resample`. 1: a single output
    has all the weight."""

    @classmethod
    def from_seq_group(cls, group: SequenceGroup) -> RequestOutput:
        """Take a snapshot of a group."""
        params = group.sampling_params
        seqs = group.get_seqs()
        effective = None
        complete = (
            SequenceStatus.FINISHED_STOPPED,
            SequenceStatus.FINISHED_LENGTH_CAPPED,
        )
        if params.resample and all(seq.status in complete for seq in seqs):
            seqs, effective = _resampled(group)
        elif not params.use_beam_search:
            seqs.sort(key=lambda seq: seq.record.cumulative_logprob, reverse=True)
        outputs = [CompletionOutput.from_sequence(seq) for seq in seqs[: params.n]]
        constraint = params.constraint
        return cls(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            outputs,
            group.is_finished(),
            group.backend,
            () if constraint is None else constraint.not_enforced,
            group.checked,
            () if constraint is None else constraint.closed,
            group.compile_seconds,
            group.error,
            RequestMetrics(
                group.arrival_time,
                group.compiled_time,
                group.first_token_time,
                group.finished_time,
            ),
            group.prompt_logprobs[:] if params.prompt_logprobs is not None else None,
            group.num_cached_tokens,
            effective,
        )


def _resampled(group: SequenceGroup) -> tuple[list[Sequence], float]:
    """Draw `n` outputs of a finished group by their weights, with replacement. Also
    return the effective number of outputs, which is `(sum of weights)² / sum of
    squares`.

    The weight of an output is its probability in the model, divided by its probability
    under the masks. This is the product of the kept masses of its tokens. Outputs that
    were cut off, and so do not satisfy the constraint, have no weight.
    """
    complete = [
        seq for seq in group.sequences if seq.status is SequenceStatus.FINISHED_STOPPED
    ] or group.sequences
    logs: list[float] = []
    for seq in complete:
        assert seq.record.details is not None
        logs.append(
            math.fsum(log for log in seq.record.details.kept if log is not None)
        )
    weights = [math.exp(log - max(logs)) for log in logs]
    effective = sum(weights) ** 2 / sum(weight * weight for weight in weights)
    return random.Random(group.seed).choices(
        complete, weights, k=group.sampling_params.n
    ), effective


def _read_text(sequence: Sequence, finished: bool, count: int) -> str:
    """Return the text of `count` tokens, without the stop token that ended it unless
    the request asks for that."""
    if _hides_stop_token(sequence):
        count -= 1
    sequence.detokenizer.feed(sequence.output_token_ids, count)
    if finished:
        sequence.detokenizer.flush()
    return sequence.detokenizer.visible(finished)


def _ended_by_stop_token(sequence: Sequence) -> bool:
    has_output = bool(sequence.output_token_ids)
    return (
        sequence.is_finished()
        and has_output
        and sequence.last_token in sequence.group.stop_ids
    )


def _hides_stop_token(sequence: Sequence) -> bool:
    """Return whether the last token is a stop token, which is not in the text."""
    return (
        _ended_by_stop_token(sequence)
        and not sequence.params.include_stop_str_in_output
    )


def _stop_reason(sequence: Sequence) -> str | int | None:
    """Return the stop string or stop token that ended a sequence; None for the model's
    own stop tokens."""
    if not _ended_by_stop_token(sequence):
        return sequence.detokenizer.stop
    if sequence.last_token in sequence.params.stop_token_ids:
        return sequence.last_token
    return None
