"""Adapter for xgrammar: fast masks, slow compilation.

Compilation takes a second on average, and sometimes it never ends: run it in a process
that may be killed.

Properties of the library that the adapter compensates:

- It ignores keywords that it doesn't know: `schema.py` beside this file refuses such
  schemas.
- Where it allows "any character", it allows surrogates over several tokens, and any
  bytes in the free text of a structural tag. What is no UTF-8 is masked here.
- It sets bits of special tokens when nearly everything is allowed: the worker clears
  them.
- It logs wrong input to stderr: tokens are checked before it gets them.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from guided.backends.base import Backend, CompiledGrammar, TextMatcher
from guided.backends.grammar import syntax
from guided.backends.without_torch import import_xgrammar
from guided.backends.xgrammar.ebnf import ebnf, exact, gbnf, quoted
from guided.backends.xgrammar.schema import XGrammarLowering
from guided.backends.xgrammar.tag import TagFormat
from guided.bitmask import Bitmask
from guided.constraint import MAX_INDENT, Constraint
from guided.errors import (
    InvalidConstraint,
    TokenRejected,
    UnsupportedConstraint,
    bounded,
)
from guided.json_text import JsonObject
from guided.regex.parser import parse
from guided.schema import string_pattern
from guided.vocabulary import Vocabulary

xgrammar = import_xgrammar()

_ATTRIBUTE = re.compile(r"(?m)^\s*[?!]?\w+\[\w+.*\](?=\s*(?:::=|:))")
QUICK_SECONDS = 1.0
"""A grammar that compiles in less time is compiled again instead of serialised. For an
ordinary schema, writing and reading xgrammar's JSON takes longer (0.31 s and 0.15 s
instead of 0.31 s with 131,072 tokens), and it has 16 MB."""


def _message(error: BaseException) -> str:
    # xgrammar may cut its quotations within a character.
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "replace")
    # Without the place in its sources, and the column in a line that `gbnf` has
    # rewritten.
    return bounded(re.sub(r"^\[[\d:]+\] \S+?:\d+: |, column \d+", "", text).strip())


class XGrammarBackend(Backend):
    """One tokenizer and one compiler, single-threaded and without its own cache (see
    `grammar_cache.py`)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes[: vocabulary.padded_vocab_size]),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.padded_vocab_size,
            stop_token_ids=list(vocabulary.stop_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            self._tokenizer, max_threads=1, cache_enabled=False
        )
        self._tokens = _SharedTokens(vocabulary)

    def compile(self, constraint: Constraint) -> XGrammarGrammar:
        started = time.thread_time()
        try:
            source, checked = self._grammar(constraint)
            if constraint.kind == "structural_tag":
                compiled = self._compiler.compile_structural_tag(source)
            else:
                compiled = self._compiler.compile_grammar(source)
            grammar = XGrammarGrammar(
                self._tokens, compiled, time.thread_time() - started
            )
            grammar.checked = checked
            return grammar
        except (RuntimeError, UnicodeDecodeError) as error:
            # Malformed schemas and regexes were refused before: xgrammar can't enforce
            # the others.
            message = f"xgrammar refuses the {constraint.kind}: {_message(error)}"
            if constraint.kind == "grammar":
                raise InvalidConstraint(message, param="grammar") from None
            raise UnsupportedConstraint(message, param=constraint.kind) from None

    def load(self, constraint: Constraint, dumped: memoryview) -> XGrammarGrammar:
        if not dumped:
            return self.compile(constraint)
        compiled = xgrammar.CompiledGrammar.deserialize_json(
            str(dumped, "utf-8"), self._tokenizer
        )
        return XGrammarGrammar(self._tokens, compiled, math.inf)

    def _grammar(self, constraint: Constraint) -> tuple[str, tuple[str, ...]]:
        """Return a constraint as a text in xgrammar's notation, and the pointers of the
        keywords that are left out."""
        if constraint.kind in ("json_schema", "json_object"):
            lowering = XGrammarLowering(constraint)
            return self._schema_ebnf(lowering, constraint.whitespace), tuple(
                lowering.checked
            )
        if constraint.kind == "structural_tag":
            tag = TagFormat(
                constraint, self._tokens.vocabulary.special_names, self._grammar
            )
            return json.dumps(tag.source()), tuple(tag.checked)
        return self._source(constraint), ()

    def _source(self, constraint: Constraint) -> str:
        """Return a constraint without schemas in xgrammar's notation."""
        match constraint.kind:
            case "regex":
                return f"root ::= {ebnf(parse(constraint.source))}"
            case "choice":
                return f"root ::= {' | '.join(map(quoted, constraint.value))}"
        attribute = _ATTRIBUTE.search(constraint.source)
        if attribute is not None:
            message = f"xgrammar has no attributes of rules, such as {bounded(attribute[0], 60)!r}"
            raise UnsupportedConstraint(message, param="grammar")
        if syntax(constraint.source) == "lark":
            grammar = xgrammar.Grammar.from_lark(
                constraint.source, tokenizer_info=self._tokenizer
            )
        else:
            grammar = xgrammar.Grammar.from_ebnf(gbnf(constraint.source))
        text = exact(str(grammar))
        for name in _rules_without_text(text):
            raise UnsupportedConstraint(
                f"xgrammar can't enforce rule {bounded(name, 60)!r}: it derives nothing but itself and the empty text",
                param="grammar",
            )
        return text

    def _schema_ebnf(self, schema: XGrammarLowering, whitespace: str | None) -> str:
        if whitespace:
            raise UnsupportedConstraint(
                f"xgrammar can't enforce the whitespace pattern {bounded(whitespace, 60)!r}: only no whitespace, or the"
                " default (leave it out)",
                param="whitespace_pattern",
            )
        # Not strict: an object is open unless its schema closes it.
        style: JsonObject = {"any_whitespace": True, "strict_mode": False}
        if whitespace is not None:
            style |= {"any_whitespace": False, "separators": (",", ":")}
        text = json.dumps(schema.document(), ensure_ascii=False)
        grammar = _corrected(
            exact(str(xgrammar.Grammar.from_json_schema(text, **style))), schema
        )
        if whitespace is None:
            for rule, right in _USUALLY_SPACED:
                grammar = re.sub(rule, right, grammar)
            grammar += _SPACES
        return grammar


