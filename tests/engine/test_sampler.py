from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.logits_processors import VllmConfig
from engine.logits_processors.custom_logits_processors import CustomLogitsProcessors
from engine.sampling.adjustments import SUPPRESSED
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.step.logprobs import TokenLogprobs
from engine.step.scheduler import Batch
from engine.step.seeds import uniforms
from engine.step.sequence import Sequence
from tests.engine.conftest import new_sequence

VOCAB = 12
EOS = 0


def sequence(
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    seed: int = 5,
    **params: Any,
) -> Sequence:
    it = new_sequence(SamplingParams(**params), list(prompt), seed=seed)
    for token in output:
        it.append(token)
    return it


def begun(*rows: Sequence) -> tuple[Sampler, Batch]:
    """A sampler at the beginning of a step, and the step's batch."""
    batch = Batch([], list(rows), [], [])
    sampler = Sampler(CustomLogitsProcessors(VllmConfig(), torch.device("cpu")), [EOS])
    sampler.processors.begin(batch)
    return sampler, batch


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([row + [-50.0] * (VOCAB - len(row)) for row in rows])


def adjusted(it: Sequence, row: list[float]) -> list[float]:
    sampler, batch = begun(it)
    found: list[float] = sampler.adjust(lambda: logits_of(row), batch)[
        0, : len(row)
    ].tolist()
    return found


def drawn(count: int, row: list[float], **params: Any) -> Counter[int]:
    (sampler, batch), logits = begun(sequence(**params)), logits_of(row)
    return Counter(
        sampler.sample(logits.clone(), batch).token_ids[0] for _ in range(count)
    )


# -- adjust


PENALTIES = {
    "repetition_penalty": 2.0,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
}
"""CTRL's, over prompt and output, then OpenAI's, over the output."""


@pytest.mark.parametrize(
    ("fields", "prompt", "output", "row", "expected"),
    [
        ({"logit_bias": {1: 2.5, 2: -1}}, (1,), (), [0.0, 1.0, 2.0], [0.0, 3.5, 1.0]),
        (
            PENALTIES,
            (2,),
            (1, 1, 3),
            [1.0, 2.0, -2.0, 4.0],
            [1.0, 1.0 - 1.25, -4.0, 2.0 - 0.75],
        ),
        ({"min_tokens": 2}, (1,), (3,), [9.0, 1.0], [pytest.approx(SUPPRESSED), 1.0]),
        ({"min_tokens": 2}, (1,), (3, 3), [9.0, 1.0], [9.0, 1.0]),
    ],
)
def test_logits_before_the_mask(
    fields: Any, prompt: Any, output: Any, row: list[float], expected: Any
) -> None:
    assert adjusted(sequence(prompt=prompt, output=output, **fields), row) == expected


