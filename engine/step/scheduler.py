"""Scheduler: selects the sequences of each step. First come, first served; chunked prefills; preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from engine.memory.block_manager import BlockManager
from engine.memory.recurrent import StateLayout
from engine.step.batch import Batch, Chunk
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus


class Scheduler:
    """Starts groups in the order of their arrival. A group starts once all its sequences fit.

    A step computes one token of each running sequence. The rest of its tokens (more, while a step delays no token) go
    to prefills, in chunks: to those that have begun, then to preempted sequences, then to new groups.

    If blocks run out, the newest sequence is preempted: it loses its blocks, and is prefilled again, prompt and output,
    before new groups start. Beams of a group are preempted and started together. Groups that wait for their grammar
    keep their place. A late sequence (`SequenceStatus.LATE`) does not run until its mask is ready, and keeps its blocks
    and the hidden state of its last token. Then it is sampled without a forward pass.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_tokens_of_prefills: int | None = None,
        layout: StateLayout | None = None,
    ) -> None:
        self.blocks = blocks
        self.layout = layout
        """The states of recurrent layers, if the model has some."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_tokens_of_prefills = max_tokens_of_prefills or max_num_batched_tokens
        """The maximum number of tokens in a step without decodes."""
        self.waiting: deque[SequenceGroup] = deque()
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Newest last."""
        self.prefilling: list[list[Sequence]] = []
        """The part of `running` with a prefill that has begun and not ended."""
        self.num_preemptions = 0
        self._last = Batch([], [], [], [])
        self._watermark = max(1, blocks.num_blocks // 100)
        """Blocks that stay free when a prefill starts, for the next tokens of the running sequences."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence could run now."""
        return bool(self.running or self.preempted or any(not group.waits_for_grammar for group in self.waiting))

    @property
    def late(self) -> list[Sequence]:
        """Sequences with a late mask."""
        status = SequenceStatus.LATE  # outside of the loop: an enum's members are looked up slowly
        return [sequence for sequence in self.running if sequence.status is status]

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.waiting.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a finished group from all queues and free its blocks."""
        for sequence in group.sequences:
            self._free(sequence)
        self.running = [sequence for sequence in self.running if sequence.group is not group]
        self.prefilling = [prefill for prefill in self.prefilling if prefill[0].group is not group]
        if self.preempted:
            self.preempted = deque(sequence for sequence in self.preempted if sequence.group is not group)
        if group in self.waiting:
            self.waiting.remove(group)

    def drop_finished(self) -> None:
        """Remove finished sequences and free their blocks."""
        for sequence in self.running:
            if sequence.is_finished():
                self._free(sequence)
        self.running = [sequence for sequence in self.running if not sequence.is_finished()]

    def schedule(self) -> Batch:
        """Build the next step's batch. It is empty if no sequence can run."""
        before = self.num_preemptions
        late = set[Sequence]()
        if self.late:  # other beams of their groups wait, too
            late.update(sequence for sequence in self.running if sequence.is_late)
        decodes, kept, copies = self._schedule_decodes(late)
        if decodes or kept or late:
            budget = self.max_num_batched_tokens - len(decodes)
        else:
            budget = self.max_tokens_of_prefills
        chunks: list[Chunk] = []
        budget = self._continue_prefills(chunks, budget)
        if self.num_preemptions == before:
            self._start_prefills(chunks, budget)
        decodes.sort(key=lambda sequence: sequence.length)
        last = self._last
        only_decodes = not chunks and not kept and not last.prefills and not last.kept
        if only_decodes and last.decodes == decodes:
            last.copies = copies
        else:
            self._last = Batch(chunks, decodes, kept, copies)
        return self._last

    # -- running sequences

    def _schedule_decodes(self, late: set[Sequence]) -> tuple[list[Sequence], list[Sequence], list[tuple[int, int]]]:
        """Assign slots to the new tokens of each running sequence that is not late. Preempt the newest while there are
        too few blocks. A sequence with forced tokens becomes a prefill. Returns the sequences with one new token, those
        without one, which have kept a hidden state, and the blocks to copy."""
        copies: list[tuple[int, int]] = []
        append_slot = self.blocks.append_slot
        block_size = self.blocks.block_size
        busy = late.union(*self.prefilling)
        done = 0
        while done < len(self.running):
            sequence = self.running[done]
            if sequence in busy:
                done += 1
                continue
            if sequence.computed % block_size == 0:
                self._note_content(sequence)
            try:
                for position in range(sequence.computed, sequence.length):
                    copy = append_slot(sequence.seq_id, position)
                    if copy is not None:
                        copies.append(copy)
            except MemoryError:
                self.preempt(self.running[-1])
                done = min(done, len(self.running))
                continue
            done += 1
        decodes: list[Sequence] = []
        kept: list[Sequence] = []
        prefills: list[list[Sequence]] = []
        for sequence in self.running:
            if busy and sequence in busy:
                continue
            length = sequence.length
            if sequence.computed == length:
                kept.append(sequence)
            elif 0 < sequence.computed == length - 1:
                sequence.computed = length
                decodes.append(sequence)
            else:
                prefills.append([sequence])
        self.prefilling[:0] = prefills
        return decodes, kept, copies

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, and queue it to be prefilled again. With a beam, all beams are preempted."""
        preempted = [sequence]
        if sequence.params.use_beam_search:
            preempted = [beam for beam in self.running if beam.group is sequence.group]
        self.running = [running for running in self.running if running not in preempted]
        prefills = [[left for left in prefill if left not in preempted] for prefill in self.prefilling]
        self.prefilling = [prefill for prefill in prefills if prefill]
        for stopped in sorted(preempted, key=lambda stopped: -stopped.index):
            self._free(stopped)
            stopped.status = SequenceStatus.WAITING
            stopped.computed = 0
            self.num_preemptions += 1
            self.preempted.appendleft(stopped)

    def rollback(self, batch: Batch, row: int, again: bool) -> None:
        """Go on with what is left of the sequence of a row after a rollback. If only the sampled token was removed, it
        is sampled again, unless `again`. Otherwise its last token is computed again; all tokens, if the model has
        recurrent layers: their states do not go back."""
        sequence = batch.sequences[row]
        if sequence.computed == sequence.length and not again:
            self._keep(batch, [row])
        else:
            if self.layout is None:
                sequence.computed = sequence.length - 1
            else:
                sequence.computed = 0
            self.blocks.rollback(sequence.seq_id, sequence.computed)

    # -- rows that are not sampled

    def _keep(self, batch: Batch, rows: list[int]) -> None:
        """Keep the hidden states of rows that are not sampled now. A later step samples them without a forward pass."""
        for row, hidden in zip(rows, batch.hidden[rows].float().cpu().numpy(), strict=True):
            batch.sequences[row].hidden = hidden

    def delay(self, batch: Batch, late: Collection[int], failed: Collection[int]) -> frozenset[int]:
        """Let the sequences of the late rows wait for their masks, and beams for all beams of their group. They keep
        their hidden states. Returns the rows of all these sequences."""
        rows = set(late)
        for row in late:
            if not batch.sequences[row].is_finished():  # a failed row may have ended its group
                batch.sequences[row].status = SequenceStatus.LATE
        sampled = {batch.sequences[row] for row in batch.beams if row not in rows and row not in failed}
        for row in batch.beams:
            if not sampled.issuperset(batch.sequences[row].group.unfinished()):
                rows.add(row)
        if rows:  # copying from the device waits for it
            self._keep(batch, list(rows))
        return frozenset(rows)

    def resume(self, decided: Collection[int] | None = None) -> None:
        """Let late sequences with these ids run: they have their mask, or an error. None: all."""
        for sequence in self.late:
            if decided is None or sequence.seq_id in decided:
                sequence.status = SequenceStatus.RUNNING

    def _free(self, sequence: Sequence) -> None:
        self._note_content(sequence)
        self.blocks.free(sequence.seq_id)

    def _note_content(self, sequence: Sequence) -> None:
        self.blocks.note_content(sequence.seq_id, sequence.computed, sequence.span)

    # -- prefills

    def _continue_prefills(self, chunks: list[Chunk], budget: int) -> int:
        """Schedule chunks of prefills that have begun. Returns the number of tokens that are left."""
        for prefill in self.prefilling:
            budget -= self._chunk(prefill, chunks, budget)
        self.prefilling = [prefill for prefill in self.prefilling if prefill[0].computed < prefill[0].length]
        return budget

    def _start_prefills(self, chunks: list[Chunk], budget: int) -> None:
        """Start prefills while they fit."""
        while budget > 0 and (parts := self._next_prefill()) and self._fits(parts):
            for part in parts:
                self._start(part)
                budget -= self._chunk(part, chunks, budget)
                if part[0].computed < part[0].length:
                    self.prefilling.append(part)

    def _next_prefill(self) -> list[list[Sequence]]:
        """Return the next prefill that could start, in parts that have the same tokens. Empty: there is none."""
        if self.preempted:
            first = self.preempted[0]
            if first.params.use_beam_search:
                beams = [beam for beam in self.preempted if beam.group is first.group]
            else:
                beams = []
            return [[sequence] for sequence in beams or [first]]
        return next(([group.sequences[:]] for group in self.waiting if not group.waits_for_grammar), [])

    def _fits(self, parts: list[list[Sequence]]) -> bool:
        """Return whether there are places and blocks for a prefill."""
        if self.running:
            spare = self._watermark
        else:
            spare = 0
        return (
            len(self.running) + sum(map(len, parts)) <= self.max_num_seqs
            and sum(self.blocks.blocks_for(part[0].length) for part in parts) + spare <= self.blocks.num_free
        )

    def _start(self, part: list[Sequence]) -> None:
        """Move a part of a prefill from its queue to `running`. Tokens in the prefix cache are not computed again."""
        first = part[0]
        if self.preempted and self.preempted[0] is first:
            self.preempted.popleft()
        else:
            self.waiting.remove(first.group)
        scores = first.params.prompt_logprobs is not None or first.has_unscored_tokens
        tokens = () if scores else first.span(0, first.length)
        computed = self.blocks.allocate([sequence.seq_id for sequence in part], first.length, tokens)
        for sequence in part:
            sequence.status = SequenceStatus.RUNNING
            sequence.computed = computed
        if first.group.num_cached_tokens is None:
            first.group.num_cached_tokens = computed
        self.running.extend(part)

    def _chunk(self, prefill: list[Sequence], chunks: list[Chunk], budget: int) -> int:
        """Schedule the next chunk of a prefill. Returns its number of tokens."""
        start = prefill[0].computed
        tokens = min(prefill[0].length - start, budget)
        if tokens > 0 and self.layout is not None and not self.layout.resumes:
            if start == 0:
                tokens = prefill[0].length
            else:
                tokens = 1
        if tokens > 0:
            for sequence in prefill:
                sequence.computed = start + tokens
            # A later prefill of this step can use these blocks: each layer stores all keys before it reads any.
            self._note_content(prefill[0])
            chunks.append(Chunk(prefill[:], start, start + tokens))
        return tokens
