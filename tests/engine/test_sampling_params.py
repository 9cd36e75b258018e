from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from engine.sampling_params import SamplingParams
from guided.constraint import Constraint
from guided.errors import InvalidRequest

REFUSED: dict[str, list[Any]] = {
    "n": [0, 1.5, True],
    "temperature": [-0.1, float("nan"), "hot"],
    "top_p": [-0.1, 1.1],
    "top_k": [-2],
    "min_p": [2.0],
    "seed": [0.5, 2**64],
    "max_tokens": [0],
    "min_tokens": [-1],
    "stop": ["", ["a", 3], ["x"] * 65, "x" * 1001],
    "stop_token_ids": [[-1], [1] * 1025],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0.0, 1e-40],
    "logit_bias": [{"3": 1.0}, {3: 101}, dict.fromkeys(range(1025), 1)],
    "logprobs": [21],
    "prompt_logprobs": [21],
    "best_of": [0],
    "length_penalty": [2.0],
    "early_stopping": ["always"],
    "whitespace_pattern": [" "],
}


@pytest.mark.parametrize(
    ("param", "value"),
    [(param, value) for param in REFUSED for value in REFUSED[param]],
)
def test_each_refusal_names_its_parameter(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=param) as refusal:
        SamplingParams(**{param: value})
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        (
            "json_schema",
            '{"enum": [1, 2], "type": "integer"}',
            {"output_type": Literal[1, 2]},
        ),
        ("output_type", Literal["a", "b"], {"choice": ["a", "b", "a"]}),
        (
            "output_type",
            dict[str, int],
            {"json_schema": TypeAdapter(dict[str, int]).json_schema()},
        ),
        ("regex", "[0-9]+", {"constraint": Constraint.regex("[0-9]+")}),
    ],
)
def test_equal_constraints_count_once(
    field: str, value: Any, others: dict[str, Any]
) -> None:
    constraint = SamplingParams(**{field: value}).constraint
    assert (
        SamplingParams(**{**others, field: value}).constraint
        == SamplingParams(**others).constraint
        == constraint
    )


BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0, "n": 2}
RESAMPLED: dict[str, Any] = {"resample": True, "regex": "a", "best_of": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {**BEAMS, "length_penalty": -100},
            r"length_penalty is -100; it must be between -10 and 10",
        ),
        ({**BEAMS, "top_p": 0.5}, "top_p does not work with use_beam_search"),
        ({**BEAMS, "mask_details": True}, "mask_details does not"),
        ({**BEAMS, "best_of": 1}, r"best_of is 1; it must be at least n \(2\)"),
        (
            {"resample": True, "best_of": 2},
            "resample draws n of best_of samples: it requires a constraint",
        ),
        ({"resample": True, "regex": "a", "n": 2}, "best_of above n"),
        ({**RESAMPLED, "use_beam_search": True}, "without beams"),
        ({**RESAMPLED, "temperature": 0.5}, "temperature must be 1"),
        ({**RESAMPLED, "logit_bias": {3: 1.0}}, "logit_bias must be None"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            r"min_tokens \(5\) is more than max_tokens \(4\)",
        ),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex"),
        ({"choice": ["a"], "output_type": Literal["a", "b"]}, "choice and output_type"),
        (
            {"json_object": True, "output_type": dict[str, int]},
            "json_object and output_type",
        ),
        ({"regex": "a", "constraint": Constraint.regex("b")}, "constraint and regex"),
        ({"regex": "a", "backend": "pencil"}, "pencil"),
        (
            {"grammar": 'start: "a"', "backend": "lm-format-enforcer"},
            r"lm-format-enforcer.*grammar",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


def test_top_k_is_off_with_minus_one_too() -> None:
    assert SamplingParams(**RESAMPLED, top_k=-1) == SamplingParams(**RESAMPLED, top_k=0)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema"),
        ({"json_schema": '{"type": "integer"}'}, "json_schema"),
        ({"json_object": True, "whitespace_pattern": ""}, "json_object"),
        ({"regex": "a+"}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"constraint": Constraint.regex("b")}, "regex"),
    ],
)
def test_the_constraint_is_there(
    fields: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(**fields)
    assert params.constraint is not None
    assert (params.constraint.kind, params.constraint.whitespace) == (
        kind,
        fields.get("whitespace_pattern"),
    )
    assert dataclasses.replace(params, n=2).constraint == params.constraint
    assert dataclasses.replace(params, stop="a").stop == ()
    assert (
        f"stop is ignored: it is not searched in the output of a {kind} constraint"
        in caplog.text
    )
    with pytest.raises(InvalidRequest, match=r"cut the .* constraint short") as refusal:
        dataclasses.replace(params, stop_token_ids=[1])
    assert refusal.value.param == "stop_token_ids"


def test_they_are_frozen_and_stop_is_a_tuple() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3])
    assert (params.stop, params.stop_token_ids) == (("x",), (3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]
