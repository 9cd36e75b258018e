"""Beams: continues the beam searches of a step, and shows their results."""

from __future__ import annotations

import time

from engine.batch import Batch
from engine.beam_search import Candidate
from engine.logprobs import TokenLogprobs
from engine.sampler import SamplerOutput, ranked_logprobs
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceGroup, SequenceStatus, common_length
from guided.post_processor import LogitPostProcessor


class Beams:
    """Continues each sequence from the beam that its `BeamSearch` chooses: updates output, blocks and matcher."""

    def __init__(self, scheduler: Scheduler, processor: LogitPostProcessor | None) -> None:
        self._scheduler, self._processor = scheduler, processor

    def advance(self, sampled: SamplerOutput, batch: Batch) -> list[SequenceGroup]:
        """Continue the searches of a step. Returns those that have ended: free them, then call `show_result`."""
        groups: dict[SequenceGroup, dict[Sequence, int]] = {}
        for place, row in enumerate(batch.beams):
            sequence = batch.sequences[row]
            if row not in sampled.skipped and not sequence.is_finished():
                groups.setdefault(sequence.group, {})[sequence] = place
        return [group for group, places in groups.items() if not self._advance(group, places, sampled)]

    def _advance(self, group: SequenceGroup, places: dict[Sequence, int], sampled: SamplerOutput) -> bool:
        """Continue one search. Returns False if it has ended."""
        search, beams = group.beams, group.sequences
        assert search is not None
        assert sampled.beam_scores is not None
        group.first_token_time = group.first_token_time or time.monotonic()
        rows = [places[one] for one in beams]
        outputs, logprobs = [one.data.output_token_ids[:] for one in beams], [one.output_logprobs[:] for one in beams]
        chosen = search.advance(sampled.beam_scores[rows], outputs)

        def scored(one: Candidate) -> list[TokenLogprobs]:
            if group.sampling_params.logprobs is None:
                return []
            assert sampled.beam_logprobs is not None
            row = sampled.beam_logprobs[rows[one.beam]]
            return [
                *logprobs[one.beam],
                *ranked_logprobs(row[None], row.new_tensor([one.token]).long(), [group.sampling_params.logprobs]),
            ]

        for one in search.finished:
            if len(one.tokens) > len(outputs[0]):  # finished in this step
                one.logprobs = scored(one.candidate)
        if chosen is None:
            return False
        ids = [one.seq_id for one in beams]
        parents = {ids[own]: ids[one.beam] for own, one in enumerate(chosen) if own != one.beam}
        self._scheduler.blocks.take_over(parents)
        for own, sequence, candidate in zip(outputs, beams, chosen, strict=True):
            output = outputs[candidate.beam]
            if own != output and self._processor is not None and sequence.guided is not None:
                self._processor.rollback(sequence.seq_id, common_length(own, output))
            sequence.take_over([*output, candidate.token], candidate.logprob, scored(candidate))
        return True


def show_result(group: SequenceGroup) -> None:
    """Replace the sequences of a search that has ended by its finished outputs, best first."""
    assert group.beams is not None
    finished = group.beams.finished
    for sequence in group.sequences:
        sequence.finish(SequenceStatus.FINISHED_STOPPED)
    del group.sequences[max(1, len(finished)) :]
    for sequence, one in zip(group.sequences, finished, strict=False):
        sequence.take_over(one.tokens, one.candidate.logprob, one.logprobs)
        sequence.status = SequenceStatus.RUNNING
        sequence.end_if_complete()
