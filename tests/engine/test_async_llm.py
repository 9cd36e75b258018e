from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from faulty_pool import FaultyPool

from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model.loader import LoadedModel
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import InternalError, InvalidConstraint, InvalidRequest

PROMPT = "Le cœur déçu"


@pytest.fixture
def pool(tiny_model: LoadedModel) -> FaultyPool:
    return FaultyPool(tiny_model.vocabulary)


@pytest.fixture
def llm(tiny_model: LoadedModel, pool: FaultyPool) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(tiny_model, pool, EngineConfig(max_model_len=256, max_num_seqs=8))
    yield engine
    engine.shutdown()
    assert not engine.health().alive


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    async def all_of_it() -> list[Any]:
        return list(
            await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)
        )

    return asyncio.run(all_of_it())


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **params})


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def test_streams_are_what_the_engine_says_in_one_go(
    llm: AsyncLLM, make_engine: Callable[..., LLMEngine]
) -> None:
    requests = {
        f"r{index}": greedy(max_tokens=10 + index, seed=index, n=1 + index % 2)
        for index in range(12)
    }
    requests["guided"] = greedy(regex="[a-z]{3,9}!")
    streams = together(
        *(
            collect(llm.generate(PROMPT, params, name))
            for name, params in requests.items()
        )
    )
    for (name, params), outputs in zip(requests.items(), streams, strict=True):
        engine = make_engine(max_model_len=256)
        engine.add_request(name, PROMPT, params, stream=False)
        expected = list[RequestOutput]()
        while engine.has_unfinished:
            expected += engine.step()
        assert len(expected) == 1, "without a stream, it is reported at the end only"
        assert [one.token_ids for one in outputs[-1].outputs] == [
            one.token_ids for one in expected[0].outputs
        ]
        texts = [output.outputs[0].text for output in outputs]
        assert all(
            later.startswith(earlier) for earlier, later in itertools.pairwise(texts)
        )
        assert [output.finished for output in outputs][:-1] == [False] * (
            len(outputs) - 1
        )


def test_the_first_output_comes_when_the_constraint_is_compiled(
    llm: AsyncLLM, pool: FaultyPool
) -> None:
    pool.hold_compiles = True

    async def work() -> tuple[bool, RequestOutput]:
        async with aclosing(
            llm.generate(PROMPT, greedy(choice=["yes " * 50]))
        ) as stream:
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: llm.health().num_waiting_for_grammar == 1)
            early = first.done()
            pool.finish_compiles()
            return early, await first

    [(early, first)] = together(work())
    assert not early
    assert first.backend == "llguidance"
    assert not first.finished


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        (PROMPT, {"grammar": "start: ("}, InvalidConstraint),
        ([5] * 300, {}, InvalidRequest),
        (PROMPT, {"max_tokens": 300}, InvalidRequest),
    ],
)
def test_what_is_refused_is_raised_before_anything_is_yielded(
    llm: AsyncLLM, prompt: Any, params: dict[str, Any], error: type[Exception]
) -> None:
    refused, other = together(
        collect(llm.generate(prompt, greedy(**params))),
        collect(llm.generate(PROMPT, greedy())),
    )
    assert isinstance(refused, error)
    assert other[-1].finished


def test_one_id_twice_is_refused_and_the_first_goes_on(llm: AsyncLLM) -> None:
    first, second = together(
        *(collect(llm.generate(PROMPT, greedy(), "same")) for _ in range(2))
    )
    assert first[-1].finished
    assert isinstance(second, ValueError)


def test_leaving_and_cancelling_abort_the_request(llm: AsyncLLM) -> None:
    long = greedy(max_tokens=240, ignore_eos=True)

    async def all_three() -> RequestOutput:
        async with aclosing(llm.generate(PROMPT, long, "left")) as stream:
            await anext(stream)
        task = asyncio.ensure_future(collect(llm.generate(PROMPT, long, "cancelled")))
        await until(lambda: "cancelled" in llm.engine.groups)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outputs = []
        async for output in llm.generate(PROMPT, long, "aborted"):
            outputs.append(output)
            llm.abort("aborted")
        await until(lambda: not llm.engine.groups)
        return outputs[-1]

    [aborted] = together(all_three())
    assert aborted.outputs[0].finish_reason == "abort"
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


def test_when_the_loop_dies_no_stream_stays_open(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.health().alive

    async def die() -> list[Any]:
        work = [
            asyncio.ensure_future(collect(llm.generate(PROMPT, greedy(max_tokens=200))))
            for _ in range(3)
        ]
        await until(lambda: len(llm.engine.groups) == 3)
        monkeypatch.setattr(llm.engine, "execute", lambda batch: 1 / 0)
        return await asyncio.gather(*work, return_exceptions=True)

    [ends] = together(die())
    assert [type(end) for end in ends] == [InternalError] * 3
    assert not llm.health().alive
    assert "ZeroDivisionError" in str(llm.health().error)
    [late] = together(collect(llm.generate(PROMPT, greedy())))
    assert isinstance(late, InternalError)


def test_shutdown_ends_open_streams(tiny_model: LoadedModel) -> None:
    llm = AsyncLLM(tiny_model, "inline", EngineConfig(max_model_len=256))

    async def work() -> Any:
        task = asyncio.ensure_future(
            collect(llm.generate(PROMPT, greedy(max_tokens=250, ignore_eos=True)))
        )
        await until(lambda: bool(llm.engine.groups))
        await asyncio.to_thread(llm.shutdown)
        return await asyncio.gather(task, return_exceptions=True)

    [[end]] = together(work())
    assert isinstance(end, InternalError)
    llm.shutdown()
