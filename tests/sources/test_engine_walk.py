"""A walk through the early vLLM engine ("Среда вывода больших моделей: анализ исходного
кода vLLM", 1), in its order.

Code is copied from it. Only imports and the model's path are changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from engine import LLM, SamplingParams
from engine.step.sequence import SequenceGroup, SequenceStatus
from guided.errors import InvalidRequest
from guided.sequence import SequenceOutput
from tests.engine.conftest import MakeEngine, finish, run
from tests.sources.step_views import (
    SequenceGroupMetadata,
    SequenceGroupOutput,
    by_group,
    seq_group_metadata_list,
)

source = pytest.mark.source


# -- 1. quick start


@pytest.fixture
def opt_125m(tiny_llama_dir: Path, tmp_path: Path) -> str:
    """A tiny OPT with random weights, in place of facebook/opt-125m. Its embedding,
    which is narrower, is its head."""
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 128,
    }
    ids = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "word_embed_proj_dim": 32,
    }
    model = OPTForCausalLM(
        OPTConfig(vocab_size=640, max_position_embeddings=128, **sizes, **ids)
    )
    for weights in model.parameters():  # biases too, which are zero otherwise
        torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(tmp_path)
    for file in tiny_llama_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return str(tmp_path)


@source(
    "run.py: LLM(model='facebook/opt-125m', tensor_parallel_size=2), then llm.generate(prompts, sampling_params)"
)
def test_quick_start(opt_125m: str) -> None:
    prompts = ["Have you followed marsggbo in Zhihu?", "Ты ударил три раза подряд?"]
    sampling_params = SamplingParams(temperature=0.8, top_k=50)
    llm = LLM(model=opt_125m, tensor_parallel_size=2)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    assert [output.prompt for output in outputs] == prompts

    def greedily(llm: LLM) -> list[list[int]]:
        with llm:
            found = llm.generate(
                prompts, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False
            )
        return [output.outputs[0].token_ids for output in found]

    assert greedily(llm) == greedily(LLM(model=opt_125m)), "as in one process"


# -- 3. sequences


@source(
    "class SequenceStatus: WAITING, RUNNING, SWAPPED, FINISHED_STOPPED, FINISHED_LENGTH_CAPPED, FINISHED_ABORTED, "
    "FINISHED_IGNORED",
    differs="there is no SWAPPED: a preempted sequence is computed again. WAITING_FOR_GRAMMAR and LATE are new",
)
def test_the_states_of_a_sequence() -> None:
    names = {status.name.removeprefix("FINISHED_") for status in SequenceStatus}
    document = {"WAITING", "RUNNING", "STOPPED", "LENGTH_CAPPED", "ABORTED", "IGNORED"}
    assert names == document | {"WAITING_FOR_GRAMMAR", "LATE", "INTERNAL_ERROR"}


@source("each sequence has a seq_id, its data, and the status WAITING")
@source(
    "logical_token_blocks: the blocks of a sequence",
    differs="the block manager has them: `BlockManager.blocks(seq_id)`",
)
def test_a_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=4)
    group = engine.admit("r", [1, 2, 3, 4, 5], SamplingParams(n=2))
    first, second = group.sequences
    assert first.seq_id != second.seq_id
    assert (first.prompt_token_ids, first.status) == (
        [1, 2, 3, 4, 5],
        SequenceStatus.WAITING,
    )
    engine.submit(group)
    engine.step()
    assert len(engine.blocks.blocks(first.seq_id)) == 2


@source(
    "SequenceGroup(request_id, seqs, sampling_params, arrival_time): seqs_dict, get_seqs(status)"
)
def test_a_sequence_group(make_engine: MakeEngine) -> None:
    engine, params = make_engine(), SamplingParams(n=3, max_tokens=5)
    group = engine.admit("r", [1, 2], params)
    assert group.seqs_dict == {seq.seq_id: seq for seq in group.get_seqs()}
    assert (group.request_id, group.sampling_params) == ("r", params)
    assert len(group.get_seqs(status=SequenceStatus.WAITING)) == 3
    engine.submit(group)
    engine.step()
    assert group.get_seqs(status=SequenceStatus.RUNNING) == group.get_seqs()
    assert not group.is_finished()
    copy = SequenceGroup("r", group.get_seqs(), params, arrival_time=group.arrival_time)
    assert copy.seqs_dict == group.seqs_dict


@source(
    "add_request(request_id, prompt, sampling_params, prompt_token_ids, arrival_time, lora_request, prefix_pos)"
)
@source(
    "lora_request, prefix_pos", differs="refused by name: there are no LoRA adapters"
)
def test_add_request(make_engine: MakeEngine) -> None:
    engine, few = make_engine(), SamplingParams(temperature=0.0, max_tokens=4)
    engine.add_request(
        "ids", None, few, prompt_token_ids=[5, 6], arrival_time=1.0, lora_request=None
    )
    engine.add_request("both", "text", few, [5, 6])
    found = finish(engine)
    assert found["ids"].outputs[0].token_ids == found["both"].outputs[0].token_ids
    assert (found["ids"].prompt_token_ids, found["both"].prompt) == ([5, 6], "text")
    assert found["ids"].metrics is not None and found["ids"].metrics.arrival_time == 1.0  # noqa: PT018
    for wrong in ({"lora_request": "x"}, {"prompt": None}):
        with pytest.raises(InvalidRequest):
            engine.add_request(
                **{"request_id": "r", "prompt": "text", "sampling_params": few, **wrong}
            )


@source(
    "SequenceGroupMetadata(request_id, is_prompt, seq_data, sampling_params, block_tables)"
)
@source(
    "Scheduler.schedule() returns List[SequenceGroupMetadata]",
    differs="it returns a Batch; tests/sources/step_views.py reads the list off it",
)
def test_sequence_group_metadata(make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=4)
    group = engine.add_request("r", [1, 2, 3, 4, 5], SamplingParams(n=2))
    [metadata] = seq_group_metadata_list(engine.scheduler.schedule(), engine.blocks)
    seqs = group.get_seqs(status=SequenceStatus.RUNNING)
    assert metadata == SequenceGroupMetadata(
        request_id=group.request_id,
        is_prompt=True,
        seq_data={seq.seq_id: seq for seq in seqs},
        sampling_params=group.sampling_params,
        block_tables={seq.seq_id: engine.blocks.blocks(seq.seq_id) for seq in seqs},
    )


@source("SequenceOutput(parent_seq_id, output_token, logprobs)")
@source("SequenceGroupOutput(samples, prompt_logprobs)")
def test_outputs_of_a_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    append = mock.Mock(side_effect=engine.append)
    monkeypatch.setattr(engine, "append", append)
    group = engine.add_request(
        "r", [1, 2], SamplingParams(n=2, logprobs=1, prompt_logprobs=0)
    )
    engine.step()
    [output] = by_group(*append.call_args.args)
    assert isinstance(output, SequenceGroupOutput)
    assert output.prompt_logprobs == group.prompt_logprobs
    for sample, seq in zip(output.samples, group.sequences, strict=True):
        assert isinstance(sample, SequenceOutput)
        assert (sample.parent_seq_id, [sample.output_token]) == (
            seq.seq_id,
            seq.output_token_ids,
        )
        assert sample.output_token in sample.logprobs


# -- 4. sampling parameters

BEAMS = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
STOPS = {
    "stop": ["x"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
}
TEXT = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
PENALTIES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
}
SAMPLED = {
    "temperature": 0.2,
    "top_p": 0.9,
    "top_k": 4,
    "logprobs": 1,
    "prompt_logprobs": 1,
}


@source(
    "SamplingParams contains n, best_of, temperature, ..., spaces_between_special_tokens"
)
@pytest.mark.parametrize(
    "fields",
    [{**SAMPLED, **PENALTIES}, {**BEAMS, "temperature": 0.0}, {**STOPS, **TEXT}],
)
def test_each_parameter_is_taken(
    make_engine: MakeEngine, fields: dict[str, Any]
) -> None:
    params = SamplingParams(n=2, best_of=3, max_tokens=4, **fields)
    output = run(make_engine(), {"r": ("So?", params)})["r"]
    assert output.error is None
    assert len(output.outputs) == 2


@source("spaces_between_special_tokens: whether to add spaces between special tokens")
def test_spaces_between_special_tokens(make_engine: MakeEngine) -> None:
    params = {
        "temperature": 0.0,
        "max_tokens": 3,
        "logit_bias": {1: 100.0},
        "ignore_eos": True,
    }
    for spaces, text in (
        (True, "<|end|> <|end|> <|end|>"),
        (False, "<|end|><|end|><|end|>"),
    ):
        given = SamplingParams(
            **params, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert run(make_engine(), {"r": ("So?", given)})["r"].outputs[0].text == text


# -- 5. outputs


@source(
    "the outputs are the n sequences with the highest cumulative_logprob, sorted; index is that of the sequence"
)
@pytest.mark.parametrize("best_of", [4, 6])
def test_outputs_are_the_most_likely_sequences(
    make_engine: MakeEngine, best_of: int
) -> None:
    engine = make_engine()
    group = engine.add_request(
        "r", "So?", SamplingParams(n=4, best_of=best_of, seed=3, max_tokens=12)
    )
    outputs = finish(engine)["r"].outputs
    best = sorted(
        group.sequences, key=lambda seq: seq.record.cumulative_logprob, reverse=True
    )[:4]
    assert [one.cumulative_logprob for one in outputs] == [
        seq.record.cumulative_logprob for seq in best
    ]
    assert [one.token_ids for one in outputs] == [seq.output_token_ids for seq in best]
    assert (
        [one.index for one in outputs]
        == [group.sequences.index(seq) for seq in best]
        != [0, 1, 2, 3]
    )
    assert all(one.logprobs is None for one in outputs)


@source(
    "CompletionOutput(index, text, token_ids, cumulative_logprob, logprobs, finish_reason)",
    differs="cumulative_logprob is None if n and best_of are 1 and no log-probabilities were asked for",
)
@pytest.mark.parametrize(
    ("fields", "there"),
    [({}, False), ({"logprobs": 0}, True), ({"n": 2}, True), ({"best_of": 2}, True)],
)
def test_cumulative_logprob(
    make_engine: MakeEngine, fields: dict[str, Any], there: bool
) -> None:
    output = run(
        make_engine(), {"r": ("So?", SamplingParams(seed=3, max_tokens=5, **fields))}
    )["r"].outputs[0]
    assert (output.cumulative_logprob is not None) == there
