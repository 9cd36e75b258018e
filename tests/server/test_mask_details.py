"""`mask_details` and `logprobs_mode`: what the masks allowed for each token, and
log-probabilities after them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from serving import sse
from starlette.testclient import TestClient

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 60,
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "mood": {"enum": ["good", "bad"]}},
    "required": ["ok", "mood"],
    "additionalProperties": False,
}


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_each_token_says_how_many_were_allowed(client: TestClient) -> None:
    body = ask(client, json_schema=SCHEMA, mask_details=True, whitespace_pattern="")
    [choice] = body["choices"]
    masks, text = choice["masks"], choice["message"]["content"]
    assert "".join(masks["tokens"]).startswith(text)
    assert (
        len(masks["tokens"])
        == len(masks["allowed"])
        == len(masks["forced"])
        == body["usage"]["completion_tokens"]
    )
    assert all(1 <= allowed < 600 for allowed in masks["allowed"])
    assert all(
        allowed == 1
        for allowed, forced in zip(masks["allowed"], masks["forced"], strict=True)
        if forced
    )
    assert any(masks["forced"])
    assert max(masks["allowed"]) > 1
    assert body["guided"]["kept_mass"] == pytest.approx(
        sum(masks["kept_mass"]) / len(masks["kept_mass"])
    )
    times = body["guided"]["masks"]
    assert times["computed"] > 0
    assert 0 < times["exposed"] <= times["total"]


def test_a_stream_reports_the_same(client: TestClient) -> None:
    fields = {"json_schema": SCHEMA, "mask_details": True, "temperature": 1, "seed": 3}
    expected = ask(client, **fields)["choices"][0]["masks"]
    *chunks, _ = sse(
        client.post(
            "/v1/chat/completions", json={**HELLO, **fields, "stream": True}
        ).text
    )
    parts = [
        each["masks"]
        for chunk in chunks
        for each in chunk["choices"]
        if "masks" in each
    ]
    # How far a worker looks ahead depends on its time: a token may be forced in one run
    # and sampled in the other.
    for name in ("tokens", "allowed"):
        assert [one for part in parts for one in part[name]] == expected[name]
    assert [one for part in parts for one in part["kept_mass"]] == pytest.approx(
        expected["kept_mass"], rel=1e-2
    )
    assert any(forced for part in parts for forced in part["forced"])
    assert chunks[-1]["guided"]["masks"]["computed"] > 0
    assert "masks" not in chunks[0]["guided"]


def test_without_a_constraint_there_is_no_number(client: TestClient) -> None:
    assert "masks" not in ask(client)["choices"][0]
    [choice] = ask(client, mask_details=True, max_tokens=4)["choices"]
    assert (
        choice["masks"]["allowed"]
        == choice["masks"]["kept_mass"]
        == [None] * len(choice["masks"]["tokens"])
    )


def test_outputs_are_drawn_by_their_kept_mass(client: TestClient) -> None:
    fields = {
        "choice": ["yes", "no", "maybe"],
        "n": 2,
        "best_of": 6,
        "temperature": 1,
        "seed": 3,
        "resample": True,
    }
    body = ask(client, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert 1 <= body["guided"]["effective_samples"] <= 6
    assert [one["message"] for one in ask(client, **fields)["choices"]] == [
        one["message"] for one in body["choices"]
    ]
    for path, fault, param in (
        ("/v1/chat/completions", {**fields, "stream": True}, "best_of"),
        ("/v1/chat/completions", {**fields, "temperature": 0}, "temperature"),
        ("/v1/responses", {"input": "hello", "resample": True}, "resample"),
    ):
        answer = client.post(
            path, json=fault if "input" in fault else {**HELLO, **fault}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_masked_choices_have_all_of_the_probability(client: TestClient) -> None:
    fields = {
        "choice": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 5,
        "logprobs_mode": "masked",
    }
    [choice] = ask(client, **fields)["choices"]
    first = choice["logprobs"]["content"][0]
    assert {each["token"] for each in first["top_logprobs"]} == {"a", "b"}
    assert math.isclose(
        sum(math.exp(each["logprob"]) for each in first["top_logprobs"]),
        1,
        abs_tol=1e-4,
    )
    [raw] = ask(client, **{**fields, "logprobs_mode": "raw"})["choices"]
    assert raw["message"] == choice["message"]
    assert (
        sum(
            math.exp(each["logprob"])
            for each in raw["logprobs"]["content"][0]["top_logprobs"]
        )
        < 0.9
    )
    assert len(raw["logprobs"]["content"][0]["top_logprobs"]) == 5
