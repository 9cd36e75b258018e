"""A model that is split over two processes says what it says in one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from transformers import GPT2Config

from engine.llm import LLM
from engine.model.attention import UnsupportedModelError
from engine.model.loader import load_model
from engine.sampling_params import SamplingParams
from guided.errors import InternalError

OPTIONS: dict[str, Any] = {
    "pool": "inline",
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 128,
    "block_size": 4,
}
PROMPTS = ["The fox", "As JSON: ", "a b c d e f g h", "Zwölf"]


def copy_tokenizer(source: Path, target: Path) -> None:
    for file in source.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())


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
            if b"engine.model.ranks" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def test_two_processes_say_what_one_does_until_one_is_killed(
    tiny_llama_dir: Path,
) -> None:
    with LLM(str(tiny_llama_dir), **OPTIONS) as one:
        expected = one.generate(PROMPTS, params(), use_tqdm=False)
        shapes = one.model.layers
        pool, generator = FaultyPool(one.model.vocabulary), random.Random(1)
    pool.delay = lambda sequence_id, position: generator.choice([0, 0, 1, 3])
    with LLM(
        str(tiny_llama_dir), tensor_parallel_size=2, **{**OPTIONS, "pool": pool}
    ) as two:
        found = two.generate(PROMPTS, params(), use_tqdm=False)
        halves = {
            layer: replace(shape, kv_heads=shape.kv_heads // 2)
            for layer, shape in shapes.items()
        }
        assert two.model.layers == halves, "each process has half of the key heads"
        assert two.engine.stats.late_rows > 5, (
            "the ranks get the hidden states that rank 0 has kept"
        )
        (rank,) = children()
        for output, same in zip(found, expected, strict=True):
            assert output.error is None
            for got, wanted in zip(output.outputs, same.outputs, strict=True):
                assert got.token_ids == wanted.token_ids
                for entries, others in zip(
                    got.logprobs or (), wanted.logprobs or (), strict=True
                ):
                    assert [*entries] == [*others]
                    values = [entry.logprob for entry in entries.values()]
                    assert values == pytest.approx(
                        [other.logprob for other in others.values()], abs=1e-4
                    )
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(
            InternalError, match="rank 1 of tensor parallelism was killed by SIGKILL"
        ):
            two.generate(PROMPTS, params(), use_tqdm=False)
    assert not list(children())
    assert not torch.distributed.is_initialized()


def test_models_that_cannot_be_split_are_refused_by_name(
    tmp_path: Path, tiny_llama_dir: Path
) -> None:
    GPT2Config(n_embd=16, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(
        tmp_path
    )
    copy_tokenizer(tiny_llama_dir, tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no plan"):
        load_model(str(tmp_path), device="cpu", tensor_parallel_size=2)
    with pytest.raises(UnsupportedModelError, match="4 heads and 2 key heads"):
        load_model(str(tiny_llama_dir), device="cpu", tensor_parallel_size=4)
