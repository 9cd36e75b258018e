"""vLLM's page "Custom Logits Processors" (docs/features/custom_logitsprocs.md), in its
order.

The page's classes are copied to tests/support/sample_processors.py. Only their imports
are changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import torch
from sample_processors import DummyLogitsProcessor, WrappedPerReqLogitsProcessor
from starlette.testclient import TestClient
from typer.testing import CliRunner

from engine import LLM, AsyncEngineArgs, AsyncLLM
from engine.config import EngineConfig
from engine.logits_processors import (
    BatchUpdate,
    MoveDirectionality,
    SamplingParams,
    VllmConfig,
)
from engine.logits_processors.batch import PersistentBatch
from engine.logits_processors.loading import load_classes
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.server.app import create_app
from engine.server.options import ServerSettings
from guided.errors import InvalidRequest
from tests.engine.conftest import MakeEngine, new_sequence, run

source = pytest.mark.source
PROMPT = [5, 6, 7]
FQCN = f"{DummyLogitsProcessor.__module__}:DummyLogitsProcessor"
ONLY_67 = SamplingParams(max_tokens=4, extra_args={"target_token": 67})


class Recorder(DummyLogitsProcessor):
    """Records what it gets. The lists are the newest instance's."""

    given: tuple[Any, ...]
    updates: list[BatchUpdate | None]
    logits: list[torch.Tensor]

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        Recorder.given, Recorder.updates, Recorder.logits = (
            (vllm_config, device, is_pin_memory),
            [],
            [],
        )

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        super().update_state(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits.clone())
        return super().apply(logits)


def target(token: int | None, max_tokens: int = 4, **others: Any) -> SamplingParams:
    extra = None if token is None else {"target_token": token}
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **others
    )


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


# -- background, and the methods of a class


@source(
    "A processor consumes the (num_requests) x (vocab_size) tensor of raw logits that the model has computed."
)
@source(
    "It transforms the rows of the requests that use it; all other rows are unmodified."
)
@source(
    "The example masks all tokens but target_token; it is off for requests without target_token."
)
@source("Custom arguments: SamplingParams.extra_args.")
def test_the_example(make_engine: MakeEngine) -> None:
    free = {"free": (PROMPT, target(None, temperature=0.0))}
    expected = tokens(run(make_engine(), free)["free"])
    requests = {"67": (PROMPT, target(67)), **free, "68": (PROMPT, target(68, 2))}
    found = run(make_engine(logits_processors=(Recorder,)), requests)
    assert {name: tokens(output) for name, output in found.items()} == {
        "67": [67] * 4,
        "free": expected,
        "68": [68] * 2,
    }
    assert [tuple(logits.shape) for logits in Recorder.logits] == [(3, 640)] * 2 + [
        (2, 640)
    ] * 2
    assert all(logits.isfinite().all() for logits in Recorder.logits)


@source(
    "__init__(vllm_config, device, is_pin_memory): vllm_config is the engine's configuration.",
    differs="VllmConfig is a class of our own with the parts of vLLM's that processors read: model and scheduler.",
)
def test_constructor(make_engine: MakeEngine, tiny_model: LoadedModel) -> None:
    make_engine(logits_processors=(Recorder,), max_num_seqs=7)
    config, device, is_pin_memory = Recorder.given
    assert isinstance(config, VllmConfig)
    assert config.scheduler_config.max_num_seqs == 7
    assert config.model_config.get_vocab_size() == 640
    assert config.model_config.max_model_len == 128
    assert not hasattr(config, "cache_config")
    assert (device, is_pin_memory) == (tiny_model.device, False)


