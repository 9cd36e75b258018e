"""Guided decoding in transformers: a logits processor for `model.generate(logits_processor=[...])`.

    vocabulary = Vocabulary.from_tokenizer(tokenizer, model.config.vocab_size)
    with GuidedLogitsProcessor(vocabulary, [Constraint.json_schema(schema), None]) as guide:
        model.generate(**inputs, logits_processor=[guide], num_beams=4, max_new_tokens=200)

transformers is not imported: `generate()` asks nothing of a logits processor but that it can be called with token ids
and scores. Masks can't be computed during the forward pass here, since `generate()` tells nobody of a token before it
asks for the next; a Ray pool (`pool="ray"`) gives isolation alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from guided.bitmask import words
from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidRequest, from_wire, to_wire
from guided.inline import InlinePool
from guided.integrations.pools import find_pool
from guided.integrations.recycled_memory import RecycledMemory
from guided.kernel import apply_bitmask
from guided.pool import MaskPool
from guided.processor import GuidedRow, LogitPostProcessor
from guided.vocabulary import Vocabulary

__all__ = ["GuidedLogitsProcessor"]

_FLOOR = -1e4
"""What other processors forbid comes to this where the constraint allows it: too little to be chosen beside anything
else, and chosen where there is nothing else; as a beam, before `generate()`'s empty ones (-1e9)."""
_LOST = -1e30
"""What ends a failed row: the only token that is left, and as a beam behind all others."""
_LATE_SECONDS = 1.0

_ids = count(1 << 40)  # of all processors in this process: they may share a pool, with an engine that counts from 0


@dataclass(slots=True)
class _Branch:
    """One constrained row: a prompt's output so far, or one of its beams'."""

    tokens: list[int] = field(default_factory=list)
    sequence_id: int | None = None
    """Its matcher, from its first mask to its end."""
    parent_id: int | None = None
    """On its first step: whose matcher to copy."""
    over: bool = False
    """It has ended: by a stop token, or `generate()` fills it up with padding."""
    failed: bool = False


