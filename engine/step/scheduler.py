"""Scheduler: selects the sequences of each step, as a `Batch`. First come, first
served; preemption.

`engine/step/prefills.py` has what a step computes beside one token of each running
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from engine.memory.block_manager import BlockManager
from engine.memory.recurrent import StateLayout
from engine.sampling_params import SamplingParams
from engine.step.prefills import Chunk, Prefills
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus

_numbers = count()  # shared by the engines of a process: they may use one pool
Plan = TypeVar("Plan")


class Batch:
    """Chunks of prefills, one token for each decoding sequence, shortest first, and
    sequences that have kept the hidden state of their last token. Row i of the logits
    is that of `sequences[i]`. `copies` are (source, target) blocks to copy before the
    forward pass: all sources are read before any target is written. One object serves
    step after step while only the same sequences decode."""

    def __init__(
        self,
        prefills: list[Chunk],
        decodes: list[Sequence],
        kept: list[Sequence],
        copies: list[tuple[int, int]],
    ) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.kept = kept
        self.copies = copies
        self.number = next(_numbers)
        """Another one for each object: the rows of a batch don't change."""
        self.sequences = decodes
        """The sampled sequences."""
        self.selected: list[int] | None = None
        """The rows of the forward pass that are sampled. None: all, in order. The last
        row of a prefill is there once for each of its sequences. Rows of earlier chunks
        are not sampled."""
        self.hidden: Tensor
        """`[rows, hidden]`: the hidden states of the sampled rows, those of `kept`
        last. Set by the step."""
        if prefills or kept:
            self._select()
        processed = [
            row
            for row, sequence in enumerate(self.sequences)
            if sequence.view is not None
        ]
        self.processed = tuple(
            sequence.view for sequence in self.sequences if sequence.view is not None
        )
        """The sequences that post-processors see: those with a constraint, or all."""
        self.processed_rows = np.array(processed, np.intp)
        """int `[len(processed)]`: their row numbers."""
        details = [sequence.record.details for sequence in self.sequences]
        self.details = [rows for rows in details if rows is not None]
        """Details of masks, where they are requested."""
        self._plans: dict[object, Any] = {}
        self.random = self.rows(lambda params: not params.is_greedy)
        self.beams = self.rows(lambda params: params.use_beam_search)

    def rows(self, applies: Callable[[SamplingParams], object]) -> list[int]:
        """Return the rows of the requests to which something applies."""
        return [
            row
            for row, sequence in enumerate(self.sequences)
            if applies(sequence.params)
        ]

    def plan(self, make: Callable[..., Plan], *arguments: Any) -> Plan:
        """Return what `make` makes of this batch and `arguments`, once for all steps
        with these rows."""
        if make not in self._plans:
            self._plans[make] = make(self, *arguments)
        plan: Plan = self._plans[make]
        return plan

    def _select(self) -> None:
        self.sequences = []
        self.selected = []
        end = 0
        for chunk in self.prefills:
            chunk.row = end
            end = end + chunk.end - chunk.start
            if chunk.is_last:
                self.sequences += chunk.sequences
                self.selected += [end - 1] * len(chunk.sequences)
        self.sequences += self.decodes
        self.selected += range(end, end + len(self.decodes))
        self.sequences += self.kept

    @property
    def is_empty(self) -> bool:
        return not self.computes and not self.kept

    @property
    def computes(self) -> bool:
        """Whether there is a forward pass: a token to compute."""
        return bool(self.prefills or self.decodes)

    @property
    def all_sequences(self) -> list[Sequence]:
        """All sequences of the step, sampled or not."""
        return (
            self.decodes
            + self.kept
            + [sequence for chunk in self.prefills for sequence in chunk.sequences]
        )


