"""The guard: what no library enforces is enforced, no key comes twice, and no text leads into a dead end."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import BYTES, WORDS
from byte_vocabulary import tokens as byte_tokens
from hypothesis import HealthCheck, Phase, assume, event, given, reject, settings
from hypothesis import strategies as st
from json_orders import reordered
from numpy.typing import NDArray

from guided.backends import Backends
from guided.backends.base import CompiledGrammar, Matcher
from guided.bitmask import allowed_ids, words
from guided.constraint import Constraint
from guided.errors import BackendError, InvalidConstraint, TokenRejected, UnsupportedConstraint
from guided.guard.plan import Plan
from guided.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def bytewise() -> Backends:
    return Backends(BYTES)


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> Backends:
    return Backends(vocabulary)


def compiled(backends: Backends, schema: Any, backend: str = "llguidance") -> CompiledGrammar:
    return backends[backend].compile(Constraint.json_schema(schema))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    try:
        matcher.accept_tokens(byte_tokens(text))
    except TokenRejected:
        return False
    return matcher.is_accepting()


def characters(matcher: Matcher) -> str:
    """Return the ASCII characters that a mask of single bytes allows."""
    row = np.full(WORDS, -1, np.int32)
    matcher.fill_bitmask(row)
    return "".join(chr(token - 1) for token in allowed_ids(row).tolist() if 1 <= token <= 128)


NEVER = {"type": "array", "prefixItems": [False]}
"""Only the empty array is valid."""
UNIQUE = {"type": "array", "uniqueItems": True}
TAGS = {**UNIQUE, "items": {"enum": ["ab", "abc", "b"]}}
PEOPLE = {
    **UNIQUE,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["x", "y"]}, "adult": {"type": "boolean"}},
        "required": ["name", "adult"],
        "additionalProperties": False,
    },
}
SINGLE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
PAYMENT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "credit_card": {"type": "integer"}},
    "dependentRequired": {"credit_card": ["billing_address"]},
}
KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "url"]}, "path": {"type": "string"}, "url": {"type": "string"}},
    "required": ["kind"],
    "allOf": [
        {"if": {"properties": {"kind": {"const": "file"}}}, "then": {"required": ["path"]}},
        {"if": {"properties": {"kind": {"const": "url"}}}, "then": {"required": ["url"]}},
    ],
}
LISTS = {"type": "array", "items": TAGS}
GRAPHS = {
    "type": "object",
    "properties": {"run": {"type": "integer"}, "result": {"type": "integer"}, "tags": TAGS, "rest": LISTS},
    "additionalProperties": False,
    "oneOf": [{"required": ["run"]}, {"required": ["result"]}],
}
SLUG = {"type": "object", "additionalProperties": {"type": "string", "not": {"enum": ["home", "index"]}}}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (UNIQUE, ["[]", '[1, true, "1", [1]]', '[{"a": 1}, {"a": 2}]'], ["[1,1]", "[1, 1.0]", '["a","\\u0061"]']),
    (UNIQUE, ["[0]"], ["[0,-0]", '[{"a":1,"b":2},{"b":2,"a":1}]', "[[],[]]"]),
    (TAGS, ['["abc","ab","b"]', "[]"], ['["ab","ab"]', '["ab", "b", "b"]']),
    ({**UNIQUE, "prefixItems": [{"type": "boolean"}, {"type": "boolean"}]}, ["[true,false,1]"], ["[true,true]"]),
    (PEOPLE, ['[{"name":"x","adult":true},{"name":"x","adult":false}]'], ['[{"name":"x","adult":true}, {"name":"x",']),
    ({"type": "array", "contains": {"const": 5}}, ["[5]", '["", 5, 6]'], ["[]", "[6]", "[55]"]),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 2}, ['["a",1,"b"]'], ['["a",1]']),
    ({"contains": {"enum": [1, "x"]}, "maxContains": 1, "type": "array"}, ['[1,2,"y"]'], ["[1,1]", '[1,"x"]', "[]"]),
    ({"type": "object", "minProperties": 2}, ['{"a":1,"b":1}'], ["{}", '{"a":1}', '{"a":1,"a":2']),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,']),
    ({"type": "object", "properties": {"z": {}}, "required": ["z"], "maxProperties": 1}, ['{"z":1}'], ['{"z":1,']),
    (PAYMENT, ["{}", '{"name":"a"}', '{"credit_card":1,"billing_address":2}'], ['{"credit_card":1}']),
    (PAYMENT, ['{"billing_address":"a"}'], ['{"name":"a","credit_card":1}']),
    (KIND, ['{"kind":"file","path":""}', '{"kind":"url","path":"a","url":""}'], ['{"kind":"file"}', '{"kind":"url"}']),
    ({"type": "object", "properties": {"a": KIND}}, ['{"a":{"kind":"file","path":""}}'], ['{"a":{"kind":"file"}}']),
    ({"anyOf": [{"type": "null"}, TAGS]}, ["null", '["ab"]'], ['["ab","ab"]']),
    ({"type": "array", "items": TAGS}, ['[["ab"],["ab"]]'], ['[["ab"],["ab","ab"]]']),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ['{"a":1}', '{"b":1}', "{}"], ['{"a":1,"b":1}']),
    (GRAPHS, ['{"run":1,"tags":["ab"]}', '{"result":1,"tags":["ab","b"]}'], ['{"run":1,"tags":["ab","ab"]}', "{}"]),
    (GRAPHS, ['{"run":1,"rest":[["b"]]}'], ['{"result":1,"rest":[["b"],["b","b"]]}', '{"run":1,"result":1}']),
    ({**SLUG, "properties": {"tags": TAGS}}, ['{"tags":["b"],"slug":"x"}'], ['{"tags":["b","b"]}', '{"slug":"home"}']),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 2, "maxProperties": 2},
        ['{"a":1,"b":1}'],
        ['{"a":1}', '{"a":1,"A":1}', '{"a":1,"b":1,"c":1}', '{"a":1,"a":1}'],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_what_no_library_enforces(bytewise: Backends, schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = compiled(bytewise, schema)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        ({"anyOf": [SINGLE, {"type": "null"}]}, ["null", '{"a":1}']),
        ({"type": "integer", "minimum": 3, "maximum": 9, "multipleOf": 3}, ["9", "3", "6"]),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2}, ["[]", "[1]", "[1,1]"]),
        ({"type": "string", "pattern": "^[ab]?$"}, ['"a"', '""', '"b"']),
    ],
)
def test_no_comma_follows_when_every_possible_item_is_used(bytewise: Backends, items: Any, texts: list[str]) -> None:
    matcher = compiled(bytewise, {**UNIQUE, "items": items}).matcher()
    for before, text in zip("[,,", texts, strict=False):
        matcher.accept_tokens(byte_tokens(before + text))
        assert ("," in characters(matcher)) == (text != texts[-1])
    assert "]" in characters(matcher)


def test_numbers_that_are_equal_are_one_of_the_values_that_are_left(bytewise: Backends) -> None:
    matcher = compiled(bytewise, {**UNIQUE, "items": {"enum": [1, 1.0, "a"]}}).matcher()
    matcher.accept_tokens(byte_tokens('["a",1'))
    assert "," not in characters(matcher)
    assert "]" in characters(matcher)
    with pytest.raises(UnsupportedConstraint, match="uniqueItems"):
        compiled(bytewise, {**UNIQUE, "items": {"enum": [1, 1.0]}, "minItems": 2})


@pytest.mark.parametrize(("backend", "text"), [("llguidance", "0.0000001"), ("xgrammar", "9.9999999999999995e-08")])
def test_numbers_that_a_library_writes_in_its_own_way_are_not_used_up(
    bytewise: Backends, backend: str, text: str
) -> None:
    matcher = compiled(bytewise, {**UNIQUE, "items": {"enum": ["a", True, 1e-07]}}, backend).matcher()
    matcher.accept_tokens(byte_tokens(f'[true,"a",{text}'))
    assert "," not in characters(matcher)
    assert "]" in characters(matcher)


@pytest.mark.parametrize(
    ("backend", "values", "text"),
    [
        ("xgrammar", [[0.1], [0.2]], "[[0.10000000000000001]"),
        ("xgrammar", [{"a": 0.1}, {"b": 1}], '[{"a":0.10000000000000001}'),
        ("llguidance", [[1e-07], [0.2]], "[[0.0000001]"),
    ],
)
def test_numbers_within_values_that_are_used_up(bytewise: Backends, backend: str, values: Any, text: str) -> None:
    matcher = compiled(bytewise, {**UNIQUE, "items": {"enum": values}, "minItems": 2}, backend).matcher()
    matcher.accept_tokens(byte_tokens(text + ","))
    for _ in range(30):
        allowed = set(characters(matcher)) - set(" \n\t\r")
        if "]" in allowed and "," not in allowed:
            break
        matcher.accept_tokens(byte_tokens(min(allowed, key=lambda each: (each == ",", each))))
    matcher.accept_tokens(byte_tokens("]"))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_over_any_library(bytewise: Backends, backend: str) -> None:
    grammar = compiled(bytewise, {**UNIQUE, "items": {"type": "string"}}, backend)
    assert accepts(grammar, '["a","b"]')
    assert not accepts(grammar, '["a","a"]')


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "lm-format-enforcer"])
def test_no_key_comes_twice(bytewise: Backends, backend: str) -> None:
    matcher = bytewise[backend].compile(Constraint.json_object()).matcher()
    matcher.accept_tokens(byte_tokens('{"ab":1,"a'))
    assert '"' in characters(matcher)
    matcher.accept_tokens(byte_tokens("b"))
    assert '"' not in characters(matcher)
    assert "c" in characters(matcher)
    with pytest.raises(TokenRejected):
        matcher.fork().accept_tokens(byte_tokens('"'))
    matcher.accept_tokens(byte_tokens('c":{"ab":1},"b":[{"ab":2},{"ab":2}]}'))
    assert matcher.is_accepting()


def test_a_key_is_the_same_however_it_is_spelled(bytewise: Backends) -> None:
    grammar = bytewise["llguidance"].compile(Constraint.json_object())
    assert not accepts(grammar, '{"é\\n":1,"é\\u000a":2}')
    assert accepts(grammar, '{"é\\n":1,"é\\u000b":2}')


def test_closed_objects_are_not_guarded(bytewise: Backends) -> None:
    """The mask of a schema that names all keys is the library's own."""
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    opened = {**closed, "additionalProperties": True}
    assert type(compiled(bytewise, closed)) is not type(compiled(bytewise, opened))


