"""Apply the edits that the post-processor requests after sampling: roll back, append (forced tokens), stop."""

from __future__ import annotations

from engine.logprobs import TokenLogprobs
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from guided.errors import InternalError
from guided.post_processor import LogitPostProcessor, SampledEdit


def follow(edit: SampledEdit, sequence: Sequence, scheduler: Scheduler, processor: LogitPostProcessor) -> int:
    """Change a sequence: its output, its blocks and its matcher. Returns the number of appended tokens."""
    if edit.rollback:
        if edit.rollback > processor.max_rollback:
            raise InternalError(f"{edit.rollback} tokens to roll back; the limit is {processor.max_rollback}")
        sequence.roll_back(min(edit.rollback, sequence.num_output_tokens))
        scheduler.rewind(sequence)
        processor.rollback(sequence.seq_id, sequence.num_output_tokens)
    appended, masked = 0, sequence.params.logprobs_mode == "masked"
    for token in edit.append:
        is_last = token in sequence.stop_ids or sequence.length + 1 >= sequence.max_length
        if is_last and sequence.needs_logprobs and not masked:
            break  # sample the last token instead: no later step would score it
        sequence.append(token)
        if masked and sequence.needs_logprobs:
            sequence.add_logprobs(TokenLogprobs((token,), (0.0,), (1,)))
        sequence.note_details(1, forced=True)
        appended += 1
        if not sequence.params.is_greedy:
            sequence.uniforms.next()  # as if it were sampled
        if is_last:
            sequence.end_by_token()
            return appended
    if edit.stop:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
    return appended
