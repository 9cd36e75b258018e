"""Guided decoding in transformers: a logits processor for
`model.generate(logits_processor=[...])`.

    vocabulary = Vocabulary.from_tokenizer(tokenizer, model.config.vocab_size)
    with GuidedLogitsProcessor(vocabulary, [Constraint.json_schema(schema), None]) as guide:
        model.generate(**inputs, logits_processor=[guide], num_beams=4, max_new_tokens=200)

transformers is not imported. `generate()` calls a logits processor after the forward
pass, so masks can't be computed during it: a Ray pool adds isolation, and hides no
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from guided.backends import candidates
from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidRequest, from_wire, to_wire
from guided.fields.output_types import constraint_for
from guided.pools.inline import InlinePool
from guided.pools.protocol import Grammar, MaskPool
from guided.processors.kernel import apply_bitmask
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

_FLOOR = -1e4
"""Minimum score of an allowed token, even if other processors forbid it: it is chosen
only if nothing else is left. As a beam, it ranks before `generate()`'s empty beams
(-1e9)."""

# shared by all processors: they may use one pool, together with an engine that counts
# from 0
_ids = count(1 << 40)


class _RowSequence(GuidedSequence):
    """The sequence of a row with a constraint."""

    output_token_ids: list[int]
    ended = False
    """Whether it has ended: by a stop token, by padding from `generate()`, or without a
    mask. It needs no masks."""
    failed = False
    """Whether it has ended without a mask."""

    def copy(self) -> _RowSequence:
        """Return a sequence for another row with the same output."""
        copy = _RowSequence(self.request_id, next(_ids), [*self.output_token_ids])
        copy.ended = self.ended
        copy.failed = self.failed
        return copy


class GuidedLogitsProcessor:
    """Constrains the rows of `generate()`: greedy, sampled, beam-searched, or drafted
    by an assistant.

    One processor serves many `generate()` calls, one after the other, from one thread:
    rows that don't continue those of the previous call start a new generation. Call
    `reset()` before a prompt that continues them by one token.

    If other processors (`min_new_tokens`, `bad_words_ids`, ...) forbid all tokens that
    the constraint allows, the constraint wins. Place this processor after your own.
    transformers runs temperature, top-k and the like after it.

    Args:
        vocabulary: as wide as the model's logits, with all tokens that end a generation
            (`model.generation_config.eos_token_id`) among its stop tokens.
        constraints: one for all rows, or one for each prompt (a list or tuple), None
            for a prompt without a constraint. Each is a `Constraint` or a Python type
            (`guided.fields.output_types`).
        pool: computes the masks; over the same vocabulary. The caller shuts it down.
            None: this process computes them.
        backend: "auto", or the name of one backend.
        failed_rows: what happens if a row has no valid mask. "raise" ends `generate()`
            with the error. "end" ends the row (as a beam, it loses against all others),
            stores the error in `failed`, and continues the other rows. Beam sampling
            (`num_beams` with `do_sample`) needs "end": it may draw forbidden tokens,
            for beams that can't win.

    Raises:
        GuidedError: a constraint can't be compiled. The message has its index in
            `constraints`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        constraints: Constraint | Any | Sequence[Constraint | Any | None],
        *,
        pool: MaskPool | None = None,
        backend: str = "auto",
        failed_rows: Literal["raise", "end"] = "raise",
    ) -> None:
        if pool is not None and pool.vocabulary != vocabulary:
            raise InvalidRequest(
                f"the pool's masks are over {pool.vocabulary}, not over {vocabulary}",
                param="pool",
            )
        self.failed: dict[int, GuidedError] = {}
        """The errors of the rows that failed in the current or last generation
        (`failed_rows="end"`), by the index of the row at that time."""
        if isinstance(constraints, list | tuple):
            many = constraints
        else:
            many = [constraints]
        self._grammars: list[Grammar | None] = [None] * len(many)
        """The grammar of each of `constraints`."""
        self._end_failed = failed_rows == "end"
        self._pool = pool or InlinePool(vocabulary)
        self._width = vocabulary.padded_vocab_size
        self._stop = list(vocabulary.stop_token_ids)
        self._text = frozenset(vocabulary.text_token_ids)
        self._closed = False
        self._ids: NDArray[np.int64] = np.empty((0, 0), np.int64)
        """The prompts and outputs of the last call, `[rows, tokens]`."""
        self._length = 0
        """Number of tokens of the prompts."""
        self._rows: dict[int, _RowSequence] = {}
        """The sequences of the rows with a constraint, by index of the row."""
        futures = {}
        for index, constraint in enumerate(many):
            if constraint is not None:
                futures[index] = self._compile(constraint, backend)
        for index, future in futures.items():
            try:
                self._grammars[index] = future.result()
            except GuidedError as error:
                raise _prefixed(error, f"constraint {index}") from error

    def _compile(self, constraint: Any, backend: str) -> Future[Grammar]:
        """Compile a constraint or a Python type."""
        if not isinstance(constraint, Constraint):
            constraint = constraint_for(constraint, param="constraints")
        return self._pool.compile(constraint, candidates(constraint.kind, backend))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for all forbidden tokens. Rows without a
        constraint are unchanged.

        Args:
            input_ids: int64 `[rows, tokens]`: prompts, padded on the left, and the
                tokens generated so far.
            scores: float `[rows, width]`, logits or log-probabilities. Not written to.

        Raises:
            GuidedError: a row has no valid mask, and `failed_rows` is "raise"; or the
                shapes don't fit.
        """
        if self._closed:
            raise RuntimeError("this processor is closed")
        if scores.shape[1] != self._width:
            message = f"the model has {scores.shape[1]} logits and the vocabulary {self._width}"
            message += f": make the vocabulary with padded_vocab_size={scores.shape[1]}"
            raise InvalidRequest(message, param="vocabulary")
        # `generate()` may write into its tensor
        ids: NDArray[np.int64] = input_ids.numpy(force=True).copy()
        if not self._continue(ids):
            self._begin(ids)
        self._ids = ids
        masked = scores.clone()
        constrained = list(self._rows)
        masked[constrained] = scores[constrained].clamp(min=_FLOOR)
        self._mask(masked)
        self._mask_ended(scores, masked)
        return masked

    def _begin(self, ids: NDArray[np.int64]) -> None:
        """Start a new generation with these prompts."""
        self.reset()
        rows = len(ids)
        prompts = len(self._grammars)
        if not prompts or rows % prompts:
            message = f"{rows} rows and {prompts} constraints: give one for all, or one (or None) for each prompt"
            raise InvalidRequest(message, param="constraints")
        self.failed.clear()
        self._length = ids.shape[1]
        for row in range(rows):
            index = row * prompts // rows  # the rows of a prompt are adjacent
            if self._grammars[index] is not None:
                self._rows[row] = self._opened(_RowSequence(str(index), next(_ids), []))

    def _opened(self, sequence: _RowSequence) -> _RowSequence:
        """Open a sequence in the pool."""
        grammar = self._grammars[int(sequence.request_id)]
        assert grammar is not None
        self._pool.open(sequence, grammar)
        return sequence

    def _continue(self, ids: NDArray[np.int64]) -> bool:
        """Update the sequences. Returns False if the rows don't continue those of the
        last call."""
        before = self._ids
        known = ids.shape[1] - 1
        if len(ids) != len(before) or not self._length <= known <= before.shape[1]:
            return False
        stayed = ids[:, :known] == before[:, :known]
        if not stayed.all() and not self._move(
            ids[:, :known], stayed.all(axis=1).tolist()
        ):
            return False
        tokens = ids[:, -1].tolist()
        length = known - self._length
        for row, sequence in self._rows.items():
            output = sequence.output_token_ids
            if len(output) > length:  # draft tokens of an assistant were rejected
                del output[length:]
                self._pool.rollback(sequence.sequence_id, length)
                if (
                    sequence.ended
                    and not sequence.failed
                    and self._text.issuperset(output)
                ):
                    sequence.ended = False
            output.append(tokens[row])
            if tokens[row] not in self._text:
                sequence.ended = True
        return True

    def _move(self, ids: NDArray[np.int64], stayed: list[bool]) -> bool:
        """Follow beams: a sequence continues in one row and is copied to others, or is
        dropped.

        Returns False if a constrained row has not the tokens of one of the last call's
        rows.
        """
        before = self._rows
        rows = {
            (sequence.request_id, self._ids[row].tobytes()): row
            for row, sequence in before.items()
        }
        parents: dict[int, int | None] = {}
        for row, sequence in before.items():
            if stayed[row]:
                parents[row] = row
            else:
                parents[row] = rows.get((sequence.request_id, ids[row].tobytes()))
        if None in parents.values():
            return False
        dropped = set(before)
        self._rows = {}
        for row, parent in sorted(parents.items(), key=lambda pair: pair[0] != pair[1]):
            assert parent is not None
            if parent in dropped:
                self._rows[row] = before[parent]
            else:
                self._rows[row] = self._opened(before[parent].copy())
            dropped.discard(parent)
        self._free(before[row] for row in dropped)
        return True

    def _mask(self, masked: torch.Tensor) -> None:
        """Wait for the masks of all rows and write -inf over what they forbid. Rows
        without a valid mask end."""
        missing = [
            (row, sequence)
            for row, sequence in self._rows.items()
            if not sequence.ended
        ]
        while missing:
            self._pool.submit(tuple(sequence for _, sequence in missing))
            step = self._pool.collect()
            masks = [part.masks[slot] for part in step.ready for slot in part.slots]
            apply_bitmask(
                masked,
                masks,
                [missing[place][0] for part in step.ready for place in part.rows],
            )
            for place, error in step.failed.items():
                self._fail(*missing[place], error)
            missing = [missing[place] for place in step.late]
            if missing:
                time.sleep(0.001)  # until a worker is up

    def _fail(self, row: int, sequence: _RowSequence, error: GuidedError) -> None:
        """End a row without a valid mask, or all of them."""
        if not self._end_failed:
            rows = len(self._ids)
            self.reset()
            raise _prefixed(error, f"row {row} of {rows}") from error
        sequence.ended = sequence.failed = True
        self.failed.setdefault(row, error)
        self._free([sequence])

    def _mask_ended(self, scores: torch.Tensor, masked: torch.Tensor) -> None:
        """Allow only stop tokens in ended rows, which `generate()` passes on while
        other rows continue."""
        ended = [row for row, sequence in self._rows.items() if sequence.ended]
        if ended:
            only_stop = torch.full_like(masked[ended], -torch.inf)
            only_stop[:, self._stop] = scores[ended][:, self._stop].clamp(min=_FLOOR)
            # Score of the stop token of a failed row: its only token, and as a beam
            # behind all others.
            lowest = max(-1e30, torch.finfo(masked.dtype).min)
            for place, row in enumerate(ended):
                if self._rows[row].failed:
                    only_stop[place, self._stop] = lowest
            masked[ended] = only_stop

    def reset(self) -> None:
        """Start a new generation with the next call, whatever its rows are."""
        self._free(self._rows.values())
        self._rows.clear()
        self._ids = np.empty((0, 0), np.int64)

    def _free(self, rows: Iterable[_RowSequence]) -> None:
        self._pool.free([sequence.sequence_id for sequence in rows])

    def close(self) -> None:
        """Free the matchers. Idempotent."""
        self._closed = True
        self.reset()

    def __enter__(self) -> GuidedLogitsProcessor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _prefixed(error: GuidedError, prefix: str) -> GuidedError:
    """Return the same error, with the row or constraint it is about."""
    code, message, param, pointer = to_wire(error)
    return from_wire((code, f"{prefix}: {message}", param, pointer))