def test_a_value_that_can_only_become_one_that_is_used_is_not_begun(bytewise: Backends) -> None:
    matcher = compiled(bytewise, TAGS).matcher()
    matcher.accept_tokens(byte_tokens('["abc","ab'))
    assert characters(matcher) == '"'
    matcher.accept_tokens(byte_tokens('",'))
    assert "b" not in characters(matcher)
    matcher.accept_tokens(byte_tokens('"'))
    assert characters(matcher) == "b"
    matcher.accept_tokens(byte_tokens('b"'))
    assert "," not in characters(matcher)
    assert "]" in characters(matcher)


@pytest.mark.parametrize("names", [{"patternProperties": {"^(a|ab)$": {}}}, {"propertyNames": {"pattern": "^(a|ab)$"}}])
def test_no_comma_after_the_last_of_few_names(bytewise: Backends, names: Any) -> None:
    closed = {} if "propertyNames" in names else {"additionalProperties": False}
    matcher = compiled(bytewise, {"type": "object", **names, **closed}).matcher()
    matcher.accept_tokens(byte_tokens('{"ab":1'))
    assert "," in characters(matcher)
    matcher.accept_tokens(byte_tokens(',"a'))
    assert characters(matcher) == '"'
    matcher.accept_tokens(byte_tokens('":2'))
    assert "," not in characters(matcher)
    assert "}" in characters(matcher)