class Scheduler:
    """Selects what a step computes: one token of each running sequence, and with the
    rest of its tokens (more, while a step delays no token) prefills.

    If blocks run out, the newest sequence is preempted: it loses its blocks, and is
    prefilled again, prompt and output, before new groups start. Beams of a group are
    preempted and started together. A late sequence (`SequenceStatus.LATE`) does not run
    until its mask is ready, and keeps its blocks and the hidden state of its last
    token. Then it is sampled without a forward pass.
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
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_tokens_of_prefills = max_tokens_of_prefills or max_num_batched_tokens
        """The maximum number of tokens in a step without decodes."""
        self.prefills = Prefills(blocks, max_num_seqs, layout)
        self.running: list[Sequence] = []
        """Newest last."""
        self.num_preemptions = 0
        self._last = Batch([], [], [], [])

    @property
    def has_work(self) -> bool:
        """Whether a sequence could run now."""
        return bool(self.running or self.prefills.has_work)

    @property
    def late(self) -> list[Sequence]:
        """Sequences with a late mask."""
        # outside of the loop: an enum's members are looked up slowly
        status = SequenceStatus.LATE
        return [sequence for sequence in self.running if sequence.status is status]

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.prefills.waiting.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a finished group from all queues and free its blocks."""
        for sequence in group.sequences:
            self._free(sequence)
        self.running = [
            sequence for sequence in self.running if sequence.group is not group
        ]
        self.prefills.remove(group)

    def drop_finished(self) -> None:
        """Remove finished sequences and free their blocks."""
        for sequence in self.running:
            if sequence.is_finished():
                self._free(sequence)
        self.running = [
            sequence for sequence in self.running if not sequence.is_finished()
        ]

    def schedule(self) -> Batch:
        """Build the next step's batch. It is empty if no sequence can run."""
        before = self.num_preemptions
        late = set[Sequence]()
        if self.late:  # other beams of their groups wait, too
            late.update(sequence for sequence in self.running if sequence.is_late)
        copies = self._append_slots(late)
        decodes, kept = self._advance(late)
        if decodes or kept or late:
            budget = self.max_num_batched_tokens - len(decodes)
        else:
            budget = self.max_tokens_of_prefills
        chunks = self.prefills.go_on(budget)
        if self.num_preemptions == before:
            budget -= sum(chunk.end - chunk.start for chunk in chunks)
            chunks += self.prefills.start(self.running, budget)
        decodes.sort(key=lambda sequence: sequence.length)
        last = self._last
        only_decodes = not chunks and not kept and not last.prefills and not last.kept
        if only_decodes and last.decodes == decodes:
            last.copies = copies
        else:
            self._last = Batch(chunks, decodes, kept, copies)
        return self._last

    def _append_slots(self, late: set[Sequence]) -> list[tuple[int, int]]:
        """Assign slots to the new tokens of each running sequence that is not late.
        Preempt the newest while there are too few blocks. Returns the blocks to
        copy."""
        copies: list[tuple[int, int]] = []
        append_slot = self.blocks.append_slot
        block_size = self.blocks.block_size
        busy = late.union(*self.prefills.begun)
        done = 0
        while done < len(self.running):
            sequence = self.running[done]
            done += 1
            if sequence in busy:
                continue
            if sequence.computed % block_size == 0:
                self.blocks.note_content(
                    sequence.seq_id, sequence.computed, sequence.span
                )
            try:
                for position in range(sequence.computed, sequence.length):
                    copy = append_slot(sequence.seq_id, position)
                    if copy is not None:
                        copies.append(copy)
            except MemoryError:
                self.preempt(self.running[-1])
                done -= 1
        return copies

    def _advance(self, late: set[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences with one token to compute, and those without
        one, which have kept a hidden state. Sequences with more tokens become
        prefills."""
        busy = late.union(*self.prefills.begun)
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
        self.prefills.begun[:0] = prefills
        return decodes, kept

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, and queue it to be prefilled again. With a
        beam, all beams are preempted."""
        preempted = [sequence]
        if sequence.params.use_beam_search:
            preempted = [beam for beam in self.running if beam.group is sequence.group]
        self.running = [running for running in self.running if running not in preempted]
        for stopped in preempted:
            self._free(stopped)
            stopped.status = SequenceStatus.WAITING
            stopped.computed = 0
        self.num_preemptions += len(preempted)
        self.prefills.restart(preempted)

    def resume(self, decided: Collection[int]) -> None:
        """Let late sequences with these ids run: they have their mask, or an error."""
        for sequence in self.late:
            if sequence.seq_id in decided:
                sequence.status = SequenceStatus.RUNNING

    def _free(self, sequence: Sequence) -> None:
        self.blocks.note_content(sequence.seq_id, sequence.computed, sequence.span)
        self.blocks.free(sequence.seq_id)