def test_penalties_count_what_comes_while_the_batch_stays() -> None:
    it = sequence(frequency_penalty=1.0)
    sampler, batch = begun(it)
    seen = []
    for token in (3, 3, 4):
        sampler.processors.begin(batch)
        seen.append(sampler.adjust(lambda: logits_of([0.0] * 5), batch)[0, :5].tolist())
        it.append(token)
    assert seen == [[0.0] * 5, [0.0, 0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, -2.0, 0.0]]
    batch = Batch([], [sequence(), it], [], [])
    sampler.processors.begin(batch)
    found = sampler.adjust(lambda: logits_of([0.0] * 5, [0.0] * 5), batch)[
        :, :5
    ].tolist()
    assert found == [[0.0] * 5, [0.0, 0.0, 0.0, -2.0, -1.0]], (
        "a new batch is counted anew"
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
def test_the_mask_wins_over_all_suppression(temperature: float) -> None:
    """Where only a stop token is legal it is taken, however it was suppressed, biased
    and penalised."""
    against: dict[str, Any] = {
        "logit_bias": {EOS: -100},
        "repetition_penalty": 100.0,
        "min_tokens": 10,
    }
    fields = {
        "temperature": temperature,
        "ignore_eos": True,
        "top_p": 0.5,
        "min_p": 0.5,
        "top_k": 3,
        **against,
    }
    sampler, batch = begun(sequence(prompt=(EOS,), **fields))
    logits = sampler.adjust(lambda: logits_of([1.0, 2.0, 3.0]), batch)
    logits[0, 1:] = float("-inf")
    output = sampler.sample(logits, batch)
    assert output.token_ids == [EOS]
    assert not output.broken


# -- sample


def test_frequencies_are_the_softmax_s() -> None:
    count, row = 20_000, [0.0, 1.0, 2.0, -1.0]
    found = drawn(count, row, temperature=1.7)
    expected = (torch.tensor(row) / 1.7).softmax(0)
    for token, share in enumerate(expected.tolist()):
        sigma = (count * share * (1 - share)) ** 0.5
        assert abs(found[token] - count * share) < 4.5 * sigma


def test_top_k_top_p_and_min_p_leave_out_the_tail() -> None:
    row = [3.0, 2.5, 2.0, 1.0, 0.0, -3.0]
    assert set(drawn(400, row, top_k=2)) == {0, 1}
    assert set(drawn(400, row, top_k=1)) == {0}
    shares = torch.tensor(row).softmax(0).cumsum(0).tolist()
    assert set(drawn(2000, row, top_p=(shares[1] + shares[2]) / 2)) == {0, 1, 2}
    assert set(drawn(400, row, top_p=1e-6)) == {0} == set(drawn(40, row, top_p=1e-46))
    assert set(drawn(2000, row, min_p=0.5)) == {0, 1}, (
        "e^-0.5 is more than a half, e^-1 is less"
    )
    assert set(drawn(2000, row, top_k=3, top_p=0.99, min_p=0.5)) == {0, 1}


def test_truncation_is_each_row_s_own() -> None:
    rows = [sequence(seed=index, top_k=k) for index, k in enumerate([1, 2, 0, -1])]
    sampler, batch = begun(*rows, sequence(temperature=0.0))
    logits = logits_of(*[[1.0, 1.1, 1.2, 1.3]] * 5)
    found = [sampler.sample(logits.clone(), batch).token_ids for _ in range(300)]
    seen = [set(column) for column in zip(*found, strict=True)]
    assert seen == [{3}, {2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {3}]


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 7},
    {"top_k": 1500, "top_p": 0.9},
    {"top_p": 0.4},
    {"top_p": 0.999},
    {"top_k": 20, "top_p": 0.7, "temperature": 2.0},
    {"min_p": 0.02, "top_p": 0.8},
]


def reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The cumulative distribution of one row, in float64."""
    scaled = logits.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = (
            weights[order].cumsum() / weights.sum() - weights[order] / weights.sum()
        )
        weights[order[before >= params.top_p]] = 0
    return np.asarray(weights.cumsum() / weights.sum())


@pytest.mark.parametrize("vocab", [1, 12, 1024, 1025, 2500])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_a_random_number_gives_the_token_of_the_distribution(
    vocab: int, spread: float
) -> None:
    """Whatever the other rows of the batch are, and in each block of the vocabulary."""
    logits = (
        torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(vocab))
        * spread
    )
    logits += torch.linspace(0, 1e-3, vocab)  # no two are equal
    logits[:, 1::3] = -torch.inf
    sampler, batch = begun(
        *(sequence(seed=row, **params) for row, params in enumerate(MIXED))
    )
    expected = [
        reference(row, SamplingParams(**params))
        for row, params in zip(logits, MIXED, strict=True)
    ]
    numbers = [uniforms(row) for row in range(len(MIXED))]
    for _ in range(40):
        for token, cumulated, row in zip(
            sampler.sample(logits.clone(), batch).token_ids,
            expected,
            numbers,
            strict=True,
        ):
            number = next(row)
            assert (
                (cumulated[token - 1] if token else 0.0) - 1e-5
                <= number
                <= cumulated[token] + 1e-5
            )
            assert token % 3 != 1


def test_a_row_without_a_token_takes_no_random_number() -> None:
    logits = torch.zeros(2, 5000)
    (sampler, batch), (other, same) = (
        begun(sequence(seed=1), sequence(seed=2)) for _ in range(2)
    )
    first, second = (sampler.sample(logits, batch).token_ids for _ in range(2))
    assert other.sample(logits, same, unsampled=frozenset({0})).token_ids[1] == first[1]
    assert other.sample(logits, same).token_ids == [first[0], second[1]]


class Reads(TorchFunctionMode):
    """The names of the calls that wait for the device."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, called: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = called.__name__
        # a sequence's next random numbers
        random = name == "tolist" and args[0].dtype == torch.float64
        if (
            name
            in (
                "tolist",
                "item",
                "nonzero",
                "numpy",
                "__bool__",
                "__float__",
                "__int__",
            )
            and not random
        ):
            self.names.append(name)
        return called(*args, **(kwargs or {}))


