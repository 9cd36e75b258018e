"""The constraint in vLLM's `structured_outputs`, with the rejections of our HTTP
server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from engine.server.options import ServerSettings
from engine.server.request.bodies import CompletionRequest
from engine.server.request.constraints import requested_constraint as asked_over_http
from guided.constraint import Constraint
from guided.errors import GuidedError, InternalError, InvalidRequest
from guided.integrations.vllm.request_params import GuidedParams, guided_params

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
TAG = json.dumps(
    {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}
)
CONFIG: Any = SimpleNamespace(
    backend="auto", disable_any_whitespace=False, disable_additional_properties=False
)


def params(
    extra: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
    **outputs: Any,
) -> Any:
    """Stand-in for vLLM's `SamplingParams` with these `structured_outputs`."""
    fields = (
        "json",
        "json_object",
        "regex",
        "choice",
        "grammar",
        "structural_tag",
        "whitespace_pattern",
    )
    switches = dict.fromkeys(
        ("disable_any_whitespace", "disable_additional_properties"), False
    )
    given = {**dict.fromkeys(fields), **switches, **outputs}
    structured = (
        SimpleNamespace(**given, all_constraints_none=lambda: not outputs)
        if outputs
        else None
    )
    plain = {
        "ignore_eos": False,
        "thinking_token_budget": None,
        "trace_decode_token_ids": None,
    }
    return SimpleNamespace(
        extra_args=extra, structured_outputs=structured, **{**plain, **(others or {})}
    )


@pytest.mark.parametrize(
    "name", [None, "kv_transfer_params", "session_id", "target_token", "x"]
)
def test_requests_without_a_constraint(name: str | None) -> None:
    """Other extra arguments belong to vLLM, and to other plugins."""
    extra = None if name is None else {name: "x"}
    assert guided_params(params(extra, {"ignore_eos": True}), CONFIG) is None


@pytest.mark.parametrize(
    ("outputs", "constraint"),
    [
        ({"json": SCHEMA}, Constraint.json_schema(SCHEMA, open_objects=False)),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            Constraint.json_schema(SCHEMA, whitespace="", open_objects=False),
        ),
        (
            {"json_object": True, "whitespace_pattern": " ?"},
            Constraint.json_object(whitespace=" ?"),
        ),
        ({"choice": ["yes", "no"]}, Constraint.choice(["yes", "no"])),
        ({"grammar": 'start: "a"'}, Constraint.grammar('start: "a"')),
        ({"structural_tag": TAG}, Constraint.structural_tag(TAG, open_objects=False)),
    ],
)
def test_every_kind(outputs: dict[str, Any], constraint: Constraint) -> None:
    assert guided_params(params(**outputs), CONFIG) == GuidedParams(constraint)


def test_the_options_of_the_server() -> None:
    config: Any = SimpleNamespace(
        backend="guidance",
        disable_any_whitespace=True,
        disable_additional_properties=True,
    )
    found = guided_params(params(json=SCHEMA), config)
    closed = Constraint.json_schema(SCHEMA, whitespace="", open_objects=False)
    assert found == GuidedParams(closed, "llguidance")
    named = guided_params(
        params({"guided_backend": "outlines_core"}, json=SCHEMA), config
    )
    assert named == GuidedParams(closed, "outlines")


def test_open_objects_reach_the_engine() -> None:
    found = guided_params(params({"open_objects": True}, json=SCHEMA), CONFIG)
    assert found == GuidedParams(Constraint.json_schema(SCHEMA, open_objects=True))
    assert GuidedParams.from_text(found.to_text()) == found
    with pytest.raises(InvalidRequest, match="true or false"):
        guided_params(params({"open_objects": "yes"}, json=SCHEMA), CONFIG)


@pytest.mark.parametrize(
    ("field", "value"), [("json", '{"type": "objekt"}'), ("regex", ""), ("choice", [])]
)
def test_rejected_as_by_our_server(field: str, value: Any) -> None:
    body = CompletionRequest.model_validate(
        {"model": "m", "prompt": "p", "structured_outputs": {field: value}}
    )
    with pytest.raises(GuidedError) as theirs:
        asked_over_http(body, ServerSettings())
    with pytest.raises(GuidedError) as ours:
        guided_params(params(**{field: value}), CONFIG)
    assert type(ours.value) is type(theirs.value)
    assert (str(ours.value), ours.value.param) == (
        str(theirs.value),
        theirs.value.param,
    )


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ],
)
def test_parameters_that_would_overwrite_masks_are_rejected(
    others: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        guided_params(params(None, others, regex="a+"), CONFIG)
    assert rejected.value.param == param


@pytest.mark.parametrize(
    "name",
    [
        "json",
        "json_schema",
        "regex",
        "backend",
        "response_format",
        "guided_json",
        "guided_decoding_backend",
    ],
)
@pytest.mark.parametrize("outputs", [{}, {"regex": "a"}], ids=str)
def test_constraints_elsewhere_are_not_ignored(
    name: str, outputs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="use structured_outputs") as rejected:
        guided_params(params({name: "x"}, **outputs), CONFIG)
    assert rejected.value.param == name


@pytest.mark.parametrize(
    ("backend", "outputs", "words"),
    [
        ("outlines", {}, "needs a constraint"),
        ("unknown", {"regex": "a"}, "there is no backend 'unknown'"),
        (5, {"regex": "a"}, "is a string, not int"),
        ("lm-format-enforcer", {"grammar": 'start: "a"'}, "does not support"),
    ],
)
def test_backends_are_checked(
    backend: Any, outputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as rejected:
        guided_params(params({"guided_backend": backend}, **outputs), CONFIG)
    assert rejected.value.param == "guided_backend"


def test_json_object_false_is_no_constraint() -> None:
    with pytest.raises(InvalidRequest, match="json_object takes true"):
        guided_params(params(json_object=False), CONFIG)


def test_the_engine_reads_the_validated_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = GuidedParams(Constraint.json_schema(SCHEMA, whitespace=" ?"), "xgrammar")
    # it is not validated again
    monkeypatch.setattr("guided.schema.document.parse", None)
    assert GuidedParams.from_text(given.to_text()) == given
    for text in (None, "xgrammar"):
        with pytest.raises(InternalError):
            GuidedParams.from_text(text)
