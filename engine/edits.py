"""Apply the edits that the post-processor requests after sampling: roll back, append (forced tokens), stop."""

from __future__ import annotations

from engine.logprobs import TokenLogprobs
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from guided.errors import InternalError, bounded
from guided.post_processor import LogitPostProcessor, SampledEdit


def follow(
    edit: SampledEdit, sequence: Sequence, scheduler: Scheduler, processor: LogitPostProcessor, vocab_size: int
) -> int:
    """Change a sequence: its output, its blocks and its matcher. Returns the number of appended tokens.

    Raises:
        InternalError: the edit removes more than the post-processor has declared, or appends what is no token.
    """
    if not all(type(token) is int and 0 <= token < vocab_size for token in edit.append):
        raise InternalError(f"tokens to append must be integers from 0 to {vocab_size - 1}: {bounded(edit.append)}")
    if edit.rollback:
        if not 0 < edit.rollback <= max(1, processor.max_rollback):  # the newest token was not sent
            raise InternalError(f"{edit.rollback} tokens to roll back; the limit is {processor.max_rollback}")
        sequence.roll_back(min(edit.rollback, sequence.num_output_tokens))
        scheduler.rewind(sequence)
        processor.rollback(sequence.seq_id, sequence.num_output_tokens)
    appended, masked = 0, sequence.params.logprobs_mode == "masked"
    for token in edit.append:
        is_last = token in sequence.stop_ids or sequence.length + 1 >= sequence.max_length
        if is_last and sequence.needs_logprobs and not masked:
            break  # sample the last token instead: no later step would score it
        entries = TokenLogprobs((token,), (0.0,), (1,)) if masked and sequence.needs_logprobs else None
        ended = sequence.append(token, entries, 1, forced=True)
        appended += 1
        if not sequence.params.is_greedy:
            sequence.uniforms.next()  # as if it were sampled
        if ended:
            return appended
    if edit.stop:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
    return appended
