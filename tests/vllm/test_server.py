"""`GUIDED_VLLM=1 vllm serve`: a client's unchanged requests are masked by the pool."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import wait_until

from tests.vllm.sample_constraints import (
    BACKENDS,
    KINDS,
    LONG,
    SCHEMA,
    Wanted,
    matches,
    regex,
    satisfies,
)
from tests.vllm.vllm_server import WAIT, Server, command, text_of

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

STRICT = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": SCHEMA},
}
NAMED = {"type": "function", "function": {"name": "add"}}


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", answer.text
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def at_once(*work: Callable[[], object]) -> None:
    """Call these functions on a thread each, and wait for all of them."""
    with ThreadPoolExecutor(len(work)) as threads:
        for future in [threads.submit(one) for one in work]:
            future.result(WAIT)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("wanted", KINDS, ids=lambda wanted: wanted.name)
def test_every_kind(server: Server, wanted: Wanted, chat: bool) -> None:
    assert wanted.is_valid(text := said(server.post(chat, **wanted.fields))), text
    with server.stream(chat, **wanted.fields) as coming:
        events = list(coming)
    assert events[-1] == "[DONE]"
    assert wanted.is_valid(text_of(events)), text_of(events)


class TestOutputs:
    @pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
    def test_tools(self, server: Server, choice: Any) -> None:
        answer = server.post(True, tools=[STRICT], tool_choice=choice)
        assert answer.status_code == 200, answer.text
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        assert calls
        assert all(
            satisfies(SCHEMA)(call["function"]["arguments"]) for call in calls
        ), calls
        with server.stream(True, tools=[STRICT], tool_choice=choice) as coming:
            events = [event for event in coming if event != "[DONE]"]
        deltas = [
            part
            for event in events
            for one in event["choices"]
            for part in one["delta"].get("tool_calls") or ()
        ]
        first = "".join(
            part["function"].get("arguments") or ""
            for part in deltas
            if part["index"] == 0
        )
        assert satisfies(SCHEMA)(first), first

    def test_responses(self, server: Server) -> None:
        text = {
            "format": {
                "type": "json_schema",
                "name": "person",
                "schema": SCHEMA,
                "strict": True,
            }
        }
        body = {
            "model": server.model,
            "input": "Text",
            "text": text,
            "max_output_tokens": 300,
        }
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=WAIT)
        assert answer.status_code == 200, answer.text
        (message,) = [
            item for item in answer.json()["output"] if item["type"] == "message"
        ]
        assert satisfies(SCHEMA)(message["content"][0]["text"]), message

    def test_several_choices_end_at_every_end_token(self, server: Server) -> None:
        """vLLM hands the model's second end token over in `stop_token_ids`."""
        choices = server.post(n=24, **regex("[ab]").fields).json()["choices"]
        assert all(matches("[ab]")(choice["text"]) for choice in choices)
        reasons = {choice["stop_reason"] for choice in choices}
        assert len(reasons) == 2, "both are equally probable"
        assert None in reasons, "the tokenizer's own"

    @pytest.mark.parametrize(
        "sampling",
        [{"min_tokens": 200}, {"logit_bias": {"65": 50.0}}, {"temperature": 0}],
        ids=str,
    )
    def test_the_mask_wins(self, server: Server, sampling: dict[str, Any]) -> None:
        answer = server.post(**regex("[0-9]{4}").fields, **sampling)
        assert matches("[0-9]{4}")(answer.json()["choices"][0]["text"].strip()), (
            answer.text
        )

    def test_kinds_and_backends_beside_unguided_requests(self, server: Server) -> None:
        before, bad = server.metric("guided_requests_total"), []

        def ask(wanted: Wanted) -> None:
            if not wanted.is_valid(text := said(server.post(**wanted.fields))):
                bad.append((wanted.name, text))

        def ask_freely() -> None:
            assert (
                server.post(max_tokens=50, ignore_eos=True).json()["choices"][0][
                    "finish_reason"
                ]
                == "length"
            )

        work = [*KINDS, *BACKENDS] * 2
        at_once(*(lambda one=one: ask(one) for one in work), *[ask_freely] * 4)  # type: ignore[misc]
        assert bad == []
        assert server.metric("guided_requests_total") == before + len(work)


