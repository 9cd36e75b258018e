"""Speculative decoding with an n-gram drafter (prompt lookup): what followed the newest tokens may follow again.

A step computes a sequence's newest token and its drafts together. Each draft adds a row to the step, with a `Sequence`
of its own: its output ends with the drafts so far. A draft is accepted if the row before it samples the same token.
Outputs are those of decoding one by one: each position has its own mask and its own random number.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace

from engine.sequence import Sequence, SequenceData, common_length, sequence_ids
from guided.post_processor import LogitPostProcessor
from guided.sequence import GuidedSequence

_SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, in this order."""


@dataclass(slots=True)
class _History:
    """What one sequence needs from step to step."""

    edits: int
    """`Sequence.edits` when `tokens` was read."""
    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By n-gram of `tokens`: where its last occurrence ends."""
    guided: list[GuidedSequence] = field(default_factory=list)
    """The matchers of the rows after 1, 2, ... drafts. They stay open from step to step."""


class Drafter:
    """Proposes up to `max_drafts` drafts per sequence and step, and makes their rows, with matchers in `processor`."""

    def __init__(self, max_drafts: int, processor: LogitPostProcessor) -> None:
        self.max_drafts, self._processor = max_drafts, processor
        self._histories: dict[Sequence, _History] = {}

    def propose(self, sequence: Sequence, budget: int) -> list[int]:
        """Return up to `budget` tokens that may follow."""
        limit = min(self.max_drafts, budget, sequence.max_length - sequence.length - 1)
        if limit <= 0 or sequence.params.use_beam_search or sequence.params.complete:
            return []
        history = self._histories.setdefault(sequence, _History(sequence.edits))
        if history.edits != sequence.edits:
            history = self._histories[sequence] = _History(sequence.edits, guided=history.guided)
        tokens = history.tokens
        indexed = len(tokens)
        tokens += sequence.data.span(indexed, sequence.length)
        for end in range(max(1, indexed), len(tokens)):
            for size in _SIZES:
                history.after[tuple(tokens[max(0, end - size) : end])] = end
        for size in _SIZES:
            found = history.after.get(tuple(tokens[-size:]))
            if found is not None:
                return tokens[found : found + limit]
        return []

    def rows(self, sequence: Sequence, drafts: list[int]) -> list[Sequence]:
        """Return a sequence for the row after each draft."""
        rows: list[Sequence] = []
        for count in range(1, len(drafts) + 1):
            row = copy.copy(sequence)
            row.data = SequenceData(sequence.data.prompt_token_ids, sequence.data.output_token_ids + drafts[:count])
            row.length, row.last_token = sequence.length + count, drafts[count - 1]
            row.output_logprobs = []
            row.uniforms = copy.copy(sequence.uniforms)
            next(itertools.islice(row.uniforms, count - 1, None))  # `count` numbers ahead
            if sequence.guided is not None:
                row.guided = self._guided(sequence, sequence.guided, count, row.data.output_token_ids)
                row.seq_id = row.guided.sequence_id
            rows.append(row)
        return rows

    def _guided(self, sequence: Sequence, main: GuidedSequence, count: int, output: list[int]) -> GuidedSequence:
        """Return the view of the row after `count` drafts. Its matcher keeps what has not changed."""
        opened = self._histories[sequence].guided
        if len(opened) < count:
            new = replace(main, sequence_id=next(sequence_ids), mask_seconds=None)
            new.output_token_ids = output
            opened.append(new)
            return new
        guided = opened[count - 1]
        known = guided.output_token_ids
        same = common_length(known, output)
        guided.output_token_ids = output
        if same < len(known):
            self._processor.rollback(guided.sequence_id, same)
        return guided

    def forget(self, sequence: Sequence) -> None:
        """Drop what a sequence that has ended needed, and free the matchers of its drafts."""
        for guided in self._histories.pop(sequence, _History(0)).guided:
            self._processor.free_sequence(guided.sequence_id)
