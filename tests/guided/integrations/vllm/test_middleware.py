"""What `vllm serve`'s clients are answered when guided requests fail: the middleware around applications that answer as
vLLM does."""

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


class Told:
    """Statuses that a test sets; and which were asked for."""

    def __init__(self, **errors: GuidedError) -> None:
        self.errors = errors
        self.asked: list[str] = []
        self.every: GuidedError | None = None
        """What every request failed of."""

    def __call__(self, request_id: str) -> GuidedError | None:
        self.asked.append(request_id)
        return self.errors.pop(request_id, None) or self.every


class Client:
    """One request, sent by hand, so that what is sent back is seen message by message."""

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
        self.leaves = asyncio.Event()
        self._parts = [self.sent[:7], self.sent[7:]]

    async def ask(self, app: Any) -> Client:
        await asyncio.wait_for(app(self.scope, self._receive, self._send), 60)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.leaves.wait()
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


def stream(*chunks: dict[str, Any], told: Callable[[], None] = lambda: None) -> Reply:
    """A stream as vLLM writes it; `told` is called before the last chunk."""

    async def events() -> AsyncIterator[str]:
        for chunk in chunks[:-1]:
            yield written(chunk)
        told()
        yield written(chunks[-1])
        yield written({"choices": [], "usage": {"completion_tokens": len(chunks)}})
        yield "data: [DONE]\n\n"

    return lambda request, body: StreamingResponse(events(), media_type="text/event-stream")


def ask(reply: Reply, body: Any, told: Told, path: str = PATHS[0]) -> Client:
    return asyncio.run(Client(body, path).ask(GuidedErrors(vllm(reply), told)))


class TestNotStreamed:
    @pytest.mark.parametrize("path", PATHS)
    def test_a_failure_is_an_error(self, path: str) -> None:
        told = Told()
        told.every = WorkerDied("the process that held the matcher is gone")
        client = ask(whole(), GUIDED, told, path)
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

    def test_its_status_is_the_errors_own(self) -> None:
        told = Told()
        told.every = PoolUnavailable("no mask actor is up")
        client = ask(whole(), GUIDED, told)
        assert (client.status, client.headers["retry-after"]) == (503, "1")
        told.every = InvalidConstraint("no such group", param="regex", pointer="")
        client = ask(whole(), GUIDED, told)
        assert (client.status, json.loads(client.body)["error"]["type"]) == (400, "invalid_request_error")

    def test_what_went_well_is_what_the_application_said(self) -> None:
        told = Told()
        client = ask(whole("34"), GUIDED, told)
        assert client.status == 200
        assert json.loads(client.body)["choices"][0]["text"] == "34"
        assert len(told.asked) == 1

    def test_headers_of_the_application_stay(self) -> None:
        told = Told()
        told.every = WorkerDied("gone")

        def reply(request: Request, body: dict[str, Any]) -> Response:
            return JSONResponse({}, headers={"x-request-id": "abc", "content-language": "en"})

        client = ask(reply, GUIDED, told)
        assert client.headers["x-request-id"] == "abc"
        assert "content-language" not in client.headers

    def test_what_the_application_refuses_stays_refused(self) -> None:
        told = Told()
        told.every = WorkerDied("of an earlier request with this id")
        client = ask(lambda request, body: JSONResponse({"error": "no"}, 400), GUIDED, told)
        assert (client.status, json.loads(client.body)) == (400, {"error": "no"})


