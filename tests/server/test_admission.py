"""Size and shape of a body are checked first, and everything that takes time runs in threads of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Request
from starlette.testclient import TestClient

from engine.logprobs import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.admission_threads import AdmissionThreads
from engine.server.answers import Answer, ChoicesAnswer
from engine.server.errors import QueueFull
from engine.server.generation import Job
from engine.server.protocol import MAX_IGNORED

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
MANY = dict.fromkeys(map(str, range(1025)), "x")
TOKENS = list(range(1000))


def refusal(client: TestClient, path: str, body: bytes | dict[str, Any]) -> tuple[str, str | None, str]:
    """Code, param and message of a 400."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert len(error["message"]) < 1000
    return error["code"], error["param"], error["message"]


class TestBodies:
    @pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
    @pytest.mark.parametrize(
        ("body", "code", "says"),
        [
            (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "'prompt' occurs twice"),
            (b'{"json_schema": {"a": 1, "a": 2}}', "invalid_json", "'a' occurs twice"),
            (b'{"json_schema": ' + b"[" * 100_000, "body_too_complex", "nested deeper than 256"),
            (b'{"messages": [' + b"0," * 300_000 + b"0]}", "body_too_complex", "more than 200000 values"),
            (b'{"prompt": [' + b'"",' * 300_000 + b'""]}', "body_too_complex", "more than 200000 values"),
            (
                b'{"prompt": [' + b"[]," * 30_000 + b"[]]}",
                "body_too_complex",
                "more than 25000 keys, objects and arrays",
            ),
            (b'{"x": {' + b'"k":0,' * 30_000 + b"}}", "body_too_complex", "more than 25000 keys"),
            (b'{"n": ' + b"1" * 4000 + b"}", "body_too_complex", "a number has more than 100 characters"),
            (b'{"prompt": "a"', "invalid_json", "at character"),
            (b'{"prompt": "\xff"}', "invalid_json", "not UTF-8"),
            ('{"prompt": "a"}'.encode("utf-16"), "invalid_json", "not UTF-8"),
        ],
        ids=lambda each: each[:20].decode("latin-1") if isinstance(each, bytes) else "",
    )
    def test_size_and_shape_come_first(self, client: TestClient, path: str, body: bytes, code: str, says: str) -> None:
        found, param, message = refusal(client, path, body)
        assert (found, param) == (code, None)
        assert says in message

    def test_a_compressed_body_is_refused_by_name(self, client: TestClient) -> None:
        body = gzip.compress(b'{"prompt": "a"}')
        answer = client.post(TEXT, content=body, headers={**JSON, "content-encoding": "gzip"})
        assert answer.status_code == 400
        assert "content-encoding gzip is not supported" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
    def test_other_content_types_are_refused(self, client: TestClient, content_type: str) -> None:
        """A page of another site can send these without asking first."""
        answer = client.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": content_type})
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (TEXT, {"prompt": [None] * 150_000}, "prompt"),
            (TEXT, {"prompt": [0] * 150_000 + [None]}, "prompt"),
            (TEXT, {"prompt": [[0], *([None] * 200)]}, "prompt"),
            (TEXT, {"prompt": [640], "echo": True}, "prompt"),
            (CHAT, {"messages": [0] * 500}, "messages[0]"),
            (CHAT, {"messages": [{"role": "user", "content": [0] * 150_000}]}, "messages[0].content"),
            (TEXT, {"prompt": "a", "stop": [0] * 150_000}, "stop"),
            (TEXT, {"prompt": "a", "choice": [0] * 150_000}, "choice"),
            ("/detokenize", {"tokens": [None] * 150_000}, "tokens"),
        ],
    )
    def test_many_errors_are_reported_as_one(
        self, client: TestClient, path: str, body: dict[str, Any], param: str
    ) -> None:
        _, found, _ = refusal(client, path, body)
        assert found is not None
        assert found.startswith(param)

    def test_many_unknown_fields(self, client_with: Callable[..., TestClient]) -> None:
        body = {"prompt": "a", **{f"unknown-{number}": 0 for number in range(20_000)}}
        assert refusal(client_with(strict_fields=True), TEXT, body)[:2] == ("unknown_parameter", "unknown-0")
        answer = client_with().post(TEXT, json=body)
        assert answer.json()["guided"]["ignored"] == [f"unknown-{number}" for number in range(MAX_IGNORED)]


