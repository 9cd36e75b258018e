"""vLLM's own API with `GUIDED_VLLM=1`: a client's unchanged requests are masked by the pool."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sample_constraints import CITIES, DATE, GBNF, KINDS, LARK, LONG, SCHEMA, Wanted, matches, regex, satisfies
from vllm_engine import mask_actors
from vllm_server import WAIT, Server, serving_vllm, text_of

_NUMBERS = r"<[0-9]{1,4}(,[0-9]{1,4})?>"
TAG = {
    "type": "tag",
    "begin": "<person>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</person>",
}
OWN = {
    "json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, satisfies(SCHEMA)),
    "json text": ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": ""}}, satisfies(SCHEMA)),
    "regex": ({"structured_outputs": {"regex": DATE}}, matches(DATE)),
    "choice": ({"structured_outputs": {"choice": CITIES}}, CITIES.__contains__),
    "lark": ({"structured_outputs": {"grammar": LARK}}, matches(_NUMBERS)),
    "gbnf": ({"structured_outputs": {"grammar": GBNF}}, matches(_NUMBERS)),
    "structural tag": (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}},
        lambda text: satisfies(SCHEMA)(text.removeprefix("<person>").removesuffix("</person>")),
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        satisfies(SCHEMA),
    ),
}


@pytest.fixture(scope="module")
def drop_in(vllm_model: Path) -> Iterator[Server]:
    with serving_vllm(vllm_model, drop_in=True) as server:
        yield server


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", answer.text
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


class TestValidOutputs:
    @pytest.mark.parametrize("chat", [False, True])
    @pytest.mark.parametrize("name", OWN)
    def test_fields_of_vllms_own_api(self, drop_in: Server, name: str, chat: bool) -> None:
        fields, is_valid = OWN[name]
        assert is_valid(text := said(drop_in.post(chat=chat, **fields))), text
        with drop_in.stream(chat=chat, **fields) as coming:
            events = list(coming)
        assert events[-1] == "[DONE]"
        assert is_valid(text_of(events)), text_of(events)

    @pytest.mark.parametrize("wanted", KINDS, ids=lambda wanted: wanted.name)
    def test_vllm_xargs(self, drop_in: Server, wanted: Wanted) -> None:
        assert wanted.is_valid(text := said(drop_in.post(wanted.extra))), text

    def test_many_at_once_beside_unguided_requests(self, drop_in: Server) -> None:
        answers: list[tuple[str, str]] = []

        def ask(name: str) -> None:
            answers.append((name, said(drop_in.post(**OWN[name][0]))))

        def ask_freely() -> None:
            assert drop_in.post(max_tokens=50, ignore_eos=True).json()["choices"][0]["finish_reason"] == "length"

        threads = [threading.Thread(target=ask, args=(name,)) for name in [*OWN] * 4]
        threads += [threading.Thread(target=ask_freely) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert len(answers) == 4 * len(OWN)
        assert [(name, text) for name, text in answers if not OWN[name][1](text)] == []


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"structured_outputs": {"json": {"type": 7}}}, "at '/type'"),
            ({"structured_outputs": {"regex": ""}}, "the regex is empty"),
            ({"structured_outputs": {"choice": ["a", ""]}}, "every choice is a non-empty string"),
            ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos can't be kept"),
            ({"structured_outputs": {"regex": "a"}, "vllm_xargs": {"regex": "a"}}, "takes one constraint"),
            ({"vllm_xargs": {"regexp": "a"}}, "did you mean regex?"),
            ({"vllm_xargs": {"backend": "outlines"}}, "backend needs a constraint"),
        ],
        ids=str,
    )
    def test_an_invalid_request_is_a_400(self, drop_in: Server, fields: dict[str, Any], words: str) -> None:
        answer = drop_in.post(**fields)
        assert answer.status_code == 400, answer.text
        assert words in answer.text

    @pytest.mark.parametrize("chat", [False, True])
    def test_a_constraint_that_does_not_compile_is_a_400(self, drop_in: Server, chat: bool) -> None:
        answer = drop_in.post(chat=chat, structured_outputs={"regex": "(a"})
        assert answer.status_code == 400, answer.text
        with drop_in.stream(chat=chat, structured_outputs={"regex": "(a"}) as coming:
            events = [event for event in coming if isinstance(event, dict) and "error" in event]
        assert [event["error"]["code"] for event in events] == [400]

    def test_other_routes_report_a_failure(self, drop_in: Server) -> None:
        text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "string", "pattern": "(a"}}}
        answer = httpx.post(
            f"{drop_in.url}/v1/responses", json={"model": drop_in.model, "input": "Text", "text": text}, timeout=WAIT
        )
        assert answer.status_code >= 400, answer.text


class TestFaults:
    def test_an_actor_that_is_killed(self, drop_in: Server) -> None:
        """The pool replays the outputs on the other actor: no request fails."""
        texts: list[str] = []
        begun = threading.Semaphore(0)

        def stream() -> None:
            with drop_in.stream(structured_outputs=LONG.extra, max_tokens=450) as coming:
                events: list[Any] = []
                for event in coming:
                    events.append(event)
                    if len(events) == 10:
                        begun.release()
            texts.append(text_of(events))

        threads = [threading.Thread(target=stream) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert begun.acquire(timeout=WAIT)
        mask_actors(drop_in.process.pid)[0].send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(WAIT)
        assert len(texts) == 8
        assert [text for text in texts if not LONG.is_valid(text)] == []

    def test_a_slow_compilation_stalls_no_other_request(self, drop_in: Server) -> None:
        slow = regex("[ab]*a[ab]{25}", backend="outlines")
        ended, gaps = threading.Event(), []

        def compile_slowly() -> None:
            drop_in.post(slow.extra, max_tokens=5)
            ended.set()

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        with drop_in.stream(max_tokens=200, ignore_eos=True) as coming:
            last = time.monotonic()
            for _ in coming:
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        assert not ended.is_set(), "the constraint was compiled too soon: the test is void"
        assert max(gaps[1:]) < 5
        thread.join(WAIT)


def test_the_pool_is_in_the_metrics(drop_in: Server) -> None:
    until = time.monotonic() + WAIT
    while "guided_mask_actors_up 2.0" not in (text := httpx.get(f"{drop_in.url}/metrics", timeout=WAIT).text):
        assert time.monotonic() < until, text
        time.sleep(0.5)
    assert "guided_mask_actors 2.0" in text
    assert "vllm:num_requests_running" in text