class TestStreamed:
    @pytest.mark.parametrize("path", PATHS)
    def test_a_failure_is_one_event_and_the_end(self, path: str) -> None:
        told = Told()

        def fail() -> None:
            told.every = WorkerDied("gone")

        client = ask(stream(text("1"), text("2"), text("", "stop"), told=fail), GUIDED, told, path)
        assert client.status == 200
        assert client.events[:2] == [text("1"), text("2")]
        assert [event["error"]["code"] for event in client.events[2:]] == ["worker_died"]

    def test_before_the_first_text_it_is_a_status(self) -> None:
        told = Told()
        told.every = InvalidConstraint("no such group", param="regex")
        client = ask(stream(delta(role="assistant", content=""), delta("stop", content="")), GUIDED, told, PATHS[1])
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
    def test_what_goes_well_is_passed_on(self, chunks: tuple[dict[str, Any], ...]) -> None:
        client = ask(stream(*chunks), GUIDED, Told())
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
        asyncio.run(client.ask(GuidedErrors(vllm(reply), Told())))
        assert [message["type"] for message in sent_before_the_end] == ["http.response.start"] + 2 * [
            "http.response.body"
        ]

    @pytest.mark.parametrize("size", [1, 7, 10_000])
    def test_events_however_they_are_cut(self, size: int) -> None:
        told = Told()
        chunks = [text("1\n\n2"), text("ü"), text("", "stop")]
        document = "".join(map(written, chunks)).encode() + b"data: [DONE]\n\n"

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(document), size):
                yield document[start : start + size]

        reply: Reply = lambda request, body: StreamingResponse(parts(), media_type="text/event-stream")  # noqa: E731
        assert ask(reply, GUIDED, told).events == [*chunks, "[DONE]"]
        told.every = WorkerDied("gone")
        assert [*ask(reply, GUIDED, told).events[:2]] == chunks[:2]
        assert list(ask(reply, GUIDED, told).events[2]) == ["error"]

    def test_other_choices_are_given_up(self) -> None:
        told, given_up = Told(), []

        async def events() -> AsyncIterator[str]:
            try:
                yield written(text("1", index=0))
                told.every = WorkerDied("gone")
                yield written(text("", "stop", index=0))
                await asyncio.Event().wait()  # the other choice, which takes for ever
            finally:
                given_up.append(True)

        reply: Reply = lambda request, body: StreamingResponse(events(), media_type="text/event-stream")  # noqa: E731
        client = ask(reply, {**GUIDED, "n": 2}, told)
        assert [list(event) for event in client.events] == [["choices"], ["error"]]
        assert len(client.messages) == 3
        assert given_up == [True]

    def test_a_failure_that_comes_with_nothing_but_the_end(self) -> None:
        told = Told()

        def fail() -> None:
            told.every = WorkerDied("gone")

        client = ask(stream(text("1"), text("2"), told=fail), GUIDED, told)  # no finish_reason at all
        assert "[DONE]" not in client.events
        assert list(client.events[-1]) == ["error"]


class TestRequestIds:
    def test_are_put_in_and_told_apart(self) -> None:
        seen: list[dict[str, Any]] = []
        told = Told()
        app = GuidedErrors(vllm(whole(), seen), told)

        async def two() -> None:
            await asyncio.gather(Client(GUIDED).ask(app), Client(GUIDED).ask(app))

        asyncio.run(two())
        ids = [body["vllm_xargs"].pop(ID) for body in seen]
        assert len(set(ids)) == 2
        assert sorted(told.asked) == sorted(ids)
        assert seen == [GUIDED, GUIDED], "everything else is as it was sent"

    @pytest.mark.parametrize("label", ["mine", "1", 1, True, "a\nb", "x" * 5000])
    def test_the_clients_own_is_a_label_and_tells_nobody_apart(self, label: Any) -> None:
        """Two users may choose the same: one must not be told what became of the other's request."""
        seen: list[dict[str, Any]] = []
        told = Told(**{str(label): WorkerDied("somebody else's")})
        body = {"vllm_xargs": {"regex": "a", ID: label}, "prompt": "ü\ud83d"}
        app = GuidedErrors(vllm(whole(), seen), told)

        async def two() -> list[Client]:
            return await asyncio.gather(Client(body).ask(app), Client(body).ask(app))

        assert [client.status for client in asyncio.run(two())] == [200, 200]
        ids = [sent["vllm_xargs"].pop(ID) for sent in seen]
        assert len(set(ids)) == 2
        assert sorted(told.asked) == sorted(ids)
        assert all(repr(label)[:50] in one and len(one) < 500 and one.isprintable() for one in ids)
        assert seen == [{"vllm_xargs": {"regex": "a"}, "prompt": "ü\ud83d"}] * 2, "everything else is as it was sent"

    @pytest.mark.parametrize("name", KINDS)
    def test_for_every_kind_of_constraint(self, name: str) -> None:
        told = Told()
        ask(whole(), {"vllm_xargs": {name: "x"}}, told)
        assert len(told.asked) == 1

    def test_however_the_name_is_escaped(self) -> None:
        told = Told()
        ask(whole(), b'{"vllm\\u005fxargs": {"regex": "a"}}', told)
        assert len(told.asked) == 1

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
    def test_however_the_body_is_encoded(self, encoding: str) -> None:
        told = Told()
        ask(whole(), json.dumps(GUIDED).encode(encoding), told)
        assert len(told.asked) == 1


