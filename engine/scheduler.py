"""Scheduler: selects the sequences of the next step. Continuous batching, preemption by recomputation."""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.drafter import Drafts
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceData, SequenceGroup, SequenceStatus

_UNLIMITED = sys.maxsize


@dataclass(slots=True)
class Chunk:
    """Part of a prefill: tokens `start` to `end` of sequences that have the same tokens and blocks."""

    sequences: list[Sequence]
    start: int
    end: int
    drafts: list[int] = field(default_factory=list)
    """The last tokens of the chunk, if they are drafts."""

    @property
    def is_last(self) -> bool:
        """The sequences are sampled after this chunk."""
        return self.end - len(self.drafts) == self.sequences[0].length


@dataclass(slots=True)
class ScheduledBatch:
    """The work of one step: chunks of prefills, and one token for each decoding sequence."""

    prefills: list[Chunk] = field(default_factory=list)
    """Each chunk is of all sequences of a new group, or of one sequence: preempted, or with several new tokens."""
    decodes: list[Sequence] = field(default_factory=list)
    """Shortest first: sequences of similar length are computed together."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks to copy before the forward pass. All sources are read before any target is written."""

    @property
    def is_empty(self) -> bool:
        return not self.prefills and not self.decodes

    @property
    def query_lens(self) -> list[int]:
        """Number of tokens that are computed: of each chunk, then of each decoding sequence."""
        return [chunk.end - chunk.start for chunk in self.prefills] + [1] * len(self.decodes)

    @property
    def seq_lens(self) -> list[int]:
        """Number of tokens that are visible after the step: of each chunk, then of each decoding sequence."""
        return [chunk.end for chunk in self.prefills] + [sequence.length for sequence in self.decodes]


@dataclass(frozen=True, slots=True)
class SequenceGroupMetadata:
    """A group's part of a step."""

    request_id: str
    is_prompt: bool
    """It is a prefill."""
    seq_data: dict[int, SequenceData]
    """By sequence id."""
    sampling_params: SamplingParams
    block_tables: dict[int, list[int]]
    """By sequence id."""


