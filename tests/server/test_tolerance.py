"""Fields without effect, errors about bodies of the wrong shape, codes that other
programs look for, and web pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi", "annotated": 1}],
    "max_tokens": 3,
}


def test_what_has_no_effect_is_named(client: TestClient) -> None:
    answer = client.post(
        CHAT,
        json={
            **USER,
            "user": "u",
            "verbosity": "low",
            "regex": "[ab]{2}",
            "ünknown": 1,
            "refusal": None,
            "z": [],
        },
    )
    assert answer.json()["guided"] == {
        "kind": "regex",
        "backend": "llguidance",
        "not_enforced": [],
        "ignored": ["user", "verbosity", "ünknown", "annotated"],
    }
    streamed = client.post(CHAT, json={**USER, "stream": True, "ünknown": 1})
    assert (
        '"guided":{"not_enforced":[],"ignored":["ünknown","annotated"]}'
        in streamed.text.split("\n\n")[0]
    )
    body = b'{"prompt": "a", "max_tokens": 1, "\\ud800\\u0000": 1}'
    answer = client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.json()["guided"]["ignored"] == ["\\ud800\\x00"]


def test_strict_fields(client_with: Callable[..., TestClient]) -> None:
    error = client_with(strict_fields=True).post(CHAT, json=USER).json()["error"]
    assert (error["code"], error["param"]) == (
        "unknown_parameter",
        "messages[0].annotated",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            ("json_shema", "json_schema"),
            ("schema", "json_schema"),
            ("response_formt", "response_format"),
        ),
        *(
            ("structured_output", "structured_outputs"),
            ("guided_schema", "guided_json"),
            ("text", "response_format"),
        ),
        *(
            ("extra_body", "its fields"),
            ("format", "response_format"),
            ("choices", "choice"),
        ),
    ],
)
def test_a_constraint_under_a_wrong_name_is_refused(
    client: TestClient, name: str, meant: str
) -> None:
    answer = client.post(CHAT, json={**USER, name: {"type": "object"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unknown_parameter",
        name,
    )
    assert f"did you mean {meant}" in error["message"]


def test_the_context_is_too_short(client: TestClient) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 700}]}
    for fields in (long, {**USER, "max_tokens": 5000}):
        error = client.post(CHAT, json=fields).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            "This model's maximum context length is 512 tokens. However, "
        )


def test_pages_of_other_origins(client_with: Callable[..., TestClient]) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    allowing = client_with(allowed_origins=("https://example.org",), api_key="k")
    preflight = allowing.options(
        CHAT, headers={**asked, "access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://example.org"
    refused = allowing.post(CHAT, json=USER, headers={"origin": "https://example.org"})
    assert refused.status_code == 401
    assert "access-control-allow-origin" in refused.headers
    assert (
        allowing.options(
            CHAT, headers={**asked, "origin": "https://other.org"}
        ).status_code
        == 400
    )
    assert (
        "access-control-allow-origin"
        not in client_with().post(CHAT, json=USER, headers=asked).headers
    )
