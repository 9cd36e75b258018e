"""Scheduler: selects the sequences of the next step. Continuous batching, preemption by recomputation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.sequence import Sequence, SequenceGroup, SequenceGroupMetadata, SequenceStatus


@dataclass(slots=True)
class ScheduledBatch:
    """The work of one step: prefills, and one token for each decoding sequence."""

    prefills: list[SequenceGroupMetadata] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks to copy before the forward pass. All sources are read before any target is written."""

    @property
    def is_empty(self) -> bool:
        return not self.prefills and not self.decodes


class Scheduler:
    """First come, first served. The newest sequence is preempted first.

    A preempted sequence loses its blocks. It is prefilled again, prompt and output, before new groups start. Groups
    that wait for their grammar are skipped and keep their turn. Parked sequences are skipped and keep their blocks.

    Args:
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step: at least the longest sequence plus `max_num_seqs`.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[SequenceGroup] = deque()
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._watermark = max(1, blocks.num_blocks // 100)

    @property
    def has_work(self) -> bool:
        """Whether a sequence could run now."""
        return bool(self.running or self.preempted or any(not group.waits_for_grammar for group in self.waiting))

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.waiting.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a finished group from all queues and free its blocks."""
        for sequence in group.sequences:
            self.blocks.free(sequence.seq_id)
        self.running = [sequence for sequence in self.running if sequence.group is not group]
        if self.preempted:
            self.preempted = deque(sequence for sequence in self.preempted if sequence.group is not group)
        if group in self.waiting:
            self.waiting.remove(group)

    def drop_finished(self) -> None:
        """Remove finished sequences and free their blocks."""
        for sequence in self.running:
            if sequence.status.is_finished:
                self.blocks.free(sequence.seq_id)
        self.running = [sequence for sequence in self.running if not sequence.status.is_finished]
        if self.preempted:  # a parked sequence can be preempted, and finish when it is sampled
            self.preempted = deque(sequence for sequence in self.preempted if not sequence.status.is_finished)

    def schedule(self) -> ScheduledBatch:
        """Build the next step's batch. It is empty if no sequence can run."""
        batch = ScheduledBatch()
        preempted = self._schedule_decodes(batch)
        if not preempted:
            self._schedule_prefills(batch)
        return batch

    def _schedule_decodes(self, batch: ScheduledBatch) -> bool:
        """Assign a slot to each running sequence. Return True if sequences had to be preempted for that."""
        queue = self.running
        append_slot = self.blocks.append_slot
        done = 0
        preempted = False
        while done < len(queue):
            sequence = queue[done]
            if sequence.parked is not None:
                done += 1
                continue
            try:
                copy = append_slot(sequence.seq_id, sequence.length - 1)
            except MemoryError:
                self.preempt(queue.pop())
                preempted = True
                continue
            if copy is not None:
                batch.copies.append(copy)
            done += 1
        batch.decodes = [sequence for sequence in queue if sequence.parked is None]
        return preempted

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that is no longer in `running`, and queue it to be prefilled again."""
        self.blocks.free(sequence.seq_id)
        sequence.status = SequenceStatus.WAITING
        sequence.group.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.appendleft(sequence)

    def _schedule_prefills(self, batch: ScheduledBatch) -> None:
        budget = self.max_num_batched_tokens - len(batch.decodes)
        for sequence in [sequence for sequence in self.preempted if sequence.parked is None]:
            prefill = SequenceGroupMetadata(sequence.group, [sequence])
            if not self._fits(prefill, budget):
                return
            self.preempted.remove(sequence)
            budget -= self._admit(prefill, batch)
        skipped: list[SequenceGroup] = []
        while self.waiting:
            group = self.waiting[0]
            if group.waits_for_grammar:
                skipped.append(self.waiting.popleft())
                continue
            prefill = SequenceGroupMetadata(group, group.sequences)
            if not self._fits(prefill, budget):
                break
            self.waiting.popleft()
            budget -= self._admit(prefill, batch)
        self.waiting.extendleft(reversed(skipped))

    def _fits(self, prefill: SequenceGroupMetadata, budget: int) -> bool:
        spare = self._watermark if self.running else 0
        return (
            prefill.num_tokens <= budget
            and len(self.running) + len(prefill.sequences) <= self.max_num_seqs
            and self.blocks.blocks_for(prefill.num_tokens) + spare <= self.blocks.num_free
        )

    def _admit(self, prefill: SequenceGroupMetadata, batch: ScheduledBatch) -> int:
        self.blocks.allocate([sequence.seq_id for sequence in prefill.sequences], prefill.num_tokens)
        for sequence in prefill.sequences:
            sequence.status = SequenceStatus.RUNNING
        self.running.extend(prefill.sequences)
        batch.prefills.append(prefill)
        return prefill.num_tokens