def test_all_tokens_of_a_step_are_read_at_once() -> None:
    sampler, batch = begun(
        sequence(top_k=5),
        sequence(),
        sequence(top_k=3, top_p=0.5),
        sequence(temperature=0.0),
    )
    with Reads() as reads:
        sampler.sample(torch.randn(4, 3000), batch)
    assert reads.names == ["tolist"]


def test_a_forbidden_token_is_never_drawn() -> None:
    row = [float("-inf"), 0.0, float("-inf"), 0.0] + [float("-inf")] * (VOCAB - 4)
    assert set(drawn(2000, row)) == {1, 3}


def test_a_row_that_is_all_forbidden_is_broken_and_no_token() -> None:
    rows = [sequence(), sequence(temperature=0.0), sequence(), sequence()]
    logits = logits_of(*[[1.0, 2.0]] * 4)
    logits[:2] = float("-inf")
    logits[2] = float("nan")
    sampler, batch = begun(*rows)
    assert sampler.sample(logits, batch).broken == [0, 1, 2]
    assert sampler.sample(logits, batch, unsampled=frozenset({0, 2})).broken == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_or_infinity_is_broken(value: float, temperature: float) -> None:
    sampler, batch = begun(sequence(temperature=temperature), sequence())
    logits = logits_of([0.0, value], [0.0, 1.0])
    assert sampler.sample(logits, batch).broken == [0]


# -- logprobs


def test_logprobs_are_of_the_raw_logits() -> None:
    row = [0.0, 1.0, 2.0, 3.0]
    sampler, batch = begun(
        sequence(temperature=0.0),
        sequence(temperature=0.0, logprobs=2, logit_bias={0: 100}),
    )
    logits = sampler.adjust(lambda: logits_of(row, row), batch)
    logits[1, 1:] = float("-inf")
    output = sampler.sample(logits, batch)
    assert output.token_ids == [3, 0]
    expected = logits_of(row).log_softmax(-1)[0].tolist()
    entries = output.logprobs[1]
    assert list(output.logprobs) == [1]
    assert [(token, entry.rank) for token, entry in entries.items()] == [
        (0, 4),
        (3, 1),
        (2, 2),
    ]
    assert all(
        entry.logprob == pytest.approx(expected[token])
        for token, entry in entries.items()
    )


def test_a_garbage_collection_visits_one_object_per_token() -> None:
    def visited() -> int:
        gc.collect()
        return len(gc.get_objects())

    before = visited()
    kept = [
        TokenLogprobs([(n + i, float(n + i), n + i) for i in range(21)])
        for n in range(500)
    ]
    assert visited() - before < 1.1 * len(kept)


# -- kept mass


def test_kept_mass_is_of_the_model_s_own_distribution() -> None:
    """Bias, penalties and temperature do not change it."""
    row = [0.0, 1.0, 2.0, 3.0]
    changed = sequence(
        prompt=(3,),
        temperature=0.1,
        logit_bias={0: 50},
        repetition_penalty=3.0,
        mask_details=True,
    )
    sampler, batch = begun(sequence(), changed, sequence(mask_details=True))
    logits = sampler.adjust(lambda: logits_of(row, row, row), batch)
    logits[1:, [1, *range(3, VOCAB)]] = float("-inf")
    output = sampler.sample(logits, batch)
    own = logits_of(row).softmax(-1)[0, [0, 2]].sum().item()
    assert output.measured == {
        1: (2, pytest.approx(math.log(own))),
        2: (2, pytest.approx(math.log(own))),
    }
