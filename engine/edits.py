"""Edits: what a step does with rows that do not just get a sampled token.

Rows without a usable mask are not sampled. After sampling, post-processors may change
outputs: in output, blocks and matcher.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.requests import Requests
from engine.sampling.output import SamplerOutput
from engine.stats import EngineStats
from engine.step.logprobs import TokenLogprobs
from engine.step.scheduler import Batch, Scheduler
from engine.step.sequence import Sequence, SequenceStatus
from guided.errors import GuidedError, InternalError, PostProcessorFailed, bounded
from guided.processors.logit_post_processor import ApplyReport, SampledEdit
from guided.processors.post_processors import PostProcessors
from guided.sequence import SequenceOutput, VetoReport


class Edits:
    """Leaves rows out of sampling, rolls outputs back, appends forced tokens, and stops
    sequences."""

    def __init__(
        self,
        processor: PostProcessors,
        scheduler: Scheduler,
        requests: Requests,
        stats: EngineStats,
        vocab_size: int,
    ) -> None:
        self._processor = processor
        self._scheduler = scheduler
        self._requests = requests
        self._stats = stats
        self._vocab_size = vocab_size

    def leave_out(
        self, batch: Batch, report: ApplyReport, failed: Collection[int]
    ) -> frozenset[int]:
        """Return the rows that are not sampled: those in `failed`, those with a failed
        or late mask, and those with a veto. End the groups of failed masks, take back
        what is vetoed, and let late sequences wait."""
        late: list[int] = []
        without = set(failed)
        for row in batch.processed_rows.tolist():
            sequence = batch.sequences[row]
            seq_id = sequence.seq_id
            if seq_id in report.failed:
                self._requests.fail(sequence.group, report.failed[seq_id])
            elif seq_id in report.vetoes:
                self._veto(report.vetoes[seq_id], batch, row)
            elif seq_id in report.late:
                late.append(row)
                continue
            else:
                continue
            without.add(row)
        self._stats.late_rows += len(late)
        without.update(self._delay(batch, late, without))
        return frozenset(without)

    def _delay(
        self, batch: Batch, late: list[int], failed: Collection[int]
    ) -> set[int]:
        """Let the sequences of the late rows wait for their masks, and beams for all
        beams of their group. They keep their hidden states. Returns the rows of all
        these sequences."""
        rows = set(late)
        for row in late:
            # a failed row may have ended its group
            if not batch.sequences[row].is_finished():
                batch.sequences[row].status = SequenceStatus.LATE
        sampled = {
            batch.sequences[row]
            for row in batch.beams
            if row not in rows and row not in failed
        }
        for row in batch.beams:
            if not sampled.issuperset(batch.sequences[row].group.unfinished()):
                rows.add(row)
        if rows:  # copying from the device waits for it
            self._keep(batch, list(rows))
        return rows

    def _keep(self, batch: Batch, rows: list[int]) -> None:
        """Keep the hidden states of rows that are not sampled now. A later step samples
        them without a forward pass."""
        for row, hidden in zip(
            rows, batch.hidden[rows].float().cpu().numpy(), strict=True
        ):
            batch.sequences[row].hidden = hidden

    def _veto(self, report: VetoReport, batch: Batch, row: int) -> None:
        """Take back the tokens of a row that violate a checked keyword."""
        sequence = batch.sequences[row]
        self._rollback(batch, row, sequence.num_output_tokens - report.length)
        sequence.record.vetoes[report.keyword] += 1
        self._stats.vetoes[report.keyword] += 1

    def apply(self, sampled: SamplerOutput, batch: Batch) -> bool:
        """Apply the edits that post-processors want after the tokens of a step. Returns
        whether a sequence has ended."""
        edits = self._processor.edits(batch.processed, self._samples(sampled, batch))
        if not edits:
            return False
        any_ended = False
        for row in batch.processed_rows.tolist():
            sequence = batch.sequences[row]
            edit = edits.get(sequence.seq_id)
            if (
                edit is None
                or row in sampled.unsampled
                or sequence.is_finished()
                or sequence.params.use_beam_search
            ):
                continue
            try:
                self._edit(edit, batch, row)
            except GuidedError as error:
                self._requests.fail(sequence.group, error)
            except Exception as error:
                self._requests.fail(
                    sequence.group,
                    PostProcessorFailed(f"a wrong edit: {bounded(error)}"),
                )
            any_ended |= sequence.is_finished()
        return any_ended

    def _samples(
        self, sampled: SamplerOutput, batch: Batch
    ) -> list[SequenceOutput | None]:
        """Return the sampled token of each processed row, if a post-processor needs
        them. None: there is none."""
        samples: list[SequenceOutput | None] = []
        if self._processor.needs_samples:
            for row in batch.processed_rows.tolist():
                sequence = batch.sequences[row]
                if row in sampled.unsampled or sequence.params.use_beam_search:
                    samples.append(None)
                else:
                    samples.append(sampled.sample_of(row, sequence.seq_id))
        return samples

    def _rollback(
        self, batch: Batch, row: int, count: int, again: bool = False
    ) -> None:
        """Remove the last `count` output tokens of a row: from output, blocks and
        matcher. A step computes the token before them again; not if only the sampled
        token was removed, unless `again`: a token that is appended is scored by the
        step that computes the one before it."""
        sequence = batch.sequences[row]
        sequence.rollback(count)
        # only the sampled token was removed
        if sequence.computed == sequence.length and not again:
            self._keep(batch, [row])
        else:
            sequence.computed = sequence.length - 1
            # states of recurrent layers do not go back
            if self._scheduler.layout is not None:
                sequence.computed = 0
            self._scheduler.blocks.rollback(sequence.seq_id, sequence.computed)
        self._processor.rollback(sequence.seq_id, sequence.num_output_tokens)

    def _edit(self, edit: SampledEdit, batch: Batch, row: int) -> None:
        """Roll back, append and stop, in this order."""
        sequence = batch.sequences[row]
        last = self._vocab_size - 1
        if not all(type(token) is int and 0 <= token <= last for token in edit.append):
            raise InternalError(
                f"tokens to append must be integers from 0 to {last}: {bounded(edit.append)}"
            )
        if edit.rollback:
            most = self._processor.max_rollback
            if not 0 < edit.rollback <= max(1, most):  # the newest token was not sent
                raise InternalError(
                    f"{edit.rollback} tokens to roll back; the limit is {most}"
                )
            scores = bool(edit.append) and not sequence.record.is_empty
            self._rollback(
                batch, row, min(edit.rollback, sequence.num_output_tokens), again=scores
            )
        for token in edit.append:
            if self._must_be_sampled(sequence, token):
                break
            ended = self._append(sequence, token)
            if ended:
                return
        if edit.stop:
            sequence.finish(SequenceStatus.FINISHED_STOPPED)

    def _must_be_sampled(self, sequence: Sequence, token: int) -> bool:
        """Return whether a forced token is left to the next step: it may be forbidden,
        or no later step would score it because it is the last."""
        group = sequence.group
        if group.restriction is not None:
            return True
        if token not in group.stop_ids and sequence.length + 1 < group.max_length:
            return False
        record = sequence.record
        return record.details is not None or (
            record.needs_logprobs and not _is_masked(sequence)
        )

    def _append(self, sequence: Sequence, token: int) -> bool:
        """Append a forced token. Returns whether it has ended the sequence."""
        entries = None
        if sequence.record.needs_logprobs and _is_masked(sequence):
            entries = TokenLogprobs([(token, 0.0, 1)])
        ended = sequence.append(token, entries, (1, None))
        self._stats.forced_tokens += 1
        if not sequence.params.is_greedy:
            next(sequence.uniforms)  # as if it were sampled
        return ended


def _is_masked(sequence: Sequence) -> bool:
    """Return whether the log-probabilities of a sequence are those after the mask,
    which leaves a forced token only."""
    return sequence.params.logprobs_mode == "masked"
