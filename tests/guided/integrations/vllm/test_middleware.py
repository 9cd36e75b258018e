"""The middleware around applications that answer as vLLM does: the answers to guided requests that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from guided.constraint import KINDS
from guided.errors import GuidedError, InvalidConstraint, PoolUnavailable, WorkerDied
from guided.integrations.vllm.error_reports import REQUEST_ID as ID
from guided.integrations.vllm.middleware import GuidedErrors

PATHS = ("/v1/completions", "/v1/chat/completions")
Reply = Callable[[Request, dict[str, Any]], Response]
GUIDED = {"vllm_xargs": {"regex": "[0-9]+"}}


class Errors:
    """Reported errors, set by a test, and the request ids that were asked for."""

    def __init__(self, **errors: GuidedError) -> None:
        self.errors = errors
        self.asked: list[str] = []
        self.every: GuidedError | None = None
        """The error of every request."""

    def __call__(self, request_id: str) -> GuidedError | None:
        self.asked.append(request_id)
        return self.errors.pop(request_id, None) or self.every


class Client:
    """One request, sent by hand, so that the answer is seen message by message."""

    def __init__(self, body: Any, path: str = PATHS[0], method: str = "POST") -> None:
        self.sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = str(len(self.sent)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
        }
        self.messages: list[dict[str, Any]] = []
        self.disconnects = asyncio.Event()
        self._parts = [self.sent[:7], self.sent[7:]]

    async def ask(self, app: Any) -> Client:
        await asyncio.wait_for(app(self.scope, self._receive, self._send), 60)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.disconnects.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(dict(message))

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        assert self.messages[-1]["type"] == "http.response.body"
        assert not self.messages[-1].get("more_body", False), "the answer has no end"
        assert not any(not message.get("more_body", True) for message in self.messages[1:-1])
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def events(self) -> list[Any]:
        events = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]


def vllm(reply: Reply, seen: list[dict[str, Any]] | None = None) -> Starlette:
    """An application with vLLM's routes."""

    async def answer(request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse({"error": "no JSON"}, 400, headers={"x-request-id": "abc"})
        if seen is not None:
            seen.append(body)
        return reply(request, body)

    return Starlette(routes=[Route(path, answer, methods=["POST"]) for path in (*PATHS, "/v1/embeddings")])


def whole(text: str = "12") -> Reply:
    return lambda request, body: JSONResponse({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})


def text(part: str, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": part, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def written(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def stream(*chunks: dict[str, Any], before_last: Callable[[], None] = lambda: None) -> Reply:
    """A stream as vLLM writes it. `before_last` is called before the last chunk."""

    async def events() -> AsyncIterator[str]:
        for chunk in chunks[:-1]:
            yield written(chunk)
        before_last()
        yield written(chunks[-1])
        yield written({"choices": [], "usage": {"completion_tokens": len(chunks)}})
        yield "data: [DONE]\n\n"

    return lambda request, body: StreamingResponse(events(), media_type="text/event-stream")


def ask(reply: Reply, body: Any, errors: Errors, path: str = PATHS[0]) -> Client:
    return asyncio.run(Client(body, path).ask(GuidedErrors(vllm(reply), errors)))


class TestNotStreamed:
    @pytest.mark.parametrize("path", PATHS)
    def test_a_failure_is_an_error(self, path: str) -> None:
        errors = Errors()
        errors.every = WorkerDied("the process that held the matcher is gone")
        client = ask(whole(), GUIDED, errors, path)
        assert client.status == 500
        assert json.loads(client.body)["error"] == {
            "message": "the process that held the matcher is gone",
            "type": "server_error",
            "param": None,
            "code": "worker_died",
            "pointer": None,
        }
        assert client.headers["x-should-retry"] == "true"
        assert client.headers["content-length"] == str(len(client.body))

    def test_its_status_is_that_of_the_error(self) -> None:
        errors = Errors()
        errors.every = PoolUnavailable("no mask actor is up")
        client = ask(whole(), GUIDED, errors)
        assert (client.status, client.headers["retry-after"]) == (503, "1")
        errors.every = InvalidConstraint("no such group", param="regex", pointer="")
        client = ask(whole(), GUIDED, errors)
        assert (client.status, json.loads(client.body)["error"]["type"]) == (400, "invalid_request_error")

    def test_an_answer_without_an_error_is_unchanged(self) -> None:
        errors = Errors()
        client = ask(whole("34"), GUIDED, errors)
        assert client.status == 200
        assert json.loads(client.body)["choices"][0]["text"] == "34"
        assert len(errors.asked) == 1

    def test_headers_of_the_application_are_kept(self) -> None:
        errors = Errors()
        errors.every = WorkerDied("gone")

        def reply(request: Request, body: dict[str, Any]) -> Response:
            return JSONResponse({}, headers={"x-request-id": "abc", "content-language": "en"})

        client = ask(reply, GUIDED, errors)
        assert client.headers["x-request-id"] == "abc"
        assert "content-language" not in client.headers

    def test_a_rejection_by_the_application_is_unchanged(self) -> None:
        errors = Errors()
        errors.every = WorkerDied("of an earlier request with this id")
        client = ask(lambda request, body: JSONResponse({"error": "no"}, 400), GUIDED, errors)
        assert (client.status, json.loads(client.body)) == (400, {"error": "no"})


class TestStreamed:
    @pytest.mark.parametrize("path", PATHS)
    def test_a_failure_is_one_event_and_the_end(self, path: str) -> None:
        errors = Errors()

        def fail() -> None:
            errors.every = WorkerDied("gone")

        client = ask(stream(text("1"), text("2"), text("", "stop"), before_last=fail), GUIDED, errors, path)
        assert client.status == 200
        assert client.events[:2] == [text("1"), text("2")]
        assert [event["error"]["code"] for event in client.events[2:]] == ["worker_died"]

    def test_a_failure_before_the_first_text_is_a_status(self) -> None:
        errors = Errors()
        errors.every = InvalidConstraint("no such group", param="regex")
        client = ask(stream(delta(role="assistant", content=""), delta("stop", content="")), GUIDED, errors, PATHS[1])
        assert client.status == 400
        assert json.loads(client.body)["error"]["code"] == "invalid_constraint"
        assert client.headers["content-type"] == "application/json"

    @pytest.mark.parametrize(
        "chunks",
        [
            (text("1"), text("2"), text("", "stop")),
            (delta(role="assistant", content=""), delta(content="1"), delta("length", content="2")),
            (delta(role="assistant", content=""), delta("stop", content="")),
            (text("", "stop"),),
        ],
    )
    def test_a_stream_without_an_error_is_unchanged(self, chunks: tuple[dict[str, Any], ...]) -> None:
        client = ask(stream(*chunks), GUIDED, Errors())
        assert client.status == 200
        assert client.events == [*chunks, {"choices": [], "usage": {"completion_tokens": len(chunks)}}, "[DONE]"]

    def test_text_is_sent_as_it_comes(self) -> None:
        sent_before_the_end = []

        async def events() -> AsyncIterator[str]:
            yield written(delta(role="assistant", content=""))
            yield written(delta(content="1"))
            await asyncio.sleep(0)
            sent_before_the_end.extend(client.messages)
            yield written(delta("stop", content=""))
            yield "data: [DONE]\n\n"

        client = Client(GUIDED)
        reply: Reply = lambda request, body: StreamingResponse(events(), media_type="text/event-stream")  # noqa: E731
        asyncio.run(client.ask(GuidedErrors(vllm(reply), Errors())))
        assert [message["type"] for message in sent_before_the_end] == ["http.response.start"] + 2 * [
            "http.response.body"
        ]

    @pytest.mark.parametrize("size", [1, 7, 10_000])
    def test_events_in_parts_of_any_size(self, size: int) -> None:
        errors = Errors()
        chunks = [text("1\n\n2"), text("ü"), text("", "stop")]
        document = "".join(map(written, chunks)).encode() + b"data: [DONE]\n\n"

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(document), size):
                yield document[start : start + size]

        reply: Reply = lambda request, body: StreamingResponse(parts(), media_type="text/event-stream")  # noqa: E731
        assert ask(reply, GUIDED, errors).events == [*chunks, "[DONE]"]
        errors.every = WorkerDied("gone")
        assert [*ask(reply, GUIDED, errors).events[:2]] == chunks[:2]
        assert list(ask(reply, GUIDED, errors).events[2]) == ["error"]

    def test_other_choices_are_aborted(self) -> None:
        errors, aborted = Errors(), []

        async def events() -> AsyncIterator[str]:
            try:
                yield written(text("1", index=0))
                errors.every = WorkerDied("gone")
                yield written(text("", "stop", index=0))
                await asyncio.Event().wait()  # the other choice, which never ends
            finally:
                aborted.append(True)

        reply: Reply = lambda request, body: StreamingResponse(events(), media_type="text/event-stream")  # noqa: E731
        client = ask(reply, {**GUIDED, "n": 2}, errors)
        assert [list(event) for event in client.events] == [["choices"], ["error"]]
        assert len(client.messages) == 3
        assert aborted == [True]

    def test_a_failure_without_a_finish_reason(self) -> None:
        errors = Errors()

        def fail() -> None:
            errors.every = WorkerDied("gone")

        client = ask(stream(text("1"), text("2"), before_last=fail), GUIDED, errors)  # no finish_reason at all
        assert "[DONE]" not in client.events
        assert list(client.events[-1]) == ["error"]


class TestRequestIds:
    def test_each_request_gets_one(self) -> None:
        seen: list[dict[str, Any]] = []
        errors = Errors()
        app = GuidedErrors(vllm(whole(), seen), errors)

        async def two() -> None:
            await asyncio.gather(Client(GUIDED).ask(app), Client(GUIDED).ask(app))

        asyncio.run(two())
        ids = [body["vllm_xargs"].pop(ID) for body in seen]
        assert len(set(ids)) == 2
        assert sorted(errors.asked) == sorted(ids)
        assert seen == [GUIDED, GUIDED], "everything else is as it was sent"

    @pytest.mark.parametrize("label", ["mine", "1", 1, True, "a\nb", "x" * 5000])
    def test_the_clients_own_id_is_only_a_label(self, label: Any) -> None:
        """Two users may choose the same id: neither must get the error of the other's request."""
        seen: list[dict[str, Any]] = []
        errors = Errors(**{str(label): WorkerDied("another request's")})
        body = {"vllm_xargs": {"regex": "a", ID: label}, "prompt": "ü\ud83d"}
        app = GuidedErrors(vllm(whole(), seen), errors)

        async def two() -> list[Client]:
            return await asyncio.gather(Client(body).ask(app), Client(body).ask(app))

        assert [client.status for client in asyncio.run(two())] == [200, 200]
        ids = [sent["vllm_xargs"].pop(ID) for sent in seen]
        assert len(set(ids)) == 2
        assert sorted(errors.asked) == sorted(ids)
        assert all(repr(label)[:50] in one and len(one) < 500 and one.isprintable() for one in ids)
        assert seen == [{"vllm_xargs": {"regex": "a"}, "prompt": "ü\ud83d"}] * 2, "everything else is as it was sent"

    @pytest.mark.parametrize("name", KINDS)
    def test_for_every_kind_of_constraint(self, name: str) -> None:
        errors = Errors()
        ask(whole(), {"vllm_xargs": {name: "x"}}, errors)
        assert len(errors.asked) == 1

    def test_an_object_is_sent_as_text(self) -> None:
        seen: list[dict[str, Any]] = []
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        app = GuidedErrors(vllm(whole(), seen), Errors())
        asyncio.run(Client({"vllm_xargs": {"json_schema": schema}}).ask(app))
        assert json.loads(seen[0]["vllm_xargs"]["json_schema"]) == schema

    def test_with_an_escaped_name(self) -> None:
        errors = Errors()
        ask(whole(), b'{"vllm\\u005fxargs": {"regex": "a"}}', errors)
        assert len(errors.asked) == 1

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
    def test_with_any_encoding(self, encoding: str) -> None:
        errors = Errors()
        ask(whole(), json.dumps(GUIDED).encode(encoding), errors)
        assert len(errors.asked) == 1


class TestBeamSearch:
    """vLLM ignores `vllm_xargs` in beam search: the constraint would have no effect."""

    @pytest.mark.parametrize("wanted", [True, 1, "true"])
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
    def test_with_a_constraint_it_is_rejected_and_not_run(self, wanted: Any, path: str, encoding: str) -> None:
        seen: list[dict[str, Any]] = []
        body = json.dumps({**GUIDED, "use_beam_search": wanted}).encode(encoding)
        client = asyncio.run(Client(body, path).ask(GuidedErrors(vllm(whole(), seen), Errors())))
        error = json.loads(client.body)["error"]
        assert (client.status, error["code"], error["param"]) == (400, "invalid_request", "use_beam_search")
        assert client.headers["x-request-id"] == "abc"
        assert not seen

    @pytest.mark.parametrize(
        "body",
        [
            {"use_beam_search": True},
            {"use_beam_search": True, "vllm_xargs": {"a": 1}},
            {**GUIDED, "use_beam_search": False},
            {**GUIDED, "use_beam_search": None},
        ],
    )
    def test_one_without_the_other_runs(self, body: dict[str, Any]) -> None:
        assert ask(whole(), body, Errors()).status == 200


class TestUntouched:
    @pytest.mark.parametrize(
        "body",
        [
            {"prompt": "a"},
            {"vllm_xargs": {"other": 1}},
            {"vllm_xargs": None},
            {"vllm_xargs": [1]},
            ["vllm_xargs"],
            {"prompt": "say vllm_xargs"},
        ],
    )
    @pytest.mark.parametrize("path", PATHS)
    def test_without_guided_parameters(self, body: Any, path: str) -> None:
        seen: list[dict[str, Any]] = []
        errors = Errors()
        errors.every = WorkerDied("another request's")
        client = asyncio.run(Client(body, path).ask(GuidedErrors(vllm(whole(), seen), errors)))
        assert (seen, client.status, errors.asked) == ([body], 200, [])

    def test_their_streams_are_not_held_back(self) -> None:
        chunks = (delta(role="assistant", content=""), delta("stop", content=""))
        plain = ask(stream(*chunks), {"prompt": "a"}, Errors())
        bare = asyncio.run(Client({"prompt": "a"}).ask(vllm(stream(*chunks))))
        assert plain.messages == bare.messages

    def test_a_body_that_is_no_json(self) -> None:
        client = Client(b'{"vllm_xargs": ')
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(await receive())
            await JSONResponse({}, 400)(scope, receive, send)

        asyncio.run(client.ask(GuidedErrors(app, Errors())))
        assert (seen[0]["body"], client.status) == (client.sent, 400)

    @pytest.mark.parametrize("scope", [{"type": "lifespan"}, {"type": "websocket", "path": PATHS[0]}])
    def test_other_scopes(self, scope: dict[str, Any]) -> None:
        seen = []

        async def app(*arguments: Any) -> None:
            seen.append(arguments)

        async def nothing(*arguments: Any) -> Any:
            raise AssertionError

        asyncio.run(GuidedErrors(app, Errors())(scope, nothing, nothing))
        assert seen == [(scope, nothing, nothing)]

    @pytest.mark.parametrize(
        ("method", "content_type"), [("GET", b"application/json"), ("POST", b"multipart/form-data")]
    )
    def test_other_bodies(self, method: str, content_type: bytes) -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope, receive, send))
            await Response()(scope, receive, send)

        client = Client(GUIDED, PATHS[0], method)
        client.scope["headers"] = [(b"content-type", content_type)]
        asyncio.run(client.ask(GuidedErrors(app, Errors())))
        assert seen == [(client.scope, client._receive, client._send)]

    def test_a_body_over_the_limits_is_vllms_to_reject(self) -> None:
        body = b'{"vllm_xargs": {"regex": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}}"
        errors = Errors()
        assert ask(whole(), body, errors).status == 200
        assert errors.asked == []


class TestDisconnections:
    def test_before_the_body_is_received(self) -> None:
        client = Client(GUIDED)
        client._parts = []
        client.disconnects.set()
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(await receive())

        asyncio.run(client.ask(GuidedErrors(app, Errors())))
        assert (seen, client.messages) == ([{"type": "http.disconnect"}], [])

    def test_the_body_of_a_request_that_is_rejected_by_its_headers_is_not_read(self) -> None:
        client = Client(GUIDED)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

        asyncio.run(client.ask(GuidedErrors(app, Errors())))
        assert client.status == 401
        assert len(client._parts) == 2, "nothing of the body was read"

    def test_in_the_middle_of_a_stream(self) -> None:
        ended = []

        async def events() -> AsyncIterator[str]:
            try:
                yield written(text("1"))
                client.disconnects.set()
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        client = Client(GUIDED)
        reply: Reply = lambda request, body: StreamingResponse(events(), media_type="text/event-stream")  # noqa: E731
        asyncio.run(client.ask(GuidedErrors(vllm(reply), Errors())))
        assert ended == [True]
