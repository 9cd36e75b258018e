"""One engine and one fault in a process of its own: `python -m benchmarks.faults.host ENGINE FAULT MODEL`.

Writes a line of JSON to stdout after each stage, so that what was seen before an end is known; what libraries print
goes to stderr. Ends without tidying up where the engine can't be talked to any more: whoever started it ends the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence

from benchmarks.faults.asked import Answer, Asked, bystanders, next_requests, victim
from benchmarks.faults.engines import Engine, ours, vllm

__all__ = ["REQUEST_SECONDS"]

REQUEST_SECONDS = 60.0
"""A request that isn't over by then counts as hung."""
NEXT_SECONDS = 20.0


async def ask(engine: Engine, request_id: str, asked: Asked, limit: float) -> Answer:
    """One request to its end, or to `limit` seconds."""
    answer = Answer(asked.name)
    begun = last = time.perf_counter()

    async def follow() -> None:
        nonlocal last
        async for answer.text, answer.tokens, answer.finish_reason, answer.error in engine.generate(request_id, asked):
            now = time.perf_counter()
            answer.longest_gap = max(answer.longest_gap, now - last)
            last = now

    try:
        await asyncio.wait_for(follow(), limit)
    except TimeoutError:
        answer.hung = True
    except Exception as error:  # what a client is told: part of what is measured
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - begun
    answer.longest_gap = max(answer.longest_gap, time.perf_counter() - last)
    return answer


async def ask_all(engine: Engine, name: str, all_asked: Sequence[Asked], limit: float) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(
        *(ask(engine, f"{name}-{index}", asked, limit) for index, asked in enumerate(all_asked))
    )


async def state(engine: Engine) -> str:
    try:
        return await asyncio.wait_for(engine.state(), NEXT_SECONDS)
    except Exception as error:
        return f"dead: {type(error).__name__}"


async def run(engine_name: str, fault: str, model: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(stage: str, **what: object) -> None:
        answers.write(json.dumps({"stage": stage, **what}) + "\n")
        answers.flush()

    name, _, option = engine_name.partition(":")
    engine = vllm(model, option == "plugin") if name == "vllm" else ours(model, int(option))
    others = bystanders()
    for stage, marked in (("warm-up", False), ("without", False), ("with", True)):
        tell(f"begins {stage}")
        asked = [victim(fault, marked), *others]
        found = await ask_all(engine, stage, asked, REQUEST_SECONDS)
        tell(stage, answers=[dataclasses.asdict(answer) for answer in found])
    tell("state", engine=await state(engine))
    found = await ask_all(engine, "next", next_requests(), NEXT_SECONDS)
    tell("next", answers=[dataclasses.asdict(answer) for answer in found], engine=await state(engine))


def main() -> None:
    engine_name, fault, model = sys.argv[1:]
    asyncio.run(run(engine_name, fault, model))


if __name__ == "__main__":
    main()
