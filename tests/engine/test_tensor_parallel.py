"""A model that is split over two processes says what it says in one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig

from engine.attention import UnsupportedModelError
from engine.llm import LLM
from engine.model_loader import LoadedModel, load_model
from engine.sampling_params import SamplingParams
from guided.errors import InternalError

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 4}
PROMPTS = ["The fox", "As JSON: ", "a b c d e f g h", "Zwölf"]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model_dir(request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """The tiny model; once with the embedding as its head."""
    if not request.param:
        return tiny_llama_dir
    config = AutoConfig.from_pretrained(tiny_llama_dir)
    config.tie_word_embeddings = True
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in tiny_llama_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def params() -> list[SamplingParams]:
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.0, "json_object": True, "logprobs": 3},
        {"seed": 4, "n": 2, "regex": "[a-z ]{20}"},
        {"temperature": 0.0, "n": 3, "use_beam_search": True},
    ]
    return [SamplingParams(max_tokens=24, **each) for each in fields]


def children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"engine.rank_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def test_two_processes_say_what_one_does_until_one_is_killed(model_dir: Path) -> None:
    with LLM(str(model_dir), **OPTIONS) as one:
        expected = one.generate(PROMPTS, params(), use_tqdm=False)
    with LLM(str(model_dir), tensor_parallel_size=2, **OPTIONS) as two:
        found = two.generate(PROMPTS, params(), use_tqdm=False)
        heads = {shape.kv_heads for shape in two.model.layers.values()}
        assert heads == {1}, "each process has one of the two key heads"
        (rank,) = children()
        for output, same in zip(found, expected, strict=True):
            assert output.error is None
            for got, wanted in zip(output.outputs, same.outputs, strict=True):
                assert got.token_ids == wanted.token_ids
                for entries, others in zip(got.logprobs or (), wanted.logprobs or (), strict=True):
                    assert {token: pytest.approx(entry.logprob, abs=1e-4) for token, entry in entries.items()} == {
                        token: other.logprob for token, other in others.items()
                    }
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(InternalError, match="rank 1 of tensor parallelism was killed by SIGKILL"):
            two.generate(PROMPTS, params(), use_tqdm=False)
    assert not list(children())
    assert not torch.distributed.is_initialized()


def test_models_that_cannot_be_split_are_refused_by_name(tmp_path: Path, tiny_llama_dir: Path) -> None:
    OPTConfig(hidden_size=16, num_attention_heads=2, architectures=["OPTForCausalLM"]).save_pretrained(tmp_path)
    for file in tiny_llama_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM has no plan"):
        load_model(str(tmp_path), device="cpu", tensor_parallel_size=2)
    with pytest.raises(UnsupportedModelError, match="4 heads and 2 key heads"):
        load_model(str(tiny_llama_dir), device="cpu", tensor_parallel_size=4)


def test_a_model_that_is_loaded_already_is_not_split(tiny_model: LoadedModel) -> None:
    assert tiny_model.ranks is None