_HEX = "[0-9A-Fa-f]"
_ESCAPES = (
    rf'([\"\\/bfnrt] | "u" [0-9A-CEFa-cef] {_HEX} {_HEX} {_HEX} | "u" [Dd] [0-7] {_HEX} {_HEX}'
    rf' | "u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})'
)
"""What may follow a backslash in a JSON string: surrogates in pairs only."""


def _corrected(grammar: str, schema: XGrammarLowering) -> str:
    """Correct the mistakes in xgrammar's grammar of a schema (see
    `XGrammarLowering`)."""
    # No literal of JSON text looks like these rules, nor like the placeholder of a
    # pattern.
    escapes = _ESCAPES
    # without `u0061` and `/`, which would be a second way to write a character of a
    # name
    if schema.open_names:
        escapes = r"([\"\\bfnrt])"
    mistakes = [(r"(?m)^basic_escape ::= .*$", f"basic_escape ::= {escapes}")]
    if schema.open_names and schema.distinct_names:
        grammar = _with_other_names(grammar)
    # no escapes: only a plain class is precompiled, otherwise each mask takes 0.4 s
    if schema.lengths:
        mistakes.append((re.escape(r"[^\"\\\r\n]"), r"[^\0-\x1f\"\\]"))
    for rule, right in mistakes:
        if not re.search(rule, grammar):
            raise UnsupportedConstraint(
                "xgrammar writes this schema in a form that is not known",
                param="json_schema",
            )
        grammar = right.join(re.split(rule, grammar))
    # After the least number of characters any others may follow, also escaped ones.
    grammar = re.sub(
        r'(_characters\{\d+), -1\} "\\""', r"\1} basic_string_sub", grammar
    )
    for name, node in schema.rules.items():
        grammar += f"\n{name} ::= {ebnf(node)}"
    grammar = re.sub(r'Regex\("\^(\w+)\$", json_string=true\)', r"(\1)", grammar)
    for rule in re.findall(r"(?m)^(\S+) ::= \(number_\d+\)$", grammar):
        grammar = grammar.replace(f'"\\"" {rule} "\\""', rule)  # a number has no quotes
    return grammar


