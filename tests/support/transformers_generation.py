"""Prompts, constraints and a reference for transformers' `generate()`, and checks of
what it generates."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from guided.backends import Backends
from guided.backends.base import CompiledGrammar
from guided.bitmask import allowed_ids
from guided.constraint import Constraint
from guided.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"enum": [1, 20, 300]},
        "s": {"type": "string", "maxLength": 4},
        "b": {"type": "boolean"},
    },
    "required": ["n", "s", "b"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
WORDS = ["yes", "no", "perhaps", "not at all"]
SUM = 'start: /[1-9]/ (" + " /[1-9]/){1,3}'
CONSTRAINTS = [
    Constraint.json_schema(SCHEMA, whitespace=""),
    Constraint.regex(DATE),
    None,
    Constraint.choice(WORDS),
    Constraint.grammar(SUM),
]
PROMPTS = [
    "As JSON: ",
    "The quick brown fox jumps over the lazy dog on ",
    "Just a text",
    "So?",
    "Count: ",
]
TOKENS = 60


class Replaying(LogitsProcessor):
    """The reference: a new matcher for every row at every step, which accepts the whole
    history."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        constraints: Sequence[Constraint | None],
        length: int,
    ) -> None:
        backends = Backends(vocabulary)["llguidance"]
        self.grammars: list[CompiledGrammar | None] = [
            one and backends.compile(one) for one in constraints
        ]
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
        found[
            sorted(set(allowed_ids(bitmask).tolist()) & set(vocabulary.text_token_ids))
        ] = True
        found[stop] = matcher.is_accepting()
        return found


def inputs(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> dict[str, Any]:
    """A batch, padded on the left."""
    return dict(
        tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    )


def outputs(
    vocabulary: Vocabulary, sequences: torch.Tensor, length: int
) -> list[tuple[str, bool]]:
    """Each row's text and whether it ended by itself."""
    found = []
    for tokens in sequences[:, length:].tolist():
        ends = [
            place
            for place, token in enumerate(tokens)
            if token in vocabulary.stop_token_ids
        ]
        text = vocabulary.decode(tokens[: ends[0]] if ends else tokens).decode(
            "utf-8", "replace"
        )
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
