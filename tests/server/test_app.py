"""The application with a real engine and a tiny random model: requests, answers and
errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import sse, wait_until
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.sampling_params import SamplingParams
from engine.server.context import ServerContext
from engine.server.options import ServerSettings
from guided.pools.protocol import CLIENT

Make = Callable[..., TestClient]

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 8,
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class Light(BaseModel):
    on: bool


def post(
    client: TestClient, path: str = "/v1/chat/completions", **body: Any
) -> httpx.Response:
    return client.post(path, json={**HELLO, **body} if "chat" in path else body)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "pointer"}
    assert error["message"]
    return error


class TestChat:
    def test_what_is_not_enforced_is_reported(self, client: TestClient) -> None:
        schema = {
            **SCHEMA,
            "properties": {
                "ok": {"type": "boolean"},
                "é": {"type": "string", "format": "mongoId"},
            },
        }
        answer = post(client, max_tokens=200, whitespace_pattern="", json_schema=schema)
        assert answer.json()["guided"]["not_enforced"] == ["/properties/é/format"]
        assert "closed" not in answer.json()["guided"]
        lax = {
            keyword: value
            for keyword, value in schema.items()
            if keyword != "additionalProperties"
        }
        assert post(client, json_schema=lax).json()["guided"]["closed"] == [""]
        assert (
            "closed"
            not in post(client, json_schema=lax, open_objects=True).json()["guided"]
        )
        refused = post(client, json_schema=schema, strict_schema=True)
        assert refused.status_code == 400
        assert "'mongoId'" in refused.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_complete(self, client: TestClient, stream: bool) -> None:
        asked = {
            "regex": "[a-z]*x",
            "complete": True,
            "temperature": 1.0,
            "stream": stream,
        }
        answer = post(client, max_tokens=3, **asked)
        last = sse(answer.text)[-2] if stream else answer.json()
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["guided"]["completed_early"] is True
        assert last["guided"]["backend"] == "llguidance"
        refused = post(client, max_tokens=None, max_completion_tokens=1, **asked)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == (
            "invalid_request",
            "max_completion_tokens",
        )
        assert "give at least 2" in error["message"]

    def test_stream_is_the_answer_in_pieces(self, client: TestClient) -> None:
        asked: dict[str, Any] = {
            "choice": ["yes, indeed", "no, never"],
            "max_tokens": None,
        }
        whole = post(client, **asked).json()
        streamed = post(
            client, **asked, stream=True, stream_options={"include_usage": True}
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *chunks, last, done = sse(streamed.text)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["guided"] == whole["guided"]
        text = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in chunks
        )
        assert text == whole["choices"][0]["message"]["content"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [
            None,
            "stop",
        ]
        assert len({chunk["id"] for chunk in chunks}) == 1

    def test_logprobs(self, client: TestClient) -> None:
        choice = post(
            client, logprobs=True, top_logprobs=3, max_tokens=5, ignore_eos=True
        ).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 5
        for token in content:
            assert len(token["top_logprobs"]) == 3
            assert token["top_logprobs"][0]["logprob"] == token["logprob"]  # greedy
            assert -9999.0 <= token["logprob"] <= 0
        spelled = b"".join(bytes(token["bytes"]) for token in content)
        assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
        text = post(
            client, regex="zq", logprobs=True, top_logprobs=20, max_tokens=None
        ).text
        assert "Infinity" not in text


class TestOpenAIClient:
    @pytest.fixture
    def sdk(self, client: TestClient) -> openai.OpenAI:
        return openai.OpenAI(
            base_url="http://testserver/v1",
            api_key="none",
            max_retries=0,
            http_client=client,
        )

    def test_it_parses_answers_and_streams(self, sdk: openai.OpenAI) -> None:
        asked: Any = {
            "model": "tiny",
            "messages": HELLO["messages"],
            "response_format": Light,
        }
        answer = sdk.chat.completions.parse(**asked)
        assert answer.guided["backend"] == "llguidance"  # type: ignore[attr-defined]
        with sdk.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert all(
            isinstance(each.choices[0].message.parsed, Light)
            for each in (answer, streamed)
        )

    def test_a_refusal_is_its_error(self, sdk: openai.OpenAI) -> None:
        form: Any = {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"properties": {"a": {"type": "no"}}},
            },
        }
        with pytest.raises(openai.BadRequestError) as raised:
            sdk.chat.completions.create(
                model="tiny", messages=HELLO["messages"], response_format=form
            )
        assert raised.value.param == "response_format"
        assert raised.value.body["pointer"] == "/properties/a/type"  # type: ignore[index]


class TestCompletions:
    def test_many_prompts_times_n(self, client: TestClient) -> None:
        body = {
            "prompt": ["a", "b", "c"],
            "n": 2,
            "regex": "[0-9]{5}",
            "temperature": 1,
            "seed": 3,
        }
        whole = post(client, "/v1/completions", **body).json()
        texts = dict.fromkeys(range(6), "")
        for event in sse(post(client, "/v1/completions", stream=True, **body).text)[
            :-1
        ]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert all(re.fullmatch("[0-9]{5}", text) for text in texts.values())
        assert len(set(texts.values())) > 1

    def test_default_length_is_openais_unless_constrained(
        self, client: TestClient
    ) -> None:
        plain = post(
            client, "/v1/completions", prompt="a", ignore_eos=True, temperature=0
        ).json()
        assert plain["usage"]["completion_tokens"] == 16
        guided = post(
            client, "/v1/completions", prompt="a", regex="[0-9]{40}", temperature=0
        ).json()
        assert (
            guided["choices"][0]["finish_reason"],
            len(guided["choices"][0]["text"]),
        ) == ("stop", 40)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("prompt", "text"), [("the fox ", "the fox runs"), ([20, 21], None)]
    )
    def test_echo(
        self, client: TestClient, prompt: Any, text: str | None, stream: bool
    ) -> None:
        body = {
            "prompt": prompt,
            "echo": True,
            "choice": ["runs"],
            "mask_details": True,
            "stream": stream,
        }
        answer = post(client, "/v1/completions", **body)
        choices = [
            chunk["choices"][0]
            for chunk in (sse(answer.text)[:-1] if stream else [answer.json()])
        ]
        told = (
            client.post("/detokenize", json={"tokens": prompt}).json().get("prompt", "")
            + "runs"
        )
        assert "".join(choice["text"] for choice in choices) == (text or told)
        tokens = [
            token
            for choice in choices
            for token in choice.get("masks", {"tokens": []})["tokens"]
        ]
        assert "".join(tokens).startswith("runs"), "the prompt has no masks"
        assert (
            post(client, "/v1/completions", **body, logprobs=1).json()["error"]["param"]
            == "echo"
        )

    def test_beams_and_best_of(self, client: TestClient) -> None:
        body = {
            "prompt": "a",
            "choice": ["yes", "no", "maybe"],
            "n": 2,
            "temperature": 0,
        }
        beams = post(
            client,
            "/v1/completions",
            use_beam_search=True,
            best_of=3,
            length_penalty=0,
            **body,
        ).json()
        assert [choice["index"] for choice in beams["choices"]] == [0, 1]
        assert len({choice["text"] for choice in beams["choices"]}) == 2
        best = post(
            client, "/v1/completions", best_of=3, **{**body, "temperature": 1}
        ).json()
        assert [choice["index"] for choice in best["choices"]] == [0, 1]
        for fields in ({"best_of": 3}, {"use_beam_search": True}):
            refused = post(client, "/v1/completions", **body, **fields, stream=True)
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                next(iter(fields)),
            )

    @pytest.mark.parametrize("stream", [False, True])
    def test_text_offsets_are_positions_in_the_text(
        self, client: TestClient, stream: bool
    ) -> None:
        body = {
            "prompt": "x",
            "choice": ["a🦖🦖b"],
            "logprobs": 1,
            "max_tokens": 30,
            "stream": stream,
        }
        answer = post(client, "/v1/completions", **body)
        chunks = sse(answer.text)[:-1] if stream else [answer.json()]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == "a🦖🦖b"
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [token for each in found for token in each["tokens"]]
        offsets = [offset for each in found for offset in each["text_offset"]]
        assert (tokens[0], tokens[-1]) == ("a", "b")
        assert tokens.count("\ufffd") > 2
        assert (offsets[:2], offsets[-1]) == ([0, 1], 3)
        assert offsets == sorted(offsets)
        assert set(offsets) == {0, 1, 2, 3}
        for name in ("token_logprobs", "top_logprobs"):
            assert sum(len(each[name]) for each in found) == len(tokens)
        assert all(1 <= len(top) <= 2 for each in found for top in each["top_logprobs"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": "1"}, "temperature"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
            ({"messages": []}, "messages"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            (
                {"continue_final_message": True, "add_generation_prompt": True},
                "add_generation_prompt",
            ),
            ({"modalities": ["audio"]}, "modalities"),
            ({"response_format": {"type": "text", "jsn": 1}}, "response_format.jsn"),
            ({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0].type",
            ),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
            ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs.regex"),
            ({"grammar": "root ::= nothing_defined_here"}, "grammar"),
            ({"regex": "a", "stop_token_ids": [5]}, "stop_token_ids"),
            ({"allowed_token_ids": [5, 10**6]}, "allowed_token_ids"),
            ({"bad_words": ["a", ""]}, "bad_words"),
            ({"choice": ["x" * 1_000_000]}, "choice"),
        ],
    )
    def test_bad_input_is_a_400_that_names_the_field(
        self, client: TestClient, fields: dict[str, Any], param: str
    ) -> None:
        for stream in (False, True):
            answer = post(client, **{**fields, "stream": stream})
            assert answer.status_code == 400, answer.text[:500]
            error = error_of(answer)
            assert error["type"] == "invalid_request_error"
            assert error["param"] is not None
            assert error["param"].startswith(param)
            assert len(error["message"]) < 1000
            assert ("Images" in error["message"]) == ("image_url" in str(fields))
            assert answer.headers["x-should-retry"] == "false"

    def test_unknown_model_path_and_method(self, client: TestClient) -> None:
        error = error_of(post(client, model="gpt-17"))
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "tiny" in error["message"]
        assert post(client, model="tiny").status_code == 200
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [
            "tiny"
        ]
        assert client.get("/v1/models/tiny").json()["max_model_len"] == 512
        assert client.get("/v1/models/nonesuch").status_code == 404
        assert error_of(client.get("/v1/completions"))["code"] == "method_not_allowed"
        for path, hint in (
            ("/chat/completions", "/v1/chat/completions"),
            ("/models", "/v1/models"),
            ("/no", "/docs"),
        ):
            error = error_of(client.get(path))
            assert error["code"] == "not_found"
            assert hint in error["message"]

    @pytest.mark.parametrize(
        ("path", "body", "says"),
        [
            (
                "/v1/chat/completions",
                {**HELLO, "regex": "("},
                "invalid_constraint: regex: ",
            ),
            (
                "/v1/chat/completions",
                {**HELLO, "model": "a\nERROR faked"},
                "model_not_found: ",
            ),
            ("/chat/completions", HELLO, "not_found: "),
        ],
    )
    def test_the_log_has_the_reason(
        self,
        client: TestClient,
        caplog: pytest.LogCaptureFixture,
        path: str,
        body: Any,
        says: str,
    ) -> None:
        with caplog.at_level("INFO", "guided.server"):
            client.post(path, json=body, headers={"x-request-id": "mine"})
        [record] = [each for each in caplog.records if "refused" in each.message]
        assert all(part in record.message for part in (says, path, "mine"))
        assert "\n" not in record.message

    def test_body_too_large(self, client_with: Make) -> None:
        answer = post(client_with(max_body_bytes=10_000), user="x" * 20_000)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
        assert "10000" in error_of(answer)["message"]

    def test_each_of_several_keys_is_accepted(self, client_with: Make) -> None:
        client = client_with(api_key="secret, two")
        for given in ("", "Bearer wrong", "secret", "Bearer secret, two", "Bearer "):
            answer = client.post(
                "/v1/chat/completions", json=HELLO, headers={"authorization": given}
            )
            assert (answer.status_code, error_of(answer)["code"]) == (
                401,
                "invalid_api_key",
            )
            assert "secret" not in answer.text
        assert client.post("/tokenize", json={}).status_code == 401
        for key in ("secret", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                client.post(
                    "/v1/chat/completions", json=HELLO, headers=headers
                ).status_code
                == 200
            )
        for path in ("/", "/health", "/metrics", "/version", "/docs"):
            assert client.get(path).status_code == 200
        with pytest.raises(ValueError, match="holds no key"):
            ServerSettings(api_key=" , ")

    def test_hosts(self, client_with: Make) -> None:
        client = client_with(allowed_hosts=("localhost", "127.0.0.1"))
        assert (
            client.get("/version", headers={"host": "127.0.0.1:8000"}).status_code
            == 200
        )
        for path in ("/", "/version", "/health", "/metrics", "/docs"):
            refused = client.get(path, headers={"host": "evil.example:8300"})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "host_not_allowed")
            assert "'evil.example:8300'" in error["message"]
            assert "--allowed-hosts" in error["message"]

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("[::1]:80", 200),
            ("LOCALHOST", 200),
            ("a.ex.org", 200),
            ("ex.org", 400),
            ("x@localhost", 400),
            ("", 400),
        ],
    )
    def test_names_of_hosts(self, client_with: Make, host: str, status: int) -> None:
        client = client_with(allowed_hosts=("localhost", "[::1]", "*.ex.org"))
        assert client.get("/version", headers={"host": host}).status_code == status

    def test_n_and_prompts_are_multiplied(self, client_with: Make) -> None:
        client = client_with(max_requests=5)
        context: ServerContext = client.app.state.context  # type: ignore[attr-defined]

        def ask(**fields: Any) -> httpx.Response:
            return post(
                client, "/v1/completions", **{"prompt": "a", "max_tokens": 1, **fields}
            )

        assert ask(n=2, prompt=["a", "b"]).status_code == 200
        assert error_of(ask(n=2, prompt=["a", "b", "c"]))["param"] == "prompt"
        with context.admit(2):
            full = ask(n=4)
            assert (full.status_code, error_of(full)["code"]) == (503, "queue_full")
            assert (full.headers["retry-after"], full.headers["x-should-retry"]) == (
                "1",
                "true",
            )
            assert ask(n=3).status_code == 200

    def test_the_compile_queue_knows_the_client(
        self, client_with: Make, tiny_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Clients take turns there: by key, or by address where no key is needed."""
        pool, clients = tiny_engine.pool, list[str]()
        compile_constraint = pool.compile

        def compile_noted(*arguments: Any) -> Any:
            clients.append(CLIENT.get())
            return compile_constraint(*arguments)

        monkeypatch.setattr(pool, "compile", compile_noted)
        for number, settings in enumerate([{}, {"api_key": "one,two"}]):
            client = client_with(**settings)
            for key in ("one", "two"):
                client.headers["authorization"] = f"Bearer {key}"
                assert post(client, regex=f"[a-z]{{{number}}}").status_code == 200
        assert clients == ["testclient", "testclient", "one", "two"]

    def test_an_actor_that_is_not_up_degrades_health(
        self, client: TestClient, tiny_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        up = tiny_engine.pool.status().workers[0]
        for worker, reason in (
            (replace(up, index=1, state="restarting"), "mask actor 1 is restarting"),
            (
                replace(up, index=1, silent=3.0),
                "mask actor 1 has had no heartbeat for 3 s",
            ),
        ):
            status = replace(
                tiny_engine.pool.status(), workers=[up, worker], quarantined=["abc"]
            )
            monkeypatch.setattr(
                tiny_engine.pool, "status", lambda status=status: status
            )
            answer = client.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
            assert answer.json()["reason"] == reason
            assert answer.json()["pool"]["quarantined"] == ["abc"]

    def test_shutting_down(self, client: TestClient) -> None:
        client.app.state.context.shutting_down = True  # type: ignore[attr-defined]
        assert post(client).status_code == 503
        assert client.get("/health").status_code == 503
        live = client.get("/health/live")
        assert (live.status_code, live.json()) == (
            200,
            {"status": "ok", "reason": None},
        )


class TestFailures:
    def test_a_response_that_fails_in_its_stream(self, failing: TestClient) -> None:
        answer = failing.post(
            "/v1/responses",
            json={"input": "hello", "regex": "[0-9]{30}", "stream": True},
        )
        last = json.loads(answer.text.strip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == (
            "response.failed",
            "failed",
        )
        assert last["response"]["error"]["code"] == "backend_error"

    def test_a_surprise_is_a_500_in_shape(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def surprise(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(SamplingParams, "__post_init__", surprise)
        answer = post(client)
        assert answer.status_code == 500
        assert error_of(answer)["code"] == "internal_error"
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"]


class TestOthers:
    def test_request_ids(self, client: TestClient) -> None:
        assert (
            client.get("/version", headers={"x-request-id": "my-id.1"}).headers[
                "x-request-id"
            ]
            == "my-id.1"
        )
        ids = {
            client.get("/version", headers={"x-request-id": "bad id"}).headers[
                "x-request-id"
            ]
            for _ in range(2)
        }
        assert len(ids) == 2
        assert client.get("/nonesuch").headers["x-request-id"]

    def test_tokenize_and_back(self, client: TestClient) -> None:
        text = "The quick 狐狸 😀 ök"
        tokens = client.post(
            "/tokenize", json={"prompt": text, "return_token_strs": True}
        ).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {
            "prompt": text
        }
        chat = client.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}
        ).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": chat}).json() == {
            "prompt": "<|user|>hi<|end|><|assistant|>"
        }
        assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
        special = client.post("/tokenize", json={"prompt": "a<|end|>b"}).json()
        assert special["count"] == 3, "a prompt is what its writer says"

    def test_metrics(self, client: TestClient) -> None:
        post(client, regex="[0-9]{200}", max_tokens=None, stream=True)
        post(client, regex="(")
        text = client.get("/metrics").text
        for line in (
            r"guided_time_to_first_token_seconds_count 1.0",
            r"guided_inter_token_latency_seconds_count [1-9]",
            r"guided_e2e_request_latency_seconds_count 1.0",
            r"guided_request_time_per_output_token_seconds_count 1.0",
            r"guided_grammar_wait_seconds_count{backend=\"llguidance\",kind=\"regex\"} 1.0",
            r"guided_request_success_total{finished_reason=\"stop\"} 1.0",
            r"guided_request_failures_total{code=\"invalid_constraint\",fault=\"request\"} 1.0",
            r"guided_request_failures_total{code=\"worker_died\",fault=\"server\"} 0.0",
            r"guided_generation_tokens_total [1-9]",
            r"guided_prefix_cache_queries_total [1-9]",
            r"guided_mask_actors_up 1.0",
        ):
            assert re.search("^" + line, text, re.MULTILINE), line

    def test_documentation_needs_no_other_host(self, client: TestClient) -> None:
        page = client.get("/docs").text
        assert "http://" not in page
        assert "https://" not in page
        for asset in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert client.get(asset).status_code == 200
        schema = client.get("/openapi.json").json()
        assert "/v1/chat/completions" in schema["paths"]
        models = schema["components"]["schemas"]
        assert "json_schema" in models["ChatRequest"]["properties"]
        for path, model in (
            ("/v1/chat/completions", "ChatRequest"),
            ("/v1/completions", "CompletionRequest"),
        ):
            [example] = models[model]["examples"]
            assert client.post(path, json=example).status_code == 200

    def test_a_model_without_a_chat_template(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            client.app.state.context.llm.tokenizer, "chat_template", None
        )  # type: ignore[attr-defined]
        error = error_of(post(client))
        assert error["param"] == "messages"
        assert "/v1/completions" in error["message"]


class TestCheck:
    """POST /v1/check: admission and compilation of a chat request, without its
    answer."""

    def test_an_accepted_request_is_described_and_counted(
        self, client: TestClient
    ) -> None:
        body = {**HELLO, "regex": "[0-9]{4}x?", "max_tokens": 5, "colour": "red"}
        checked = client.post("/v1/check", json=body).json()
        assert checked["guided"] == {
            "kind": "regex",
            "backend": "llguidance",
            "not_enforced": [],
            "ignored": ["colour"],
        }
        assert checked["compile_seconds"] > 0
        assert (
            checked["prompt_tokens"]
            == client.post("/v1/check", json=HELLO).json()["prompt_tokens"]
            > 0
        )
        hits = 'guided_grammar_cache_hits_total{backend="llguidance",kind="regex"} '
        before = (
            client.get("/metrics").text.partition(hits)[2].partition("\n")[0] or "0"
        )
        assert client.post("/v1/check", json=body).json()["compile_seconds"] == 0
        after = client.get("/metrics").text.partition(hits)[2].partition("\n")[0]
        assert float(after) == float(before) + 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"json_schema": {"properties": {"a": {"type": "int"}}}},
            {"grammar": "start: missing"},
            {
                "json_schema": {"type": "string", "pattern": "(?=a)"},
                "backend": "xgrammar",
                "strict_schema": True,
            },
            {"stream": True, "stream_options": {"include_usage": 3}},
        ],
    )
    def test_the_error_is_that_of_the_request(
        self, client: TestClient, fields: dict[str, Any]
    ) -> None:
        checked = client.post("/v1/check", json={**HELLO, **fields})
        asked = client.post("/v1/chat/completions", json={**HELLO, **fields})
        assert checked.status_code == asked.status_code == 400
        assert checked.json() == asked.json()

    def test_its_generations_are_aborted(self, client: TestClient) -> None:
        context = client.app.state.context  # type: ignore[attr-defined]
        for stream in (True, False):
            body = {
                **HELLO,
                "regex": "a{400}",
                "stream": stream,
                "n": 2,
                "max_tokens": None,
            }
            assert client.post("/v1/check", json=body).status_code == 200
        wait_until(
            lambda: context.in_flight == 0 and context.llm.health().num_running == 0
        )
        assert "guided_request_success_total{" not in client.get("/metrics").text, (
            "no generation has ended"
        )
