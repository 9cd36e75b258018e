"""The logits processor in transformers' `generate()`, compared with one that replays the whole history at each step."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from faulty_pool import FaultyPool, without_rows
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from benchmarks.transformers_processor import MODES as MODES_OF_BENCHMARK
from benchmarks.transformers_processor import Generation
from benchmarks.workload import DATA
from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidRequest, PoolUnavailable, TokenRejected, UnsupportedConstraint
from guided.inline import InlinePool
from guided.integrations import transformers
from guided.integrations.recycled_memory import RecycledMemory
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.pool import MaskPool, StepMasks
from guided.sequence import GuidedSequence
from guided.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 20, 300]}, "s": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}},
    "required": ["n", "s", "b"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
WORDS = ["yes", "no", "perhaps", "not at all"]
SUM = 'root ::= [1-9] (" + " [1-9]){1,3}'
CONSTRAINTS = [
    Constraint.json_schema(SCHEMA, whitespace=""),
    Constraint.regex(DATE),
    None,
    Constraint.choice(WORDS),
    Constraint.grammar(SUM),
]
PROMPTS = ["As JSON: ", "The quick brown fox jumps over the lazy dog on ", "Just a text", "So?", "Count: "]
TOKENS = 60


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()


@pytest.fixture(scope="module")
def vocabulary(tiny_tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> Vocabulary:
    return Vocabulary.from_tokenizer(tiny_tokenizer, model.config.vocab_size)


@pytest.fixture
def pool(vocabulary: Vocabulary) -> Iterator[InlinePool]:
    pool = InlinePool(vocabulary)
    yield pool
    pool.shutdown()


class Replaying(LogitsProcessor):
    """The reference: a new matcher for every row at every step, which accepts the whole history."""

    def __init__(self, vocabulary: Vocabulary, constraints: Sequence[Constraint | None], length: int) -> None:
        backends = Backends(vocabulary)["llguidance"]
        self.grammars: list[CompiledGrammar | None] = [one and backends.compile(one) for one in constraints]
        self.vocabulary = vocabulary
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, tokens in enumerate(input_ids[:, self.length :].tolist()):
            grammar = self.grammars[row * len(self.grammars) // len(scores)]
            if grammar is not None:
                scores[row, ~self.allowed(grammar, tokens)] = -torch.inf
        return scores

    def allowed(self, grammar: CompiledGrammar, tokens: list[int]) -> torch.Tensor:
        vocabulary = self.vocabulary
        found = torch.zeros(vocabulary.padded_vocab_size, dtype=torch.bool)
        stop = list(vocabulary.stop_token_ids)
        if not set(tokens) <= set(vocabulary.text_token_ids):
            found[stop] = True
            return found
        matcher = grammar.matcher()
        matcher.accept_tokens(tokens)
        bitmask = np.zeros(-(-vocabulary.padded_vocab_size // 32), np.int32)
        matcher.fill_bitmask(bitmask)
        found[sorted(set(allowed_ids(bitmask).tolist()) & set(vocabulary.text_token_ids))] = True
        found[stop] = matcher.is_accepting()
        return found


def inputs(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> dict[str, Any]:
    """A batch, padded on the left."""
    return dict(tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left"))


def outputs(vocabulary: Vocabulary, sequences: torch.Tensor, length: int) -> list[tuple[str, bool]]:
    """Each row's text and whether it ended by itself."""
    found = []
    for tokens in sequences[:, length:].tolist():
        ends = [place for place, token in enumerate(tokens) if token in vocabulary.stop_token_ids]
        text = vocabulary.decode(tokens[: ends[0]] if ends else tokens).decode("utf-8", "replace")
        found.append((text, bool(ends)))
    return found


def check(place: int, text: str) -> None:
    match place:
        case 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        case 1:
            assert re.fullmatch(DATE, text), text
        case 3:
            assert text in WORDS
        case 4:
            assert re.fullmatch(r"[1-9]( \+ [1-9]){1,3}", text), text


MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 20},
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 3, "repetition_penalty": 1.2, "use_cache": False},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{key}={value}" for key, value in mode.items()))
def test_a_batch_of_different_constraints_is_valid_and_equal_to_the_reference(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    mode: dict[str, Any],
) -> None:
    fresh = RecycledMemory.like
    monkeypatch.setattr(RecycledMemory, "like", lambda self, scores: fresh(self, scores).fill_(1e9))
    batch = inputs(tiny_tokenizer, PROMPTS)
    length = batch["input_ids"].shape[1]
    with (
        GuidedLogitsProcessor(vocabulary, CONSTRAINTS) as subject,
        GuidedLogitsProcessor(vocabulary, CONSTRAINTS, in_place=True) as writer,
    ):
        found = []
        for processor in (subject, writer, Replaying(vocabulary, CONSTRAINTS, length)):
            torch.manual_seed(1)
            found.append(model.generate(**batch, **mode, logits_processor=[processor], max_new_tokens=TOKENS))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    each = len(found[0]) // len(PROMPTS)
    ended = 0
    for row, (text, end) in enumerate(outputs(vocabulary, found[0], length)):
        if end:
            check(row // each, text)
            ended += row // each != 2
    assert ended == 4 * each


def test_beams_move_and_no_matcher_is_left(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    pool = FaultyPool(vocabulary)
    subject = GuidedLogitsProcessor(vocabulary, Constraint.json_schema(SCHEMA), pool=pool)
    batch = inputs(tiny_tokenizer, PROMPTS[:2])
    model.generate(**batch, num_beams=4, logits_processor=[subject], max_new_tokens=30)
    assert pool.parents.count(None) == 8
    assert len(pool.opened) > 16
    assert set(pool.opened) >= {parent for parent in pool.parents if parent is not None}
    assert len(set(pool.opened) - pool.freed) <= 8
    subject.close()
    subject.close()
    assert set(pool.opened) == pool.freed
    assert pool.released == 1
    with pytest.raises(RuntimeError, match="closed"):
        subject(batch["input_ids"], torch.zeros(2, vocabulary.padded_vocab_size))


def test_one_processor_serves_many_generations(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE)) as subject:
        grown = ["Well"]
        for _ in range(4):
            batch = inputs(tiny_tokenizer, grown)
            sequences = model.generate(**batch, logits_processor=[subject], max_new_tokens=TOKENS)
            [(text, end)] = outputs(vocabulary, sequences, batch["input_ids"].shape[1])
            assert end
            check(1, text)
            grown = [f"{grown[0]}: {text}. And"]
        # Other rows, and a generation that was cut short.
        batch = inputs(tiny_tokenizer, PROMPTS[:3])
        model.generate(**batch, logits_processor=[subject], max_new_tokens=3)
        sequences = model.generate(**batch, num_beams=2, logits_processor=[subject], max_new_tokens=TOKENS)
        for text, _ in outputs(vocabulary, sequences, batch["input_ids"].shape[1]):
            check(1, text)


def test_a_generation_that_was_cut_short_continues_or_starts_again_after_reset(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = inputs(tiny_tokenizer, PROMPTS[:1])
    length = batch["input_ids"].shape[1]
    with GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE)) as subject:
        part = model.generate(**batch, logits_processor=[subject], max_new_tokens=3)
        whole = model.generate(part, logits_processor=[subject], max_new_tokens=TOKENS)
        check(1, outputs(vocabulary, whole, length)[0][0])
        part = model.generate(**batch, logits_processor=[subject], max_new_tokens=3)
        subject.reset()
        whole = model.generate(part, logits_processor=[subject], max_new_tokens=TOKENS)
        check(1, outputs(vocabulary, whole, length + 3)[0][0])


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 3}, {"assistant": True, "num_assistant_tokens": 3}], ids=str
)
def test_drafts_are_rolled_back(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
    options: dict[str, Any],
) -> None:
    if options.pop("assistant", False):
        torch.manual_seed(3)
        assistant = LlamaForCausalLM(model.config).eval()
        assistant.generation_config.eos_token_id = model.generation_config.eos_token_id
        options["assistant_model"] = assistant
    batch = inputs(tiny_tokenizer, ["2024-10-11 and 2025-12-13 and "])
    with GuidedLogitsProcessor(vocabulary, Constraint.regex(f"({DATE} ){{2}}{DATE}")) as subject:
        plain = model.generate(**batch, logits_processor=[subject], max_new_tokens=80)
        drafted = model.generate(**batch, **options, logits_processor=[subject], max_new_tokens=80)
    assert torch.equal(plain, drafted)
    for date in outputs(vocabulary, drafted, batch["input_ids"].shape[1])[0][0].split(" "):
        check(1, date)


