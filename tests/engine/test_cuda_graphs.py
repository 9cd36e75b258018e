"""Decode steps by CUDA graphs. The calls of CUDA are replaced: a replay runs the
recorded code again, on the CPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, PROMPTS, save

from engine.config import EngineConfig
from engine.llm import LLM
from engine.llm_engine import LLMEngine
from engine.model import runner as model_runner
from engine.model.cuda_graphs import DecodeGraphs, GraphCalls, Outputs, graph_sizes
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine, run


class Calls(GraphCalls):
    """Notes the calls in order. Capture number `fails` raises."""

    def __init__(self, fails: int | None = None) -> None:
        self.log: list[str] = []
        self._captures, self._events, self._fails = 0, 0, fails

    def capture(self, run: Callable[[], None]) -> Any:
        self._captures += 1
        if self._captures == self._fails:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            except RuntimeError:
                raise RuntimeError("capture invalidated")  # noqa: B904  as torch's context manager does
        run()
        return run

    def replay(self, graph: Callable[[], None]) -> None:
        self.log.append("replay")
        graph()

    def record(self) -> Any:
        self._events += 1
        self.log.append(f"record {self._events}")
        return Event(self.log, f"wait {self._events}")


class Event:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def synchronize(self) -> None:
        self._log.append(self._name)


REQUESTS: dict[str, tuple[Any, SamplingParams]] = {
    "guided": (
        [7, 8, 9],
        SamplingParams(regex="[0-9]{12}", seed=3, n=2, max_tokens=30),
    ),
    "beams": (
        [5, 6],
        SamplingParams(
            use_beam_search=True, best_of=3, n=2, temperature=0.0, max_tokens=9
        ),
    ),
    "penalised": (
        [9],
        SamplingParams(
            temperature=0.0, max_tokens=40, frequency_penalty=0.9, logprobs=2
        ),
    ),
    "long": ([9, 8] * 9, SamplingParams(temperature=0.8, seed=1, max_tokens=60)),
}


def outputs(engine: LLMEngine) -> dict[str, list[list[int]]]:
    return {
        name: [part.token_ids for part in output.outputs]
        for name, output in run(engine, REQUESTS).items()
    }


def test_the_sizes_are_vllms() -> None:
    assert graph_sizes(20) == [20, 16, 8, 4, 2, 1]
    assert graph_sizes(3) == [3, 2, 1]
    assert graph_sizes(32)[:3] == [32, 24, 16]
    assert graph_sizes(1) == [1]


def test_outputs_are_those_of_eager_steps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outputs(make_engine(max_num_seqs=9, block_size=4))
    calls = Calls()
    monkeypatch.setattr(model_runner, "graph_calls", lambda device: calls)
    engine = make_engine(max_num_seqs=9, block_size=4)
    assert outputs(engine) == expected
    assert calls.log.count("replay") > 30
    calls.log.clear()
    assert (
        outputs(make_engine(max_num_seqs=9, block_size=4, enforce_eager=True))
        == expected
    )
    assert not calls.log


def test_a_failed_capture_leaves_eager_steps_and_one_warning(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = outputs(make_engine(max_num_seqs=9))
    calls = Calls(fails=1)
    monkeypatch.setattr(model_runner, "graph_calls", lambda device: calls)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(max_num_seqs=9)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "operation not permitted when stream is capturing" in warning
    assert outputs(engine) == expected
    assert "replay" not in calls.log


def test_a_failed_small_graph_leaves_the_larger_ones(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = outputs(make_engine(max_num_seqs=9))
    calls = Calls(fails=3)
    monkeypatch.setattr(model_runner, "graph_calls", lambda device: calls)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(max_num_seqs=9)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "there are no CUDA graphs below 8 rows: RuntimeError('operation not permitted"
    )
    assert outputs(engine) == expected
    assert calls.log.count("replay") > 30


def test_a_failed_capture_restores_stream_and_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = ["main"]

    @contextmanager
    def capturing(graph: Any, pool: Any, stream: str, **others: Any) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            raise RuntimeError("capture invalidated")

    ended: list[Any] = []
    side = SimpleNamespace(wait_stream=lambda stream: None)
    cuda = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda device: side,
        "device": nullcontext,
        "stream": nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: None,
        "graph": capturing,
        "current_stream": lambda: streams[-1],
        "set_stream": streams.append,
        "current_device": lambda: 0,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    end = "_cuda_endAllocateToPool"
    monkeypatch.setattr(
        torch._C, end, lambda device, pool: ended.append((device, pool)), raising=False
    )
    with pytest.raises(RuntimeError, match="capture invalidated"):
        GraphCalls(torch.device("cuda")).capture(lambda: None)
    assert streams == ["main", side, "main"]
    assert ended == [(0, (0, 1))]


def test_recurrent_states_of_padded_rows_are_kept_apart(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = next(family for family in FAMILIES if family.title == "Qwen 3.5")
    model = load_model(
        save(family.make(), tmp_path, tiny_tokenizer),
        device="cpu",
        dtype="float32",
        max_model_len=64,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, n=3)
    found = []
    for calls in (None, Calls()):
        monkeypatch.setattr(
            model_runner, "graph_calls", lambda device, calls=calls: calls
        )
        llm = LLM(
            model,
            pool="inline",
            config=EngineConfig(max_num_seqs=9, kv_cache_bytes=8 << 20),
        )
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found.append([part.token_ids for output in outputs for part in output.outputs])
    assert found[0] == found[1]
    assert calls is not None
    assert calls.log.count("replay") > 15


def test_the_kv_cache_leaves_room_for_graphs(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, sizes, held = [8 << 30], list[int](), [1 << 30]

    def empty_cache() -> None:
        free.append(free.pop() + held[0])
        held[0] = 0

    class Big(Calls):
        def capture(self, run: Callable[[], None]) -> Any:
            empty_cache()
            free[0] -= 1 << 30
            sizes.append(len(super().capture(run).args[0][0]))
            graph = torch.Generator()  # any object of which the end can be noticed
            weakref.finalize(graph, lambda: free.append(free.pop() + (1 << 30)))
            return graph

    for name in (
        "reset_peak_memory_stats",
        "synchronize",
        "memory_allocated",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 16 << 30))
    left = []
    for calls in (None, Calls(), Big()):
        held[0] = 1 << 30  # unused memory, which torch gives back when it captures
        free[0] = 7 << 30
        monkeypatch.setattr(
            model_runner, "graph_calls", lambda device, calls=calls: calls
        )
        left.append(
            ModelRunner(tiny_model, block_size=16).memory_for_cache(
                300, rows=20, max_model_len=128
            )
        )
    assert sizes == [20]
    assert left[0] - left[1] == len(graph_sizes(20)) * 8 << 20  # for the driver
    assert left[1] - left[2] == 1 << 30
    assert free == [8 << 30]


def test_graphs_see_padded_rows_and_growing_tables() -> None:
    seen: list[list[list[int]]] = []
    blocks: list[list[list[int]]] = []

    def forward(inputs: torch.Tensor, tables: torch.Tensor) -> Outputs:
        seen.append(inputs.tolist())
        blocks.append(tables.tolist())
        return inputs[:1].t().float(), inputs[:2].t().double()

    calls = Calls()
    graphs = DecodeGraphs(
        calls, forward, torch.tensor([0, 99, 0]), 3, [4, 2], torch.device("cpu")
    )
    # once for the outputs, then the largest first
    assert [len(view[0]) for view in seen] == [4, 4, 2]
    assert (seen[0], blocks[0]) == ([[0] * 4, [99] * 4, [0] * 4], [[0] * 3] * 4)
    seen.clear()
    hidden, logits = graphs.run(
        np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), np.array([[1], [2], [3]])
    )
    assert seen[-1] == [[1, 2, 3, 0], [4, 5, 6, 99], [7, 8, 9, 0]]
    assert blocks[-1] == [[1, 0, 0], [2, 0, 0], [3, 0, 0], [0, 0, 0]]
    assert (hidden.tolist(), logits.tolist()) == (
        [[1], [2], [3]],
        [[1, 4], [2, 5], [3, 6]],
    )
    graphs.run(np.array([[1], [4], [7]]), np.array([[8, 9]]))
    assert seen[-1] == [[1, 0], [4, 99], [7, 0]]
    assert blocks[-1] == [[8, 9, 0], [2, 0, 0]]  # the second row pads the step


def test_a_buffer_is_written_after_the_event_of_its_copy() -> None:
    calls = Calls()
    graphs = DecodeGraphs(
        calls,
        lambda inputs, tables: (inputs.t().clone(),),
        torch.tensor([0]),
        1,
        [1],
        torch.device("cpu"),
    )
    for token in range(4):
        graphs.run(np.array([[token]]), np.array([[token]]))
    steps = [[f"wait {step + 1}", f"record {step + 3}", "replay"] for step in range(4)]
    assert calls.log == [
        "record 1",
        "record 2",
        *(call for step in steps for call in step),
    ]


def test_processors_change_a_copy_of_the_logits(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "graph_calls", lambda device: Calls())
    engine = LLMEngine(tiny_model, EngineConfig(max_model_len=64, max_num_seqs=2))
    engine.add_request(
        "one", [5, 6], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    )
    engine.step()
    with torch.inference_mode():
        hidden = engine.execute(engine.schedule())
        first = engine.runner.compute_logits(hidden)
        expected = first.clone()
        first.fill_(0)
        assert torch.equal(engine.runner.compute_logits(hidden), expected)
        assert first.dtype == torch.float32