@pytest.mark.parametrize(
    "names", [{"patternProperties": {"^[A-Z]{3}$": {}}}, {"propertyNames": {"pattern": "^[A-Z]{3}$"}}]
)
@pytest.mark.parametrize("opened", [True, False])
def test_a_key_that_can_only_become_one_that_is_used_is_not_begun(
    bytewise: Backends, names: dict[str, Any], opened: bool
) -> None:
    """Of many names too: after `"US`, a `D` would leave nothing but the end of the key."""
    schema = {"type": "object", **names, "additionalProperties": opened or "propertyNames" in names}
    matcher = compiled(bytewise, schema).matcher()
    matcher.accept_tokens(byte_tokens('{"USD":1,"US'))
    assert {"A", "E"} <= set(characters(matcher))
    if "D" in characters(matcher):  # other names may be allowed, and begin like it
        matcher.accept_tokens(byte_tokens("D"))
        assert set(characters(matcher)) - {'"'}


def test_the_last_of_few_objects(bytewise: Backends) -> None:
    matcher = compiled(bytewise, PEOPLE).matcher()
    matcher.accept_tokens(byte_tokens('[{"name":"x","adult":true},{"name":"x","adult":'))
    assert characters(matcher).strip() == "f"
    matcher.accept_tokens(byte_tokens('false}, {"name":"'))
    assert characters(matcher) == "y"


