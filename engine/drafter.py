"""Speculative decoding with an n-gram drafter (prompt lookup): what followed the newest tokens may follow again.

A step computes a sequence's newest token and its drafts together. Each draft adds a row to the step, with a `Sequence`
of its own: its output ends with the drafts so far, so that masks, penalties and log-probabilities are those of that
position. A draft is accepted if the row before it samples the same token. Outputs are those of decoding one by one:
each position has its own mask and its own random number.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.sequence import Sequence, SequenceData, common_length
from guided.sequence import GuidedSequence

if TYPE_CHECKING:
    from engine.sampler import SamplerOutput

_SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, in this order."""


class Drafts:
    """The drafts of one sequence, and what they need from step to step."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._edits = sequence.edits
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """By n-gram of `_tokens`: where its last occurrence ends."""
        self.guided: list[GuidedSequence] = []
        """The matchers of the rows after 1, 2, ... drafts. They stay open from step to step."""

    def propose(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that may follow."""
        sequence, tokens = self._sequence, self._tokens
        if self._edits != sequence.edits:
            self._edits = sequence.edits
            tokens.clear()
            self._after.clear()
        indexed = len(tokens)
        tokens += sequence.data.span(indexed, sequence.length)
        for end in range(max(1, indexed), len(tokens)):
            for size in _SIZES:
                self._after[tuple(tokens[max(0, end - size) : end])] = end
        for size in _SIZES:
            found = self._after.get(tuple(tokens[-size:]))
            if found is not None:
                return tokens[found : found + limit]
        return []

    def rows(self, drafts: list[int]) -> list[tuple[Sequence, int | None]]:
        """Return a sequence for the row after each draft, and the length of the output that its matcher can keep.

        The length is None if the output has only grown since the last step, or the matcher is new.
        """
        main = self._sequence
        found: list[tuple[Sequence, int | None]] = []
        for count in range(1, len(drafts) + 1):
            row = copy.copy(main)
            row.data = SequenceData(main.data.prompt_token_ids, main.data.output_token_ids + drafts[:count])
            row.length, row.last_token = main.length + count, drafts[count - 1]
            row.output_logprobs = []
            row.uniforms = main.uniforms.ahead(count)
            changed = None
            if main.guided is not None:
                row.guided, changed = self._guided(main.guided, count, row.data.output_token_ids)
                row.seq_id = row.guided.sequence_id
            found.append((row, changed))
        return found

    def _guided(self, main: GuidedSequence, count: int, output: list[int]) -> tuple[GuidedSequence, int | None]:
        if len(self.guided) < count:
            name = Sequence.next_id()
            new = replace(
                main, sequence_id=name, output_token_ids=output, parent_id=main.sequence_id, mask_seconds=None
            )
            self.guided.append(new)
            return new, None
        guided = self.guided[count - 1]
        known = guided.output_token_ids
        same = common_length(known, output)
        guided.output_token_ids = output
        return guided, same if same < len(known) else None


def accept(sequence: Sequence, row: int, drafts: list[int], sampled: SamplerOutput, skipped: Collection[int]) -> int:
    """Append the tokens that were sampled after accepted drafts. Returns their number.

    Args:
        row: the sequence's own row. Those of its drafts follow.
        skipped: rows that were not sampled.
    """
    for count, draft in enumerate(drafts):
        accepted = sampled.token_ids[row] == draft
        row += 1
        if sequence.is_finished() or not accepted or row in skipped or row in sampled.broken:
            return count
        token = sampled.token_ids[row]
        sequence.append(token)
        sequence.computed += 1
        if not sequence.params.is_greedy:
            sequence.uniforms.next()
        sequence.end_by_token()
        if row in sampled.logprobs:
            sequence.add_logprobs(sampled.logprobs[row])
        if row in sampled.allowed:
            sequence.note_details(sampled.allowed[row])
        if sequence.params.stop:
            sequence.end_by_stop_string()
    return len(drafts)
