"""Rows without a valid mask, and arguments that are rejected."""

from __future__ import annotations

import pytest
import torch
from faulty_pool import FaultyPool, without_rows
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers_generation import DATE, PROMPTS, SUM, TOKENS, check, inputs, outputs

from guided.constraint import Constraint
from guided.errors import BackendError, InvalidRequest, UnsupportedConstraint
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.pools.inline import InlinePool
from guided.pools.protocol import StepMasks
from guided.vocabulary import Vocabulary


class TestFailures:
    def test_a_failed_row_is_named(
        self,
        model: LlamaForCausalLM,
        vocabulary: Vocabulary,
        tiny_tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        pool = FaultyPool(vocabulary)
        batch = inputs(tiny_tokenizer, PROMPTS[:2])
        subject = GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE), pool=pool)
        pool.fails = lambda sequence_id, position: (
            sequence_id == pool.opened[1] and position == 3
        )
        with pytest.raises(BackendError, match="row 1 of 2: told to fail"):
            model.generate(**batch, logits_processor=[subject], max_new_tokens=TOKENS)
        assert set(pool.opened) == pool.freed
        pool.fails = lambda sequence_id, position: False
        sequences = model.generate(
            **batch, logits_processor=[subject], max_new_tokens=TOKENS
        )
        for text, _ in outputs(vocabulary, sequences, batch["input_ids"].shape[1]):
            check(1, text)

    @pytest.mark.parametrize("beams", [1, 3])
    def test_a_failed_row_ends_and_the_others_continue(
        self,
        model: LlamaForCausalLM,
        vocabulary: Vocabulary,
        tiny_tokenizer: PreTrainedTokenizerFast,
        beams: int,
    ) -> None:
        pool = FaultyPool(vocabulary)
        batch = inputs(tiny_tokenizer, PROMPTS[:3])
        length = batch["input_ids"].shape[1]
        with GuidedLogitsProcessor(
            vocabulary, Constraint.regex(DATE), pool=pool, failed_rows="end"
        ) as subject:
            pool.fails = lambda sequence_id, position: (
                sequence_id == pool.opened[beams] and position == 2
            )
            sequences = model.generate(
                **batch,
                num_beams=beams,
                logits_processor=[subject],
                max_new_tokens=TOKENS,
            )
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
            sequences = model.generate(
                **batch, logits_processor=[subject], max_new_tokens=TOKENS
            )
            assert not subject.failed
            for text, _ in outputs(vocabulary, sequences, length):
                check(1, text)

    def test_waits_for_a_worker(self, vocabulary: Vocabulary) -> None:
        class Empty(FaultyPool):
            """No worker is up before the third step."""

            calls = 0

            def collect(self, deadline: float | None = None) -> StepMasks:
                step = super().collect(deadline)
                self.calls += 1
                return without_rows(step, [0]) if self.calls < 3 else step

        pool = Empty(vocabulary)
        with GuidedLogitsProcessor(
            vocabulary, Constraint.regex("a+"), pool=pool
        ) as subject:
            masked = subject(
                torch.tensor([[1], [2]]), torch.zeros(2, vocabulary.padded_vocab_size)
            )
        assert pool.calls == 3
        assert torch.equal(masked[0], masked[1])
        assert masked[0].isfinite().sum() < 20


class TestRejections:
    def test_a_constraint_that_cant_be_compiled(self, vocabulary: Vocabulary) -> None:
        constraints = [None, Constraint.regex("a"), Constraint.regex(r"a(?=b)c")]
        with pytest.raises(InvalidRequest, match="constraint 2: "):
            GuidedLogitsProcessor(vocabulary, constraints)
        with pytest.raises(UnsupportedConstraint, match="outlines"):
            GuidedLogitsProcessor(
                vocabulary, Constraint.grammar(SUM), backend="outlines"
            )

    def test_logits_of_another_width(self, vocabulary: Vocabulary) -> None:
        with (
            GuidedLogitsProcessor(vocabulary, Constraint.regex("a+")) as subject,
            pytest.raises(InvalidRequest, match="padded_vocab_size=700"),
        ):
            subject(torch.tensor([[1]]), torch.zeros(1, 700))

    def test_rows_that_are_no_multiple_of_the_constraints(
        self, vocabulary: Vocabulary
    ) -> None:
        with (
            GuidedLogitsProcessor(
                vocabulary, [Constraint.regex("a+"), None]
            ) as subject,
            pytest.raises(InvalidRequest, match="3 rows and 2 constraints"),
        ):
            subject(
                torch.tensor([[1]] * 3), torch.zeros(3, vocabulary.padded_vocab_size)
            )

    def test_a_pool_over_other_tokens(
        self, vocabulary: Vocabulary, pool: InlinePool
    ) -> None:
        other = Vocabulary(vocabulary.token_bytes[:300], (1,), frozenset({1}), 300)
        with pytest.raises(InvalidRequest, match="the pool's masks are over"):
            GuidedLogitsProcessor(other, Constraint.regex("a+"), pool=pool)
