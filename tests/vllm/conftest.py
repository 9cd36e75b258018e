"""A tiny model, and `vllm serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.vllm.vllm_server import MAX_MODEL_LEN, Server, serving_vllm

ALSO_ENDS = "<|user|>"
"""The model's second end token."""

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # warnings of vLLM itself
    # read when vLLM is imported, which is later
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def pytest_report_header() -> str:
    try:
        return f"vLLM {version('vllm')}"
    except PackageNotFoundError:
        return "vLLM is not installed: make test-vllm"


@pytest.fixture(scope="session")
def vllm_model(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Llama without weights and the tokenizer of 600 tokens; 640 logits.

    Like many chat models, it has two tokens that end an output. The weights that vLLM
    makes up (`load_format="dummy"`) are so small that all tokens are about equally
    probable.
    """
    path = tmp_path_factory.mktemp("vllm-llama")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=640,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        dtype="float32",
    )
    config.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    ends = [
        tiny_tokenizer.eos_token_id,
        tiny_tokenizer.convert_tokens_to_ids(ALSO_ENDS),
    ]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path


@pytest.fixture(scope="session")
def server(vllm_model: Path) -> Iterator[Server]:
    """One server for many tests. It has few blocks: eight long requests don't fit, so
    some are preempted."""
    few_blocks = ("--block-size", "32", "--num-gpu-blocks-override", "40")
    with serving_vllm(
        vllm_model,
        *few_blocks,
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    ) as server:
        yield server