def _with_other_names(grammar: str) -> str:
    """Replace xgrammar's rules for the names of other properties, which exclude the
    declared names only.

    Such a rule is a trie, with a rule for each byte of UTF-8. An alternative `("c"
    rule)` continues a declared name; the rule after a whole name has no alternative
    that ends the string.
    """
    bodies: dict[str, str] = dict(
        re.findall(r"(?m)^(\S+_addl_key(?:_\d+)?) ::= (.*)$", grammar)
    )

    def names(rule: str, start: str) -> Iterator[str]:
        if not bodies[rule].startswith('(("\\"") |'):
            yield start.encode("latin-1").decode()
        for text, rest in re.findall(
            r'\("((?:[^"\\]|\\.)+)" (\S+_addl_key_\d+)\)', bodies[rule]
        ):
            yield from names(rest, start + json.loads(f'"{text}"'))

    for rule, body in bodies.items():
        if rule.endswith("_addl_key"):
            first = re.findall(r"\S+_addl_key_\d+", body)[0]
            node = string_pattern.in_json(
                string_pattern.other_names(names(first, "")), escapes=False
            )
            grammar = grammar.replace(
                f"{rule} ::= {body}", f'{rule} ::= ("\\"" {ebnf(node)} "\\"")'
            )
    return grammar


def _rules_without_text(grammar: str) -> list[str]:
    """Return the rules that derive no text, in xgrammar's own notation: they crash it
    (a segfault)."""
    bodies: dict[str, str] = dict(re.findall(r"(?m)^(\S+) ::= (.*)$", grammar))
    text = re.compile(r'["\[]|\b(?:Regex|TagDispatch|Token|TokenTagDispatch)\(')
    with_text = {name for name, body in bodies.items() if text.search(body)}
    names = {
        name: set(re.findall(r"[^\s(){}|,]+", body))
        for name, body in bodies.items()
        if name not in with_text
    }
    while grown := {
        name
        for name, used in names.items()
        if name not in with_text and used & with_text
    }:
        with_text |= grown
    return [name for name in bodies if name not in with_text]


_SPACES = f'\nline_break ::= "" | "\\n" [ ]{{0,{MAX_INDENT}}}\nafter_comma ::= " " | line_break\n'
_USUALLY_SPACED = (
    # In a JSON string a line break is written \\n: this class with raw ones occurs
    # between tokens only.
    (re.escape(r"[ \n\r\t]*"), "line_break"),
    ('line_break "," line_break', '"," after_comma'),
    ('line_break ":" line_break', '":" (" " | "")'),
    (r'"([\[{])" line_break "([\]}])"', r'"\1" "\2"'),
    # The items of an array that may all be missing: the line breaks belong to them.
    (r'"\[" line_break (\w+_suffix_0) line_break "\]"', r'"[" \1 "]"'),
    (r'(?m)^(\w+_suffix_0 ::= \("" \| )(\(.*\))\)$', r"\1(line_break \2 line_break))"),
)
"""Replacements that make xgrammar's whitespace the default of
`guided.constraint.LINE_BREAK`, in this order."""