class TestBatches:
    def test_preempted_requests_continue(self, server: Server) -> None:
        before, texts = server.metric("vllm:num_preemptions_total"), list[str]()
        at_once(
            *[lambda: texts.append(said(server.post(max_tokens=450, **LONG.fields)))]
            * 10
        )
        assert len(texts) == 10
        assert all(map(LONG.is_valid, texts))
        assert server.metric("vllm:num_preemptions_total") > before, (
            "no request was preempted: the test is void"
        )

    def test_aborted_requests_leave_their_rows(self, server: Server) -> None:
        texts = list[str]()

        def abort() -> None:
            with server.stream(max_tokens=450, **LONG.fields) as coming:
                for _ in range(5):
                    next(coming)

        at_once(
            *[
                abort,
                lambda: texts.append(said(server.post(max_tokens=450, **LONG.fields))),
            ]
            * 4
        )
        assert len(texts) == 4
        assert all(map(LONG.is_valid, texts))
        wait_until(lambda: not server.metric("guided_mask_open_sequences"), WAIT)


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"structured_outputs": {"json": {"type": 7}}}, "at '/type'"),
            (
                {
                    "structured_outputs": {"regex": "a"},
                    "vllm_xargs": {"guided_backend": "guesswork"},
                },
                "guesswork",
            ),
            ({"vllm_xargs": {"regex": "a"}}, "use structured_outputs"),
        ],
        ids=str,
    )
    def test_an_invalid_request_is_a_400(
        self, server: Server, fields: dict[str, Any], words: str
    ) -> None:
        answer = server.post(**fields)
        assert answer.status_code == 400, answer.text
        assert words in answer.text

    def test_constraints_that_do_not_compile_are_400s(self, server: Server) -> None:
        with ThreadPoolExecutor(8) as threads:
            asked = [
                threads.submit(
                    server.post,
                    bool(number % 2),
                    structured_outputs={"regex": f"(a{number}"},
                )
                for number in range(80)
            ]
        assert [one.result().status_code for one in asked] == [400] * 80

    @pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
    def test_a_stream_that_does_not_compile_is_a_400(
        self, server: Server, chat: bool
    ) -> None:
        with server.stream(chat, structured_outputs={"regex": "(a"}) as coming:
            events = [
                event
                for event in coming
                if isinstance(event, dict) and "error" in event
            ]
        assert [event["error"]["code"] for event in events] == [400]


class TestFaults:
    @pytest.mark.parametrize("killed", [1, 2])
    def test_actors_that_are_killed(self, server: Server, killed: int) -> None:
        """The pool replays the outputs on an actor that is up: no request fails."""
        texts = list[str]()
        begun, all_begun = threading.Semaphore(0), 8

        def stream() -> None:
            events: list[Any] = []
            with server.stream(max_tokens=450, **LONG.fields) as coming:
                for event in coming:
                    events.append(event)
                    if len(events) == 10:
                        begun.release()
            texts.append(text_of(events))

        def kill() -> None:
            for _ in range(3):
                assert begun.acquire(timeout=WAIT)
            for actor in server.mask_actors()[:killed]:
                actor.send_signal(signal.SIGKILL)

        at_once(kill, *[stream] * all_begun)
        assert len(texts) == all_begun
        assert [text for text in texts if not LONG.is_valid(text)] == []

    def test_a_slow_compilation_stalls_no_other_request(self, server: Server) -> None:
        ended, gaps, statuses = threading.Event(), [], []

        def compile_slowly() -> None:
            statuses.append(
                server.post(
                    max_tokens=5, **regex("[ab]*a[ab]{25}", "outlines").fields
                ).status_code
            )
            ended.set()

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        with server.stream(max_tokens=200, ignore_eos=True) as coming:
            last = time.monotonic()
            for _ in coming:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        assert not ended.is_set(), (
            "the constraint was compiled too soon: the test is void"
        )
        assert max(gaps[1:]) < 5
        thread.join(WAIT)
        assert statuses == [400]


def test_the_pool_is_in_the_metrics(server: Server) -> None:
    wait_until(lambda: server.metric("guided_mask_actors_up") == 2, WAIT)
    assert server.metric("guided_mask_actors") == 2


def test_an_untested_version_does_not_start(vllm_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from guided.integrations.vllm import activation\nactivation.TESTED_VERSIONS = ('0.1.0',)\n"
    )
    environment = {**os.environ, "GUIDED_VLLM": "1", "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command(vllm_model, 0),
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert run.returncode != 0
    assert (
        "GUIDED_VLLM=1 works with vLLM 0.1.0, and this is vLLM"
        in run.stderr + run.stdout
    )
