"""All spellings of a constraint mean the same, and errors name the field as the request spells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from engine.server.constraints import RequestedConstraint, requested_constraint
from engine.server.generation import Job
from engine.server.protocol import ChatRequest, CompletionRequest
from guided.constraint import Constraint
from guided.errors import GuidedError, InvalidConstraint, InvalidRequest, UnsupportedConstraint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GRAMMAR = 'root ::= "yes" | "no"'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def of(**fields: Any) -> RequestedConstraint:
    return requested_constraint(chat(**fields))


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA), "json_schema"),
        ({"json_schema": '{"type": "integer"}'}, Constraint.json_schema({"type": "integer"}), "json_schema"),
        ({"response_format": response_format(SCHEMA)}, Constraint.json_schema(SCHEMA), "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(SCHEMA), "structured_outputs.json"),
        ({"guided_json": SCHEMA}, Constraint.json_schema(SCHEMA), "guided_json"),
        ({"regex": "a+"}, Constraint.regex("a+"), "regex"),
        ({"structured_outputs": {"regex": "a+"}}, Constraint.regex("a+"), "structured_outputs.regex"),
        ({"guided_regex": "a+"}, Constraint.regex("a+"), "guided_regex"),
        ({"choice": ["a", "b"]}, Constraint.choice(["a", "b"]), "choice"),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint.choice(["a"]), "structured_outputs.choice"),
        ({"guided_choice": ["a"]}, Constraint.choice(["a"]), "guided_choice"),
        ({"grammar": GRAMMAR}, Constraint.grammar(GRAMMAR), "grammar"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, Constraint.grammar(GRAMMAR), "structured_outputs.grammar"),
        ({"guided_grammar": GRAMMAR}, Constraint.grammar(GRAMMAR), "guided_grammar"),
        ({"json_object": True}, Constraint.json_object(), "json_object"),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object(), "response_format"),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_object(), "structured_outputs.json_object"),
        ({"structural_tag": TAG}, Constraint.structural_tag(TAG), "structural_tag"),
        ({"response_format": TAG}, Constraint.structural_tag(TAG), "response_format"),
        ({"response_format": OLDER_TAG}, Constraint.structural_tag(OLDER_TAG), "response_format"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            Constraint.structural_tag(TAG),
            "structured_outputs.structural_tag",
        ),
        ({"ebnf": GRAMMAR}, Constraint.grammar(GRAMMAR), "ebnf"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Constraint.json_schema(SCHEMA),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            Constraint.json_schema(SCHEMA),
            "response_format",
        ),
        ({"response_format": {"type": "json", "value": SCHEMA}}, Constraint.json_schema(SCHEMA), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": "true"},
                }
            },
            Constraint.json_schema(SCHEMA),
            "response_format",
        ),
        # guidance's VLLMModel sends its schema in two fields.
        ({"json_schema": SCHEMA, "guided_json": json.dumps(SCHEMA)}, Constraint.json_schema(SCHEMA), "json_schema"),
    ],
)
def test_every_spelling_is_one_constraint(fields: dict[str, Any], expected: Constraint, param: str) -> None:
    assert of(**fields) == RequestedConstraint(expected, "auto", param)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"json_object": False}])
def test_none_is_none(fields: dict[str, Any]) -> None:
    assert of(**fields).constraint is None


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA, "whitespace_pattern": " ?"},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
    ],
)
def test_whitespace_reaches_the_constraint(fields: dict[str, Any]) -> None:
    assert of(**fields).constraint == Constraint.json_schema(SCHEMA, whitespace=" ?")


def test_disable_any_whitespace_is_no_whitespace() -> None:
    found = of(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}).constraint
    assert found == Constraint.json_schema(SCHEMA, whitespace="")


def test_disable_additional_properties_closes_objects() -> None:
    found = of(structured_outputs={"json": SCHEMA, "disable_additional_properties": True}).constraint
    assert found == Constraint.json_schema({**SCHEMA, "additionalProperties": False})


@pytest.mark.parametrize(
    ("fields", "backend"),
    [({"backend": "xgrammar"}, "xgrammar"), ({"guided_decoding_backend": "guidance"}, "llguidance"), ({}, "outlines")],
)
def test_backend_of_the_request_goes_before_the_servers(fields: dict[str, Any], backend: str) -> None:
    assert requested_constraint(chat(choice=["a"], **fields), default_backend="outlines").backend == backend


@pytest.mark.parametrize(
    ("fields", "kind", "param", "says"),
    [
        ({"regex": "a", "choice": ["b"]}, InvalidConstraint, "choice", ["regex", "choice"]),
        (
            {"response_format": response_format(SCHEMA), "structured_outputs": {"regex": "a"}},
            InvalidConstraint,
            "structured_outputs.regex",
            ["response_format", "structured_outputs.regex"],
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            InvalidConstraint,
            "structured_outputs.choice",
            ["structured_outputs.regex", "structured_outputs.choice"],
        ),
        ({"json_schema": SCHEMA, "guided_json": {}}, InvalidConstraint, "guided_json", ["json_schema", "guided"]),
        (
            {"json_schema": {}, "response_format": {"type": "json_object"}},
            InvalidConstraint,
            "response_format",
            ["json_schema", "response_format"],
        ),
        ({"regex": "(", "guided_regex": "(", "grammar": "("}, InvalidConstraint, "grammar", ["are given"]),
        ({"json_schema": {"const": 0}, "guided_json": {"const": False}}, InvalidConstraint, "guided_json", ["given"]),
        ({"structured_outputs": {}}, InvalidConstraint, "structured_outputs", ["no constraint"]),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            InvalidConstraint,
            "structured_outputs.structural_tag",
            ["format"],
        ),
        ({"response_format": {"type": "structural_tag"}}, InvalidConstraint, "response_format", ["format"]),
        ({"response_format": {"type": "json"}}, InvalidConstraint, "response_format.value", ["Missing"]),
        ({"response_format": {"type": "text", "format": {}}}, InvalidConstraint, "response_format.format", ["text"]),
        (
            {"response_format": {"type": "json_schema"}},
            InvalidConstraint,
            "response_format.json_schema.schema",
            ["Missing"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            InvalidConstraint,
            "response_format.json_schema.schema",
            ["Missing"],
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
            InvalidConstraint,
            "response_format.json_schema",
            ["json_object"],
        ),
        ({"guided_choice": []}, InvalidConstraint, "guided_choice", ["empty"]),
        ({"regex": "a", "whitespace_pattern": " "}, InvalidRequest, "whitespace_pattern", ["regex"]),
        ({"whitespace_pattern": " "}, InvalidRequest, "whitespace_pattern", ["JSON constraint"]),
        (
            {"json_schema": SCHEMA, "whitespace_pattern": " ", "guided_whitespace_pattern": ""},
            InvalidRequest,
            "guided_whitespace_pattern",
            ["whitespace_pattern and guided_whitespace_pattern"],
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            InvalidRequest,
            "structured_outputs.disable_additional_properties",
            ["regex"],
        ),
        ({"json_schema": SCHEMA, "whitespace_pattern": "\x00"}, InvalidConstraint, "whitespace_pattern", ["NUL"]),
        ({"structured_outputs": {"regex": "a\x00"}}, InvalidConstraint, "structured_outputs.regex", ["NUL"]),
        ({"backend": "nonesuch"}, InvalidRequest, "backend", ["nonesuch", "llguidance"]),
        (
            {"grammar": GRAMMAR, "guided_decoding_backend": "outlines"},
            UnsupportedConstraint,
            "guided_decoding_backend",
            ["outlines", "grammar"],
        ),
        ({"regex": "a", "guided_decoding_backend": "xgrammar:x"}, InvalidRequest, "guided_decoding_backend", ["x"]),
        (
            {"backend": "xgrammar", "guided_decoding_backend": "xgrammar"},
            InvalidRequest,
            "guided_decoding_backend",
            ["backend"],
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], kind: type[GuidedError], param: str, says: list[str]) -> None:
    with pytest.raises(kind) as raised:
        of(**fields)
    assert raised.value.param == param
    for text in says:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "object", "properties": {"a": {"type": "stsring"}}}, "/properties/a/type"),
        ({"type": "object", "properties": {"b": {"minimum": "1"}}}, "/properties/b/minimum"),
    ],
)
def test_bad_schema_has_a_pointer(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidConstraint) as raised:
        of(response_format=response_format(schema))
    assert (raised.value.param, raised.value.pointer) == ("response_format", pointer)


def test_errors_of_the_compilation_are_respelled() -> None:
    job = Job("1", "1", [[1], [2]], SamplingParams(regex="a+"), of(guided_regex="a+").param, stream=False)
    assert job.respell(InvalidConstraint("bad", param="regex"), 0).param == "guided_regex"
    assert job.respell(InvalidConstraint("bad"), 0).param == "guided_regex"
    assert job.respell(InvalidRequest("bad", param="stop"), 0).param == "stop"
    assert str(job.respell(InvalidRequest("too long", param="prompt"), 1)) == "prompt[1]: too long"


def test_fields_that_ask_for_nothing_are_taken() -> None:
    chat(tools=[], tool_choice="none", user="u", metadata={"a": "b"}, store=True, audio=None, functions=None)
    chat(messages=[{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}])
    CompletionRequest.model_validate({"prompt": [1, 2], "suffix": ""})


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_the_four_shapes_of_a_prompt(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


def test_strict_schema() -> None:
    schema = {"type": "string", "format": "semver"}
    assert of(json_schema=schema).constraint.not_enforced == ("/format",)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedConstraint, match="semver"):
        of(json_schema=schema, strict_schema=True)