class GuidedLogitsProcessor:
    """Holds `generate()`'s rows to constraints: greedy, sampled, beam-searched or drafted by an assistant.

    A row's state is that of its token history after the prompt: where a beam has moved to another row, its matcher is
    copied. A call whose rows don't go on from those of the call before begins a new generation, so one processor serves
    many `generate()` calls, one after the other, from one thread. One thing looks like going on and may not be meant
    so: a prompt that is the last prompt, a beginning of what was generated then (or nothing), and one token more, any
    token: all behind the last prompt counts as output. Call `reset()` before such a prompt.

    What a constraint allows is never empty: where other processors (`min_new_tokens`, `bad_words_ids`, ...) forbid all
    of it, the constraint wins. Put it behind processors of your own; transformers' temperature, top-k and the like run
    behind it by themselves.

    Args:
        vocabulary: as wide as the model's logits, with all tokens that end a generation
            (`model.generation_config.eos_token_id`) among its stop tokens.
        constraints: one for all rows, or one for each prompt, None where it has none. A prompt's beams and its
            `num_return_sequences` share its constraint.
        pool: where masks are computed. None: in this process. A name, "ray": that pool (entry point `guided.pools`), as
            its class makes it without options, opened here and shut down by `close()`. A pool, over the same
            vocabulary: shared, and not shut down here.
        backend: "auto", or the name of one backend.
        failed_rows: what happens where a row has no valid mask, because a backend failed, its worker died, or it holds
            a token that its masks forbade. "raise" ends `generate()` with that error, the row named. "end" has the row
            stop at once (as a beam it loses against all others), notes the error in `failed`, and the other rows go
            on. Beam sampling (`num_beams` with `do_sample`) draws forbidden tokens where it finds too few others, for
            beams that can't win: it needs "end".
        in_place: write into the scores that are handed in, which saves a copy of those that allow much. Not where
            somebody keeps them: with `output_logits=True`, `generate()` does, and would return masked logits as raw. It
            ends at the second token then.

    Raises:
        GuidedError: a constraint can't be compiled; says which one (its place in `constraints`) and why.
        PoolUnavailable: there is no pool of that name, or it can't be opened.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        constraints: Constraint | Sequence[Constraint | None],
        *,
        pool: MaskPool | str | None = None,
        backend: str = "auto",
        failed_rows: Literal["raise", "end"] = "raise",
        in_place: bool = False,
    ) -> None:
        if not (pool is None or isinstance(pool, str)) and pool.vocabulary != vocabulary:
            raise InvalidRequest(f"the pool's masks are over {pool.vocabulary}, not over {vocabulary}", param="pool")
        self.failed: dict[int, GuidedError] = {}
        """Rows of the current or last generation that were ended (`failed_rows="end"`): as they stood when it was."""
        self._constraints = [constraints] if isinstance(constraints, Constraint) else list(constraints)
        self._end_failed = failed_rows == "end"
        self._in_place = in_place
        self._taken: Callable[[], torch.Tensor | None] = lambda: None
        self._own_pool: MaskPool | None = None
        if pool is None:
            pool = self._own_pool = InlinePool(vocabulary)
        elif isinstance(pool, str):
            pool = self._own_pool = find_pool(pool, {})(vocabulary)
        self._processor = LogitPostProcessor(pool)
        self._width = vocabulary.padded_vocab_size
        self._bitmask: NDArray[np.int32] = np.empty((0, words(self._width)), np.int32)
        self._memory = RecycledMemory()
        self._stop = list(vocabulary.stop_token_ids)
        self._text = frozenset(vocabulary.text_token_ids)
        self._closed = False
        self._prompts = torch.empty(0, 0, dtype=torch.long)
        self._outputs: NDArray[np.int64] = np.empty((0, 0), np.int64)
        """`[rows, tokens]`: all rows' output as of the last call."""
        self._branches: dict[int, _Branch] = {}
        """By row; those without a constraint have none."""
        self._requests: dict[int, str] = {}
        """By row: whose constraint it has."""
        self._leaving: list[int] = []
        try:
            self._compile(backend)
        except BaseException:
            self.close()
            raise

    def _compile(self, backend: str) -> None:
        futures = {}
        for place, constraint in enumerate(self._constraints):
            if constraint is not None:
                futures[place] = self._processor.initialize(str(place), constraint, backend)
        for place, future in futures.items():
            try:
                future.result()
            except GuidedError as error:
                raise _named(error, f"constraint {place}") from error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores with -inf wherever a constraint forbids a token; rows without a constraint as they are.

        Args:
            input_ids: int64 `[rows, tokens]`: prompts, padded on the left where need be, and what was generated.
            scores: float `[rows, width]`, logits or log-probabilities; not written to but with `in_place`.

        Raises:
            GuidedError: a row has no valid mask, and `failed_rows` is "raise".
            InvalidRequest: the scores are not as wide as the vocabulary, or rows and constraints don't go together; or
                somebody has kept those that were last written to, with `in_place`.
        """
        if self._closed:
            raise RuntimeError("this processor is closed")
        if scores.shape[1] != self._width:
            raise InvalidRequest(
                f"the model has {scores.shape[1]} logits and the vocabulary {self._width}: make the vocabulary with "
                f"padded_vocab_size={scores.shape[1]}",
                param="vocabulary",
            )
        if self._in_place:
            self._take(scores)
        if not self._goes_on(input_ids):
            self._begin(input_ids)
        rows = self._collect(len(scores))
        masked = scores.detach() if self._in_place else self._memory.like(scores)
        if not self._in_place:
            for row in range(len(scores)):
                if row not in self._branches:
                    masked[row] = scores[row]
        apply_bitmask(scores, self._masks(rows), rows, masked, _FLOOR)
        self._end(scores, masked)
        return masked

    def _take(self, scores: torch.Tensor) -> None:
        """These will be written to. The last ones must be gone by now: what is returned is another object."""
        kept, self._taken = self._taken(), weakref.ref(scores)
        if kept is not None and kept is not scores:
            raise InvalidRequest(
                "in_place=True writes into the scores that are handed in, and somebody keeps them: "
                "generate(output_logits=True) does, or another logits processor",
                param="in_place",
            )

    # which row is whose

    def _begin(self, input_ids: torch.Tensor) -> None:
        """A new generation: its rows are prompts."""
        self.reset()
        rows, prompts = len(input_ids), len(self._constraints)
        if not prompts or rows % prompts:
            raise InvalidRequest(
                f"{rows} rows and {prompts} constraints: give one for all, or one (or None) for each prompt",
                param="constraints",
            )
        self.failed.clear()
        self._prompts = input_ids.clone()
        self._outputs = np.empty((rows, 0), np.int64)
        for row in range(rows):
            place = row * prompts // rows  # a prompt's rows are neighbours
            if self._constraints[place] is not None:
                self._branches[row] = _Branch()
                self._requests[row] = str(place)

    def _goes_on(self, input_ids: torch.Tensor) -> bool:
        """Bring the branches to these rows, where all of them go on from the last call's."""
        length = self._prompts.shape[1]
        if len(input_ids) != len(self._prompts) or input_ids.shape[1] <= length:
            return False
        if input_ids.device != self._prompts.device or not torch.equal(input_ids[:, :length], self._prompts):
            return False
        outputs: NDArray[np.int64] = input_ids[:, length:].numpy(force=True).copy()
        parents = self._parents(outputs)
        if parents is None:
            return False
        if parents:
            self._move(parents)
        known = outputs.shape[1] - 1
        tokens = outputs[:, -1].tolist()
        for row, branch in self._branches.items():
            if len(branch.tokens) > known:
                self._roll_back(branch, known)
            branch.tokens.append(tokens[row])
            if tokens[row] not in self._text:
                branch.over = True
                self._leave(branch)
        self._outputs = outputs
        return True

    def _parents(self, outputs: NDArray[np.int64]) -> dict[int, int] | None:
        """By constrained row: the row that it was before its last token. Empty where all stayed what they were; None
        where one was none of them.

        Args:
            outputs: `[rows, tokens]`, at least one token.
        """
        before, known = self._outputs, outputs.shape[1] - 1
        if known > before.shape[1]:
            return None
        if np.array_equal(outputs[:, :known], before[:, :known]):
            return {}
        stayed = (outputs[:, :known] == before[:, :known]).all(axis=1).tolist()
        if all(stayed[row] for row in self._branches):
            return {}
        if known < before.shape[1]:
            return None
        histories = {(self._requests[row], before[row].tobytes()): row for row in self._branches}
        parents: dict[int, int] = {}
        for row in self._branches:
            parent = row if stayed[row] else histories.get((self._requests[row], outputs[row, :known].tobytes()))
            if parent is None:
                return None
            parents[row] = parent
        return parents

    def _move(self, parents: dict[int, int]) -> None:
        """Beams: a branch goes on in one row, is copied to others (1 us; rolling back a dropped one takes longer), or
        ends."""
        before, gone = self._branches, set(self._branches)
        branches: dict[int, _Branch] = {}
        for row, parent in sorted(parents.items(), key=lambda pair: pair[0] != pair[1]):
            old = before[parent]
            if parent in gone:
                gone.discard(parent)
                branches[row] = old
            else:
                branches[row] = _Branch(list(old.tokens), None, old.sequence_id, old.over, old.failed)
        for row in gone:
            self._leave(before[row])
        self._branches = branches

    def _roll_back(self, branch: _Branch, known: int) -> None:
        """An assistant's draft is not so any more."""
        del branch.tokens[known:]
        branch.over = branch.failed or not self._text.issuperset(branch.tokens)
        if branch.sequence_id is not None:
            self._processor.rollback(branch.sequence_id, known)

    def _leave(self, branch: _Branch) -> None:
        """Its matcher isn't needed any more, once this step's copies of it are made."""
        if branch.sequence_id is not None:
            self._leaving.append(branch.sequence_id)
            branch.sequence_id = None

    # masks

    def _collect(self, batch: int) -> list[int]:
        """Have the masks of the rows that go on in `_bitmask`; which rows these are. Those without a mask end."""
        processor = self._processor
        processor.failures()  # those that are lost fail below, in their rows
        if len(self._bitmask) < batch:
            self._bitmask = np.empty((batch, self._bitmask.shape[1]), np.int32)
        rows = self._rows()
        by_id = {row.sequence_id: row for row in rows}
        failed: dict[int, GuidedError] = {}
        waiting: set[int] = set()
        while rows:
            processor.prepare(rows)
            report = processor.collect(self._bitmask)
            failed |= report.failed
            waiting |= set(report.late)
            rows = []
            while waiting and not rows:  # no worker is up: the pool says how long that may take
                settled = waiting.intersection(processor.settled(_LATE_SECONDS))
                rows = [by_id[sequence_id] for sequence_id in settled]
                waiting -= settled
        for sequence_id in self._leaving:
            processor.free_sequence(sequence_id)
        self._leaving.clear()
        if failed:
            self._fail({by_id[sequence_id].logits_row: error for sequence_id, error in failed.items()})
        return sorted(row.logits_row for one, row in by_id.items() if one not in failed)

    def _masks(self, rows: list[int]) -> NDArray[np.int32] | list[NDArray[np.int32]]:
        """Of these rows, as the kernel takes them without a copy."""
        return self._bitmask[: len(rows)] if rows == list(range(len(rows))) else [self._bitmask[row] for row in rows]

    def _rows(self) -> list[GuidedRow]:
        """All that go on; copies before their originals, which accept a token of their own in this step."""
        copies: list[GuidedRow] = []
        others: list[GuidedRow] = []
        for row, branch in self._branches.items():
            if branch.over:
                continue
            if branch.sequence_id is None:
                branch.sequence_id = next(_ids)
            (others if branch.parent_id is None else copies).append(
                GuidedRow(self._requests[row], branch.sequence_id, branch.tokens, row, branch.parent_id)
            )
            branch.parent_id = None
        return copies + others

    def _fail(self, failed: dict[int, GuidedError]) -> None:
        if not self._end_failed:
            row = min(failed)
            self.reset()
            raise _named(failed[row], f"row {row} of {len(self._outputs)}") from failed[row]
        for row, error in failed.items():
            branch = self._branches[row]
            branch.over = branch.failed = True
            branch.sequence_id = None
            self.failed.setdefault(row, error)

    def _end(self, scores: torch.Tensor, masked: torch.Tensor) -> None:
        """Rows that are over may only stop: `generate()` asks for them as long as others go on."""
        over = [row for row, branch in self._branches.items() if branch.over]
        if over:
            failed = torch.tensor([self._branches[row].failed for row in over], device=masked.device)
            rows = torch.tensor(over, device=masked.device).unsqueeze(1)
            stop = torch.tensor(self._stop, device=masked.device)
            kept = scores[rows, stop].clamp_(min=_FLOOR)
            kept[failed] = max(_LOST, torch.finfo(masked.dtype).min)
            masked[over] = -torch.inf
            masked[rows, stop] = kept

    # the end

    def reset(self) -> None:
        """The next call begins a new generation, whatever its rows are."""
        self._free(self._leaving)
        self._free(branch.sequence_id for branch in self._branches.values() if branch.sequence_id is not None)
        self._leaving.clear()
        self._branches.clear()
        self._requests.clear()
        self._prompts = torch.empty(0, 0, dtype=torch.long)

    def _free(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._processor.free_sequence(sequence_id)

    def close(self) -> None:
        """Give matchers and grammars back, and the pool, where it is this processor's own. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        self._memory.clear()
        for place in range(len(self._constraints)):
            self._processor.free(str(place))
        if self._own_pool is not None:
            self._own_pool.shutdown()

    def __enter__(self) -> GuidedLogitsProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _named(error: GuidedError, what: str) -> GuidedError:
    """The same error, saying which row or constraint it is about."""
    code, message, param, pointer = to_wire(error)
    return from_wire((code, f"{what}: {message}", param, pointer))
