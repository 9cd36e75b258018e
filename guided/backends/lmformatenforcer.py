"""Adapter for lm-format-enforcer: character-level parsers in Python. The slow backend: a mask takes milliseconds.

The library's `TokenEnforcer` is not used: it answers exceptions with end-of-sequence only, and stores every prefix for
ever. The adapter walks the library's prefix tree of the tokens with the library's parsers.

A character of the library is one byte of UTF-8 here, so tokens may begin and end within a character. Within JSON
strings, a space is `SPACE`: the library skips spaces at their beginning. The JSON parser takes `{"a":1,}` and `1.e5`,
so `json_syntax` runs in parallel, and both must accept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np
from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, RegexParser
from lmformatenforcer.characterlevelparser import StringParser, UnionParser
from lmformatenforcer.external.jsonschemaobject import JsonSchemaObject
from numpy.typing import NDArray

from guided import regex
from guided.backends.base import Backend
from guided.backends.few_keywords import FewKeywords
from guided.backends.lmformatenforcer_bytes import (
    ALPHABET,
    CONFIG,
    SPACE,
    ByteTokens,
    StrictJson,
    byte_table,
    in_bytes,
    state_key,
)
from guided.backends.mask_cache import MaskCache
from guided.backends.matchers import StateGrammar
from guided.backends.native import guard
from guided.backends.schema_lowering import any_of
from guided.constraint import Constraint
from guided.errors import GuidedError, UnsupportedConstraint, bounded
from guided.schema.keywords import ALL_TYPES, Schema, is_number, types_of
from guided.vocabulary import Vocabulary

_native = guard("lm-format-enforcer")


class LMFormatEnforcerBackend(Backend):
    """The tokens in the library's own form, shared by all grammars.

    Args:
        masks: storage for masks. None: a new one.
    """

    name: ClassVar[str] = "lm-format-enforcer"

    def __init__(self, vocabulary: Vocabulary, masks: MaskCache | None = None) -> None:
        self._tokens = ByteTokens(vocabulary)
        self._masks = MaskCache() if masks is None else masks

    def compile(self, constraint: Constraint, leave_out: Collection[str] = ()) -> LMFormatEnforcerGrammar:
        try:
            start, checked = _parser(constraint, leave_out)
        except GuidedError:
            raise
        except Exception as error:  # the library raises bare Exceptions for what it doesn't know
            reason = bounded(f"{type(error).__name__}: {error}")
            message = f"lm-format-enforcer can't enforce this {constraint.kind}: {reason}"
            raise UnsupportedConstraint(message, param=constraint.kind) from error
        grammar = LMFormatEnforcerGrammar(start, self._tokens, self._masks)
        grammar.checked = checked
        return grammar

    def load(self, constraint: Constraint, dumped: bytes, leave_out: Collection[str] = ()) -> LMFormatEnforcerGrammar:
        """Compile again: it takes milliseconds."""
        return self.compile(constraint, leave_out)


def _parser(constraint: Constraint, leave_out: Collection[str]) -> tuple[CharacterLevelParser, tuple[str, ...]]:
    """Return the library's parser of a constraint, and the pointers of the keywords that are left out."""
    if constraint.kind == "choice":
        return UnionParser([StringParser(choice.encode().decode("latin-1")) for choice in constraint.choices]), ()
    if constraint.kind == "regex":
        pattern = regex.render(in_bytes(regex.parse(constraint.source)))
        return RegexParser(pattern, CONFIG) if pattern else StringParser(""), ()
    if constraint.whitespace:
        message = "lm-format-enforcer has no whitespace pattern, only any whitespace and none"
        raise UnsupportedConstraint(message, param="whitespace_pattern")
    document = json.loads(constraint.source or '{"type": "object"}')
    lowering = _Lowering(document, leave_out=leave_out, strict=constraint.strict)
    schema = lowering.document()
    definitions = schema.pop("$defs", {})
    # An alternative with a parser of its own: otherwise two arrays would put their items on the same stack.
    options = [_json_parser(option, definitions, lowering.patterns) for option in schema.get("anyOf", [schema])]
    parser = options[0] if len(options) == 1 else UnionParser(options)
    return StrictJson(parser, spaces=constraint.whitespace is None), tuple(lowering.checked)


def _json_parser(
    schema: dict[str, Any], definitions: dict[str, Any], patterns: dict[str, RegexParser]
) -> JsonSchemaParser:
    context = JsonSchemaParser._Context()
    context.model_class = JsonSchemaObject(**schema, **{"$defs": definitions})
    context.alphabet_without_quotes = ALPHABET.replace('"', "")
    context.regex_parser_cache = patterns  # the library's own is shared by the process
    return JsonSchemaParser(context, CONFIG)


