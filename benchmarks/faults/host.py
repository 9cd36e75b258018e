"""Run one engine and one fault, as a child process of `benchmarks.vllm_faults`. The arguments are ENGINE, FAULT, MODEL.

Writes a line of JSON to stdout after each stage, so that the parent has the results before a crash. Where the engine no
longer answers, it ends without cleaning up, and the parent kills the remaining processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.child_process import answer_writer
from benchmarks.faults.engines import Engine, ours, vllm
from benchmarks.faults.requests import Answer, Request, bystanders, next_requests, victim

REQUEST_SECONDS = 60.0
"""A request that takes longer counts as hung."""
NEXT_SECONDS = 20.0
FREE_TOKENS, BEGUN_TOKENS, KILL_SECONDS = 800, 20, 0.5


async def ask(engine: Engine, request_id: str, request: Request, limit: float, answer: Answer | None = None) -> Answer:
    """Run one request to its end, or for `limit` seconds. `answer` is filled meanwhile."""
    answer = answer or Answer(request.name)
    begun = last = time.perf_counter()

    async def follow() -> None:
        nonlocal last
        async for output in engine.generate(request_id, request):
            now = time.perf_counter()
            if answer.tokens:  # the time to the first token is no gap
                answer.longest_gap = max(answer.longest_gap, now - last)
            answer.text, answer.tokens, answer.finish_reason, answer.error = output
            last = now

    try:
        await asyncio.wait_for(follow(), limit)
    except TimeoutError:
        answer.hung = True
    except Exception as error:  # the error that a client gets is part of the result
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - begun
    answer.longest_gap = max(answer.longest_gap, time.perf_counter() - last)
    return answer


async def ask_all(engine: Engine, name: str, requests: Sequence[Request], limit: float) -> list[Answer]:
    """Run all requests at once."""
    return await asyncio.gather(
        *(ask(engine, f"{name}-{index}", request, limit) for index, request in enumerate(requests))
    )


async def ask_first(engine: Engine, request: Request) -> list[Answer]:
    """Run the first guided request beside two that are not guided and have begun. Returns the latter's answers."""
    plain = [Answer(f"plain {index}") for index in range(2)]
    free = Request("plain", FREE_TOKENS)
    running = [
        asyncio.ensure_future(ask(engine, f"first-{index}", free, REQUEST_SECONDS, answer))
        for index, answer in enumerate(plain)
    ]
    while any(answer.tokens < BEGUN_TOKENS for answer in plain) and not all(task.done() for task in running):
        await asyncio.sleep(0.01)
    for answer in plain:
        answer.longest_gap = 0.0
    await ask(engine, "first-guided", request, REQUEST_SECONDS)
    return await asyncio.gather(*running)


async def kill_an_actor() -> None:
    """Kill one of this process's mask actors, after a while."""
    await asyncio.sleep(KILL_SECONDS)
    family = psutil.Process().children(recursive=True)
    actors = [process for process in family if process.name().startswith("ray::MaskActor")]
    if not actors:
        raise RuntimeError("there is no mask actor to kill: the pool is not open")
    actors[0].kill()


async def state(engine: Engine) -> str:
    try:
        return await asyncio.wait_for(engine.state(), NEXT_SECONDS)
    except Exception as error:
        return f"dead: {type(error).__name__}"


async def run(engine_name: str, fault: str, model: str) -> None:
    write = answer_writer()

    def report(stage: str, **fields: object) -> None:
        write({"stage": stage, **fields})

    name, _, option = engine_name.partition(":")
    backend = "outlines" if fault == "slow compile" and not option else "guidance"
    engine = vllm(model, option, backend) if name == "vllm" else ours(model, int(option))
    others = bystanders()
    report("first", answers=[dataclasses.asdict(answer) for answer in await ask_first(engine, others[0])])
    for stage, marked in (("warm-up", False), ("without", False), ("with", True)):
        report(f"begins {stage}")
        requests = [victim(fault, marked), *others]
        killing = asyncio.ensure_future(kill_an_actor()) if fault == "killed actor" and marked else None
        found = await ask_all(engine, stage, requests, REQUEST_SECONDS)
        if killing is not None:
            await killing
        report(stage, answers=[dataclasses.asdict(answer) for answer in found])
    report("state", engine=await state(engine))
    found = await ask_all(engine, "next", next_requests(), NEXT_SECONDS)
    report("next", answers=[dataclasses.asdict(answer) for answer in found], engine=await state(engine))


def main() -> None:
    engine_name, fault, model = sys.argv[1:]
    asyncio.run(run(engine_name, fault, model))


if __name__ == "__main__":
    main()
