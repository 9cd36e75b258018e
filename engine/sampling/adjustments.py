"""Adjustments: what requests ask for beside the mask and plain sampling.

Before the mask: bias, custom logits processors, penalties, suppressed tokens
(`min_tokens`), and the restriction of a request (`allowed_token_ids`, `bad_words`).
Suppressed tokens get a very small but finite logit, and the mask sets -inf: where only
these are legal, the mask wins. After sampling: log-probabilities, scores of beams, and
measured masks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens

import numpy as np
import torch
from torch import Tensor

from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.sampling.output import SamplerOutput
from engine.sampling_params import GREEDY_BELOW
from engine.step.logprobs import ranked_logprobs
from engine.step.restriction import Restriction
from engine.step.scheduler import Batch

SUPPRESSED = -1e30
"""The logit of a suppressed token: finite in float32 even when a penalty or the lowest
temperature multiplies it."""
PROBE_STEPS = 61
"""Every `PROBE_STEPS` steps, about `_PROBE_ROWS` masks are sampled for the kept-mass
histogram. The number is a prime, so that answers of the same length are not always
sampled at the same place."""
_PROBE_ROWS = 4


class _Rows:
    """The rows of a batch that each adjustment is for."""

    def __init__(self, batch: Batch) -> None:
        self.penalised = batch.rows(
            lambda params: (
                params.logit_bias or params.min_tokens or params.has_penalties
            )
        )
        self.with_logprobs: list[int] = []
        self.with_masked_logprobs: list[int] = []
        self.measured: list[int] = []
        """Rows with details of their masks."""
        self.restricted: list[tuple[int, Restriction]] = []
        self.searched: list[tuple[int, set[int]]] = []
        """Rows with a structural tag and stop strings: `Detokenizer.free_places` of
        each."""
        for row, sequence in enumerate(batch.sequences):
            if sequence.record.needs_logprobs:
                self.with_logprobs.append(row)
                if sequence.params.logprobs_mode == "masked":
                    self.with_masked_logprobs.append(row)
            if sequence.record.details is not None:
                self.measured.append(row)
            if sequence.group.restriction is not None:
                self.restricted.append((row, sequence.group.restriction))
            if sequence.detokenizer.free_places is not None:
                self.searched.append((row, sequence.detokenizer.free_places))


class Adjustments:
    """Call `apply` before the mask and `report` after sampling. `stop_token_ids` are
    the model's own. Raw log-probabilities are those before bias, penalties, mask and
    temperature (vLLM's default)."""

    def __init__(
        self, processors: CustomLogitsProcessors, stop_token_ids: Tokens[int]
    ) -> None:
        self._processors = processors
        self._stop_token_ids = stop_token_ids
        self._raw: Tensor | None = None
        self._beam_logprobs: Tensor | None = None
        self._steps = 0
        self._measured: list[int] = []
        """Rows of which the masks are measured in this step."""
        self._unmasked: Tensor
        """A copy of the model's logits of these rows, float32 `[measured, vocab]`."""

    def apply(self, compute: Callable[[], Tensor], batch: Batch) -> Tensor:
        """Return the logits of `compute`, float32 `[rows, vocab]`, with bias, custom
        processors, penalties, suppression and restrictions. It is called again if a
        custom processor raises after it has changed some."""
        logits = compute()
        rows = batch.plan(_Rows)
        self._copy_measured(logits, batch, rows.measured)
        if rows.with_logprobs:
            self._raw = logits[rows.with_logprobs].log_softmax(-1)
        penalties = None
        if rows.penalised:
            penalties = batch.plan(_Penalties, logits, self._stop_token_ids)
        before = self._processors.before

        def biased(logits: Tensor) -> Tensor:
            if penalties is not None:
                if before:  # they see suppressed tokens, as in vLLM
                    penalties.suppress_stop_tokens(logits)
                penalties.add_bias(logits)
            return logits

        logits = self._processors.run(
            before, biased(logits), batch, lambda: biased(compute())
        )
        if penalties is not None:
            penalties.apply(logits)
            penalties.suppress_stop_tokens(logits)
        if batch.beams:
            given = logits.new_tensor(
                [batch.sequences[row].params.temperature for row in batch.beams]
            )
            heat = given.where(given >= GREEDY_BELOW, 1.0)
            self._beam_logprobs = (logits[batch.beams] / heat[:, None]).log_softmax(-1)
        for row, restriction in rows.restricted:
            restriction.apply(logits[row], batch.sequences[row].output_token_ids)
        return logits

    def reads(self, batch: Batch) -> bool:
        """Return whether `report` reads from the device."""
        rows = batch.plan(_Rows)
        return bool(
            self._measured or rows.with_logprobs or rows.searched or batch.beams
        )

    def report(self, output: SamplerOutput, logits: Tensor, batch: Batch) -> None:
        """Add to a step's output what requests want to know of it. `logits` are
        masked."""
        rows = batch.plan(_Rows)
        if self._measured:
            output.measured = self._measure(logits, output.unsampled)
        if rows.with_logprobs:
            self._add_logprobs(output, logits, batch, rows)
        if rows.searched:
            self._note_free_places(logits, batch, rows, output.unsampled)
        if batch.beams and self._beam_logprobs is not None:
            forbidden = logits[batch.beams].isneginf()
            output.beam_logprobs = self._beam_logprobs
            output.beam_scores = self._beam_logprobs.masked_fill(forbidden, -torch.inf)
            self._beam_logprobs = None

    def _add_logprobs(
        self, output: SamplerOutput, logits: Tensor, batch: Batch, rows: _Rows
    ) -> None:
        logprobs = self._raw
        self._raw = None
        assert logprobs is not None, "apply comes before report"
        masked = rows.with_masked_logprobs
        if masked:
            logprobs[np.searchsorted(rows.with_logprobs, masked)] = logits[
                masked
            ].log_softmax(-1)
        tokens = torch.tensor(
            [output.token_ids[row] for row in rows.with_logprobs], device=logits.device
        )
        counts = [
            batch.sequences[row].params.logprobs or 0 for row in rows.with_logprobs
        ]
        output.logprobs = dict(
            zip(
                rows.with_logprobs,
                ranked_logprobs(logprobs, tokens, counts),
                strict=True,
            )
        )

    def _note_free_places(
        self, logits: Tensor, batch: Batch, rows: _Rows, unsampled: Collection[int]
    ) -> None:
        """Note which outputs could end here: see `Detokenizer.free_places`."""
        stops = logits[:, self._stop_token_ids[0]].isfinite().tolist()
        for row, places in rows.searched:
            if stops[row] and row not in unsampled:
                places.add(batch.sequences[row].num_output_tokens)

    def _copy_measured(self, logits: Tensor, batch: Batch, measured: list[int]) -> None:
        """Copy the model's logits of the rows with masks that are measured in this
        step."""
        self._steps += 1
        self._measured = measured
        if self._steps % PROBE_STEPS == 0:
            constrained = batch.rows(lambda params: params.constraint is not None)
            step = max(1, len(constrained) // _PROBE_ROWS)
            self._measured = sorted({*measured, *constrained[::step]})
        if self._measured:
            self._unmasked = logits[self._measured]

    def _measure(
        self, masked: Tensor, unsampled: Collection[int]
    ) -> dict[int, tuple[int, float]]:
        """Measure the masks of the copied rows: `SamplerOutput.measured`."""
        allowed = masked[self._measured] > -torch.inf
        total = self._unmasked.logsumexp(-1)
        kept = (
            (self._unmasked.masked_fill_(~allowed, -torch.inf).logsumexp(-1) - total)
            .clamp_(max=0.0)
            .tolist()
        )
        columns = zip(self._measured, allowed.sum(-1).tolist(), kept, strict=True)
        return {
            row: (count, mass) for row, count, mass in columns if row not in unsampled
        }


class _Penalties:
    """The biased, penalised and short rows of a batch as tensors. All methods change
    logits, float32 `[rows, vocab]`, in place. `stop_token_ids` are the model's own."""

    def __init__(
        self, batch: Batch, logits: Tensor, stop_token_ids: Collection[int]
    ) -> None:
        self._device = device = logits.device
        bias: list[float] = []
        biased: list[tuple[int, int]] = []
        for row in batch.rows(lambda params: params.logit_bias):
            for token, value in (batch.sequences[row].params.logit_bias or {}).items():
                biased.append((row, token))
                bias.append(value)
        self._bias = torch.tensor(bias, dtype=torch.float32, device=device)
        self._biased = _places(biased, device)
        short = batch.rows(lambda params: params.min_tokens)
        self._with_min_tokens = [(row, batch.sequences[row]) for row in short]
        self._stops = {
            row: {*stop_token_ids, *sequence.params.stop_token_ids}
            for row, sequence in self._with_min_tokens
        }
        self._short: list[int] = []
        """Rows with fewer than `min_tokens` output tokens, of which `_suppressed` has
        the stop tokens."""
        penalised = batch.rows(lambda params: params.has_penalties)
        self._sequences = [batch.sequences[row] for row in penalised]
        params = [sequence.params for sequence in self._sequences]
        self._rows = torch.tensor(penalised, device=device)
        self._repetition = torch.tensor(
            [p.repetition_penalty for p in params], device=device
        )[:, None]
        self._frequency = torch.tensor(
            [p.frequency_penalty for p in params], device=device
        )[:, None]
        self._presence = torch.tensor(
            [p.presence_penalty for p in params], device=device
        )[:, None]
        self._counts = torch.zeros(len(params), logits.shape[1], device=device)
        self._in_prompt = torch.zeros(
            len(params), logits.shape[1], dtype=torch.bool, device=device
        )
        self._seen = [(sequence.edits, 0) for sequence in self._sequences]
        """Numbers of edits and of tokens of each sequence that `_counts` has."""
        for index, sequence in enumerate(self._sequences):
            self._in_prompt[
                index, torch.tensor(sequence.prompt_token_ids, device=device)
            ] = True

    def add_bias(self, logits: Tensor) -> None:
        """Add `logit_bias`."""
        if len(self._bias):
            logits[self._biased] += self._bias

    def suppress_stop_tokens(self, logits: Tensor) -> None:
        """Suppress stop tokens in rows with fewer than `min_tokens` output tokens."""
        short: list[int] = []
        for row, sequence in self._with_min_tokens:
            if sequence.num_output_tokens < sequence.params.min_tokens:
                short.append(row)
        if short != self._short:
            self._short = short
            stops = [(row, token) for row in short for token in self._stops[row]]
            self._suppressed = _places(stops, self._device)
        if short:
            logits[self._suppressed] = SUPPRESSED

    def apply(self, logits: Tensor) -> None:
        """Penalise tokens that have appeared. The repetition penalty (arXiv:1909.05858)
        comes first, then OpenAI's: frequency once per occurrence, presence once."""
        if not self._sequences:
            return
        fresh: list[tuple[int, int]] = []
        for index, sequence in enumerate(self._sequences):
            edits, start = self._seen[index]
            if edits != sequence.edits:
                self._counts[index] = 0
                start = 0
            fresh += [(index, token) for token in sequence.output_token_ids[start:]]
            self._seen[index] = sequence.edits, sequence.num_output_tokens
        if fresh:
            self._counts.index_put_(
                _places(fresh, self._device),
                torch.ones((), device=self._device),
                accumulate=True,
            )
        picked = logits[self._rows]
        appeared = self._counts > 0
        factor = torch.where(appeared | self._in_prompt, self._repetition, 1.0)
        picked = torch.where(picked > 0, picked / factor, picked * factor)
        picked -= self._frequency * self._counts + self._presence * appeared
        logits[self._rows] = picked


def _places(
    pairs: list[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (row, token) pairs as two index tensors."""
    rows, tokens = (
        torch.tensor(pairs, dtype=torch.int64)
        .reshape(-1, 2)
        .t()
        .to(device, non_blocking=True)
    )
    return rows, tokens
