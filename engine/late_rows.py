"""LateRows: sequences that wait for a mask that was late. The scheduler skips them meanwhile."""

from __future__ import annotations

from collections.abc import Collection

from engine.batch import Batch
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats


class LateRows:
    """Skips a sequence from a late row on until its mask is ready. Its last token is then computed again. A group's
    beams are skipped together. A sequence that is preempted or ends is late no more."""

    def __init__(self, scheduler: Scheduler, stats: EngineStats) -> None:
        self._scheduler, self._stats = scheduler, stats
        self._skipped: dict[Sequence, bool] = {}
        """Skipped sequences. True: its own mask is missing. False: it is a beam, and another one's mask is missing."""

    def __len__(self) -> int:
        return sum(sequence.is_late for sequence in self._skipped)

    def add(self, batch: Batch, late: Collection[int], failed: Collection[int]) -> frozenset[int]:
        """Skip the sequences of the late rows, and beams if not all beams of their group can be sampled now. Returns
        the rows of all these sequences."""
        rows = dict.fromkeys(late, True)
        sampled = {batch.sequences[row] for row in batch.beams if row not in rows and row not in failed}
        for row in batch.beams:
            if not sampled.issuperset(batch.sequences[row].group.unfinished()):
                rows.setdefault(row, False)
        for row, is_late in rows.items():
            sequence = batch.sequences[row]
            if not sequence.is_finished():  # a failed row may have ended its group
                self._scheduler.skip(sequence)
                self._skipped[sequence] = is_late
                self._stats.late_rows += is_late
        return frozenset(rows)

    def resume(self, decided: Collection[int]) -> None:
        """Let the sequences with these ids run again, which have their mask, or an error; beams only together."""
        self._skipped = {one: late and one.seq_id not in decided for one, late in self._skipped.items() if one.is_late}
        self._run([one for one in self._skipped if not any(self._skipped.get(each, True) for each in _together(one))])

    def resume_all(self) -> None:
        """Let all sequences run again."""
        self._run(list(self._skipped))

    def _run(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.is_late = False
            del self._skipped[sequence]
        self._stats.computed_again += len(sequences)


def _together(sequence: Sequence) -> list[Sequence]:
    """Return the sequences that run in the same step: a beam's group, or one sequence."""
    return sequence.group.unfinished() if sequence.params.use_beam_search else [sequence]
