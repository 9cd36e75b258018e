"""Random requests to the HTTP API: the real application and engine, with compilation in processes.

`--hypothesis-profile fuzz` runs more examples. `docs/failure-model.md` says how to run schemathesis against a real
server.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
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
from benchmarks.random_constraints.languages import Case, random_choice, random_grammar, random_regex
from benchmarks.random_constraints.schemas import random_schema
from engine.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.model_loader import LoadedModel
from engine.server.app import create_app
from engine.server.options import ServerSettings
from guided.backends import BACKENDS
from guided.limits import CompileLimits

EXAMPLES = max(1, settings.default.max_examples // 5)
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
INTERNAL = {"backend_error", "constraint_not_met", "dead_end", "token_rejected", "mask_timeout"}
"""Our errors that a grammar may cause. `internal_error` is not one of them."""


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel, local_ray: None) -> Iterator[AsyncLLM]:
    pool = RayPool(tiny_model.vocabulary, num_actors=1, compile_limits=CompileLimits(processes=1, seconds=3.0))
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
            # Rules beyond the type of a field (an empty prompt, two constraints) are checked elsewhere.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        keep()


NAMES = st.sampled_from(["a", "b", "name", "", "a/b", "~0", "é", "x" * 40, "$ref", "type"])
TEXTS = st.one_of(
    st.sampled_from(["a", "ab", "", " ", '"', "\\", "\n", "{", "é", "🦖", "\x7f", "null", "1"]), st.text(max_size=8)
)
NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([0, 1, -1, 1.5, -0.0, 1e-3, 1e300, 10**20, 2**63, 0.1]),
    st.floats(allow_nan=False, allow_infinity=False),
)
JUNK: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


def mostly(usual: SearchStrategy[Any], rare: SearchStrategy[Any], of: int = 60) -> SearchStrategy[Any]:
    """Draw from `rare` about once in `of` draws, otherwise from `usual`."""
    return st.integers(1, of).flatmap(lambda drawn: rare if drawn == of else usual)


def _values(make: Callable[[random.Random], Case]) -> SearchStrategy[Any]:
    return st.randoms(use_true_random=True).map(lambda source: make(source).value)


def _nearly(texts: SearchStrategy[str]) -> SearchStrategy[str]:
    """Draw `texts`, some of them with a piece removed, inserted or replaced."""
    pieces = st.one_of(st.sampled_from(list("()[]{}|*+?.^$\\/\"'<>:=#%~-,;&!\n\0 ")), st.text(max_size=4))

    def damage(text: str, start: int, length: int, piece: str) -> str:
        start %= len(text) + 1
        return text[:start] + piece + text[start + length :]

    return mostly(texts, st.builds(damage, texts, st.integers(0, 200), st.integers(0, 6), pieces), of=4)


def _schemas() -> SearchStrategy[Any]:
    """Draw schemas, some of them with a keyword that has an odd value, or that are none."""
    sound = _values(random_schema)
    odd = st.sampled_from(["$id", "$anchor", "$schema", "$ref", "$dynamicRef", "format", "nullable", "items", "none"])
    junk = st.builds(lambda schema, name, value: {"anyOf": [schema, {name: value}]}, sound, odd, JUNK)
    return mostly(mostly(sound, junk, of=3), JUNK, of=30)


def _structural_tags(contents: SearchStrategy[Any]) -> SearchStrategy[Any]:
    tag = st.fixed_dictionaries({"type": st.just("tag"), "begin": TEXTS, "content": contents, "end": TEXTS})
    return st.fixed_dictionaries({"type": st.just("structural_tag"), "format": st.one_of(tag, contents)})


def _fields() -> dict[str, SearchStrategy[Any]]:
    """Values of each constraint's request field: valid, nearly valid and broken ones."""
    fields = {
        "json_schema": _schemas(),
        "regex": _nearly(_values(random_regex)),
        "choice": mostly(_values(random_choice), st.lists(TEXTS, max_size=4), of=3),
    }
    patterns = {"regex": "pattern"}  # its other name in a structural tag
    contents = [
        st.fixed_dictionaries({"type": st.just(kind), patterns.get(kind, kind): values})
        for kind, values in fields.items()
    ]
    return {
        **fields,
        "json_object": st.just(True),
        "grammar": _nearly(_values(random_grammar)),
        "structural_tag": _structural_tags(st.one_of(*contents, st.just({"type": "any_text"}), JUNK)),
    }