def test_obligations_come_before_the_end(bytewise: Backends) -> None:
    matcher = compiled(bytewise, PAYMENT).matcher()
    matcher.accept_tokens(byte_tokens('{"credit_card":1'))
    assert "}" not in characters(matcher)
    matcher.accept_tokens(byte_tokens(',"'))
    assert characters(matcher) == "b"


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": {"type": "boolean"}, "minItems": 3},
        {**UNIQUE, "items": {"enum": [1, 2]}, "minItems": 3},
        {"type": "array", "items": {"type": "string"}, "contains": {"type": "integer"}},
        {"type": "array", "contains": {"minimum": 5}, "maxContains": 2},
        {"type": "array", "contains": {"const": 1}, "maxItems": 3},
        {"type": "object", "additionalProperties": False, "properties": {"a": {}}, "minProperties": 2},
        {"type": "array", "prefixItems": [{"type": "string"}, False], "contains": {"type": "number"}},
        {"type": "array", "prefixItems": [{**NEVER, "minItems": 1}], "contains": {"type": "number"}},
        {**UNIQUE, "minItems": 2, "items": NEVER},
        {**UNIQUE, "minItems": 4, "items": {"type": "string", "pattern": "^a*$", "maxLength": 2}},
    ],
)
def test_what_could_end_in_a_dead_end_is_refused(bytewise: Backends, schema: Any) -> None:
    with pytest.raises(InvalidConstraint):
        compiled(bytewise, schema)


@pytest.mark.parametrize(
    "items",
    [
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 1, "maxLength": 20},
        {"type": "array", "prefixItems": [{"type": "string"}], "minItems": 1},
    ],
)
def test_what_has_enough_values_is_not_refused(bytewise: Backends, items: Any) -> None:
    compiled(bytewise, {**UNIQUE, "minItems": 5, "items": items})


def test_a_refusal_names_the_place_in_the_users_schema(bytewise: Backends) -> None:
    schema = {"properties": {"a": {"type": "array", "contains": {"minimum": 5}, "maxContains": 2}}}
    with pytest.raises(UnsupportedConstraint, match="contains"):
        compiled(bytewise, schema)


