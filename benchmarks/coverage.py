"""Write docs/coverage.md: what becomes of each keyword of JSON Schema, as the code says.

    python -m benchmarks.coverage

Each keyword has a small schema, a valid and an invalid instance. The command compiles the schema with each backend, and
has it decide the instances.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.default_model import checkpoint_path
from guided.backends import Backends, candidates
from guided.backends.base import CompiledGrammar
from guided.check.check import check, vocabulary_of
from guided.constraint import Constraint
from guided.errors import GuidedError
from guided.masks.compilation import compile_with

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
SAMPLES = Path(__file__).with_name("keywords.jsonl")
_HEAD = """# Keywords of JSON Schema

How each keyword is enforced. This page is generated: `python -m benchmarks.coverage` compiles the sample of each row
and checks that a valid instance is accepted and an invalid instance is not. Another schema with the same keyword may be
refused: `guided check FILE` reports on your schema.

*enforced*: the mask is exact. *checked*: the mask allows a superset, and the whole output is validated before it may
end. *refused*: 400, with the keyword's pointer. *narrower*: some valid values are never generated. The backends are
llguidance and xgrammar, of which `auto` takes the first that does not refuse the schema; rows name the backend where
they differ. outlines and lm-format-enforcer, which `auto` does not use, enforce fewer keywords
(`guided/backends/schema_lowering.py`), and check every output.

## Where a checked keyword is violated

The engine validates each value where it ends. A token after which no continuation can satisfy the schema is taken back
and forbidden at its place, and the next token is sampled without it. After four such vetoes in one value, and where no
token is left, the output goes back: to the beginning of the value, or of the newest member of an object or array, and
then to the places before it. After 64 vetoes in an output, the request ends with `constraint_not_met`. Patterns are
followed within strings, too, unless a negative lookaround sees the end of the text, or the pattern has `\\p`, `\\P` or
`\\s`. After the first veto of an output, such a string is written by single ASCII characters, where some may follow.

After a veto, an answer is no longer a sample of the model's distribution of valid outputs, because the forbidden tokens
depend on the sampled ones. Tokens with the same effect are forbidden too: those with the same beginning, those with
which a value of a wrong type begins, those that end a number, and all but the comma after a bracket that was taken back
behind a whole member. Where the output goes back, tokens with the same first character and blanks are forbidden.

Inside vLLM and transformers, and with beam search, accepted tokens stay, and only the whole output is validated before
it may end.

## Objects are closed in requests

`Constraint.json_schema`, `guided check` and the rows below read a schema as written. In a request, an object with
`properties` has no other properties, unless `additionalProperties` or `unevaluatedProperties` allow them. Names that
match `patternProperties` stay possible, and `{"type": "object"}` alone stays open. This is *narrower* than JSON Schema
by choice: most schemas of applications list only `properties`, and a model would then add other keys. OpenAI's strict
mode, vLLM and llama.cpp close these objects, too.

- An object is closed as a whole: `allOf`, `$ref`, and the conditions of `if` and `dependentSchemas` that hold
  contribute their properties, as with `unevaluatedProperties: false`. An object with `anyOf` has the properties of one
  alternative. Where the masks leave out a condition, an object may have the properties of all branches.
- `guided.closed` in the answer has the JSON pointers of these objects. `open_objects: true` in a request, or
  `guided serve --open-objects`, keeps the schema as written; `guided check --close-objects` reads it as a request.
- In an object that stays open in a request, no additional key is a declared name in other case or with blanks around
  it.

## Valid values that are never generated

