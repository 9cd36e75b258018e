"""Write docs/coverage.md: how each keyword of JSON Schema is enforced.

    python -m benchmarks.coverage

Each keyword has a small schema, a valid instance and an invalid instance. The command
compiles the schema with each backend, and has the compiled grammar decide the
instances.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
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
_PAGE = """# Keywords of JSON Schema

How each keyword is enforced. `python -m benchmarks.coverage` writes this page: it compiles a sample of each keyword,
and checks that a valid instance is accepted and an invalid instance is not. Another schema with the same keyword may be
refused: `guided check FILE` reports on your schema.

- *enforced*: the mask is exact.
- *checked*: the mask allows a superset, and the whole output is validated before it may end.
- *refused*: 400, with the keyword's pointer.
- *narrower*: some valid values are never generated.

`auto` takes llguidance, or xgrammar if llguidance refuses the schema; rows name the backend where the two differ.
outlines and lm-format-enforcer enforce fewer keywords (`guided/backends/schema_lowering.py`), and check every output.

## Keywords

Enforced by llguidance and xgrammar, with the samples of `benchmarks/keywords.jsonl`:
{enforced}.

| other keyword | sample | how |
|---|---|---|
{rows}

## Where a checked keyword is violated

The engine validates each value where it ends. If no continuation can satisfy the schema after a token, the engine takes
the token back, forbids it at its place, and samples the next token without it (a *veto*). After four vetoes in one
value, and where no token is left, the output goes back: to the beginning of the value or of the newest member of an
object or array, then to earlier places. After 64 vetoes in an output, the request ends with `constraint_not_met`.

- A veto also forbids tokens with the same effect, for example with the same beginning (`guided/masks/vetoes.py`).
- An answer with a veto is no longer a sample of the model's distribution of valid outputs, because the forbidden tokens
  depend on the sampled ones.
- Patterns are followed within strings, except those with `\\p`, `\\P`, `\\s` or a negative lookaround that sees the end
  of the text. After the first veto of an output, such a string is written in single ASCII characters where possible.
- Inside vLLM and transformers, and with beam search, no token is taken back: only the whole output is validated before
  it may end.

## Objects are closed in requests

In a request, an object with `properties` has no other properties, unless `additionalProperties` or
`unevaluatedProperties` allow them. Names that match `patternProperties` stay possible, and `{"type": "object"}` alone
stays open. This is *narrower* than JSON Schema by choice: most schemas of applications list only `properties`, and a
model would add other keys. OpenAI's strict mode, vLLM and llama.cpp close these objects, too. `Constraint.json_schema`,
`guided check` and the samples above read a schema as written.

- An object is closed as a whole: `allOf`, `$ref`, and the conditions of `if` and `dependentSchemas` that hold
  contribute their properties, as with `unevaluatedProperties: false`. An object with `anyOf` has the properties of one
  alternative. Where the masks leave out a condition, an object may have the properties of all branches.
- `guided.closed` in the answer has the JSON pointers of these objects. `open_objects: true` in a request, or
  `guided serve --open-objects`, keeps the schema as written. `guided check --close-objects` reads it as a request.
- In an object that stays open in a request, no additional key is a declared name in other case or with blanks around
  it.

## Valid values that are never generated

- Properties come in the schema's order, in structural tags also with `any_order`. Alternatives of `anyOf` and `oneOf`
  that the canonical form merges have the order of one of them.
- Whitespace between JSON tokens is [bounded](http-reference.md#json-schemas). outlines allows one blank between any two
  tokens, and no line break; lm-format-enforcer at most 12 blanks, tabs and line breaks.
- Characters that JSON has to escape, where a library writes no escapes (`\\u0041`). llguidance: with `pattern` or
  `format`, and where an object with named properties may have others, because the key `"\\u0061"` would evade the
  schema of `a`. xgrammar: with `pattern`, `format` or `maxLength` (unless the pattern needs escapes), and with
  `minLength` in the first characters. outlines: with `minLength`, `maxLength` or `pattern`.
- Integers have no fraction (`1.0`). Numbers have at most 24 digits in a row, and two in the exponent. Numbers with
  bounds have no exponent. An exclusive bound, and a bound with more than six decimals, becomes the next allowed number
  with six decimals, or the next integer beyond a billion, because readers that round to a double could round other
  numbers to an excluded one.
- Numbers with `multipleOf` have no exponent, at most six decimals and at most 15 digits, integers more if a bound
  needs them.
- `oneOf` of objects that refer to themselves: if two alternatives differ by a property that only one of them requires,
  the other one never has this property. Where the type of a value decides the alternative of `oneOf`, numbers with a
  fraction are left out, unless the schema has `not` or `if`.
- xgrammar: an object with a property that can have no value (`"a": false`), or a name that has to be escaped, has no
  other properties. Listed objects and arrays have no whitespace. outlines and lm-format-enforcer: an object with
  `properties` has no others.
- Structural tags: names that the schema does not list have no `&` in elements.
- Formats, and keywords of younger drafts, are enforced in every draft, without some of their notations:

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
"""
_BACKENDS = candidates("json_schema")
"""The backends of `auto`."""


class Sample(NamedTuple):
    """A line of keywords.jsonl: a schema that depends on one keyword, a valid instance
    and an invalid instance."""

    keyword: str
    schema: dict[str, Any]
    valid: Any
    invalid: Any


def verdict(sample: Sample, backends: Backends) -> str:
    """Compile a sample with each backend. Returns one verdict, or a verdict per backend
    if they differ.

    Raises:
        AssertionError: a backend accepts the invalid instance.
    """
    verdicts = {name: _verdict(sample, name, backends) for name in _BACKENDS}
    if len(set(verdicts.values())) == 1:
        return verdicts[_BACKENDS[0]]
    return ", ".join(f"{name}: {text}" for name, text in verdicts.items())


def _verdict(sample: Sample, name: str, backends: Backends) -> str:
    text = json.dumps(sample.schema)
    report = check(sample.keyword, text, backends, backend=name)
    if not report.accepted:
        return "refused"
    grammar = compile_with(backends, Constraint.json_schema(text), name).grammar
    assert not _accepts(grammar, backends, sample.invalid), (
        f"{name} accepts what violates {sample.keyword}"
    )
    how = "checked" if report.checked else "enforced"
    return how if _accepts(grammar, backends, sample.valid) else f"{how}, narrower"


def _accepts(grammar: CompiledGrammar, backends: Backends, value: Any) -> bool:
    """Return whether `value` is an output, with or without spaces between its JSON
    tokens."""
    for separators in ((",", ":"), (", ", ": ")):
        matcher = grammar.matcher()
        try:
            matcher.accept_tokens(
                backends.vocabulary.encode(json.dumps(value, separators=separators))
            )
        except GuidedError:
            continue
        if matcher.is_accepting():
            return True
    return False


def page() -> str:
    """Return the page."""
    backends = Backends(vocabulary_of(checkpoint_path()))
    enforced = []
    rows = []
    for line in SAMPLES.read_text().splitlines():
        sample = Sample(**json.loads(line))
        text = verdict(sample, backends)
        if text == "enforced":
            enforced.append(sample.keyword)
        else:
            schema = json.dumps(
                sample.schema, ensure_ascii=False, separators=(",", ":")
            ).replace("|", "\\|")
            rows.append(f"| {sample.keyword} | `{schema}` | {text} |")
    names = fill("; ".join(enforced), 120, break_on_hyphens=False)
    return _PAGE.replace("{enforced}", names).replace("{rows}", "\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(page())
