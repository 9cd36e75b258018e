"""vLLM's V2 runner with asynchronous scheduling, as on GPUs: on the device of
`benchmarks.fake_device`.

That module says what the device can't show: CUDA graphs, races of streams, compiled
kernels, several devices, EAGLE.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_device import ENVIRONMENT
from tests.vllm.sample_constraints import KINDS, SCHEMA, regex, satisfies
from tests.vllm.test_server import STRICT, at_once, said
from tests.vllm.vllm_server import WAIT, Server, serving_vllm, text_of

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

LONG = regex("[a-z ]{150}")


def test_late_rows_with_draft_tokens() -> None:
    """Tests of `test_manager.py`, in a process of their own. All of them pass there,
    but take minutes."""
    tests = [
        "tests/vllm/test_manager.py",
        "-k",
        "TestLateMasks and v2-drafts and (some or kept)",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in run.stdout, run.stdout[-4000:]


@pytest.fixture(scope="module")
def v2_server(vllm_model: Path) -> Iterator[Server]:
    """Twelve long requests don't fit into its blocks, so some are preempted."""
    few_blocks = ("--block-size", "32", "--num-gpu-blocks-override", "17")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving_vllm(
        vllm_model, *few_blocks, *tools, module="benchmarks.fake_device"
    ) as server:
        yield server


def test_kinds_and_tools(v2_server: Server) -> None:
    bad: list[str] = []

    def ask(chat: bool, wanted: Any) -> None:
        if not wanted.is_valid(text := said(v2_server.post(chat, **wanted.fields))):
            bad.append(f"{wanted.name}: {text}")

    def call() -> None:
        answer = v2_server.post(True, tools=[STRICT], tool_choice="required").json()
        for made in answer["choices"][0]["message"]["tool_calls"]:
            if not satisfies(SCHEMA)(made["function"]["arguments"]):
                bad.append(str(made))

    at_once(
        call,
        *(
            lambda wanted=wanted: ask(wanted.name == "schema", wanted)
            for wanted in KINDS
        ),
    )  # type: ignore[misc]
    assert bad == []


def test_preempted_requests_and_killed_actors(v2_server: Server) -> None:
    before, texts, begun = (
        v2_server.metric("vllm:num_preemptions_total"),
        list[str](),
        threading.Semaphore(0),
    )

    def stream() -> None:
        events: list[Any] = []
        with v2_server.stream(**LONG.fields) as coming:
            for event in coming:
                events.append(event)
                if len(events) == 5:
                    begun.release()
        texts.append(text_of(events))

    def kill() -> None:
        for _ in range(2):
            assert begun.acquire(timeout=WAIT)
        v2_server.mask_actors()[0].send_signal(signal.SIGKILL)

    at_once(kill, *[stream] * 12)
    assert [LONG.is_valid(text) for text in texts] == [True] * 12, texts
    assert v2_server.metric("vllm:num_preemptions_total") > before, (
        "no request was preempted: the test is void"
    )