def test_an_invalid_document_is_an_internal_error(bytewise: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check: whatever the rules missed does not end in `stop`."""
    monkeypatch.setattr(Plan, "root", lambda self, first: None)
    matcher = compiled(bytewise, UNIQUE).matcher()
    matcher.accept_tokens(byte_tokens("[1,1]"))
    with pytest.raises(BackendError, match="non-unique"):
        matcher.is_accepting()


# Shrinking takes minutes here.
DRAWN = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
KEYS = ["a", "b", "c"]
VALUES = st.sampled_from([None, True, False, 0, 1, 2, "", "x", "xy"])
SCALARS = st.sampled_from(
    [{}, {"type": "boolean"}, {"enum": [1, 2, "x"]}, {"type": "string"}, {"type": "integer"}, {"const": "xy"}]
)
NAMED = st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True)
TESTS = st.one_of(
    st.builds(lambda names: {"required": names}, NAMED),
    st.builds(lambda name, value: {"properties": {name: {"const": value}}}, st.sampled_from(KEYS), VALUES),
    st.builds(
        lambda name, value: {"properties": {name: {"enum": [value, 1]}}, "required": [name]},
        st.sampled_from(KEYS),
        VALUES,
    ),
)
CONDITIONS = st.one_of(
    TESTS.map(lambda test: {"not": test}),
    st.lists(TESTS, min_size=3, max_size=3).map(lambda tests: dict(zip(("if", "then", "else"), tests, strict=True))),
    st.lists(TESTS, min_size=2, max_size=3).map(lambda tests: {"oneOf": tests}),
    st.dictionaries(st.sampled_from([*KEYS, "d"]), NAMED, min_size=1, max_size=2).map(
        lambda needs: {"dependentRequired": needs}
    ),
    st.dictionaries(st.sampled_from(KEYS), TESTS, min_size=1, max_size=1).map(lambda then: {"dependentSchemas": then}),
    st.integers(0, 3).map(lambda count: {"minProperties": count}),
    st.integers(0, 3).map(lambda count: {"maxProperties": count}),
)


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": items},
        optional={
            "uniqueItems": st.just(True),
            "contains": SCALARS,
            "minContains": st.integers(0, 2),
            "maxContains": st.integers(0, 2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "prefixItems": st.lists(SCALARS, min_size=1, max_size=2),
        },
    )


OBJECTS = st.builds(
    lambda properties, required, closed, conditions: {
        "type": "object",
        "properties": properties,
        "required": required,
        **({"additionalProperties": False} if closed else {}),
        "allOf": conditions,
    },
    st.dictionaries(st.sampled_from(KEYS), SCALARS | arrays(SCALARS), max_size=3),
    st.lists(st.sampled_from(KEYS), max_size=1),
    st.booleans(),
    st.lists(CONDITIONS, min_size=1, max_size=2),
)


SCHEMAS = st.one_of(OBJECTS, arrays(SCALARS), arrays(OBJECTS), arrays(arrays(SCALARS))).flatmap(
    lambda schema: st.sampled_from([schema, {"anyOf": [{"type": "null"}, schema]}, {"properties": {"a": schema}}])
)
INSTANCES = st.recursive(
    VALUES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*KEYS, "d"]), inner)),
    max_leaves=6,
)


def grammar_or_none(backends: Backends, schema: Any) -> CompiledGrammar | None:
    try:
        return compiled(backends, schema)
    except InvalidConstraint:
        event("refused")
        return None


NUMBERS = (0, -0.0, 0.25, 0.5, -0.5, -0.75, 0.1 + 0.2, 1, 10, 101, -1, -10, 1.5, 1e30, 1e-7)


@settings(DRAWN, max_examples=60)
@given(
    values=st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=6, unique=True),
    backend=st.sampled_from(["llguidance", "xgrammar"]),
    source=st.randoms(use_true_random=False),
)
def test_a_number_that_can_only_become_one_that_is_used_is_not_begun(
    bytewise: Backends, values: list[float], backend: str, source: random.Random
) -> None:
    """After `[-0.75,-0` nothing could follow; after `[0,-0`, it could become -0.75."""
    schema = {**UNIQUE, "items": {"enum": values}, "minItems": len(values)}
    try:
        matcher = compiled(bytewise, schema, backend).matcher()
    except UnsupportedConstraint:
        reject()
    for _ in range(200):
        allowed = sorted(set(characters(matcher)) - set(" \n\t\r"))
        if not allowed:
            break
        matcher.accept_tokens(byte_tokens(source.choice(allowed)))
    assert matcher.is_accepting()


@settings(DRAWN, max_examples=150)
@given(schema=SCHEMAS, instances=st.lists(INSTANCES, min_size=6, max_size=6))
def test_exactly_the_valid_instances_are_accepted(bytewise: Backends, schema: Any, instances: list[Any]) -> None:
    grammar = grammar_or_none(bytewise, schema)
    assume(grammar is not None)
    assert grammar is not None
    validator = jsonschema.Draft202012Validator(schema)
    for instance in instances:
        if validator.is_valid(instance):
            event("valid")
            assert any(accepts(grammar, json.dumps(one)) for one in reordered(instance)), instance
        else:
            assert not accepts(grammar, json.dumps(instance)), instance


def walk(matcher: Matcher, vocabulary: Vocabulary, generator: random.Random, limit: int = 60) -> bytes | None:
    """Generate random allowed tokens, with rollbacks and forks on the way; None if the walk does not end."""
    text: list[int] = []
    row = np.empty(words(vocabulary.padded_vocab_size), np.int32)
    for _ in range(limit):
        accepting = matcher.is_accepting()
        allowed = tokens_allowed(matcher, row, vocabulary)
        assert accepting or len(allowed), vocabulary.decode(text)
        if accepting and (not len(allowed) or generator.random() < 0.4):
            return vocabulary.decode(text)
        if text and generator.random() < 0.1:
            count = generator.randint(1, min(3, len(text)))
            matcher.rollback(count)
            matcher.accept_tokens(text[-count:])
            assert np.array_equal(tokens_allowed(matcher, row, vocabulary), allowed)
        if generator.random() < 0.1:
            matcher = matcher.fork()
        closing = [token for token in allowed if vocabulary.token_bytes[token][:1] in b'"}],:']
        used = [token for token in allowed if vocabulary.token_bytes[token] in (b"a", b"b", b"x", b"1", b"t")]
        draw = generator.random()
        token = int(generator.choice(closing if closing and draw < 0.5 else used if used and draw < 0.8 else allowed))
        matcher.accept_tokens([token])
        text.append(token)
    return None


def tokens_allowed(matcher: Matcher, row: NDArray[np.int32], vocabulary: Vocabulary) -> NDArray[np.int64]:
    row.fill(-1)
    matcher.fill_bitmask(row)
    return np.intersect1d(allowed_ids(row), vocabulary.text_token_ids)


@settings(DRAWN, max_examples=80)
@given(schema=SCHEMAS, seed=st.integers(0, 999))
def test_random_walks_end_in_valid_documents(
    backends: Backends, vocabulary: Vocabulary, schema: Any, seed: int
) -> None:
    grammar = grammar_or_none(backends, schema)
    assume(grammar is not None)
    assert grammar is not None
    generator = random.Random(seed)
    for _ in range(3):
        text = walk(grammar.matcher(), vocabulary, generator)
        if text is not None:
            event("ended")
            pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            assert unique_keys(pairs), text
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


ONE_OR_TWO = {"contains": {"enum": [1, 2, "x"]}, "minContains": 0, "maxContains": 2}


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"enum": [1, 2, "x"]}, **ONE_OR_TWO},
        {"items": {"enum": [1, 2, "x"]}, "prefixItems": [{"type": "integer"}], **ONE_OR_TWO},
        {"items": {"enum": [1, 2, "x"]}, "uniqueItems": True, **ONE_OR_TWO},
        {"prefixItems": [{"const": 1}, {"const": 1}], **ONE_OR_TWO, "maxContains": 1},
        {"prefixItems": [{"const": 1}, {"const": 1}], "uniqueItems": True},
        {"prefixItems": [{"enum": [1, 2]}, {"enum": [1]}], "items": {"type": "string"}, "uniqueItems": True},
        {"prefixItems": [{"type": "string"}], "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        {"prefixItems": [{"type": "integer"}] * 2, "items": {"enum": [*range(10)]}, "uniqueItems": True},
    ],
)
def test_no_comma_leads_into_an_array_that_has_no_further_item(
    backends: Backends, vocabulary: Vocabulary, schema: Any, backend: str
) -> None:
    schema = {"type": "array", **schema}
    try:
        grammar = compiled(backends, schema, backend)
    except UnsupportedConstraint as error:
        pytest.skip(str(error))
    texts = [walk(grammar.matcher(), vocabulary, random.Random(seed)) for seed in range(60)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended
    for value in ended:
        jsonschema.Draft202012Validator(schema).validate(value)


def unique_keys(value: Any) -> bool:
    """Whether no object has a key twice; objects are lists of pairs."""
    if not isinstance(value, list):
        return True
    keys = [item[0] for item in value if isinstance(item, tuple)]
    return len(keys) == len(set(keys)) and all(
        unique_keys(item[1] if isinstance(item, tuple) else item) for item in value
    )