@source("is_argmax_invariant() is evaluated once at startup.")
@source(
    "If it is True, apply is skipped in steps in which all requests use greedy sampling."
)
def test_argmax_invariance(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_invariant, temperature, calls in [
        (False, 0.0, 6),
        (True, 0.0, 0),
        (True, 1.0, 6),
    ]:
        asked = mock.Mock(return_value=is_invariant)
        monkeypatch.setattr(Recorder, "is_argmax_invariant", asked)
        run(
            make_engine(logits_processors=(Recorder,)),
            {"r": (PROMPT, target(None, 6, temperature=temperature))},
        )
        assert (len(Recorder.logits), asked.call_count) == (calls, 1)


@source(
    "update_state gets the changes of the persistent batch at the beginning of the step."
)
@source("Each step calls update_state() and apply().")
@source("batch_update may be None: the batch has not changed.")
@source(
    "A processor may use the output_token_ids list that it has retained since the request was added."
)
def test_the_calls_of_a_step_and_the_retained_output(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    events: list[Any] = []

    class Retaining(Recorder):
        def update_state(self, batch_update: BatchUpdate | None) -> None:
            super().update_state(batch_update)
            if batch_update is not None:
                [(_, _, _, self.output)] = batch_update.added
            events.append(list(self.output))

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            events.append(list(self.output))
            return super().apply(logits)

    with tiny_model.body.register_forward_hook(lambda *_: events.append("forward")):
        found = run(
            make_engine(logits_processors=(Retaining,)), {"r": (PROMPT, target(None))}
        )
    assert [update is None for update in Recorder.updates] == [False, True, True, True]
    outputs = [tokens(found["r"])[:step] for step in range(4)]
    assert events == [
        event for output in outputs for event in (output, "forward", output)
    ]


# -- how the engine builds the BatchUpdate


@source(
    "New requests replace finished ones by Add, from the smallest index of a replaced request to the largest."
)
@source("As many new requests as finished ones: nothing else is to be done.")
@source(
    "Condense: move the highest non-empty slot to the lowest empty slot, by a unidirectional move."
)
@source(
    "Continue with increasing targets and decreasing sources until the batch is contiguous."
)
@source("Shrink: batch_size is the number of non-empty slots.")
@pytest.mark.parametrize(
    ("before", "after", "added", "removed", "moved"),
    [
        ("abcd", "efbd", [(0, "e"), (2, "f")], [], []),
        ("abcdefgh", "cegh", [], [0, 1, 3, 5], [(7, 0), (6, 1), (4, 3)]),
    ],
)
def test_added_replace_finished_and_the_batch_is_condensed(
    before: str, after: str, added: Any, removed: Any, moved: Any
) -> None:
    every, batch = (
        {
            name: new_sequence(SamplingParams(extra_args={"name": name}), PROMPT)
            for name in "abcdefgh"
        },
        PersistentBatch(),
    )
    batch.update([every[name] for name in before])
    update = batch.update([every[name] for name in after])
    assert update is not None
    assert [
        (index, (params.extra_args or {})["name"])
        for index, params, _, _ in update.added
    ] == added
    one_way = [
        (first, second)
        for first, second, how in update.moved
        if how is MoveDirectionality.UNIDIRECTIONAL
    ]
    assert (sorted(update.removed), one_way, update.batch_size) == (removed, moved, 4)


@source(
    "All requests in the persistent batch are running requests.",
    differs="A request is in the batch only in steps that sample it: not while its prompt is computed in chunks.",
)
def test_the_batch_has_the_rows_that_are_sampled(make_engine: MakeEngine) -> None:
    engine = make_engine(
        logits_processors=(Recorder,),
        max_num_batched_tokens=16,
        max_num_seqs=2,
        block_size=8,
    )
    run(engine, {"long": ([5] * 40, target(None, 1))})
    assert [update and update.batch_size for update in Recorder.updates] == [
        None,
        None,
        1,
    ]


# -- request-level processors


@source("AdapterLogitsProcessor wraps a request-level processor.")
@source(
    "new_req_logits_processor may return None: the processor is not applied to this request."
)
@source("The base class keeps a sparse state, and discards that of finished requests.")
def test_wrapped_example(make_engine: MakeEngine) -> None:
    sizes: list[int] = []

    class Wrapped(WrappedPerReqLogitsProcessor):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            sizes.append(len(self.req_info))
            return super().apply(logits)

    free = {"free": (PROMPT, target(None, temperature=0.0))}
    expected = tokens(run(make_engine(), free)["free"])
    engine = make_engine(logits_processors=(Wrapped,))
    found = run(
        engine, {"67": (PROMPT, target(67)), **free, "68": (PROMPT, target(68, 2))}
    )
    assert [tokens(found[name]) for name in ("67", "free", "68")] == [
        [67] * 4,
        expected,
        [68] * 2,
    ]
    run(engine, free)
    assert sizes == [2, 2, 1, 1, 0, 0, 0, 0]


# -- loading


@source("The loaded set can't be changed, nor extended on demand for a request.")
def test_no_processor_on_demand() -> None:
    with pytest.raises(InvalidRequest, match="logits_processors"):
        SamplingParams(logits_processors=[DummyLogitsProcessor])  # type: ignore[call-arg]


@source("Method 1: a fully-qualified class name, dotted.path.to.module:ClassName.")
@source("Method 3: a class object, passed to LLM or AsyncLLM.")
@source("Offline: configure the processor for an LLM request.")
@source("Offline: configure the processor for an AsyncLLM request.")
@pytest.mark.parametrize("given", [FQCN, DummyLogitsProcessor])
def test_llm_and_async_llm(tiny_model: LoadedModel, given: str | type) -> None:
    with LLM(tiny_model, logits_processors=[given]) as llm:
        [output] = llm.generate("Hello", ONLY_67, use_tqdm=False)
    assert tokens(output) == [67] * 4

    async def last(engine: AsyncLLM) -> RequestOutput:
        outputs = engine.generate(
            request_id="request-0", prompt="Hello", sampling_params=ONLY_67
        )
        return [output async for output in outputs][-1]

    engine_args = AsyncEngineArgs(model=tiny_model, logits_processors=[given])
    async_llm = AsyncLLM.from_engine_args(engine_args)
    assert tokens(asyncio.run(last(async_llm))) == [67] * 4
    async_llm.shutdown()


@source("Pass the name to the server on the command line: --logits-processors.")
def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.server import process
    from engine.server.cli import app

    given: list[EngineConfig] = []
    monkeypatch.setattr(
        process, "serve", lambda options, listener: given.append(options.engine)
    )
    two = [
        "--logits-processors",
        FQCN,
        "--logits-processors",
        "sample_processors:MyBias",
    ]
    for arguments in (two, ["--no-logits-processor-plugins"]):
        assert (
            CliRunner().invoke(app, ["serve", "--port", "0", *arguments]).exit_code == 0
        )
    assert [config.logits_processors for config in given] == [
        (FQCN, "sample_processors:MyBias"),
        (),
    ]
    assert [config.logits_processor_plugins for config in given] == [True, False]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with the given entry points of
    `vllm.logits_processors`."""

    def installing(*points: str) -> None:
        information = tmp_path / "plugins-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n"
        )
        (information / "entry_points.txt").write_text(
            "\n".join(["[vllm.logits_processors]", *points])
        )
        monkeypatch.syspath_prepend(tmp_path)

    return installing


@source(
    "Method 2: entry points of the group vllm.logits_processors are loaded automatically."
)
@source(
    "vLLM always loads all processors of the group.",
    differs="--no-logits-processor-plugins turns that off, and our own entry, which is for vLLM, is left out.",
)
def test_entry_points(install: Callable[..., None], make_engine: MakeEngine) -> None:
    install("second = sample_processors:MyBias", f"first = {FQCN}")
    engine = make_engine(logits_processors=("sample_processors:MyMinP",))
    names = [kind.__name__ for kind in engine.sampler.processors.classes]
    assert names == ["DummyLogitsProcessor", "MyBias", "MyMinP"], (
        "without our own entry, which is for vLLM"
    )
    assert tokens(run(engine, {"r": (PROMPT, target(67))})["r"]) == [67] * 4
    assert load_classes(EngineConfig(logits_processor_plugins=False)) == []


@source(
    "A processor that is loaded must be a subclass of LogitsProcessor (entry points)."
)
def test_entry_points_that_do_not_fit(install: Callable[..., None]) -> None:
    install("mine = sample_processors:SamplingParams")
    with pytest.raises(
        ValueError,
        match=r"not a subclass .*\(entry point mine .*--no-logits-processor-plugins",
    ):
        load_classes(EngineConfig())


# -- requests over HTTP


@source("REST API: configure the processor for a request by vllm_xargs.")
@source("OpenAI SDK: configure the processor for a request by extra_body.")
@source("Requests with invalid custom arguments are rejected.")
def test_custom_arguments_over_http(tiny_llama_dir: Path) -> None:
    engine = AsyncLLM(str(tiny_llama_dir), dtype="float32", logits_processors=[FQCN])
    xargs = {"vllm_xargs": {"target_token": 67, "others": [1, "two", 0.5]}}
    request: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
    with TestClient(create_app(engine, ServerSettings(model_name="tiny"))) as client:
        answer = client.post(
            "/v1/completions", json={**request, "logprobs": 0, **xargs}
        ).json()["choices"][0]
        assert len({*answer["logprobs"]["tokens"]}) == 1
        sdk = openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=client
        )
        assert (
            sdk.completions.create(**request, extra_body=xargs).choices[0].text
            == answer["text"]
        )
        wrong = client.post(
            "/v1/completions",
            json={"prompt": "Hello", "vllm_xargs": {"target_token": "five"}},
        )
        assert wrong.status_code == 400
        error = wrong.json()["error"]
        assert (error["param"], error["code"]) == ("vllm_xargs", "invalid_request")
        assert error["message"] == "target_token value five is not int"
    engine.shutdown()