def _requests() -> SearchStrategy[dict[str, Any]]:
    """Bodies for `/v1/completions`: usually one constraint, and some parameters."""
    one = st.one_of(*(st.fixed_dictionaries({kind: values}) for kind, values in _fields().items()))
    two = st.tuples(one, one).map(lambda pair: {**pair[0], **pair[1]})
    constraints = mostly(one, st.one_of(st.just({}), two), of=5)
    parameters = st.fixed_dictionaries(
        {"max_tokens": mostly(st.integers(1, 24), JUNK)},
        optional={
            "backend": mostly(st.sampled_from(["auto", *BACKENDS]), JUNK),
            "stream": mostly(st.booleans(), JUNK),
            "temperature": mostly(st.sampled_from([0, 0.7, 2]), JUNK),
            "n": mostly(st.integers(1, 3), JUNK),
            "logprobs": mostly(st.integers(0, 3), JUNK),
            "min_tokens": mostly(st.integers(0, 5), JUNK),
            "logit_bias": mostly(st.dictionaries(st.integers(0, 640).map(str), st.integers(-100, 100)), JUNK),
            "stop": mostly(TEXTS, JUNK),
            "whitespace_pattern": mostly(st.sampled_from(["", " ?"]), JUNK),
        },
    )
    prompts = mostly(st.one_of(TEXTS, st.lists(TEXTS, max_size=2), st.lists(st.integers(0, 639), max_size=5)), JUNK)
    usual = st.tuples(prompts, constraints, parameters).map(lambda drawn: {"prompt": drawn[0], **drawn[1], **drawn[2]})
    return mostly(usual, st.dictionaries(NAMES, JUNK, max_size=4), of=20)


def _check_error(error: dict[str, Any], status: int) -> None:
    assert set(error) == {"message", "type", "param", "code", "pointer"}, error
    assert 0 < len(error["message"]) < 2000
    assert status < 500 or error["code"] in INTERNAL, error


def _check_text(body: dict[str, Any], text: str) -> None:
    """Check that an output that ended with `stop` satisfies its constraint, with independent validators."""
    body = {name: value for name, value in body.items() if value is not None}  # null is the same as no field
    if "choice" in body:
        assert text in body["choice"]
    elif "json_object" in body:
        assert isinstance(json.loads(text), dict)
    elif "json_schema" in body:
        schema, value = body["json_schema"], json.loads(text)
        try:
            jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(value)
        except (jsonschema.ValidationError, re.error):
            # Patterns are in the dialect of ECMA 262, which Python's validator doesn't support.
            if "pattern" not in json.dumps(schema):
                raise


def _is_answered(client: TestClient, body: dict[str, Any]) -> bool:
    content = json.dumps(body, allow_nan=True).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    answer: httpx.Response = client.post("/v1/completions", content=content, headers=headers)
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
                _check_text(body, choice["text"])
        return True
    *events, last = sse(answer.text)
    if last != "[DONE]":
        _check_error(last["error"], 500)
        return False
    assert {event["choices"][0]["finish_reason"] for event in events} & {"stop", "length"}
    return True


def test_any_generation_is_answered_or_refused(client: TestClient, engine: AsyncLLM) -> None:
    """Every answer is a declared error or an output that satisfies its constraint."""
    answered = []

    @settings(SETTINGS, max_examples=5 * EXAMPLES)
    @given(_requests())
    def answer(body: dict[str, Any]) -> None:
        answered.append(_is_answered(client, body))

    answer()
    assert any(answered)
    health = engine.health()
    assert health.alive
    assert health.num_running == health.num_waiting == 0
    assert engine.engine.blocks.num_free == engine.engine.blocks.num_blocks
