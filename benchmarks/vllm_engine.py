"""Measure steps of vLLM's engine in this process, without a server: a child of
`benchmarks.vllm`.

`python -m benchmarks.vllm_engine OPTIONS` runs in vLLM's environment. OPTIONS and the
printed rows are JSON.

The case `steady` has N requests at once. For some N, further cases have N requests
beside one request: in `late` its masks take `SLOW_SECONDS`, in `new schema` it joins in
the middle with a new schema. In `actors killed`, mask actors are killed in the middle.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from benchmarks import report
from benchmarks.fake_device import use
from benchmarks.injected_faults import SLOW_SECONDS
from benchmarks.serving import MESSAGES, NAMES, SCHEMAS, endless_schema

SETTLED = 8
"""Number of tokens after which the gaps of a request count."""
MIDDLE = 0.4
"""Share of the run after which the event in the middle happens."""


def schema_with(name: str) -> dict[str, Any]:
    """Return an endless schema with a property of this name."""
    schema = endless_schema(0)
    item = schema["items"]
    item["properties"][name] = {"type": "string", "maxLength": 30}
    item["required"].append(name)
    return schema


class Engine:
    """vLLM's engine, one step at a time."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options["step_seconds"]:
            use()
        from vllm import LLM

        simulated = {
            "worker_cls": "benchmarks.simulated_worker.SimulatedWorker",
            "enforce_eager": True,
        }
        outputs = (
            {"backend": options["backend"], "disable_any_whitespace": True}
            if options["backend"]
            else {}
        )
        self._llm = LLM(
            model=options["model"],
            max_model_len=1024,
            max_num_seqs=max(options["requests"]) + 2,
            disable_log_stats=True,
            enable_prefix_caching=options["prefix_caching"],
            structured_outputs_config=outputs,
            additional_config={"guided": {"num_actors": 2}}
            if options["switch"]
            else {},
            **(simulated if options["step_seconds"] else {}),
        ).llm_engine
        self._core = self._llm.engine_core.engine_core
        self._is_guided = options["backend"] is not None
        self._tokens = options["tokens"]
        self._ids = itertools.count()
        tokenizer = self._llm.get_tokenizer()
        self._prompt = tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True
        )

    def add(self, schema: dict[str, Any] | None, tokens: int) -> str:
        """Add a request. Returns vLLM's internal id."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        structured = (
            {"structured_outputs": StructuredOutputsParams(json=schema)}
            if schema
            else {"ignore_eos": True}
        )
        params = SamplingParams(max_tokens=tokens, temperature=1.0, **structured)
        before = set(self._core.scheduler.requests)
        self._llm.add_request(str(next(self._ids)), self._prompt, params)
        (added,) = set(self._core.scheduler.requests) - before
        return str(added)

    def run(
        self,
        count: int,
        victim: dict[str, Any] | None = None,
        in_the_middle: Callable[[], Any] | None = None,
    ) -> tuple[list[list[float]], list[float]]:
        """Run `count` requests, perhaps with another request from the start, or with an
        event in the middle.

        Returns:
            The times of the tokens of the `count` requests, and of the other request.
            If it joined in the middle, they
            start at that time.
        """
        others = [
            self.add(
                endless_schema(i % SCHEMAS) if self._is_guided else None, self._tokens
            )
            for i in range(count)
        ]
        other = self.add(victim, self._tokens) if victim else ""
        times: dict[str, list[float]] = defaultdict(list)
        while len(times[others[0]]) < self._tokens or any(
            len(times[name]) < self._tokens for name in others
        ):
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            now = time.perf_counter()
            for output in outputs[0].outputs if outputs and 0 in outputs else ():
                times[output.request_id] += [now] * len(output.new_token_ids)
            if not executed:
                time.sleep(0.001)  # as vLLM's loop does
            if (
                in_the_middle is not None
                and len(times[others[0]]) > MIDDLE * self._tokens
            ):
                begun = time.perf_counter()
                other = in_the_middle() or ""
                times[other].append(begun)
                in_the_middle = None
        self._core.abort_requests(list(self._core.scheduler.requests))
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._core.step_fn()
        return [times[name] for name in others], times[other]


def gaps(times: list[list[float]]) -> list[float]:
    return [
        after - before
        for each in times
        for before, after in itertools.pairwise(each[SETTLED:])
    ]


def figures(case: str, count: int, times: list[list[float]]) -> dict[str, Any]:
    """Return the row of a run. Times are in milliseconds."""
    found = gaps(times)
    seconds = max(each[-1] for each in times) - min(each[SETTLED] for each in times)
    row = {"case": case, "requests": count, "tokens_per_second": len(found) / seconds}
    row |= {f"itl_{name}": value for name, value in report.percentiles(found).items()}
    return {**row, "itl_max": round(1e3 * max(found), 3)}


def kill_actors(number: int) -> None:
    """Kill mask actors of this process's pool."""
    family = psutil.Process().children(recursive=True)
    actors = [
        process for process in family if process.name().startswith("ray::MaskActor")
    ]
    for actor in actors[:number]:
        actor.send_signal(signal.SIGKILL)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    engine = Engine(options)
    rows = []
    for count in options["requests"]:
        engine.run(max(count, SCHEMAS))  # compiles and warms up
        times, _ = engine.run(count)
        rows.append(figures("steady", count, times))
        if count not in options["beside"] or not options["backend"]:
            continue
        step = rows[-1]["itl_p50"]
        if options["backend"] == "guidance":
            times, victim = engine.run(count, schema_with("injected_sleep"))
            row = figures("late", count, times)
            between = [after - before for before, after in itertools.pairwise(victim)]
            late = [gap for gap in between if gap > 0.8 * SLOW_SECONDS]
            row["late_steps"] = [
                round((1e3 * (gap - SLOW_SECONDS)) / step, 2) for gap in late
            ]
            row["to_steady"] = round(row["itl_p99"] / rows[-1]["itl_p99"], 3)
            rows.append(row)
        for number in range(options["rounds"]):
            name = f"{NAMES[number]}_{count}_{number}"
            times, new = engine.run(
                count, in_the_middle=partial(engine.add, schema_with(name), 40)
            )
            rows.append(
                {
                    **figures("new schema", count, times),
                    "ttft": round(1e3 * (new[1] - new[0]), 1),
                }
            )
        if options["switch"]:
            for number in (1, 2):
                times, _ = engine.run(count, in_the_middle=partial(kill_actors, number))
                rows.append(figures(f"{number} of 2 actors killed", count, times))
    return rows


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's engine in this process need not be taken apart