class _Lowering(FewKeywords):
    """Values with characters that JSON escapes are left out."""

    library = "lm-format-enforcer"
    enforced: ClassVar[dict[str, tuple[str, ...]]] = {
        "string": ("minLength", "maxLength", "pattern", "format"),
        "array": ("items", "minItems", "maxItems"),
        "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    }

    def __init__(self, schema: Schema, *, leave_out: Collection[str] = (), strict: bool = False) -> None:
        super().__init__(schema, leave_out=leave_out, strict=strict)
        self.patterns: dict[str, RegexParser] = {}

    def any_value(self) -> dict[str, Any]:
        return {"anyOf": [{"type": kind} for kind in ALL_TYPES]}

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        nested = [part for part in self.form.alternatives(schema) if not types_of(part).isdisjoint(_NESTED)]
        if len(nested) > 1 or any(types_of(part) >= {*_NESTED} for part in nested):
            raise self.refusal(schema, "$ref", " with several alternatives")  # their items would share a stack
        return self.keep_reference(schema)

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        texts = [self.name(value) for value in values if isinstance(value, str)]
        numbers = [value for value in values if is_number(value)]
        others = [value for value in values if value is None or isinstance(value, bool) or value in ([], {})]
        if None in texts or len(texts) + len(numbers) + len(others) < len(values):
            raise self.refusal(schema, keyword, " with arrays, objects or text that JSON escapes")
        options: list[dict[str, Any]] = [{"type": "string", "enum": texts}] if texts else []
        options += [{"enum": numbers}] if numbers else []
        return any_of([*options, *({"const": _Literal(json.dumps(value))} for value in others)])

    def text(self, least: int, most: float) -> dict[str, Any]:
        counts = {**({"minLength": least} if least else {}), **({} if most == math.inf else {"maxLength": int(most)})}
        return {"type": "string", **counts} if most else {"type": "string", "enum": [""]}

    def matching(self, pattern: regex.Node) -> dict[str, Any]:
        rendered = f"(?:{regex.render(in_bytes(pattern, ord(SPACE)))})"
        if rendered == "(?:)":
            return self.text(0, 0)
        if rendered not in self.patterns:
            self.patterns[rendered] = RegexParser(rendered, CONFIG)
        return {"type": "string", "pattern": rendered}

    def name(self, text: str) -> str | None:
        if json.dumps(text, ensure_ascii=False) != f'"{text}"':
            return None
        return text.encode().decode("latin-1").replace(" ", SPACE)


class _Literal(str):
    """The text of a `const`: the library puts other strings between quotes."""


_NESTED = ("array", "object")


class LMFormatEnforcerGrammar(StateGrammar):
    """The states are the library's parsers, which are immutable."""

    accepts_empty = False

    def __init__(self, start: CharacterLevelParser, tokens: ByteTokens, masks: MaskCache) -> None:
        self.vocabulary = tokens.vocabulary
        self.start = start
        self._tokens = tokens
        self._masks = masks.of_grammar()
        self._tables: dict[Any, tuple[NDArray[np.int32], dict[int, int]]] = {}

    def dump(self) -> bytes:
        """Return nothing: see `LMFormatEnforcerBackend.load`."""
        return b""

    def next_state(self, state: CharacterLevelParser, token: int) -> CharacterLevelParser | None:
        content = self.vocabulary.token_bytes[token] if 0 <= token < self.vocabulary.vocab_size else b""
        with _native:
            for character in content.decode("latin-1"):
                if character not in state.get_allowed_characters():
                    return None
                state = state.add_character(character)
        return state if content else None

    def is_final(self, state: CharacterLevelParser) -> bool:
        with _native:
            return bool(state.can_end())

    def mask(self, state: CharacterLevelParser) -> NDArray[np.int32]:
        with _native:
            key = state_key(state)
            mask = self._masks.get(key)
            if mask is None:
                mask = self._mask(state)
                self._masks.put(key, mask, keeps=state)
            return mask

    def _mask(self, state: CharacterLevelParser) -> NDArray[np.int32]:
        pattern = state.open_pattern() if isinstance(state, StrictJson) else state
        if isinstance(pattern, RegexParser):
            if pattern.context not in self._tables:
                self._tables[pattern.context] = byte_table(pattern.context.pattern, " " if pattern is state else SPACE)
            table, rows = self._tables[pattern.context]
            inside = self._tokens.matching(table, rows[pattern.current_state])
        elif (shortcut := state.shortcut_key()) is not None:
            inside = self._tokens.free(*shortcut[1:])
        else:
            return self._tokens.pack(self._walk(state))
        return inside if pattern is state else inside | self._tokens.pack(self._walk(state, '"'))

    def _walk(self, state: CharacterLevelParser, first: str = "") -> list[int]:
        """Return the tokens that may follow `state`; with `first`, only those that begin with it."""
        found: list[int] = []
        todo = [(self._tokens.root, state, first)]
        while todo:
            node, at, only = todo.pop()
            for character in node.children.keys() & set(at.get_allowed_characters()):
                if not only or character == only:
                    child = node.children[character]
                    found += child.tokens
                    if child.children:
                        todo.append((child, at.add_character(character), ""))
        return found