- Whitespace between JSON tokens is that of `json.dumps` and `JSON.stringify`: see
  [the reference](http-reference.md#json-schemas). outlines allows one blank between any two tokens, and no line break;
  lm-format-enforcer at most 12 blanks, tabs and line breaks.
- Escapes such as `\\u0041` in strings, which costs only characters that JSON has to escape. llguidance: none with
  `pattern` or `format`, and none where an object with named properties may have others, because in a key `"\\u0061"`
  would evade the schema of `a`. xgrammar: none with `pattern`, `format` or `maxLength` (unless the pattern needs them),
  and with `minLength` none in the first characters. outlines: none with `minLength`, `maxLength` or `pattern`.
- Numbers with bounds have no exponent. An exclusive bound, and a bound with more than six decimals, becomes the next
  allowed number with six decimals, or the next integer beyond a billion, because readers that round to a double could
  round other numbers to an excluded one.
- Numbers with `multipleOf` have no exponent, at most six decimals and at most 15 digits. Integers may have more if
  a bound needs them.
- An integer has no fraction, and a number with a bound no exponent (`1e-06`). An exponent has at most two digits.
- Alternatives of `anyOf` and `oneOf` that the canonical form merges have the order of one of them.
- `oneOf` of objects that refer to themselves: where an alternative is told apart by a property that another one
  requires, it does not have this property, with any value. Where a schema has neither `not` nor `if`, and a value has
  other types than numbers so that it is in one alternative of `oneOf` only, it is no number with a fraction.
- xgrammar: an object with a property that can have no value (`"a": false`), or a name that has to be escaped, has no
  other properties, and listed objects and arrays have no whitespace. outlines and lm-format-enforcer: an object with
  `properties` has no others.
- Structural tags: with `any_order`, properties still come in the schema's order. Names that the schema does not
  list have no `&` in elements.
- Formats, and keywords of younger drafts, are enforced in every draft. Some of their notations are never written:

| format | not written |
|---|---|
| time, date-time | leap seconds, lower-case `t` and `z` |
| email, idn-email | quoted names (`"a b"@x.y`), addresses of hosts (`a@[192.168.1.1]`) |
| hostname | labels with hyphens at the third and fourth place (`xn--...`) |
| idn-hostname, idn-email | hosts with several alphabets in a label, or others than `guided/schema/formats.py` lists |
| ipv6 | IPv4 in the last two groups (`::ffff:192.168.0.1`) |
| uri, iri and their references | addresses of IPv6 (`http://[::1]/`), except for `uri` on llguidance |
| uri-template | reserved operators (`{=a}`) |
| regex | groups deeper than two levels, and what JavaScript and Python do not share |

## Keywords

| keyword | sample | what becomes of it |
|---|---|---|
"""
_BACKENDS = candidates("json_schema")
"""The backends of `auto`."""


class Sample(NamedTuple):
    """A line of keywords.jsonl: a schema that depends on one keyword, and instances of which the second violates it."""

    keyword: str
    schema: dict[str, Any]
    valid: Any
    invalid: Any


def row(sample: Sample, backends: Backends) -> list[str]:
    """Compile a sample with each backend. Returns the cells of its row: one verdict, or several if they differ.

    Raises:
        AssertionError: a backend accepts the invalid instance.
    """
    verdicts = {name: _verdict(sample, name, backends) for name in _BACKENDS}
    found = set(verdicts.values())
    text = found.pop() if len(found) == 1 else ", ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())
    schema = json.dumps(sample.schema, ensure_ascii=False, separators=(",", ":")).replace("|", "\\|")
    return [sample.keyword, f"`{schema}`", text]


def _verdict(sample: Sample, name: str, backends: Backends) -> str:
    text = json.dumps(sample.schema)
    report = check(sample.keyword, text, backends, backend=name)
    if not report.accepted:
        return "refused"
    grammar = compile_with(backends, Constraint.json_schema(text), name).grammar
    assert not _accepts(grammar, backends, sample.invalid), f"{name} accepts what violates {sample.keyword}"
    how = "checked" if report.checked else "enforced"
    return how if _accepts(grammar, backends, sample.valid) else f"{how}, narrower"


def _accepts(grammar: CompiledGrammar, backends: Backends, value: Any) -> bool:
    """Whether `value` is an output, with or without spaces between its JSON tokens."""
    for separators in ((",", ":"), (", ", ": ")):
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(backends.vocabulary.encode(json.dumps(value, separators=separators)))
        except GuidedError:
            continue
        if matcher.is_accepting():
            return True
    return False


def page() -> str:
    """Return the page."""
    backends = Backends(vocabulary_of(checkpoint_path()))
    samples = [Sample(**json.loads(line)) for line in SAMPLES.read_text().splitlines()]
    lines = [f"| {' | '.join(row(sample, backends))} |" for sample in samples]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
