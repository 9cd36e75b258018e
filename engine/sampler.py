"""Sampler: samples tokens from logits, for a whole batch at once.

`adjust` applies bias, custom logits processors, penalties, suppressed tokens (`min_tokens`) and the restriction of the
request (`allowed_token_ids`, `bad_words`). Then the engine applies the mask. `sample` applies temperature, min_p,
argmax-invariant custom processors, top_k and top_p, and draws. Suppressed tokens get a very small but finite logit, and
the mask sets -inf: where only these are legal, the mask wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.sampling_params import GREEDY_BELOW
from engine.step.batch import Batch
from engine.step.logprobs import TokenLogprobs
from guided.sequence import SequenceOutput

SUPPRESSED = -1e30
"""The logit of a suppressed token: finite in float32 even when a penalty or the lowest temperature multiplies it."""
PROBE_STEPS = 61
"""Every `PROBE_STEPS` steps, about `_PROBE_ROWS` masks are sampled for the kept-mass histogram. The number is a prime,
so that answers of the same length are not always sampled at the same place."""
_PROBE_ROWS = 4
_BLOCK = 1024
"""Number of tokens of which the probabilities are summed, to find where a random number lies."""
_FEW = 1024
"""Number of the most likely tokens that are sorted for top_p. All are, if their probabilities do not suffice."""


@dataclass(slots=True)
class SamplerOutput:
    """One step's tokens. Entry i is of row i, and meaningless for an unsampled row."""

    token_ids: list[int]
    unsampled: frozenset[int] = frozenset()
    """Rows without a token: their mask is late or was vetoed, or their mask or a logits processor has failed."""
    broken: list[int] = field(default_factory=list)
    """Rows of which the sampled or the largest logit is not finite: the mask forbids every token, or the model computed
    NaN."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, if requested: those of the sampled token and of the most likely tokens."""
    measured: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By row, if requested, and of a few constrained rows now and then: the number of tokens that could be sampled, and
    the log of their kept mass. That is their probability in the model's own distribution: before bias, penalties and
    mask, at temperature 1."""
    beam_logprobs: Tensor | None = None
    """float32 `[len(batch.beams), vocab]`: of the adjusted logits, before the mask."""
    beam_scores: Tensor | None = None
    """The same, -inf where the mask forbids."""

    def sample_of(self, row: int, seq_id: int) -> SequenceOutput:
        """Return the token of a row, which continues sequence `seq_id`."""
        return SequenceOutput(seq_id, self.token_ids[row], self.logprobs.get(row, {}))


class Sampler:
    """Call once per step: `adjust` before the mask, `sample` after it. `stop_token_ids` are the model's own. Raw
    log-probabilities are those before bias, penalties, mask and temperature (vLLM's default)."""

    def __init__(self, processors: CustomLogitsProcessors, stop_token_ids: Tokens[int]) -> None:
        self.processors = processors
        self._stop_token_ids = stop_token_ids
        self._raw: Tensor | None = None
        self._beam_logprobs: Tensor | None = None
        self._steps = 0
        self._measured: list[int] = []
        """Rows of which the masks are measured in this step."""
        self._unmasked: Tensor
        """A copy of the model's logits of these rows, float32 `[measured, vocab]`."""

    def adjust(self, compute: Callable[[], Tensor], batch: Batch) -> Tensor:
        """Return the logits of `compute`, float32 `[rows, vocab]`, with bias, custom processors, penalties,
        suppression and restrictions. It is called again if a custom processor raises after it has changed some."""
        logits = compute()
        self._copy_measured(logits, batch)
        if batch.with_logprobs:
            self._raw = logits[batch.with_logprobs].log_softmax(-1)
        penalties = None
        if batch.biased or batch.penalised or batch.with_min_tokens:
            penalties = batch.plan(_Penalties, logits, self._stop_token_ids)

        def biased(logits: Tensor) -> Tensor:
            if penalties is not None:
                if self.processors.before:  # they see suppressed tokens, as in vLLM
                    penalties.suppress_stop_tokens(logits)
                penalties.add_bias(logits)
            return logits

        logits = self.processors.run(self.processors.before, biased(logits), batch, lambda: biased(compute()))
        if penalties is not None:
            penalties.apply(logits)
            penalties.suppress_stop_tokens(logits)
        if batch.beams:
            given = logits.new_tensor([batch.sequences[row].params.temperature for row in batch.beams])
            heat = given.where(given >= GREEDY_BELOW, 1.0)
            self._beam_logprobs = (logits[batch.beams] / heat[:, None]).log_softmax(-1)
        for row, restriction in batch.restricted:
            restriction.apply(logits[row], batch.sequences[row].output_token_ids)
        return logits

    def sample(self, logits: Tensor, batch: Batch, unsampled: frozenset[int] = frozenset()) -> SamplerOutput:
        """Sample one token per row from adjusted and masked logits, float32 `[rows, vocab]`. The random generators of
        `unsampled` rows do not advance."""
        if (rows := batch.with_masked_logprobs) and self._raw is not None:
            self._raw[np.searchsorted(batch.with_logprobs, rows)] = logits[rows].log_softmax(-1)
        best, chosen = logits.max(-1)
        is_finite = best.isfinite()
        if batch.random:
            best, chosen = self._draw(logits, best, chosen, batch, unsampled)
            is_finite &= best.isfinite()
        token_ids, finite = torch.stack((chosen, is_finite)).tolist()  # the step's one synchronisation
        output = SamplerOutput(token_ids, unsampled)
        output.broken = [row for row, finite_row in enumerate(finite) if not finite_row and row not in unsampled]
        if self._measured:
            output.measured = self._measure(logits, unsampled)
        if rows := batch.with_logprobs:
            raw = self._raw
            self._raw = None
            assert raw is not None, "adjust comes before sample"
            counts = [batch.sequences[row].params.logprobs or 0 for row in rows]
            output.logprobs = dict(zip(rows, ranked_logprobs(raw, chosen[rows], counts), strict=True))
        if batch.searched:
            self._note_free_places(logits, batch, unsampled)
        if self._beam_logprobs is not None:
            forbidden = logits[batch.beams].isneginf()
            output.beam_logprobs = self._beam_logprobs
            self._beam_logprobs = None
            output.beam_scores = output.beam_logprobs.masked_fill(forbidden, -torch.inf)
        return output

    def _note_free_places(self, logits: Tensor, batch: Batch, unsampled: frozenset[int]) -> None:
        """Note which outputs could end here: see `Detokenizer.free_places`."""
        stops = logits[:, self._stop_token_ids[0]].isfinite().tolist()
        for row, places in batch.searched:
            if stops[row] and row not in unsampled:
                places.add(batch.sequences[row].num_output_tokens)

    def _copy_measured(self, logits: Tensor, batch: Batch) -> None:
        """Copy the model's logits of the rows with masks that are measured in this step."""
        self._steps += 1
        self._measured = batch.measured
        if self._steps % PROBE_STEPS == 0:
            rows = batch.constrained
            self._measured = sorted({*batch.measured, *rows[:: max(1, len(rows) // _PROBE_ROWS)]})
        if self._measured:
            self._unmasked = logits[self._measured]

    def _measure(self, masked: Tensor, unsampled: frozenset[int]) -> dict[int, tuple[int, float]]:
        """Measure the masks of the copied rows: `SamplerOutput.measured`."""
        allowed = masked[self._measured] > -torch.inf
        total = self._unmasked.logsumexp(-1)
        kept = (self._unmasked.masked_fill_(~allowed, -torch.inf).logsumexp(-1) - total).clamp_(max=0.0).tolist()
        columns = zip(self._measured, allowed.sum(-1).tolist(), kept, strict=True)
        return {row: (count, mass) for row, count, mass in columns if row not in unsampled}

    def _draw(
        self, logits: Tensor, best: Tensor, greedy: Tensor, batch: Batch, unsampled: frozenset[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled logits and tokens: drawn in random rows, `best` and `greedy` in the others."""
        plan = batch.plan(_Distribution, logits.device)
        uniforms = [0.5 if row in unsampled else next(batch.sequences[row].uniforms) for row in plan.rows]
        all_random = len(plan.rows) == len(logits)
        if self.processors.after:

            def whole() -> Tensor:
                return logits.index_copy(0, plan.index, plan.scaled(logits[plan.index]))

            scaled = self.processors.run(self.processors.after, whole(), batch, whole)[plan.index]
        else:
            scaled = plan.scaled(logits if all_random else logits[plan.index])
        drawn = plan.draw(scaled, uniforms)
        values = scaled.gather(1, drawn[:, None])[:, 0]
        if all_random:
            return values, drawn
        return best.index_copy(0, plan.index, values), greedy.index_copy(0, plan.index, drawn)


def ranked_logprobs(logprobs: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Return the token of each row and its `counts[row]` most likely, from `logprobs`, float32 `[rows, vocab]`."""
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    ranked: list[TokenLogprobs] = []
    columns = (tokens.tolist(), chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    for count, token, value, rank, ids, values in zip(counts, *columns, strict=True):
        entries = [(token, value, rank)]
        entries += (
            (other, logprob, place)
            for place, (other, logprob) in enumerate(zip(ids[:count], values[:count], strict=True), start=1)
            if other != token and logprob > -torch.inf  # the mask may leave fewer
        )
        ranked.append(TokenLogprobs(entries))
    return ranked


class _Penalties:
    """The biased, penalised and short rows of a batch as tensors. All methods change logits, float32 `[rows,
    vocab]`, in place. `stop_token_ids` are the model's own."""

    def __init__(self, batch: Batch, logits: Tensor, stop_token_ids: Collection[int]) -> None:
        self._device = device = logits.device
        bias: list[float] = []
        biased: list[tuple[int, int]] = []
        for row in batch.biased:
            for token, value in (batch.sequences[row].params.logit_bias or {}).items():
                biased.append((row, token))
                bias.append(value)
        self._bias = torch.tensor(bias, dtype=torch.float32, device=device)
        self._biased = _places(biased, device)
        self._with_min_tokens = [(row, batch.sequences[row]) for row in batch.with_min_tokens]
        self._stops = {
            row: {*stop_token_ids, *sequence.params.stop_token_ids} for row, sequence in self._with_min_tokens
        }
        self._short: list[int] = []
        """Rows with fewer than `min_tokens` output tokens, of which `_suppressed` has the stop tokens."""
        self._sequences = [batch.sequences[row] for row in batch.penalised]
        params = [sequence.params for sequence in self._sequences]
        self._rows = torch.tensor(batch.penalised, device=device)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], device=device)[:, None]
        self._frequency = torch.tensor([p.frequency_penalty for p in params], device=device)[:, None]
        self._presence = torch.tensor([p.presence_penalty for p in params], device=device)[:, None]
        self._counts = torch.zeros(len(params), logits.shape[1], device=device)
        self._in_prompt = torch.zeros(len(params), logits.shape[1], dtype=torch.bool, device=device)
        self._seen = [(sequence.edits, 0) for sequence in self._sequences]
        """Numbers of edits and of tokens of each sequence that `_counts` has."""
        for index, sequence in enumerate(self._sequences):
            self._in_prompt[index, torch.tensor(sequence.prompt_token_ids, device=device)] = True

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
        """Penalise tokens that have appeared. The repetition penalty (arXiv:1909.05858) comes first, then OpenAI's:
        frequency once per occurrence, presence once."""
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
            self._counts.index_put_(_places(fresh, self._device), torch.ones((), device=self._device), accumulate=True)
        picked = logits[self._rows]
        appeared = self._counts > 0
        factor = torch.where(appeared | self._in_prompt, self._repetition, 1.0)
        picked = torch.where(picked > 0, picked / factor, picked * factor)
        picked -= self._frequency * self._counts + self._presence * appeared
        logits[self._rows] = picked


def _places(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (row, token) pairs as two index tensors."""
    rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).unbind(1)
    return rows, tokens


class _Distribution:
    """The random rows of a batch and their parameters as tensors."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.rows = batch.random
        self.index = torch.tensor(self.rows, device=device)
        params = [batch.sequences[row].params for row in self.rows]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._temperatures = column([p.temperature for p in params])
        self._min_p = column([p.min_p for p in params]).log_() if any(p.min_p for p in params) else None
        cut = [place for place, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
        self._cut = torch.tensor(cut, device=device)
        """Places of the rows with top_k or top_p."""
        self._ks = [params[place].top_k for place in cut]
        self._limits = column([k if k > 0 else math.inf for k in self._ks])
        self._top_p = column([params[place].top_p for place in cut])

    def scaled(self, logits: Tensor) -> Tensor:
        """Divide `logits`, float32 `[len(rows), vocab]`, by the temperatures, and set the tokens to -inf that are less
        than `min_p` times as likely as the most likely one. Returns a new tensor."""
        scaled = logits / self._temperatures
        if self._min_p is not None:
            scaled.masked_fill_(scaled < scaled.max(-1, keepdim=True).values + self._min_p, -torch.inf)
        return scaled

    def draw(self, logits: Tensor, uniforms: list[float]) -> Tensor:
        """Draw one token per row, int64 `[rows]`: invert the cumulative distribution of scaled logits, `[rows, vocab]`,
        at `uniforms`, one number in [0, 1) per row. What top_k and top_p exclude becomes -inf."""
        shares = torch.tensor(uniforms, dtype=torch.float64)
        if logits.is_cuda:  # a copy from pinned memory does not wait for the device
            shares = shares.pin_memory()
        shares = shares.to(logits.device, non_blocking=logits.is_cuda)
        if self._ks:
            values, ids = self._kept(logits[self._cut], _FEW)
            logits.index_fill_(0, self._cut, -torch.inf)
            logits[self._cut[:, None], ids] = values
        return _invert(logits.softmax(-1), shares)

    def _kept(self, logits: Tensor, few: int) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of the rows with top_k or top_p, `[rows, count]`: their logits, -inf where they
        are excluded, and ids. In rows without top_k the best `few` are tried first."""
        vocab = logits.shape[1]
        count = min(vocab, max(self._ks) if min(self._ks) > 0 else max(few, *self._ks))
        values, ids = logits.topk(count, dim=-1)
        values = values.masked_fill(torch.arange(count, device=logits.device) >= self._limits, -torch.inf)
        has_no_k = self._limits.isinf()
        total = torch.where(has_no_k, logits.logsumexp(-1, keepdim=True), values.logsumexp(-1, keepdim=True))
        mass = (values - total).exp()
        cumulated = mass.cumsum(-1)
        if min(self._ks) <= 0 and count < vocab and (has_no_k & (cumulated[:, -1:] < self._top_p)).any():
            return self._kept(logits, vocab)
        before = cumulated - mass
        # A token stays while the tokens before it sum to less than top_p. The first always stays.
        return values.masked_fill_((before > 0) & (before >= self._top_p) & (self._top_p < 1.0), -torch.inf), ids


def _invert(weights: Tensor, shares: Tensor) -> Tensor:
    """Return the column of each row at which its cumulated weights exceed a share of their sum, int64 `[rows]`.

    Only the sums of blocks, and the weights of one block, are cumulated: in float64, which is slow on most GPUs.

    Args:
        weights: float32 `[rows, columns]`, not negative.
        shares: float64 `[rows]`, in [0, 1).
    """
    rows, columns = weights.shape
    if columns % _BLOCK:
        weights = F.pad(weights, (0, -columns % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    block, rest = _search(blocks.sum(-1), shares[:, None])
    place, _ = _search(blocks.take_along_dim(block[:, :, None], 1)[:, 0], rest)
    return (block * _BLOCK + place)[:, 0].clamp_(max=columns - 1)


def _search(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column in which a share of each row's sum lies, int64 `[rows, 1]`, and the share within its weight."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    # Slightly less than the sum, so that rounding cannot lead past the last column with a weight.
    targets = shares.clamp(0.0, 1 - 2**-40) * cumulated[:, -1:]
    column = torch.searchsorted(cumulated, targets, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, column)
    return column, (targets - cumulated.gather(1, column) + weight) / weight