def test_bans_of_other_processors_never_allow_forbidden_tokens(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = inputs(tiny_tokenizer, PROMPTS[:2])
    length = batch["input_ids"].shape[1]
    with GuidedLogitsProcessor(vocabulary, Constraint.choice(["yes"])) as subject:
        for mode in ({}, {"do_sample": True}, {"num_beams": 3}):
            sequences = model.generate(
                **batch, **mode, logits_processor=[subject], min_new_tokens=20, max_new_tokens=30
            )
            assert outputs(vocabulary, sequences, length) == [("yes", True)] * 2


class Recording(LogitsProcessor):
    """Keeps copies of the scores."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_raw_logits_and_scores_that_are_kept_do_not_change(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast, mode: dict[str, Any]
) -> None:
    batch = inputs(tiny_tokenizer, ["2024-10-11 and "] if "prompt_lookup_num_tokens" in mode else PROMPTS)
    constraints = CONSTRAINTS if len(batch["input_ids"]) > 1 else CONSTRAINTS[1:2]
    found, recording = [], Recording()
    in_place = "num_beams" in mode or "prompt_lookup_num_tokens" in mode  # modes in which `generate()` makes copies
    with (
        GuidedLogitsProcessor(vocabulary, constraints) as subject,
        GuidedLogitsProcessor(vocabulary, constraints, in_place=in_place) as writer,
    ):
        for processor in (subject, writer, Replaying(vocabulary, constraints, batch["input_ids"].shape[1])):
            torch.manual_seed(1)
            result = model.generate(
                **batch,
                **mode,
                logits_processor=[recording, processor],
                max_new_tokens=20,
                return_dict_in_generate=True,
                output_logits=True,
                output_scores=True,
            )
            found.append(result)
    *ours, replayed = found
    if "prompt_lookup_num_tokens" not in mode:
        for raw, seen in zip(ours[0].logits, recording.scores, strict=False):
            assert torch.equal(raw.log_softmax(-1) if "num_beams" in mode else raw, seen)
    for result in ours:
        assert len(result.logits) == len(result.scores) > 5
        for one, other in zip(result.logits, replayed.logits, strict=True):
            assert torch.equal(one, other)
            assert one.isfinite().all()
        for one, other in zip(result.scores, replayed.scores, strict=True):
            assert torch.equal(one, other)


def test_in_place_writes_into_the_scores(vocabulary: Vocabulary) -> None:
    prompt, constraints = torch.tensor([[1], [2]]), [Constraint.regex("a+"), None]
    scores = torch.randn(2, vocabulary.padded_vocab_size)
    with (
        GuidedLogitsProcessor(vocabulary, constraints) as subject,
        GuidedLogitsProcessor(vocabulary, constraints, in_place=True) as writer,
    ):
        expected = subject(prompt, scores)
        assert writer(prompt, scores).data_ptr() == scores.data_ptr()
    assert torch.equal(scores, expected)


def test_in_place_is_rejected_with_raw_logits_and_not_with_kept_scores(
    model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = inputs(tiny_tokenizer, PROMPTS)
    replaying = Replaying(vocabulary, CONSTRAINTS, batch["input_ids"].shape[1])
    options = {**batch, "max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    with GuidedLogitsProcessor(vocabulary, CONSTRAINTS, in_place=True) as subject:
        with pytest.raises(InvalidRequest, match="output_logits=True"):
            model.generate(**options, logits_processor=[subject], output_logits=True)
        for _ in range(2):
            found, expected = (
                model.generate(**options, logits_processor=[processor]) for processor in (subject, replaying)
            )
            assert torch.equal(found.sequences, expected.sequences)
            assert all(map(torch.equal, found.scores, expected.scores))


@pytest.mark.parametrize("in_place", [False, True])
def test_tokens_that_others_forbid_are_allowed_only_if_few_are_left(vocabulary: Vocabulary, in_place: bool) -> None:
    a = vocabulary.encode("a")[0]
    scores = torch.randn(2, vocabulary.padded_vocab_size)
    scores[:, a] = -torch.inf
    with GuidedLogitsProcessor(
        vocabulary, [Constraint.regex("a"), Constraint.regex("(?s:.)*")], in_place=in_place
    ) as subject:
        masked = subject(torch.tensor([[1], [2]]), scores.clone())
        assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
        assert masked[1].isfinite().sum() > 300
        assert masked[1, a].isneginf() or masked[1, a] <= -1e4
        subject.reset()
        scores[:] = -torch.inf
        masked = subject(torch.tensor([[1], [2]]), scores)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [a]
    assert masked[1].isfinite().sum() > 300


def test_scores_and_rows_without_a_constraint_are_unchanged(vocabulary: Vocabulary) -> None:
    scores = torch.randn(2, vocabulary.padded_vocab_size)
    scores[1, 5] = -torch.inf
    before = scores.clone()
    with GuidedLogitsProcessor(vocabulary, [Constraint.regex("a+"), None]) as subject:
        masked = subject(torch.tensor([[1], [2]]), scores)
    assert torch.equal(scores, before)
    assert torch.equal(masked[1], before[1])
    assert 0 < masked[0].isfinite().sum() < 20


def test_a_row_that_ended_early_is_allowed_stop_tokens_only(vocabulary: Vocabulary) -> None:
    """`stop_strings` end a row in the middle of its constraint: `generate()` pads it."""
    prompt = torch.tensor([[7], [8]])
    a = vocabulary.encode("a")[0]
    padding = min(vocabulary.special_token_ids - set(vocabulary.stop_token_ids))
    with GuidedLogitsProcessor(vocabulary, Constraint.regex("a{9}")) as subject:
        scores = torch.zeros(2, vocabulary.padded_vocab_size)
        subject(prompt, scores)
        for column in ([[a], [a]], [[padding], [a]], [[padding], [a]]):
            prompt = torch.cat([prompt, torch.tensor(column)], dim=1)
            masked = subject(prompt, scores)
        assert masked[0].isfinite().nonzero().flatten().tolist() == sorted(vocabulary.stop_token_ids)
        assert masked[1, a].isfinite()


class TestFailures:
    def test_a_failed_row_is_named(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        pool = FaultyPool(vocabulary)
        batch = inputs(tiny_tokenizer, PROMPTS[:2])
        subject = GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE), pool=pool)
        pool.fails = lambda sequence_id, position: sequence_id == pool.opened[1] and position == 3
        with pytest.raises(BackendError, match="row 1 of 2: told to fail"):
            model.generate(**batch, logits_processor=[subject], max_new_tokens=TOKENS)
        assert set(pool.opened) == pool.freed
        pool.fails = lambda sequence_id, position: False
        sequences = model.generate(**batch, logits_processor=[subject], max_new_tokens=TOKENS)
        for text, _ in outputs(vocabulary, sequences, batch["input_ids"].shape[1]):
            check(1, text)

    @pytest.mark.parametrize("beams", [1, 3])
    def test_a_failed_row_ends_and_the_others_continue(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast, beams: int
    ) -> None:
        pool = FaultyPool(vocabulary)
        batch = inputs(tiny_tokenizer, PROMPTS[:3])
        length = batch["input_ids"].shape[1]
        with GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE), pool=pool, failed_rows="end") as subject:
            pool.fails = lambda sequence_id, position: sequence_id == pool.opened[beams] and position == 2
            sequences = model.generate(**batch, num_beams=beams, logits_processor=[subject], max_new_tokens=TOKENS)
            found = outputs(vocabulary, sequences, length)
            assert all(end for _, end in found)
            assert len(subject.failed) == 1
            assert isinstance(next(iter(subject.failed.values())), BackendError)
            for row, (text, _) in enumerate(found):
                if beams > 1 or row != 1:
                    check(1, text)
                else:
                    assert len(vocabulary.encode(text)) <= 2
            pool.fails = lambda sequence_id, position: False
            sequences = model.generate(**batch, logits_processor=[subject], max_new_tokens=TOKENS)
            assert not subject.failed
            for text, _ in outputs(vocabulary, sequences, length):
                check(1, text)

    def test_a_forbidden_token_is_an_error(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        class Liar(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                return torch.where(torch.arange(scores.shape[1]) == vocabulary.encode("x")[0], 1e9, scores)

        batch = inputs(tiny_tokenizer, PROMPTS[:1])
        with (
            GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE)) as subject,
            pytest.raises(TokenRejected, match="row 0 of 1"),
        ):
            model.generate(**batch, logits_processor=[subject, Liar()], max_new_tokens=TOKENS)

    def test_beam_sampling_draws_forbidden_tokens_only_for_beams_that_lose(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        batch = inputs(tiny_tokenizer, PROMPTS[:2])
        constraint = Constraint.choice(WORDS)
        with GuidedLogitsProcessor(vocabulary, constraint, failed_rows="end") as subject:
            for seed in range(3):
                torch.manual_seed(seed)
                sequences = model.generate(
                    **batch, num_beams=4, do_sample=True, logits_processor=[subject], max_new_tokens=TOKENS
                )
                for text, end in outputs(vocabulary, sequences, batch["input_ids"].shape[1]):
                    assert end
                    check(3, text)

    def test_waits_for_a_worker(self, vocabulary: Vocabulary) -> None:
        class Empty(FaultyPool):
            """No worker is up before the second `settled` call."""

            calls = 0
            step: Sequence[GuidedSequence] = ()

            def submit(self, sequences: Sequence[GuidedSequence], new_tokens: Any = None) -> None:
                self.step = sequences
                super().submit(sequences, new_tokens)

            def collect(self, timeout: float | None = None, patience: float | None = None) -> StepMasks:
                step = super().collect(timeout, patience)
                return without_rows(step, [0]) if self.calls < 2 else step

            def settled(self, timeout: float = 0.0) -> list[int]:
                self.calls += 1
                return [sequence.sequence_id for sequence in self.step]

        pool = Empty(vocabulary)
        with GuidedLogitsProcessor(vocabulary, Constraint.regex("a+"), pool=pool) as subject:
            masked = subject(torch.tensor([[1], [2]]), torch.zeros(2, vocabulary.padded_vocab_size))
        assert pool.calls == 2
        assert torch.equal(masked[0], masked[1])
        assert masked[0].isfinite().sum() < 20


class TestRejections:
    def test_a_constraint_that_cant_be_compiled(self, vocabulary: Vocabulary) -> None:
        constraints = [None, Constraint.regex("a"), Constraint.regex(r"a(?=b)c")]
        with pytest.raises(InvalidRequest, match="constraint 2: "):
            GuidedLogitsProcessor(vocabulary, constraints)
        with pytest.raises(UnsupportedConstraint, match="outlines"):
            GuidedLogitsProcessor(vocabulary, Constraint.grammar(SUM), backend="outlines")

    def test_logits_of_another_width(self, vocabulary: Vocabulary) -> None:
        with (
            GuidedLogitsProcessor(vocabulary, Constraint.regex("a+")) as subject,
            pytest.raises(InvalidRequest, match="padded_vocab_size=700"),
        ):
            subject(torch.tensor([[1]]), torch.zeros(1, 700))

    def test_rows_that_are_no_multiple_of_the_constraints(self, vocabulary: Vocabulary) -> None:
        with (
            GuidedLogitsProcessor(vocabulary, [Constraint.regex("a+"), None]) as subject,
            pytest.raises(InvalidRequest, match="3 rows and 2 constraints"),
        ):
            subject(torch.tensor([[1]] * 3), torch.zeros(3, vocabulary.padded_vocab_size))

    def test_an_unknown_pool(self, vocabulary: Vocabulary) -> None:
        with pytest.raises(PoolUnavailable, match="no pool 'rey': there are inline, ray"):
            GuidedLogitsProcessor(vocabulary, Constraint.regex("a+"), pool="rey")

    def test_a_pool_over_other_tokens(self, vocabulary: Vocabulary, pool: InlinePool) -> None:
        other = Vocabulary(vocabulary.token_bytes[:300], (1,), frozenset({1}), 300)
        with pytest.raises(InvalidRequest, match="the pool's masks are over"):
            GuidedLogitsProcessor(other, Constraint.regex("a+"), pool=pool)


class TestPools:
    def test_a_ray_pool(
        self, model: LlamaForCausalLM, vocabulary: Vocabulary, tiny_tokenizer: PreTrainedTokenizerFast, local_ray: None
    ) -> None:
        from actors import RayPool

        batch = inputs(tiny_tokenizer, PROMPTS)
        pool = RayPool(vocabulary, num_actors=2)
        try:
            with (
                GuidedLogitsProcessor(vocabulary, CONSTRAINTS, pool=pool) as there,
                GuidedLogitsProcessor(vocabulary, CONSTRAINTS) as here,
            ):
                for mode in ({}, {"num_beams": 3}):
                    found = [
                        model.generate(**batch, **mode, logits_processor=[one], max_new_tokens=30)
                        for one in (there, here)
                    ]
                    assert torch.equal(*found)
            assert pool.status().healthy
        finally:
            pool.shutdown()

    def test_a_pool_by_name_is_opened_and_shut_down(
        self,
        model: LlamaForCausalLM,
        vocabulary: Vocabulary,
        tiny_tokenizer: PreTrainedTokenizerFast,
        local_ray: None,
        opened: list[MaskPool],
    ) -> None:
        batch = inputs(tiny_tokenizer, PROMPTS)
        with (
            GuidedLogitsProcessor(vocabulary, CONSTRAINTS, pool="ray") as there,
            GuidedLogitsProcessor(vocabulary, CONSTRAINTS, pool="inline") as here,
        ):
            ray, inline = opened
            assert (ray.status().name, inline.status().name) == ("ray", "inline")
            pids = [worker.pid for worker in ray.status().workers]
            assert pids
            assert os.getpid() not in pids
            found = [model.generate(**batch, logits_processor=[one], max_new_tokens=20) for one in (there, here)]
            assert torch.equal(*found)
        for pid in pids:
            assert pid is not None
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(120)  # raises if the actor is still there

    def test_the_pool_is_shut_down_if_a_constraint_cant_be_compiled(
        self, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed = []

        class Noting(InlinePool):
            def shutdown(self) -> None:
                closed.append(self)
                super().shutdown()

        monkeypatch.setattr(transformers, "find_pool", lambda name, options: Noting)
        with pytest.raises(InvalidRequest, match="constraint 0: "):
            GuidedLogitsProcessor(vocabulary, Constraint.regex(r"a(?=b)c"), pool="noting")
        assert len(closed) == 1

    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> list[MaskPool]:
        """Pools that were opened by name."""
        found: list[MaskPool] = []
        real = transformers.find_pool

        def noted(name: str, options: Mapping[str, Any]) -> Callable[[Vocabulary], MaskPool]:
            open_pool = real(name, options)

            def open_noted(vocabulary: Vocabulary) -> MaskPool:
                found.append(open_pool(vocabulary))
                return found[-1]

            return open_noted

        monkeypatch.setattr(transformers, "find_pool", noted)
        return found


@pytest.mark.skipif(not DATA.exists(), reason="the development data isn't there (shared/data beside the repository)")
def test_real_schemas_greedily_and_by_beam_search() -> None:
    """A sample of `python -m benchmarks.transformers_processor`."""
    generation = Generation(max_tokens=120)
    tasks = list(generation.tasks(DATA, 8, seed=1))
    for mode in MODES_OF_BENCHMARK:
        row = generation.run(mode, tasks, 4, tqdm(disable=True))
        assert not row["wrong"]
        assert row["valid"] == row["ended"] > 0
        assert row["ended"] + row["beginnings"] == row["outputs"] >= 8
