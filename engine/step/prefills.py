"""Prefills: prompts, and outputs that are computed again, as chunks of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.memory.block_manager import BlockManager
from engine.memory.recurrent import StateLayout
from engine.step.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class Chunk:
    """Part of a prefill: tokens `start` to `end` of sequences that have the same tokens
    and blocks."""

    sequences: list[Sequence]
    start: int
    end: int
    row: int = 0
    """Row of the hidden states of its first token. Set by `Batch`."""

    @property
    def is_last(self) -> bool:
        """The sequences are sampled after this chunk."""
        return self.end == self.sequences[0].length

    def unscored(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of its prompt tokens and forced tokens that have no
        log-probabilities yet, although they are wanted. Row `row + first - 1 - start`
        predicts `first`."""
        sequence = self.sequences[0]
        num_prompt = len(sequence.prompt_token_ids)
        wanted: list[tuple[int, int]] = []
        if sequence.params.prompt_logprobs is not None:
            wanted.append((len(sequence.group.prompt_logprobs), num_prompt))
        if sequence.has_unscored_tokens:
            num_scored = sequence.record.num_scored(sequence.num_output_tokens)
            wanted.append((num_prompt + num_scored, sequence.length))
        for first, end in wanted:
            last = min(self.end + 1, end)
            if first < last:
                yield first, last


class Prefills:
    """Prefills that have begun, and the queues of those that have not. Groups start in
    the order of their arrival, once all their sequences fit; preempted sequences start
    before new groups. Groups that wait for their grammar keep their place."""

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, layout: StateLayout | None
    ) -> None:
        self.waiting: deque[SequenceGroup] = deque()
        self.preempted: deque[Sequence] = deque()
        self.begun: list[list[Sequence]] = []
        """The running sequences with a prefill that has not ended, in parts with the
        same tokens."""
        self.max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._layout = layout
        self._watermark = max(1, blocks.num_blocks // 100)
        """Blocks that stay free when a prefill starts, for the next tokens of the
        running sequences."""

    @property
    def has_work(self) -> bool:
        """Whether a prefill could start, if it fits."""
        return bool(self._next())

    def remove(self, group: SequenceGroup) -> None:
        """Remove a finished group."""
        self.begun = [
            prefill for prefill in self.begun if prefill[0].group is not group
        ]
        if self.preempted:
            self.preempted = deque(
                sequence for sequence in self.preempted if sequence.group is not group
            )
        if group in self.waiting:
            self.waiting.remove(group)

    def restart(self, preempted: Collection[Sequence]) -> None:
        """Queue preempted sequences, with the newest first."""
        prefills = [
            [sequence for sequence in prefill if sequence not in preempted]
            for prefill in self.begun
        ]
        self.begun = [prefill for prefill in prefills if prefill]
        self.preempted.extendleft(
            sorted(preempted, key=lambda sequence: -sequence.index)
        )

    def go_on(self, budget: int) -> list[Chunk]:
        """Return the next chunks of the prefills that have begun, of at most `budget`
        tokens."""
        chunks: list[Chunk] = []
        for prefill in self.begun:
            budget -= self._add_chunk(prefill, chunks, budget)
        self.begun = [
            prefill for prefill in self.begun if prefill[0].computed < prefill[0].length
        ]
        return chunks

    def start(self, running: list[Sequence], budget: int) -> list[Chunk]:
        """Start prefills while they fit beside `running`, to which their sequences are
        added. Returns their first chunks, of at most `budget` tokens."""
        chunks: list[Chunk] = []
        while budget > 0 and (parts := self._next()) and self._fits(parts, running):
            for part in parts:
                self._allocate(part)
                running.extend(part)
                budget -= self._add_chunk(part, chunks, budget)
                if part[0].computed < part[0].length:
                    self.begun.append(part)
        return chunks

    def _next(self) -> list[list[Sequence]]:
        """Return the next prefill that could start, in parts that have the same tokens.
        Empty: there is none."""
        if self.preempted:
            first = self.preempted[0]
            if first.params.use_beam_search:
                return [[beam] for beam in self.preempted if beam.group is first.group]
            return [[first]]
        for group in self.waiting:
            if not group.waits_for_grammar:
                return [group.sequences[:]]
        return []

    def _fits(self, parts: list[list[Sequence]], running: list[Sequence]) -> bool:
        """Return whether there are places and blocks for a prefill."""
        places = len(running) + sum(map(len, parts))
        blocks = sum(self._blocks.blocks_for(part[0].length) for part in parts)
        if running:
            blocks += self._watermark
        return places <= self.max_num_seqs and blocks <= self._blocks.num_free

    def _allocate(self, part: list[Sequence]) -> None:
        """Take a part of a prefill from its queue. Tokens in the prefix cache are not
        computed again."""
        first = part[0]
        if self.preempted and self.preempted[0] is first:
            self.preempted.popleft()
        else:
            self.waiting.remove(first.group)
        tokens: list[int] = []
        if first.params.prompt_logprobs is None and not first.has_unscored_tokens:
            tokens = first.span(0, first.length)
        computed = self._blocks.allocate(
            [sequence.seq_id for sequence in part], first.length, tokens
        )
        for sequence in part:
            sequence.status = SequenceStatus.RUNNING
            sequence.computed = computed
        if first.group.num_cached_tokens is None:
            first.group.num_cached_tokens = computed

    def _add_chunk(
        self, prefill: list[Sequence], chunks: list[Chunk], budget: int
    ) -> int:
        """Add the next chunk of a prefill. Returns its number of tokens."""
        first = prefill[0]
        start = first.computed
        tokens = min(first.length - start, budget)
        if tokens > 0 and self._layout is not None and not self._layout.resumes:
            if start == 0:
                tokens = first.length
            else:
                tokens = 1
        if tokens > 0:
            for sequence in prefill:
                sequence.computed = start + tokens
            # A later prefill of this step can use these blocks: each layer stores all
            # keys before it reads any.
            self._blocks.note_content(first.seq_id, first.computed, first.span)
            chunks.append(Chunk(prefill[:], start, start + tokens))
        return tokens
