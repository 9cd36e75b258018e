from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config import EngineConfig
from engine.llm import LLM
from engine.model.loader import LoadedModel
from engine.sampling_params import SamplingParams
from guided.errors import ContextLengthExceeded, InvalidConstraint, InvalidRequest
from guided.pools.inline import InlinePool

PROMPTS = ["The quick", "brown fox", "jumps"]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return LLM(
        str(tiny_llama_dir),
        "inline",
        config=EngineConfig(max_model_len=128),
        dtype="float32",
        device="cpu",
    )


def test_many_prompts_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    many = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in many] == PROMPTS
    for prompt, output in zip(PROMPTS, many, strict=True):
        [alone] = llm.generate(prompt, params, use_tqdm=False)
        [by_ids] = llm.generate(llm.tokenizer.encode(prompt), params, use_tqdm=False)
        assert (
            output.outputs[0].token_ids
            == alone.outputs[0].token_ids
            == by_ids.outputs[0].token_ids
        )


def test_parameters_and_errors_belong_to_their_prompt(llm: LLM) -> None:
    params = [
        SamplingParams(json_object=True, max_tokens=60, whitespace_pattern="", seed=1),
        SamplingParams(grammar="start: (", max_tokens=5),
        SamplingParams(choice=["a", "b"]),
    ]
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    if found[0].outputs[0].finish_reason == "stop":
        assert isinstance(json.loads(found[0].outputs[0].text), dict)
    assert isinstance(found[1].error, InvalidConstraint)
    assert found[2].outputs[0].text in ("a", "b")


def test_one_bad_request_and_none_is_run(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="500 in the completion"):
        llm.generate(
            PROMPTS,
            [SamplingParams(), SamplingParams(max_tokens=500), SamplingParams()],
            use_tqdm=False,
        )
    assert not llm.engine.has_unfinished
    with pytest.raises(ValueError, match="3 prompts and 1"):
        llm.generate(PROMPTS, [SamplingParams()])


def test_the_progress_bar_counts_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens/s" in shown


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [one] = llm.chat(conversation, params, use_tqdm=False)
    assert (
        llm.tokenizer.decode(one.prompt_token_ids)
        == "<|user|>hello<|end|><|assistant|>"
    )
    two = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in two] == [
        one.outputs[0].token_ids
    ] * 2


def test_a_pool_is_handed_in_or_made(tiny_model: LoadedModel) -> None:
    pool = InlinePool(tiny_model.vocabulary)
    assert LLM(tiny_model, pool).pool is pool
    with pytest.raises(ValueError, match="pool is 'elsewhere'"):
        LLM(tiny_model, "elsewhere")  # type: ignore[arg-type]
    with LLM(tiny_model, "inline") as made:
        assert made.pool.status().name == "inline"


def test_the_package_exports_what_it_says() -> None:
    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        engine.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("refuser", "name", "instead"),
    [
        (LLM, "dtype", "name of a model"),
        (LLM, "gpu_memory_utilization", "kv_cache_bytes"),
        (LLM, "max_num_seq", "did you mean max_num_seqs"),
        (SamplingParams, "guided_json", "json_schema"),
        (SamplingParams, "max_token", "max_tokens"),
    ],
)
def test_an_unknown_option_is_refused_by_name(
    tiny_model: LoadedModel, refuser: Any, name: str, instead: str
) -> None:
    with pytest.raises(InvalidRequest, match=instead) as raised:
        refuser(*([tiny_model] if refuser is LLM else []), **{name: 1})
    assert raised.value.param == name


def test_vllms_quick_start_keywords(tiny_model: LoadedModel) -> None:
    with LLM(
        tiny_model, tensor_parallel_size=1, enforce_eager=True, max_model_len=64, seed=3
    ) as llm:
        assert (llm.max_model_len, llm.engine.config.seed) == (64, 3)
        params = SamplingParams(temperature=0.0, max_tokens=4)
        ids = llm.tokenizer.encode("The fox")
        text, tokens, plain = llm.generate(
            [{"prompt": "The fox"}, {"prompt_token_ids": ids}, ids],
            params,
            use_tqdm=False,
        )
        assert (
            text.outputs[0].token_ids
            == tokens.outputs[0].token_ids
            == plain.outputs[0].token_ids
        )
        with pytest.raises(InvalidRequest, match="text or token ids"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, params)
        with pytest.raises(InvalidRequest, match="LoRA"):
            llm.generate("x", params, lora_request="adapter")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


def test_answers_are_parsed_back(llm: LLM) -> None:
    [output] = llm.generate(
        "The", SamplingParams(output_type=Color, n=2), use_tqdm=False
    )
    assert all(
        isinstance(one.parsed, Color) and one.parsed.value == one.text
        for one in output.outputs
    )
    [cut] = llm.generate(
        "The", SamplingParams(output_type=list[str], max_tokens=1), use_tqdm=False
    )
    assert cut.outputs[0].finish_reason == "length"
    assert cut.outputs[0].parsed is None
    with pytest.raises(InvalidConstraint, match="regex and output_type are given"):
        SamplingParams(regex="a", output_type=Color)


def test_a_prompt_that_is_too_long_is_an_error(llm: LLM) -> None:
    with pytest.raises(
        ContextLengthExceeded, match=f"resulted in {llm.max_model_len} tokens"
    ):
        llm.generate(
            ["a", [5] * llm.max_model_len],
            SamplingParams(max_tokens=None),
            use_tqdm=False,
        )
    [one] = llm.generate(
        [[5] * (llm.max_model_len - 1)], SamplingParams(max_tokens=1), use_tqdm=False
    )
    assert len(one.outputs[0].token_ids) == 1
