"""The plugin and its middleware in a real `vllm serve`, from the client's side."""

from __future__ import annotations

import signal
import threading
from typing import Any

import httpx
import pytest
from sample_constraints import KINDS, LONG, Wanted, regex
from vllm_engine import mask_actors
from vllm_server import WAIT, Server, text_of


def said(answer: httpx.Response) -> str:
    (choice,) = answer.json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("wanted", KINDS, ids=lambda wanted: wanted.name)
class TestEveryKind:
    def test_not_streamed(self, server: Server, wanted: Wanted, chat: bool) -> None:
        answer = server.post(wanted.extra, chat)
        assert answer.status_code == 200, answer.text
        assert wanted.is_valid(said(answer)), said(answer)

    def test_streamed(self, server: Server, wanted: Wanted, chat: bool) -> None:
        with server.stream(wanted.extra, chat) as coming:
            events = list(coming)
        assert events[-1] == "[DONE]"
        assert wanted.is_valid(text_of(events)), text_of(events)


class TestErrors:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("chat", [False, True])
    def test_a_constraint_that_does_not_compile_is_a_400_with_our_body(
        self, server: Server, chat: bool, stream: bool
    ) -> None:
        answer = server.post({"regex": "(a"}, chat, stream=stream)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_constraint", "invalid_request_error")
        assert answer.headers["x-should-retry"] == "false"

    def test_a_rejection_before_compilation_is_vllms_400_with_our_message(self, server: Server) -> None:
        answer = server.post({"json_schema": '{"type": 7}'})
        assert answer.status_code == 400
        assert "at '/type'" in answer.text

    @pytest.mark.parametrize("chat", [False, True])
    def test_guided_beam_search_is_rejected(self, server: Server, chat: bool) -> None:
        answer = server.post({"regex": "[0-9]{3}"}, chat, use_beam_search=True, n=2, max_tokens=8)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "use_beam_search"
        answer = server.post(None, chat, use_beam_search=True, n=2, max_tokens=8)
        assert answer.status_code == 200, answer.text

    def test_two_users_of_one_id_get_their_own_errors(self, server: Server) -> None:
        answers: dict[str, httpx.Response] = {}

        def ask(pattern: str) -> None:
            answers[pattern] = server.post({"regex": pattern, "guided_request_id": "1"})

        threads = [threading.Thread(target=ask, args=(pattern,)) for pattern in ("[a-c]{200}", "(a")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert {pattern: answer.status_code for pattern, answer in answers.items()} == {"[a-c]{200}": 200, "(a": 400}

    def test_an_unguided_request(self, server: Server) -> None:
        answer = server.post(max_tokens=5)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    def test_an_actor_that_is_killed_during_streams(self, server: Server) -> None:
        """Four streams and four whole answers, on two actors: those on the killed actor end with an error."""
        seen, answers, lock, begun = {}, {}, threading.Lock(), threading.Semaphore(0)

        def stream(index: int) -> None:
            with server.stream(LONG.extra, chat=bool(index % 2), max_tokens=450) as coming:
                events: list[Any] = []
                for event in coming:
                    events.append(event)
                    if len(events) == 10:
                        begun.release()
            with lock:
                seen[index] = events

        def post(index: int) -> None:
            answer = server.post(LONG.extra, chat=bool(index % 2), max_tokens=450)
            with lock:
                answers[index] = answer

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4) for work in (stream, post)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            assert begun.acquire(timeout=WAIT)
        victim, *others = mask_actors(server.process.pid)
        assert others
        victim.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(WAIT)
        assert len(seen) == len(answers) == 4

        lost = 0
        for events in seen.values():
            if "error" in events[-1]:
                lost += 1
                assert events[-1]["error"]["code"] == "worker_died"
                assert regex("[a-z ]+").is_valid(text_of(events))
            else:
                assert events[-1] == "[DONE]"
                assert LONG.is_valid(text_of(events))
        for answer in answers.values():
            if answer.status_code == 500:
                lost += 1
                assert answer.json()["error"]["code"] == "worker_died"
                assert answer.headers["x-should-retry"] == "true"
            else:
                assert LONG.is_valid(said(answer))
        assert 1 <= lost < 8
        assert httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 200
        assert KINDS[0].is_valid(said(server.post(KINDS[0].extra)))
