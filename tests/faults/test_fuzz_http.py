"""Random requests to the HTTP API: the real application and engine, with compilation in
processes.

`--hypothesis-profile fuzz` runs more examples. `docs/failure-model.md` says how to run
schemathesis against a real server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import sse
from starlette.testclient import TestClient

from actors import RayPool
from benchmarks.random_outputs import random_case
from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.model.loader import LoadedModel
from engine.server.app import create_app
from engine.server.options import ServerSettings
from guided.backends import BACKENDS
from guided.limits import CompileLimits

EXAMPLES = max(1, settings.default.max_examples // 5)
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
INTERNAL = {
    "backend_error",
    "constraint_not_met",
    "dead_end",
    "token_rejected",
    "mask_timeout",
}
"""Our errors that a grammar may cause. `internal_error` is not one of them."""


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel, local_ray: None) -> Iterator[AsyncLLM]:
    pool = RayPool(
        tiny_model.vocabulary,
        num_actors=1,
        compile_limits=CompileLimits(processes=1, seconds=3.0),
    ).started()
    engine = AsyncLLM(tiny_model, pool, EngineConfig(max_num_seqs=8, max_model_len=96))
    yield engine
    engine.shutdown()
    pool.shutdown()


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[TestClient]:
    app = create_app(engine, ServerSettings(model_name="tiny"))
    with TestClient(app, raise_server_exceptions=True) as client:
        yield client


@pytest.fixture(scope="module")
def api(client: TestClient) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", client.app)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_the_description_promises_is_kept(api: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 13
    for operation in operations:
        if operation.method == "get" and mode is GenerationMode.NEGATIVE:
            continue  # there is nothing to get wrong

        @SETTINGS
        @given(operation.as_strategy(generation_mode=mode))
        def keep(case: Any) -> None:
            # Rules beyond the type of a field (an empty prompt, two constraints) are
            # checked elsewhere.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        keep()


TEXTS = st.one_of(
    st.sampled_from(
        ["a", "", " ", '"', "\\", "\n", "é", "🦖", "\x7f", "null", "$ref", "type"]
    ),
    st.text(max_size=8),
)
JUNK: SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=5,
)
PIECES = st.one_of(
    st.sampled_from(list("()[]{}|*+?.^$\\/\"'<>:=#%~-,;&!\n\0 ")), st.text(max_size=4)
)
FIELDS: dict[str, SearchStrategy[Any]] = {
    "prompt": st.one_of(
        TEXTS, st.lists(TEXTS, max_size=2), st.lists(st.integers(0, 639), max_size=5)
    ),
    "max_tokens": st.integers(1, 24),
    "backend": st.sampled_from(["auto", *BACKENDS]),
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "logprobs": st.integers(0, 3),
    "min_tokens": st.integers(0, 5),
    "logit_bias": st.dictionaries(st.integers(0, 640).map(str), st.integers(-100, 100)),
    "stop": TEXTS,
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], Callable[[str], str | None]]:
    """Draw a body for `/v1/completions`, and what says why an output violates its
    constraint (None: it does not).

    Some constraints are parts of a structural tag, some are damaged, and some bodies
    have a field with another value.
    """
    case = random_case(1, draw(st.integers(0, 10**9)))
    body = draw(st.fixed_dictionaries({}, optional=FIELDS)) | {
        "prompt": draw(FIELDS["prompt"])
    }
    body |= {"max_tokens": 24, case.kind: case.value}
    match draw(st.sampled_from(["sound", "sound", "in a tag", "damaged", "junk"])):
        case "sound":
            return body, case.problem
        case "in a tag":
            content = {
                "type": case.kind,
                "pattern" if case.kind == "regex" else case.kind: body.pop(case.kind),
            }
            tag = {
                "type": "tag",
                "begin": draw(TEXTS),
                "content": content,
                "end": draw(TEXTS),
            }
            body["structural_tag"] = {"type": "structural_tag", "format": tag}
        case "damaged" if isinstance(case.value, str):
            start = draw(st.integers(0, len(case.value)))
            body[case.kind] = (
                case.value[:start]
                + draw(PIECES)
                + case.value[start + draw(st.integers(0, 6)) :]
            )
        case "damaged":
            body[case.kind] = {"anyOf": [case.value, {draw(TEXTS): draw(JUNK)}]}
        case "junk":
            body[draw(st.sampled_from([*body, *FIELDS]))] = draw(JUNK)
    return body, lambda text: None


def _check_error(error: dict[str, Any], status: int) -> None:
    assert set(error) == {"message", "type", "param", "code", "pointer"}, error
    assert 0 < len(error["message"]) < 2000
    assert status < 500 or error["code"] in INTERNAL, error


def _is_answered(
    client: TestClient, body: dict[str, Any], problem: Callable[[str], str | None]
) -> bool:
    content = json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    answer: httpx.Response = client.post(
        "/v1/completions", content=content, headers=headers
    )
    assert answer.headers["x-request-id"]
    if answer.status_code != 200:
        assert answer.status_code in (400, 500), answer.text
        error = answer.json()["error"]
        if error["code"] != "constraint_not_met":  # another sample may meet it
            assert answer.headers["x-should-retry"] == "false"
        _check_error(error, answer.status_code)
        return False
    if not body.get("stream"):
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
            if choice["finish_reason"] == "stop":
                assert problem(choice["text"]) is None
        return True
    *events, last = sse(answer.text)
    if last != "[DONE]":
        _check_error(last["error"], 500)
        return False
    assert {event["choices"][0]["finish_reason"] for event in events} & {
        "stop",
        "length",
    }
    return True


def test_any_generation_is_answered_or_refused(
    client: TestClient, engine: AsyncLLM
) -> None:
    """Every answer is a declared error or an output that satisfies its constraint."""
    answered = []

    @settings(SETTINGS, max_examples=5 * EXAMPLES)
    @given(requests())
    def answer(drawn: tuple[dict[str, Any], Callable[[str], str | None]]) -> None:
        answered.append(_is_answered(client, *drawn))

    answer()
    assert any(answered)
    health = engine.health()
    assert health.alive
    assert health.num_running == health.num_waiting == 0
    assert engine.engine.blocks.num_free == engine.engine.blocks.num_blocks