class TestCounts:
    @pytest.mark.parametrize(
        ("path", "fields", "param", "says"),
        [
            (
                CHAT,
                {"messages": [{"role": "user", "content": "a"}] * 600},
                "messages",
                "600 messages; the context of 512",
            ),
            (TEXT, {"prompt": ["a"] * 257}, "prompt", "257 prompts with n = 1; the limit of one request is 256"),
            (TEXT, {"prompt": [[1]] * 100, "n": 3}, "prompt", "100 prompts with n = 3"),
            (TEXT, {"prompt": [[1]] * 100, "best_of": 3}, "prompt", "100 prompts with best_of = 3"),
            (TEXT, {"prompt": "a", "n": 300}, "n", "n is 300"),
            (TEXT, {"prompt": "a", "stop": ["x"] * 65}, "stop", "65 strings; the limit is 64"),
            (TEXT, {"prompt": "a", "stop": "x" * 1001}, "stop", "1001 characters; the limit is 1000"),
            (TEXT, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids", "1025 tokens; the limit is 1024"),
            (TEXT, {"prompt": "a", "logit_bias": MANY}, "logit_bias", "1025 entries"),
            (TEXT, {"prompt": "a", "vllm_xargs": MANY}, "vllm_xargs", "1025 entries"),
        ],
    )
    def test_a_limit_is_named(
        self, client: TestClient, path: str, fields: dict[str, Any], param: str, says: str
    ) -> None:
        code, found, message = refusal(client, path, {**fields, "max_tokens": 1})
        assert (code, found) == ("invalid_request", param)
        assert says in message

    def test_outputs_count_as_requests_in_flight(self, client_with: Callable[..., TestClient]) -> None:
        client = client_with(max_requests=5)
        assert client.post(TEXT, json={"prompt": ["a", "b"], "n": 2, "max_tokens": 1}).status_code == 200
        assert refusal(client, TEXT, {"prompt": ["a", "b"], "n": 3, "max_tokens": 1})[1] == "prompt"
        with client.app.state.context.admit(2, "another client"):  # type: ignore[attr-defined]
            assert client.post(TEXT, json={"prompt": "a", "n": 4, "max_tokens": 1}).status_code == 429


class TestTexts:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (TEXT, {"prompt": ["word " * 300] * 64, "n": 4, "logprobs": 20, "max_tokens": 100}),
            (TEXT, {"prompt": ["word " * 300] * 64, "logprobs": 20, "regex": "a+"}),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 300}], "n": 64, "logprobs": True}
                   | {"top_logprobs": 20, "max_tokens": 200}),
        ],
    )  # fmt: skip
    def test_the_size_of_the_answer_is_checked_before_a_text_is_tokenized(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
    ) -> None:
        tokenizer = client.app.state.context.engine.tokenizer  # type: ignore[attr-defined]
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        _, _, message = refusal(client, path, body)
        assert "log-probabilities; the limit for several choices is 200000" in message

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (TEXT, {"prompt": "word " * 800_000}, "prompt"),
            (TEXT, {"prompt": ["a", " " * 4_000_000]}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": "狐" * 500_000}]}, "messages"),
            (CHAT, {"messages": [{"role": "user", "content": "<|end|>" * 500_000}]}, "messages"),
            ("/tokenize", {"prompt": "word " * 800_000}, "prompt"),
        ],
    )
    def test_a_text_that_is_far_too_long_is_not_tokenized(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
    ) -> None:
        tokenizer = client.app.state.context.engine.tokenizer  # type: ignore[attr-defined]
        encode, lengths = tokenizer.encode, []

        def counted(text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", counted)
        code, found, message = refusal(client, path, body)
        assert (code, found) == ("invalid_request" if path == "/tokenize" else "context_length_exceeded", param)
        assert "8 contexts long" in message or "This model's maximum context length is 512 tokens." in message
        assert sum(lengths) < 100_000

    def test_long_texts_of_few_tokens_are_taken(self, client: TestClient) -> None:
        tokens = client.post("/tokenize", json={"prompt": "The quick brown fox jumps over " * 400}).json()["tokens"]
        assert len(tokens) > 512
        text = "The quick brown fox jumps over the lazy dog, and then it writes a letter to its friend. " * 12
        count = client.post("/tokenize", json={"prompt": text}).json()["count"]
        answer = client.post(TEXT, json={"prompt": text, "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == count


def request_of(*chunks: bytes, taken: list[int] | None = None, client: str = "") -> Request:
    """A client's request, whose body arrives in chunks. `taken` gets the size of each when it is read."""
    left = list(chunks)

    async def receive() -> Any:
        chunk = left.pop(0)
        if taken is not None:
            taken.append(len(chunk))
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    return Request({"type": "http", "method": "POST", "headers": [], "state": {"client": client}}, receive)


def alone(client: str) -> bool:
    """Return that no other client is active."""
    return False


class TestThreads:
    def test_the_number_of_waiting_bodies_is_limited(self) -> None:
        async def run() -> None:
            threads, free = AdmissionThreads(5, alone), threading.Event()

            def work(body: bytes) -> int:
                assert free.wait(60)
                return len(body)

            others = [asyncio.create_task(threads.run(request_of(b"small"), work)) for _ in range(5)]
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFull):
                await threads.run(request_of(b"small"), work)
            assert await asyncio.to_thread(lambda: 1) == 1, "other threads are not occupied"
            others.pop().cancel()  # a client that has gone makes room
            await asyncio.sleep(0.05)
            others.append(asyncio.create_task(threads.run(request_of(b"small"), work)))
            await asyncio.sleep(0.05)
            free.set()
            assert await asyncio.gather(*others) == [5] * 5

        asyncio.run(run())

    def test_clients_take_turns(self) -> None:
        async def run() -> None:
            threads, free, done = AdmissionThreads(8, alone), threading.Event(), list[bytes]()

            def work(body: bytes) -> None:
                assert free.wait(60)
                done.append(body)

            def send(client: str, number: int) -> asyncio.Task[None]:
                return asyncio.create_task(threads.run(request_of(f"{client}{number}".encode(), client=client), work))

            flood = [send("a", number) for number in range(8)]
            await asyncio.sleep(0.05)
            others = [send("b", 0), send("c", 0), send("b", 1)]
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFull):
                await send("a", 8)
            flood.pop(4).cancel()
            free.set()
            await asyncio.gather(*flood, *others)
            places = [done.index(body) for body in (b"b0", b"c0", b"b1")]
            assert max(places) < 9, "each waited for at most one more of the flood's"
            assert done.index(b"a7") > max(places)

        asyncio.run(run())

    def test_clients_take_turns_with_large_bodies(self) -> None:
        async def run() -> None:
            threads, free, done = AdmissionThreads(8, alone), threading.Event(), list[str]()

            def send(client: str) -> asyncio.Task[None]:
                def work(body: bytes) -> None:
                    assert free.wait(60)
                    done.append(client)

                return asyncio.create_task(threads.run(request_of(b"x" * 100_000, client=client), work))

            tasks = [send(client) for client in "aaaaaaabb"]
            await asyncio.sleep(0.05)
            free.set()
            await asyncio.gather(*tasks)
            assert "".join(done).startswith("abab")

        asyncio.run(run())

    def test_large_bodies_are_read_one_after_the_other_and_delay_no_small_one(self) -> None:
        async def run() -> None:
            threads, free = AdmissionThreads(5, alone), threading.Event()

            def work(body: bytes) -> int:
                assert free.wait(60)
                return len(body)

            piece, taken = b"x" * 40_000, []
            large = [asyncio.create_task(threads.run(request_of(*[piece] * 10, taken=taken), work)) for _ in range(40)]
            await asyncio.sleep(0.1)
            assert sum(taken) <= 16 * 400_000 + 24 * 80_000
            assert await threads.run(request_of(b"small"), len) == 5
            free.set()
            assert await asyncio.gather(*large) == [400_000] * 40

        asyncio.run(run())


class _Plain(ChoicesAnswer):
    whole_object = chunk_object = "test"

    def message(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text}

    def content(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def opening(self, index: int) -> None:
        return None

    def logprobs(self, index: int, output: CompletionOutput, which: slice) -> dict[str, Any]:
        assert which.stop - which.start <= 64
        return {"tokens": output.token_ids[which], "rest": None}


class TestAnswers:
    @pytest.fixture
    def answer(self, client: TestClient) -> Answer:
        job = Job("id", "http", [[1]], SamplingParams(n=3, logprobs=1), None, stream=False)
        return _Plain(client.app.state.context, job, None)  # type: ignore[attr-defined]

    @pytest.fixture
    def output(self) -> RequestOutput:
        entries = [TokenLogprobs((token,), (-1.0,), (1,)) for token in TOKENS]
        outputs = [CompletionOutput(i, "é" * 90_000, TOKENS, -1.0, entries, "length") for i in range(3)]
        return RequestOutput("id", None, [1], outputs, True)

    def test_others_run_while_a_long_answer_is_written(self, answer: Answer, output: RequestOutput) -> None:
        async def run() -> list[bytes]:
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            pieces = [piece async for piece in answer.whole([output])]
            task.cancel()
            assert turns >= 3 * 1000 // 64
            return pieces

        pieces = asyncio.run(run())
        assert len(pieces) > 3
        found = json.loads(b"".join(pieces))
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
        for choice in found["choices"]:
            assert choice["logprobs"] == {"tokens": TOKENS, "rest": None}
            assert choice["text"] == "é" * 90_000
        assert found["usage"]["completion_tokens"] == 3000

    def test_a_stream_that_was_not_read_goes_on_in_slices(self, answer: Answer, output: RequestOutput) -> None:
        chunks = list(answer.new_events(0, output))
        choices = [chunk["choices"][0] for chunk in chunks]
        first = [choice for choice in choices if choice["index"] == 0]
        assert [token for choice in first[:-1] for token in choice["logprobs"]["tokens"]] == TOKENS
        assert "".join(choice["text"] for choice in first) == "é" * 90_000
        assert [choice["finish_reason"] for choice in first[-2:]] == [None, "length"]
        assert list(answer.new_events(0, output)) == []