class Scheduler:
    """Shares the engine between clients: the client with the least running work is next, and each client's groups
    start in the order of their arrival. If a group does not fit, sequences of a client that runs more are preempted,
    newest first. Outputs of a group that still do not fit start later. If blocks run out, the newest sequence is
    preempted first.

    A step computes one token of each decoding sequence. Its remaining tokens go to prefills, in chunks. Prefills that
    have begun come first. While other prefills wait, each gets at most half of the tokens that are left. So a long
    prompt delays neither the running sequences nor a short prompt for long.

    While there are several clients, a step takes at most about twice as long as one with a single sequence of each
    client, prefills included. Of each client the oldest sequences run; the others wait and keep their blocks. A
    sequence with a long context counts as several, because its keys are read for each of its tokens. The
    prefills that have begun get an equal part of the tokens for each client. So a client with few sequences is not
    slowed down by one with many, or with long prompts. In every other of these steps, new prefills come before those
    that have begun.

    A preempted sequence loses its blocks. It is prefilled again, prompt and output, before new groups start. Groups
    that wait for their grammar are skipped and keep their turn. Late sequences are skipped and keep their blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        step_tokens: int,
        context_tokens: int,
        num_drafts: int = 0,
    ) -> None:
        self.blocks = blocks
        self.num_drafts = num_drafts
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step_tokens = step_tokens
        self.context_tokens = context_tokens
        self.waiting: deque[SequenceGroup] = deque()
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prefilling: list[list[Sequence]] = []
        """The part of `running` with a prefill that has begun and not ended."""
        self.num_preemptions = 0
        self._clients: Counter[str] = Counter()
        """Unfinished groups by client."""
        self._new_first = False
        """In the last step, new prefills came before those that had begun. Alternates while clients share steps."""
        self._watermark = max(1, blocks.num_blocks // 100)
        self._least_chunk = max(1, blocks.block_size // 2)
        """Tokens that are left for prefills in every step, and with which one starts."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence could run now."""
        return bool(self.running or self.preempted or any(not group.waits_for_grammar for group in self.waiting))

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.waiting.append(group)
        self._clients[group.client] += 1

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
        self._clients[group.client] -= 1
        self._clients += Counter()  # drops clients without groups

    def drop_finished(self) -> None:
        """Remove finished sequences and free their blocks."""
        for sequence in self.running:
            if sequence.is_finished():
                self._free(sequence)
        self.running = [sequence for sequence in self.running if not sequence.is_finished()]

    def schedule(self) -> ScheduledBatch:
        """Build the next step's batch. It is empty if no sequence can run."""
        batch = ScheduledBatch()
        has_prefills = bool(self.preempted or self.waiting)
        tokens, share = self._limits()
        if has_prefills:
            self._make_room(share)
        held = self._held(share)
        preempted = self._schedule_decodes(batch, held)
        is_shared = share < _UNLIMITED
        decoded = sum(map(self._cost, batch.decodes)) if is_shared else len(batch.decodes)
        budget = max(tokens - decoded, min(self._least_chunk, self.max_num_batched_tokens))
        begun, starts = self.prefilling[:], has_prefills and not preempted
        # Alternate: a new client does not wait for the prefills of others, and new prefills do not starve these.
        self._new_first = is_shared and not self._new_first
        if starts and self._new_first:
            budget = self._schedule_prefills(batch, budget, share)
        budget = self._continue_prefills(begun, batch, budget, held)
        if starts and not self._new_first:
            budget = self._schedule_prefills(batch, budget, share)
        if self.num_drafts:
            self._schedule_drafts(batch, budget)
        batch.decodes.sort(key=lambda sequence: sequence.length)
        return batch

    def seq_group_metadata_list(self, batch: ScheduledBatch) -> list[SequenceGroupMetadata]:
        """Describe a scheduled batch by groups: the prefills, then the decodes."""
        parts = [(True, chunk.sequences) for chunk in batch.prefills]
        decodes: dict[SequenceGroup, list[Sequence]] = {}
        for sequence in batch.decodes:
            decodes.setdefault(sequence.group, []).append(sequence)
        return [
            SequenceGroupMetadata(
                sequences[0].group.request_id,
                is_prompt,
                {sequence.seq_id: sequence.data for sequence in sequences},
                sequences[0].params,
                {sequence.seq_id: self.blocks.blocks(sequence.seq_id) for sequence in sequences},
            )
            for is_prompt, sequences in parts + [(False, sequences) for sequences in decodes.values()]
        ]

    def share(self, clients: int) -> int:
        """Return how many sequences of each client a step computes at least, if `clients` clients have as many."""
        return self.step_tokens // clients + 2

    def _limits(self) -> tuple[int, int]:
        """Return the maximum cost of this step and of each client's sequences in it, in tokens (see `_cost`).

        While only one client's sequences could run, only the number of tokens is limited.
        """
        if len(self._clients) < 2:
            return self.max_num_batched_tokens, _UNLIMITED
        costs = self._costs()
        waiting = {group.client for group in self.waiting if not group.waits_for_grammar}
        waiting.update(sequence.group.client for sequence in self.preempted)
        costs.update(waiting - costs.keys())
        tokens = self.step_tokens + 2 * len(costs)
        if len(costs) < 2:
            return self.max_num_batched_tokens, _UNLIMITED
        share = self.share(len(costs))
        while share < tokens and sum(min(cost, share + 1) for cost in costs.values()) <= tokens:
            share += 1
        return min(tokens, self.max_num_batched_tokens), share

    def _held(self, share: int) -> frozenset[int]:
        """Return ids of sequences that do not run in this step: of each client all but the oldest, which cost `share`.
        Beams of a group are held or run together."""
        running: Counter[str] = Counter()
        let_in: set[SequenceGroup] = set()
        held: set[int] = set()
        for sequence in self.running if share < _UNLIMITED else ():
            group = sequence.group
            if sequence.is_late:
                continue
            if running[group.client] < share or (group.beams is not None and group in let_in):
                running[group.client] += self._cost(sequence)
                let_in.add(group)
            else:
                held.add(sequence.seq_id)
        return frozenset(held)

    def _schedule_drafts(self, batch: ScheduledBatch, budget: int) -> None:
        """Turn decoding sequences with drafts into chunks, as far as tokens and blocks are left."""
        decodes: list[Sequence] = []
        for sequence in batch.decodes:
            drafts: list[int] = []
            if sequence.group.beams is None and not sequence.params.complete:
                sequence.drafts = sequence.drafts or Drafts(sequence)
                limit = min(self.num_drafts, budget, sequence.max_length - sequence.length - 1)
                drafts = sequence.drafts.propose(limit) if limit > 0 else []
            try:
                for position in range(sequence.length, sequence.length + len(drafts)):
                    self.blocks.append_slot(sequence.seq_id, position)
            except MemoryError:
                drafts = []
            if drafts:
                batch.prefills.append(Chunk([sequence], sequence.length - 1, sequence.length + len(drafts), drafts))
                budget -= len(drafts)
            else:
                decodes.append(sequence)
        batch.decodes = decodes

    def _schedule_decodes(self, batch: ScheduledBatch, held: frozenset[int]) -> bool:
        """Assign slots to the new tokens of each running sequence that is not held. Return True if sequences were
        preempted for that.

        A sequence with several new tokens (forced tokens) becomes a prefill of its own.
        """
        queue = self.running
        append_slot, block_size = self.blocks.append_slot, self.blocks.block_size
        skipped = held.union(sequence.seq_id for prefill in self.prefilling for sequence in prefill)
        done = 0
        preempted = False
        while done < len(queue):
            sequence = queue[done]
            if sequence.is_late or sequence.seq_id in skipped:
                done += 1
                continue
            if sequence.computed % block_size == 0:
                self._note_content(sequence)
            try:
                for position in range(sequence.computed, sequence.length):
                    copy = append_slot(sequence.seq_id, position)
                    if copy is not None:
                        batch.copies.append(copy)
            except MemoryError:
                self.preempt(queue[-1])
                queue, preempted = self.running, True
                done = min(done, len(queue))
                continue
            done += 1
        behind: list[list[Sequence]] = []
        for sequence in queue:
            if sequence.is_late or sequence.seq_id in skipped:
                continue
            if sequence.computed == sequence.length - 1:
                sequence.computed = sequence.length
                batch.decodes.append(sequence)
            else:
                behind.append([sequence])
        self.prefilling[:0] = behind
        return preempted

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, and queue it to be prefilled again. With a beam, all beams are preempted."""
        preempted = {sequence}
        if sequence.group.beams is not None:
            preempted.update(one for one in self.running if one.group is sequence.group)
        self.running = [one for one in self.running if one not in preempted]
        self.prefilling = [left for prefill in self.prefilling if (left := [o for o in prefill if o not in preempted])]
        for one in sorted(preempted, key=lambda one: -one.index):
            self._free(one)
            one.status = SequenceStatus.WAITING
            one.computed = 0
            one.is_late = False
            self.num_preemptions += 1
            self.preempted.appendleft(one)

    def take_over(self, beams: list[Sequence], parents: list[int]) -> None:
        """Give each beam the blocks of beam `parents[i]`."""
        ids = [beam.seq_id for beam in beams]
        self.blocks.take_over({ids[own]: ids[parent] for own, parent in enumerate(parents) if own != parent})

    def skip(self, sequence: Sequence) -> None:
        """Do not run a sequence while `is_late` is set. Then compute its last token again."""
        sequence.is_late = True
        self.rewind(sequence)

    def rewind(self, sequence: Sequence) -> None:
        """Have the last token computed again, if it was computed. Tokens after it were removed."""
        sequence.computed = min(sequence.computed, sequence.length - 1)
        self.blocks.rewind(sequence.seq_id, sequence.computed)

    def _free(self, sequence: Sequence) -> None:
        self._note_content(sequence)
        self.blocks.free(sequence.seq_id)

    def _note_content(self, sequence: Sequence) -> None:
        self.blocks.note_content(sequence.seq_id, sequence.computed, sequence.data.span)

    def _make_room(self, share: int) -> None:
        """Preempt sequences of the client that runs the most, if another client's next prefill does not fit. That
        client then runs no more sequences than the preempted one, so it is not preempted in return."""
        if len(self._clients) < 2:
            return
        queues = self._queues()
        if not queues:
            return
        costs, running = self._costs(), self._running_by_client()
        client = _next_client(queues, costs)
        prefill = queues[client][0]
        while not self._fits(prefill, len(prefill)) and costs[client] < share:
            most = max(running, key=running.__getitem__, default=client)
            if running[most] - 1 < running[client] + len(prefill):
                return
            newest = next(sequence for sequence in reversed(self.running) if sequence.group.client == most)
            self.preempt(newest)
            running = self._running_by_client()

    def _continue_prefills(
        self, begun: list[list[Sequence]], batch: ScheduledBatch, budget: int, held: frozenset[int]
    ) -> int:
        """Schedule chunks of prefills that have begun. Returns the number of tokens that are left.

        Each client gets an equal part of the tokens. The client that needs the fewest comes first, and what it leaves
        goes to the others.
        """
        queues: dict[str, list[list[Sequence]]] = {}
        for prefill in begun:
            if prefill[0].seq_id not in held:
                queues.setdefault(prefill[0].group.client, []).append(prefill)
        needed = {client: sum(one[0].length - one[0].computed for one in queue) for client, queue in queues.items()}
        others_wait = bool(self.preempted or self.waiting)
        for done, client in enumerate(sorted(queues, key=needed.__getitem__)):
            part = -(-budget // (len(queues) - done))
            for prefill in queues[client]:
                alone = prefill is queues[client][-1] and not others_wait
                taken = self._chunk(prefill, batch, self._tokens_of(prefill, part, alone=alone))
                part, budget = part - taken, budget - taken
        self.prefilling = [prefill for prefill in self.prefilling if prefill[0].computed < prefill[0].length]
        return budget

    def _tokens_of(self, prefill: list[Sequence], tokens: int, *, alone: bool) -> int:
        """Return how many of `tokens` a prefill may take: half, if it is long and not alone. A small chunk of a long
        prefill would read its whole context for few tokens."""
        is_short = prefill[0].length - prefill[0].computed <= self.blocks.block_size
        return tokens if alone or is_short else min(tokens, max(-(-tokens // 2), self._least_chunk))

    def _chunk(self, prefill: list[Sequence], batch: ScheduledBatch, tokens: int) -> int:
        """Schedule the next chunk of a prefill, of at most `tokens` tokens. Returns its number of tokens."""
        start = prefill[0].computed
        end = min(prefill[0].length, start + tokens)
        if end > start:
            for sequence in prefill:
                sequence.computed = end
            # A later prefill of this step can use these blocks: each layer stores all keys before it reads any.
            self._note_content(prefill[0])
            batch.prefills.append(Chunk(prefill[:], start, end))
        return end - start

    def _schedule_prefills(self, batch: ScheduledBatch, budget: int, share: int) -> int:
        """Start prefills, as far as each client's share goes. Returns the number of tokens that are left."""
        if len(self.running) >= self.max_num_seqs:
            return budget
        costs, queues = self._costs(), self._queues()
        while queues:
            client = _next_client(queues, costs)
            prefill = queues[client][0]
            if costs[client] >= share:
                return budget
            slots = 1 if prefill[0].group.beams is None else len(prefill)
            if budget < min(self._least_chunk, prefill[0].length) or not self._fits(prefill, slots):
                return budget
            queues[client].popleft()
            if not queues[client]:
                del queues[client]
            parts = self._take(prefill)
            costs[client] += sum(self._cost(sequence) for part in parts for sequence in part)
            for part in parts:
                self._admit(part)
                alone = not queues and part is parts[-1]
                budget -= self._chunk(part, batch, self._tokens_of(part, budget, alone=alone))
                if part[0].computed < part[0].length:
                    self.prefilling.append(part)
        return budget

    def _take(self, prefill: list[Sequence]) -> list[list[Sequence]]:
        """Remove a prefill from its queue. Returns its parts, which are computed separately.

        Outputs of a new group without a slot are queued to start later. So a large group does not wait until all of it
        fits beside the sequences of others.
        """
        group = prefill[0].group
        if prefill is not group.sequences:
            for sequence in prefill:
                self.preempted.remove(sequence)
            return [[sequence] for sequence in prefill]
        self.waiting.remove(group)
        free = self.max_num_seqs - len(self.running)
        self.preempted.extend(prefill[free:])
        return [prefill[:free]]

    def _running_by_client(self) -> Counter[str]:
        return Counter(sequence.group.client for sequence in self.running)

    def _costs(self) -> Counter[str]:
        """Return what one token of each running sequence costs, by client. Late sequences do not count."""
        costs: Counter[str] = Counter()
        for sequence in self.running:
            if not sequence.is_late:
                costs[sequence.group.client] += self._cost(sequence)
        return costs

    def _cost(self, sequence: Sequence) -> int:
        """Return the time of one decoded token, in units of the time of a token without context."""
        return 1 + sequence.length // self.context_tokens

    def _queues(self) -> dict[str, deque[list[Sequence]]]:
        """Return the prefills that could run, by client: preempted sequences, then groups in the order of arrival."""
        queues: dict[str, deque[list[Sequence]]] = {}
        for sequence in self.preempted:
            queue = queues.setdefault(sequence.group.client, deque())
            if queue and sequence.group.beams is not None and queue[-1][0].group is sequence.group:
                queue[-1].append(sequence)  # beams start together: one alone could not go on
            else:
                queue.append([sequence])
        for group in self.waiting:
            if not group.waits_for_grammar:
                queues.setdefault(group.client, deque()).append(group.sequences)
        return queues

    def _fits(self, prefill: list[Sequence], slots: int) -> bool:
        """Return whether `slots` more sequences could run, and there are blocks for a prefill."""
        spare = self._watermark if self.running else 0
        parts = 1 if prefill is prefill[0].group.sequences else len(prefill)
        return (
            len(self.running) + slots <= self.max_num_seqs
            and self.blocks.blocks_for(prefill[0].length) * parts + spare <= self.blocks.num_free
        )

    def _admit(self, prefill: list[Sequence]) -> None:
        """Assign blocks for all tokens of a prefill. Tokens in the prefix cache are not computed again."""
        first = prefill[0]
        scores = first.params.prompt_logprobs is not None or first.has_unscored_tokens
        tokens = () if scores else first.data.token_ids
        computed = self.blocks.allocate([sequence.seq_id for sequence in prefill], first.length, tokens)
        for sequence in prefill:
            sequence.status = SequenceStatus.RUNNING
            sequence.computed = computed
        self.running.extend(prefill)


def _next_client(queues: dict[str, deque[list[Sequence]]], costs: Counter[str]) -> str:
    """Return the client with the least running work; of several, the one with the smallest next prefill.

    Beams that were preempted for another client are not started again before that client's prefill.
    """
    return min(queues, key=lambda client: (costs[client], len(queues[client][0])))
