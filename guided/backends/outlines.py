"""Adapter for outlines-core: one automaton over tokens, built in advance; then each
step is a look-up.

Compilation takes a second on average, in one case of five over ten seconds, and
gigabytes at worst: run it in a process that may be killed.

Properties of the library that the adapter compensates:

- Its automata prefer the first alternative (`yes|yes please` allows `yes` only), unless
  the pattern ends with `$`. A pattern that ends with `$` can't match the empty text, so
  a regex that does is refused.
- It knows one end-of-sequence token only, so the adapter handles stop tokens.
- A regex can't count levels. So `json_object` allows three: the object, and objects and
  arrays within values of it.
- It reads a subschema by its first keyword of `properties`, `allOf`, `anyOf`, `oneOf`,
  `prefixItems`, `enum`, `const`, `$ref`, `type`, ignores others, and puts patterns
  between quotes unchanged. So it gets one of them at a time, and each document is
  validated before it may end.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from guided.backends.base import Backend, CompiledGrammar, TextMatcher
from guided.backends.schema_lowering import FewKeywords
from guided.bitmask import Bitmask
from guided.constraint import Constraint
from guided.errors import TokenRejected, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.regex import tree as regex
from guided.schema import string_pattern
from guided.schema.keywords import numbers_in
from guided.vocabulary import Vocabulary

_PLAIN = regex.Chars(string_pattern.PLAIN)
_LARGE = 10**18


class OutlinesBackend(Backend):
    """One vocabulary in outlines' own form, shared by all grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokens: dict[bytes, list[int]] = {}
        for token in vocabulary.text_token_ids:
            tokens.setdefault(vocabulary.token_bytes[token], []).append(token)
        self._tokens = outlines_core.Vocabulary(vocabulary.stop_token_ids[0], tokens)

    def compile(self, constraint: Constraint) -> OutlinesGrammar:
        try:
            index = outlines_core.Index(
                f"(?:{self._pattern(constraint)})$", self._tokens
            )
        except ValueError as error:
            message = f"outlines refuses the {constraint.kind}: {bounded(error)}"
            raise UnsupportedConstraint(message, param=constraint.kind) from None
        grammar = OutlinesGrammar(self._vocabulary, index)
        if constraint.kind == "json_schema":
            grammar.checked = ("",)
        return grammar

    def load(self, constraint: Constraint, dumped: memoryview) -> OutlinesGrammar:
        index = outlines_core.Index.from_binary(bytes(dumped))
        return OutlinesGrammar(self._vocabulary, index)

    def _pattern(self, constraint: Constraint) -> str:
        """Return the constraint as one regex."""
        if constraint.texts is None:
            schema = json.dumps(
                _OutlinesLowering(constraint).document(), ensure_ascii=False
            )
            spaces = constraint.whitespace
            return str(
                build_regex_from_schema(
                    schema, spaces and f"(?:{string_pattern.whitespace(spaces)})"
                )
            )
        pattern = regex.render(constraint.texts)
        if re.fullmatch(pattern, ""):
            message = "outlines can't enforce a regex that the empty text matches: choose another backend"
            raise UnsupportedConstraint(message, param="regex")
        return pattern


class _OutlinesLowering(FewKeywords):
    """Objects have the named properties in this order and no others, arrays with
    `prefixItems` exactly these items.

    Strings with a length or a pattern have no escapes: with them, 20 characters take a
    minute to compile.
    """

    library = "outlines"

    def any_value(self) -> JsonObject:
        return {"anyOf": [{}]}  # alone, `{}` becomes alternatives without parentheses

    def finite(self, schema: JsonObject, keyword: str, values: list[Any]) -> JsonObject:
        for value in numbers_in(values):
            # the library writes 10**30 as 1e+30: another number
            if isinstance(value, int) and abs(value) >= _LARGE:
                refusal = self.refusal(
                    schema,
                    keyword,
                    f" with an integer as large as {bounded(value, 40)}",
                )
                refusal.keyword = (
                    ""  # not left out: jsonschema-rs compares such numbers as floats
                )
                raise refusal
        return {"enum": values}

    def string(self, schema: JsonObject) -> JsonObject:
        least = schema.get("minLength", 0)
        most = schema.get("maxLength")
        if schema.get("format") == "uuid":
            return {"type": "string", "format": "uuid"}
        if "pattern" in schema:
            try:
                plain = string_pattern.in_json(
                    self.parse_pattern(schema), escapes=False
                )
            except UnsupportedConstraint:
                raise self.refusal(schema, "pattern") from None
        elif least or most:
            plain = regex.repeat(_PLAIN, least, most)
        else:
            return {"type": "string"}
        return {"type": "string", "pattern": f"^(?:{regex.render(plain)})$"}

    def array(self, schema: JsonObject) -> JsonObject:
        prefix = schema.get("prefixItems", [])
        if prefix and schema.get("minItems", 0) <= len(prefix):
            return {"prefixItems": [self.lower(part) for part in prefix]}
        return super().array(schema)

    def name(self, text: str) -> str:
        # outlines does not escape names
        return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(eq=False)
class OutlinesGrammar(CompiledGrammar):
    """An automaton over tokens."""

    vocabulary: Vocabulary
    index: Any

    def matcher(self) -> OutlinesMatcher:
        return OutlinesMatcher(self)

    def dump(self) -> bytes:
        """Return the automaton in outlines' own serialisation."""
        _, (binary,) = self.index.__reduce__()
        return bytes(binary)


class OutlinesMatcher(TextMatcher):
    """One sequence: the library's guide, which reads the tokens again after a
    rollback."""

    def __init__(self, grammar: OutlinesGrammar) -> None:
        super().__init__(grammar.vocabulary)
        self._grammar = grammar
        self._guide = outlines_core.Guide(grammar.index)

    def accept_text(self, token_ids: list[int]) -> None:
        for token in token_ids:
            try:
                self._guide.advance(token, return_tokens=False)
            except (ValueError, OverflowError):
                raise TokenRejected(f"token {token} is not allowed here") from None

    def fill_bitmask(self, row: Bitmask) -> bool:
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
        return self.is_accepting()

    def rollback_text(self, count: int) -> None:
        self._guide.reset()
        self.accept_text(self._tokens)

    def copy_state(self) -> None:
        self._guide = outlines_core.Guide(self._grammar.index)
        self.accept_text(self._tokens)

    def is_accepting(self) -> bool:
        return bool(self._guide.is_finished())
