"""`allowed_token_ids` and `bad_words` with words as people have them, by `LLM` and the
embedded model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.default_model import checkpoint_path
from engine.detokenizer import TokenTexts
from engine.outputs import RequestOutput
from engine.step.restriction import Restriction
from guided.vocabulary import Vocabulary

PROMPT = "Text: Tomas Berg is 51 years old and lives in Oslo.\nJSON: "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
    "required": ["name", "city"],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(checkpoint_path()), pool="inline") as made:
        yield made


def run(llm: LLM, **fields: Any) -> RequestOutput:
    [output] = llm.generate(
        PROMPT,
        SamplingParams(**{"temperature": 0, "max_tokens": 60, **fields}),
        use_tqdm=False,
    )
    return output


@pytest.mark.parametrize(
    "fields",
    [{}, {"json_schema": SCHEMA}, {"json_schema": SCHEMA, "temperature": 0.8, "n": 3}],
)
def test_a_word_of_several_tokens_is_not_written(
    llm: LLM, fields: dict[str, Any]
) -> None:
    spelled = llm.tokenizer.encode(" Berg", add_special_tokens=False)
    assert len(spelled) > 1
    assert "Berg" in run(llm, **fields).outputs[0].text
    for output in run(llm, **fields, bad_words=["Berg", "Oslo"]).outputs:
        assert output.finish_reason in ("stop", "length")
        assert not {"Berg", "Oslo"} & {*output.text.replace('"', " ").split()}
    # it only is a part of the word, if a token has the rest
    one = run(llm, **fields, bad_words=["Ber"]).outputs[0]
    assert one.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"choice": ["yes", "no"], "bad_words": ["yes"]}, "no"),
        ({"choice": ["yes", "no"], "bad_words": ["no"]}, "yes"),
        ({"regex": "[0-9]{4}", "allowed_token_ids": "7"}, "7777"),
        ({"choice": ["yes", "no"], "bad_words": ["yes", "no"]}, None),
        ({"regex": "[0-9]{4}", "allowed_token_ids": "x"}, None),
        ({"json_schema": SCHEMA, "bad_words": ["city"]}, None),
        (
            {
                "choice": ["ab", "ac"],
                "bad_words": ["ab", "ac"],
                "use_beam_search": True,
                "best_of": 2,
            },
            None,
        ),
    ],
)
def test_beside_a_constraint_both_masks_hold(
    llm: LLM, fields: dict[str, Any], expected: str | None
) -> None:
    if "allowed_token_ids" in fields:
        tokens = llm.tokenizer.encode(
            fields["allowed_token_ids"], add_special_tokens=False
        )
        fields = {**fields, "allowed_token_ids": tokens}
    [output] = run(llm, **fields).outputs[:1]
    if expected is None:
        assert output.error is not None
        assert (output.finish_reason, output.error.code) == ("error", "dead_end")
    else:
        assert (output.text, output.finish_reason) == (expected, "stop")


def test_many_words_take_no_pass_over_the_vocabulary_each() -> None:
    """32 times as many words take some 5 times as long; with a pass for each ending of
    each word, 32 times."""
    letters = random.Random(0)
    words = [
        "".join(letters.choices("etaoinshrdlu", k=letters.randint(1, 9)))
        for _ in range(150_000)
    ]
    texts = TokenTexts(
        Vocabulary(
            tuple(word.encode() for word in words), (0,), frozenset({0}), len(words)
        ),
        [],
    )
    bad = ["".join(letters.choices("etaoinshrdlu", k=64)) for _ in range(256)]

    def seconds(count: int) -> float:
        began = time.process_time()
        params = SamplingParams(bad_words=bad[:count])
        Restriction(params, texts, [0], torch.device("cpu"))
        return time.process_time() - began

    seconds(1)  # what all restrictions share
    few = min(seconds(8) for _ in range(3))
    assert seconds(256) < 15 * few


def test_ignore_eos_leaves_the_allowed_tokens(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("abc", add_special_tokens=False)
    output = run(llm, allowed_token_ids=tokens, ignore_eos=True, temperature=1).outputs[
        0
    ]
    assert len(output.token_ids) == 60
    assert {*output.token_ids} <= {*tokens}


def test_cached_tokens_of_a_repeated_prompt(llm: LLM) -> None:
    run(llm)
    assert (run(llm).num_cached_tokens or 0) >= 16
