"""What concerns the device: running out of memory, the size of the cache, and the
engine on CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sampling_params import SamplingParams
from guided.errors import InternalError
from tests.engine.conftest import MakeEngine, run


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    fields: dict[str, dict[str, Any]] = {
        "guided": {"regex": "[0-9]{12}", "seed": 3, "n": 2},
        "scored": {"regex": "[a-z]{12}", "temperature": 0.0, "logprobs": 1},
        "free": {"temperature": 0.0, "max_tokens": 20},
        "newest": {"temperature": 0.0, "max_tokens": 20},
    }
    return {
        name: ([7, 8, 9] * (place + 1), SamplingParams(**{"max_tokens": 30, **params}))
        for place, (name, params) in enumerate(fields.items())
    }


@pytest.mark.parametrize("step", [0, 1, 6])
@pytest.mark.parametrize("where", ["execute", "compute_logits"])
def test_out_of_memory_fails_the_newest_group_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    expected = run(make_engine(), requests())
    engine = make_engine(block_size=4)
    real, calls = getattr(engine.runner, where), [0]

    def once(*arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == step + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        result: torch.Tensor = real(*arguments)
        return result

    monkeypatch.setattr(engine.runner, where, once)
    found = run(engine, requests())
    failed = found.pop("newest")
    assert isinstance(failed.error, InternalError)
    assert "out of memory" in str(failed.error)
    for name, output in found.items():
        assert [one.token_ids for one in output.outputs] == [
            one.token_ids for one in expected[name].outputs
        ]
        assert all(
            one.logprobs is None or len(one.logprobs) == len(one.token_ids)
            for one in output.outputs
        )


def test_the_kv_cache_gets_what_the_largest_step_leaves(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []

    def note(module: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        steps.append((inputs["input_ids"].shape[1], int(inputs["position_ids"].max())))

    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    runner, left = ModelRunner(tiny_model, block_size=16), []
    with tiny_model.body.register_forward_hook(note, with_kwargs=True):
        for peak in (0, 1 << 30):
            monkeypatch.setattr(
                torch.cuda, "max_memory_allocated", lambda device, peak=peak: 100 + peak
            )
            left.append(runner.memory_for_cache(300, rows=5, max_model_len=128))
    assert steps == [(300, 127)] * 2
    assert 0 < left[0] < 8 << 30
    assert left[0] - left[1] >= 1 << 30


def test_a_forward_pass_runs_on_the_device_of_its_tokens(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[str] = []
    devices: list[list[str]] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device.type)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    with tiny_model.body.register_forward_pre_hook(
        lambda body, args: devices.append(current.copy())
    ):
        LLM(tiny_model).generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert devices == [["cpu"]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_cuda_guided_outputs_are_those_of_the_cpu(
    tiny_model: LoadedModel,
    tiny_llama_dir: Path,
    enforce_eager: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts, params = zip(*requests().values(), strict=True)
    config = EngineConfig(max_model_len=128, enforce_eager=enforce_eager)
    expected = LLM(tiny_model, config=copy.copy(config)).generate(
        list(prompts), list(params), use_tqdm=False
    )
    on_gpu = load_model(str(tiny_llama_dir), dtype="float32", device="cuda")
    found = LLM(on_gpu, config=config).generate(
        list(prompts), list(params), use_tqdm=False
    )
    # graphs are not off
    assert not [
        record for record in caplog.records if record.name == "engine.model.runner"
    ]
    for one, same in zip(found, expected, strict=True):
        assert [each.text for each in one.outputs] == [
            each.text for each in same.outputs
        ]
