"""The logits processor in transformers' `generate()`, compared with one that replays
the whole history at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers_generation import (
    CONSTRAINTS,
    DATE,
    PROMPTS,
    SCHEMA,
    TOKENS,
    Replaying,
    check,
    inputs,
    outputs,
)

from guided.constraint import Constraint
from guided.integrations.transformers import GuidedLogitsProcessor
from guided.vocabulary import Vocabulary

MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 20},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 3, "repetition_penalty": 1.2, "use_cache": False},
]


@pytest.mark.parametrize(
    "mode",
    MODES,
    ids=lambda mode: "-".join(f"{key}={value}" for key, value in mode.items()),
)
def test_a_batch_of_different_constraints(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mode: dict[str, Any],
) -> None:
    batch = inputs(tiny_tokenizer, PROMPTS)
    length = batch["input_ids"].shape[1]
    with GuidedLogitsProcessor(vocabulary, CONSTRAINTS) as subject:
        found = []
        for processor in (subject, Replaying(vocabulary, CONSTRAINTS, length)):
            torch.manual_seed(1)
            found.append(
                model.generate(
                    **batch, **mode, logits_processor=[processor], max_new_tokens=TOKENS
                )
            )
    assert torch.equal(found[0], found[1])
    each = len(found[0]) // len(PROMPTS)
    ended = 0
    for row, (text, end) in enumerate(outputs(vocabulary, found[0], length)):
        if end:
            check(row // each, text)
            ended += row // each != 2
    assert ended == 4 * each


def test_beams_move_and_no_matcher_is_left(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    pool = FaultyPool(vocabulary)
    subject = GuidedLogitsProcessor(
        vocabulary, Constraint.json_schema(SCHEMA), pool=pool
    )
    batch = inputs(tiny_tokenizer, PROMPTS[:2])
    model.generate(**batch, num_beams=4, logits_processor=[subject], max_new_tokens=30)
    assert len(pool.opened) > 16
    assert len(set(pool.opened) - pool.freed) <= 8
    subject.close()
    subject.close()
    assert set(pool.opened) == pool.freed
    with pytest.raises(RuntimeError, match="closed"):
        subject(batch["input_ids"], torch.zeros(2, vocabulary.padded_vocab_size))


def test_one_processor_serves_many_generations(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    with GuidedLogitsProcessor(vocabulary, Constraint.regex(DATE)) as subject:
        grown = ["Well"]
        for _ in range(4):
            batch = inputs(tiny_tokenizer, grown)
            sequences = model.generate(
                **batch, logits_processor=[subject], max_new_tokens=TOKENS
            )
            [(text, end)] = outputs(vocabulary, sequences, batch["input_ids"].shape[1])
            assert end
            check(1, text)
            grown = [f"{grown[0]}: {text}. And"]
        # Other rows, and a generation that was cut short.
        batch = inputs(tiny_tokenizer, PROMPTS[:3])
        model.generate(**batch, logits_processor=[subject], max_new_tokens=3)
        sequences = model.generate(
            **batch, num_beams=2, logits_processor=[subject], max_new_tokens=TOKENS
        )
        for text, _ in outputs(vocabulary, sequences, batch["input_ids"].shape[1]):
            check(1, text)


def test_a_cut_generation_continues_or_starts_again(
    model: LlamaForCausalLM,
    vocabulary: Vocabulary,
    tiny_tokenizer: PreTrainedTokenizerFast,
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
    "options",
    [{"prompt_lookup_num_tokens": 3}, {"assistant": True, "num_assistant_tokens": 3}],
    ids=str,
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
    with GuidedLogitsProcessor(
        vocabulary, Constraint.regex(f"({DATE} ){{2}}{DATE}")
    ) as subject:
        plain = model.generate(**batch, logits_processor=[subject], max_new_tokens=80)
        drafted = model.generate(
            **batch, **options, logits_processor=[subject], max_new_tokens=80
        )
    assert torch.equal(plain, drafted)
    for date in outputs(vocabulary, drafted, batch["input_ids"].shape[1])[0][0].split(
        " "
    ):
        check(1, date)