class TestBeamSearch:
    """vLLM's own leaves `vllm_xargs` out: nobody would see the constraint."""

    @pytest.mark.parametrize("wanted", [True, 1, "true"])
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
    def test_with_a_constraint_it_is_refused_and_not_run(self, wanted: Any, path: str, encoding: str) -> None:
        seen: list[dict[str, Any]] = []
        body = json.dumps({**GUIDED, "use_beam_search": wanted}).encode(encoding)
        client = asyncio.run(Client(body, path).ask(GuidedErrors(vllm(whole(), seen), Told())))
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
        assert ask(whole(), body, Told()).status == 200


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
        told = Told()
        told.every = WorkerDied("somebody else's")
        client = asyncio.run(Client(body, path).ask(GuidedErrors(vllm(whole(), seen), told)))
        assert (seen, client.status, told.asked) == ([body], 200, [])

    def test_their_streams_are_not_held_back(self) -> None:
        chunks = (delta(role="assistant", content=""), delta("stop", content=""))
        plain = ask(stream(*chunks), {"prompt": "a"}, Told())
        bare = asyncio.run(Client({"prompt": "a"}).ask(vllm(stream(*chunks))))
        assert plain.messages == bare.messages

    def test_a_body_that_is_no_json_is_the_applications_to_refuse(self) -> None:
        client = Client(b'{"vllm_xargs": ')
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(await receive())
            await JSONResponse({}, 400)(scope, receive, send)

        asyncio.run(client.ask(GuidedErrors(app, Told())))
        assert (seen[0]["body"], client.status) == (client.sent, 400)

    @pytest.mark.parametrize("scope", [{"type": "lifespan"}, {"type": "websocket", "path": PATHS[0]}])
    def test_what_is_no_request(self, scope: dict[str, Any]) -> None:
        seen = []

        async def app(*arguments: Any) -> None:
            seen.append(arguments)

        async def nothing(*arguments: Any) -> Any:
            raise AssertionError

        asyncio.run(GuidedErrors(app, Told())(scope, nothing, nothing))
        assert seen == [(scope, nothing, nothing)]

    @pytest.mark.parametrize(("path", "method"), [("/v1/embeddings", "POST"), (PATHS[0], "GET")])
    def test_other_routes(self, path: str, method: str) -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope, receive, send))
            await Response()(scope, receive, send)

        client = Client(GUIDED, path, method)
        asyncio.run(client.ask(GuidedErrors(app, Told())))
        assert seen == [(client.scope, client._receive, client._send)]


class TestClientsThatGo:
    def test_before_the_body_is_there(self) -> None:
        client = Client(GUIDED)
        client._parts = []
        client.leaves.set()
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(await receive())

        asyncio.run(client.ask(GuidedErrors(app, Told())))
        assert (seen, client.messages) == ([{"type": "http.disconnect"}], [])

    def test_who_is_refused_by_the_headers_is_not_listened_to(self) -> None:
        client = Client(GUIDED)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

        asyncio.run(client.ask(GuidedErrors(app, Told())))
        assert client.status == 401
        assert len(client._parts) == 2, "nothing of the body was read"

    def test_in_the_middle_of_a_stream(self) -> None:
        ended = []

        async def events() -> AsyncIterator[str]:
            try:
                yield written(text("1"))
                client.leaves.set()
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        client = Client(GUIDED)
        reply: Reply = lambda request, body: StreamingResponse(events(), media_type="text/event-stream")  # noqa: E731
        asyncio.run(client.ask(GuidedErrors(vllm(reply), Told())))
        assert ended == [True]
