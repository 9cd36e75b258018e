"""ParkedSequences: sequences that wait for a mask while the others go on. Their logits are kept and sampled later."""

from __future__ import annotations

import time

import torch

from engine.sampler import Sampler
from engine.sampling_metadata import SamplingMetadata
from engine.sequence import Sequence, SequenceGroup
from engine.stats import EngineStats
from guided.post_processor import LogitPostProcessor


class ParkedSequences:
    """Parks and unparks sequences. At most `limit` of them are sampled at once."""

    def __init__(
        self, sampler: Sampler, processor: LogitPostProcessor | None, stats: EngineStats, *, limit: int
    ) -> None:
        self._sampler, self._processor, self._limit = sampler, processor, limit
        self._parked: dict[int, Sequence] = {}
        self.stats = stats

    def __len__(self) -> int:
        return len(self._parked)

    def add(
        self, sequence: Sequence, logits: torch.Tensor, row: int, metadata: SamplingMetadata, is_late: bool = True
    ) -> None:
        """Park a sequence, unless it has ended (an earlier row may have ended its group). `is_late` as in `Parked`."""
        if sequence.parked is None and not sequence.is_finished():
            sequence.parked = self._sampler.park(logits, row, metadata)
            sequence.parked.is_late = is_late
            self._parked[sequence.seq_id] = sequence
            self.stats.parkings += 1
            self.stats.parked = len(self._parked)

    def remove(self, sequence: Sequence) -> None:
        """Unpark a sequence. One that is not parked is ignored."""
        if sequence.parked is not None:
            self.stats.parked_seconds += time.monotonic() - sequence.parked.since
            sequence.parked = None
            del self._parked[sequence.seq_id]
            self.stats.parked = len(self._parked)

    def hold_beams(self, logits: torch.Tensor, metadata: SamplingMetadata, skipped: frozenset[int]) -> frozenset[int]:
        """Park beams if not all beams of their group can be sampled now. Returns their rows."""
        sampled = {metadata.sequences[row] for row in metadata.beams if row not in skipped}
        held: set[int] = set()
        for row in metadata.beams:
            sequence = metadata.sequences[row]
            if not sampled.issuperset(sequence.group.unfinished()):
                held.add(row)
                self.add(sequence, logits, row, metadata, is_late=False)
        return frozenset(held)

    def settled(self, timeout: float) -> list[Sequence]:
        """Return sequences that can be sampled now, a group's beams only together. Waits `timeout` seconds at most."""
        if not self._parked:
            return []
        waits = any(one.parked is not None and one.parked.is_late for one in self._parked.values())
        ids = self._processor.settled(timeout) if waits and self._processor is not None else []
        settled = {seq_id: self._parked[seq_id] for seq_id in ids if seq_id in self._parked}
        found = [one for one in settled.values() if one.group.beams is None]
        groups: dict[SequenceGroup, None] = {one.group: None for one in self._parked.values() if one.group.beams}
        for group in groups:
            beams = group.unfinished()
            if all(one.parked is not None and (not one.parked.is_late or one.seq_id in settled) for one in beams):
                found[:0] = beams
        limit = self._limit  # the rest follows in the next step
        while len(found) > limit and found[limit].group is found[limit - 1].group:
            limit -= 1
        return found[:limit]
