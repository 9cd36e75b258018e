from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from guided.constraint import Constraint
from guided.errors import InvalidConstraint, InvalidRequest, UnsupportedConstraint


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("seed", 0.5),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", 3]),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1001),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: 101}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("best_of", 0),
        ("length_penalty", 2.0),
        ("early_stopping", "always"),
        ("whitespace_pattern", " "),
        ("backend", "pencil"),
    ],
)
def test_each_refusal_names_its_parameter(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{param: value})
    assert refusal.value.param == param
    assert param in str(refusal.value) or "beam search" in str(refusal.value) or "backend" in str(refusal.value)


@pytest.mark.parametrize("power", [-100, 100])
def test_a_length_penalty_that_overflows(power: int) -> None:
    with pytest.raises(InvalidRequest, match=r"length_penalty is -?100; it must be between -10 and 10"):
        SamplingParams(use_beam_search=True, temperature=0, length_penalty=power)


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(5\) is more than max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema"),
        ({"json_schema": '{"type": "integer"}'}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "a+"}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_the_constraint_is_there(fields: dict[str, Any], kind: str) -> None:
    params = SamplingParams(**fields)
    assert params.constraint is not None
    assert params.constraint.kind == kind
    assert dataclasses.replace(params, n=2).constraint == params.constraint
    for param in ("stop", "stop_token_ids"):
        with pytest.raises(InvalidRequest, match=r"cut the .* constraint short") as refusal:
            dataclasses.replace(params, **{param: [1] if param == "stop_token_ids" else "a"})
        assert refusal.value.param == param


def test_whitespace_goes_with_json() -> None:
    constraint = SamplingParams(json_schema={}, whitespace_pattern="").constraint
    assert constraint is not None
    assert constraint.whitespace == ""
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        SamplingParams(regex="a", whitespace_pattern=" ")


def test_two_constraints_are_refused_by_name() -> None:
    with pytest.raises(InvalidConstraint, match="json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")
    with pytest.raises(InvalidConstraint, match="constraint and regex"):
        SamplingParams(regex="a", constraint=Constraint.regex("b"))
    assert SamplingParams(constraint=Constraint.regex("b")).constraint == Constraint.regex("b")


def test_a_backend_that_can_t_do_it_is_refused() -> None:
    with pytest.raises(UnsupportedConstraint, match=r"lm-format-enforcer.*grammar"):
        SamplingParams(grammar='start: "a"', backend="lm-format-enforcer")


def test_they_are_frozen_and_stop_is_a_tuple() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]
