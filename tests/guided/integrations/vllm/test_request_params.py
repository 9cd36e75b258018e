"""Guided parameters in vLLM's extra arguments, and rejections with the messages of our HTTP server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.server.constraints import requested_constraint as asked_over_http
from engine.server.protocol import CompletionRequest
from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, InvalidConstraint, InvalidRequest
from guided.integrations.vllm.request_params import GuidedParams, guided_params, request_id

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


def params(extra: dict[str, Any] | None, **others: Any) -> Any:
    plain = {
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "structured_outputs": None,
        "thinking_token_budget": None,
        "trace_decode_token_ids": None,
    }
    return SimpleNamespace(extra_args=extra, **{**plain, **others})


@pytest.mark.parametrize("extra", [None, {}, {"session_id": "s"}, {"json_object": 0}, {"json_object": "false"}])
def test_requests_without_a_constraint(extra: dict[str, Any] | None) -> None:
    assert guided_params(params(extra, stop=["x"], ignore_eos=True)) is None


@pytest.mark.parametrize(
    ("extra", "constraint"),
    [
        ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
        ({"json_schema": {"type": "integer"}}, Constraint.json_schema({"type": "integer"})),
        ({"json_object": 1, "whitespace_pattern": " ?"}, Constraint.json_object(whitespace=" ?")),
        ({"regex": "[0-9]+"}, Constraint.regex("[0-9]+")),
        ({"choice": ["yes", "no"]}, Constraint.choice(["yes", "no"])),
        ({"grammar": 'start: "a"'}, Constraint.grammar('start: "a"')),
    ],
)
def test_every_kind(extra: dict[str, Any], constraint: Constraint) -> None:
    assert guided_params(params(extra)) == GuidedParams(constraint)


def test_the_backend() -> None:
    found = guided_params(params({"regex": "a", "backend": "outlines_core", "guided_request_id": 7}))
    assert found == GuidedParams(Constraint.regex("a"), "outlines")


@pytest.mark.parametrize(
    "extra",
    [
        {"json_schema": '{"type": "objekt"}'},
        {"json_schema": '{"$ref": "https://example.com/schema"}'},
        {"json_schema": "{"},
        {"regex": "a", "choice": ["b"]},
        {"regex": ""},
        {"regex": "a{100000}"},
        {"regex": "a\x00"},
        {"choice": []},
        {"grammar": " "},
        {"grammar": 'start: "a"', "backend": "lm-format-enforcer"},
        {"regex": "a", "backend": "unknown"},
        {"whitespace_pattern": " "},
        {"regex": "a", "whitespace_pattern": " "},
        {"json_object": True, "whitespace_pattern": "a{100000}"},
    ],
    ids=str,
)
def test_rejected_as_by_our_server(extra: dict[str, Any]) -> None:
    with pytest.raises(GuidedError) as theirs:
        asked_over_http(CompletionRequest.model_validate({"model": "m", "prompt": "p", **extra}))
    with pytest.raises(GuidedError) as ours:
        guided_params(params(extra))
    assert type(ours.value) is type(theirs.value)
    assert (str(ours.value), ours.value.param) == (str(theirs.value), theirs.value.param)


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": object()}, "structured_outputs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ],
)
def test_parameters_that_would_overwrite_masks_are_rejected(others: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        guided_params(params({"regex": "a+"}, **others))
    assert rejected.value.param == param


@pytest.mark.parametrize("others", [{"stop": ["x"]}, {"stop_token_ids": [5]}])
def test_stops_are_rejected(others: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        guided_params(params({"regex": "a+"}, **others))
    assert [rejected.value.param] == list(others)


def test_the_engine_reads_the_validated_constraint() -> None:
    given = GuidedParams(Constraint.json_schema(SCHEMA, whitespace=" ?"), "xgrammar")
    assert GuidedParams.from_text(given.to_text()) == given
    for text in (None, "xgrammar"):
        assert isinstance(GuidedParams.from_text(text), InternalError)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("json", "json_schema"),
        ("schema", "json_schema"),
        ("json_shema", "json_schema"),
        ("regexp", "regex"),
        ("Regex", "regex"),
        ("choices", "choice"),
        ("ebnf", "grammar"),
        ("guided_schema", "json_schema"),
        ("back-end", "backend"),
        ("whitespace_patern", "whitespace_pattern"),
    ],
)
def test_near_misses_are_not_ignored(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}") as rejected:
        guided_params(params({name: "x"}))
    assert rejected.value.param == name


def test_options_without_a_constraint_are_not_ignored() -> None:
    with pytest.raises(InvalidRequest, match="needs a constraint"):
        guided_params(params({"backend": "outlines"}))


@pytest.mark.parametrize("name", ["kv_transfer_params", "session_id", "kv_cache_report_mode", "target_token", "x"])
def test_parameters_of_vllm_and_of_other_plugins_are_theirs(name: str) -> None:
    assert guided_params(params({name: "x"})) is None


def test_the_id_is_known_if_other_parameters_are_invalid() -> None:
    assert request_id(params({"regex": 5, "guided_request_id": "a"})) == "a"
    assert request_id(params({"regex": 5})) is None
    assert request_id(params(None)) is None


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_decoding_backend"])
def test_former_names_are_not_ignored(name: str) -> None:
    with pytest.raises(InvalidRequest, match="did you mean"):
        guided_params(params({name: "x"}))


@pytest.mark.parametrize("extra", [{"backend": 5}, {"json_object": "perhaps"}, {"json_object": [1]}])
def test_values_of_other_types_are_rejected(extra: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, InvalidConstraint)):
        guided_params(params(extra))
