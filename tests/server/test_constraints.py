"""All spellings of a constraint mean the same, and errors name the field as the request
spells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from engine.server.http_errors import FieldNames
from engine.server.options import ServerSettings
from engine.server.request.bodies import ChatRequest
from engine.server.request.constraints import RequestedConstraint, requested_constraint
from engine.server.request.job import Job
from guided.constraint import Constraint
from guided.errors import (
    ConstraintTooLarge,
    GuidedError,
    InvalidConstraint,
    InvalidRequest,
    UnsupportedConstraint,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
}
GRAMMAR = 'root ::= "yes" | "no"'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}


MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(MESSAGES | fields)


def of(**fields: Any) -> RequestedConstraint:
    return requested_constraint(chat(**fields), ServerSettings())


VALUES: dict[str, Any] = {
    "json_schema": SCHEMA,
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": GRAMMAR,
    "json_object": True,
    "structural_tag": TAG,
}
OTHERS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("json_schema", SCHEMA, {"response_format": FORMAT}, "response_format"),
    (
        "json_schema",
        SCHEMA,
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        "structured_outputs.json",
    ),
    (
        "json_object",
        True,
        {"response_format": {"type": "json_object"}},
        "response_format",
    ),
    ("structural_tag", TAG, {"response_format": TAG}, "response_format"),
    ("structural_tag", OLDER_TAG, {"response_format": OLDER_TAG}, "response_format"),
    # llama.cpp has the schema beside the type.
    (
        "json_schema",
        SCHEMA,
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format",
    ),
    (
        "json_schema",
        SCHEMA,
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        "response_format",
    ),
    *((kind, value, {kind: value}, kind) for kind, value in VALUES.items()),
    *(
        (
            kind,
            VALUES[kind],
            {"structured_outputs": {kind: VALUES[kind]}},
            f"structured_outputs.{kind}",
        )
        for kind in ("regex", "choice", "grammar", "json_object", "structural_tag")
    ),
    ("json_schema", SCHEMA, {"guided_json": SCHEMA}, "guided_json"),
    *(
        (kind, VALUES[kind], {f"guided_{kind}": VALUES[kind]}, f"guided_{kind}")
        for kind in ("regex", "choice", "grammar")
    ),
]


@pytest.mark.parametrize(("kind", "value", "fields", "param"), OTHERS)
def test_every_spelling_is_one_constraint(
    kind: Any, value: Any, fields: dict[str, Any], param: str
) -> None:
    expected = Constraint.of_kind(kind, value, open_objects=False, param=kind)
    found = of(**fields)
    assert found == RequestedConstraint(expected, "auto")
    assert found.constraint is not None
    assert (found.constraint.param, found.constraint.pointer) == (param, "")


def test_limits_hold() -> None:
    with pytest.raises(
        ConstraintTooLarge, match="10001 entries; the limit is 10000"
    ) as raised:
        of(guided_choice=[str(number) for number in range(10_001)])
    assert raised.value.param == "guided_choice"


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"json_object": False}]
)
def test_none_is_none(fields: dict[str, Any]) -> None:
    assert of(**fields).constraint is None


@pytest.mark.parametrize(
    ("fields", "whitespace"),
    [
        ({"json_schema": SCHEMA, "whitespace_pattern": " ?"}, " ?"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, " ?"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, " ?"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ""),
    ],
)
def test_whitespace_reaches_the_constraint(
    fields: dict[str, Any], whitespace: str
) -> None:
    assert of(**fields).constraint == Constraint.json_schema(
        SCHEMA, whitespace=whitespace, open_objects=False
    )


@pytest.mark.parametrize(
    ("fields", "server", "is_open"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"open_objects": True}, False, True),
        ({"open_objects": False}, True, False),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_additional_properties": True,
                }
            },
            True,
            False,
        ),
    ],
)
def test_objects_are_closed_unless_asked_otherwise(
    fields: dict[str, Any], server: bool, is_open: bool
) -> None:
    body = chat(
        **({"json_schema": SCHEMA} if "structured_outputs" not in fields else {}),
        **fields,
    )
    found = requested_constraint(body, ServerSettings(open_objects=server)).constraint
    assert found == Constraint.json_schema(SCHEMA, open_objects=is_open)


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"backend": "xgrammar"}, "xgrammar"),
        ({"guided_decoding_backend": "guidance"}, "llguidance"),
        ({}, "outlines"),
    ],
)
def test_backend_of_the_request_goes_before_the_servers(
    fields: dict[str, Any], backend: str
) -> None:
    assert (
        requested_constraint(
            chat(choice=["a"], **fields), ServerSettings(backend="outlines")
        ).backend
        == backend
    )


MISSING = "response_format.json_schema.schema"
OLDER = "guided_decoding_backend"
CLOSED = "structured_outputs.disable_additional_properties"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "says"),
    [
        (
            {"regex": "a", "guided_choice": ["b"]},
            InvalidConstraint,
            "guided_choice",
            "regex and guided_choice",
        ),
        (
            {"structured_outputs": {}},
            InvalidConstraint,
            "structured_outputs",
            "no constraint",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            InvalidConstraint,
            "response_format",
            "format",
        ),
        (
            {"response_format": {"type": "text", "format": {}}},
            InvalidConstraint,
            "response_format.format",
            "text",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            InvalidConstraint,
            MISSING,
            "Missing",
        ),
        (
            {"response_format": {**FORMAT, "type": "text"}},
            InvalidConstraint,
            MISSING[:27],
            "not text",
        ),
        (
            {"regex": "a", "whitespace_pattern": " "},
            InvalidRequest,
            "whitespace_pattern",
            "regex",
        ),
        (
            {"whitespace_pattern": " "},
            InvalidRequest,
            "whitespace_pattern",
            "JSON constraint",
        ),
        (
            {
                "json_schema": SCHEMA,
                "whitespace_pattern": " ",
                "guided_whitespace_pattern": "",
            },
            *(
                InvalidRequest,
                "guided_whitespace_pattern",
                "whitespace_pattern and guided_whitespace_pattern",
            ),
        ),
        (
            {"structured_outputs": {"regex": "a", CLOSED[19:]: True}},
            InvalidRequest,
            CLOSED,
            "regex",
        ),
        (
            {"json_schema": SCHEMA, "whitespace_pattern": "\x00"},
            InvalidConstraint,
            "whitespace_pattern",
            "NUL",
        ),
        ({"backend": "nonesuch"}, InvalidRequest, "backend", "llguidance"),
        (
            {"choice": ["a"], "backend": "xgrammar", OLDER: "outlines"},
            InvalidRequest,
            OLDER,
            "one",
        ),
        (
            {"choice": ["a"], OLDER: "xgrammar:no-fall"},
            InvalidRequest,
            OLDER,
            "no-fallback",
        ),
        (
            {"grammar": GRAMMAR, OLDER: "outlines"},
            UnsupportedConstraint,
            OLDER,
            "outlines",
        ),
    ],
)
def test_what_is_wrong_is_named(
    fields: dict[str, Any], kind: type[GuidedError], param: str, says: str
) -> None:
    names = FieldNames()

    def build() -> SamplingParams:
        body = ChatRequest.model_validate(MESSAGES | fields, context={"names": names})
        wanted = requested_constraint(body, ServerSettings())
        return SamplingParams(constraint=wanted.constraint, backend=wanted.backend)

    with pytest.raises(kind) as raised:
        build()
    names.respell(raised.value)
    assert raised.value.param == param
    assert says in str(raised.value)


def test_errors_of_the_compilation_are_respelled() -> None:
    params = SamplingParams(constraint=of(guided_regex="a+").constraint)
    job = Job("1", "1", [[1], [2]], params, stream=False)
    assert (
        job.located(InvalidConstraint("bad", param="regex"), 0).param == "guided_regex"
    )
    assert job.located(InvalidConstraint("bad"), 0).param == "guided_regex"
    assert job.located(InvalidRequest("bad", param="stop"), 0).param == "stop"
    kept = InvalidConstraint("bad", param="regex")
    assert (job.located(kept, 0).param, kept.param) == ("guided_regex", "regex"), (
        "other requests get it, too"
    )
    assert (
        job.located(InvalidRequest("too long", param="prompt"), 1).param == "prompt[1]"
    )