@dataclass(eq=False)
class XGrammarGrammar(CompiledGrammar):
    """A compiled grammar, without the vocabulary."""

    tokens: _SharedTokens
    compiled: Any
    seconds: float
    """CPU time of the compilation."""

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.tokens, xgrammar.GrammarMatcher(self.compiled))

    def dump(self) -> bytes:
        """Return xgrammar's own JSON, without the tokenizer; empty if compiling again
        is quick."""
        if self.seconds < QUICK_SECONDS:
            return b""
        return str(self.compiled.serialize_json()).encode()


class XGrammarMatcher(TextMatcher):
    """One sequence. The adapter handles stop tokens: xgrammar's matcher gets text
    tokens only."""

    def __init__(self, shared: _SharedTokens, matcher: Any) -> None:
        super().__init__(shared.vocabulary)
        self._shared = shared
        self.native = matcher
        """The library's own matcher."""

    def accept_text(self, token_ids: list[int]) -> None:
        rest: bytes | None = self._shared.unfinished(self._tokens)
        for token in token_ids:
            if token not in self._shared.known or rest is None:
                raise TokenRejected(
                    f"token {token} is special or outside the vocabulary"
                )
            rest = _unfinished(rest + self._shared.vocabulary.token_bytes[token])
            if rest is None or not self.native.accept_token(token):
                raise TokenRejected(f"token {token} is not allowed here")

    def fill_bitmask(self, row: Bitmask) -> bool:
        """See `Matcher.fill_bitmask`. Written in place, without a copy."""
        if not self.native.fill_next_token_bitmask(row):
            row.fill(-1)  # everything is allowed
        rest = self._shared.unfinished(self._tokens)
        if rest or row.item(self._shared.word) >> self._shared.bit & 1:
            np.bitwise_and(row, self._shared.after(rest), out=row)
        return self._shared.vocabulary.allows_stop(row)

    def rollback_text(self, count: int) -> None:
        self.native.rollback(count)

    def copy_state(self) -> None:
        self.native = self.native.fork()

    def is_accepting(self) -> bool:
        return bool(self.native.is_completed()) and not self._shared.unfinished(
            self._tokens
        )


class _SharedTokens:
    """The data that all matchers of one vocabulary share."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.known = frozenset(vocabulary.text_token_ids)
        self.after = lru_cache(maxsize=1024)(self._after)
        contents = vocabulary.token_bytes
        self._wrong = [
            token for token in self.known if _unfinished(contents[token]) is None
        ]
        """Tokens that are no UTF-8, but may continue a character."""
        self.word, self.bit = divmod(min(self._wrong, default=0), 32)
        """Place of one of them in a mask: where it is not allowed, none is."""

    def unfinished(self, tokens: list[int]) -> bytes:
        """Return the beginning of a character at the end of an output."""
        if not tokens or self.vocabulary.token_bytes[tokens[-1]][-1] < 0x80:
            return b""
        return (
            _unfinished(self.vocabulary.decode(tokens[-4:]).lstrip(_CONTINUING)) or b""
        )

    def _after(self, rest: bytes) -> Bitmask:
        """Return a mask without the tokens that are no UTF-8 after the beginning of a
        character."""
        if not rest:
            return ~self.vocabulary.mask(self._wrong)
        texts = (
            (token, rest + self.vocabulary.token_bytes[token]) for token in self._wrong
        )
        fitting = [token for token, text in texts if _unfinished(text) is not None]
        return self.vocabulary.mask(fitting)


_CONTINUING = bytes(range(0x80, 0xC0))
"""The bytes of a character in UTF-8 after its first."""
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


def _unfinished(text: bytes) -> bytes | None:
    """Return the beginning of a character at the end of a text; None if the text is no
    UTF-8."""
    try:
        _, length = codecs.utf_8_decode(text, "strict", False)
    except UnicodeDecodeError:
        return None
    if _SURROGATE.search(text):
        return None
    return text[length:]
