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
from typing import Any, ClassVar

import numpy as np
from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, RegexParser
from lmformatenforcer.characterlevelparser import StringParser, UnionParser
from lmformatenforcer.external.jsonschemaobject import JsonSchemaObject
from numpy.typing import NDArray

from guided import regex
from guided.backends.base import Backend
from guided.backends.enforced_keywords import Form, SchemaReader, any_of
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
from guided.constraint import Constraint
from guided.errors import GuidedError, UnsupportedConstraint, bounded
from guided.schema.keywords import ALL_TYPES, is_number
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

    def compile(self, constraint: Constraint) -> LMFormatEnforcerGrammar:
        try:
            start = _parser(constraint)
        except GuidedError:
            raise
        except Exception as error:  # the library raises bare Exceptions for what it doesn't know
            reason = bounded(f"{type(error).__name__}: {error}")
            message = f"lm-format-enforcer can't enforce this {constraint.kind}: {reason}"
            raise UnsupportedConstraint(message, param=constraint.kind) from error
        return LMFormatEnforcerGrammar(start, self._tokens, self._masks)

    def load(self, constraint: Constraint, dumped: bytes) -> LMFormatEnforcerGrammar:
        """Compile again: it takes milliseconds."""
        return self.compile(constraint)


def _parser(constraint: Constraint) -> CharacterLevelParser:
    if constraint.kind == "choice":
        return UnionParser([StringParser(choice.encode().decode("latin-1")) for choice in constraint.choices])
    if constraint.kind == "regex":
        pattern = regex.render(in_bytes(regex.parse(constraint.source)))
        return RegexParser(pattern, CONFIG) if pattern else StringParser("")
    if constraint.whitespace:
        message = "lm-format-enforcer has no whitespace pattern, only any whitespace and none"
        raise UnsupportedConstraint(message, param="whitespace_pattern")
    reader = _Reader(constraint.source or '{"type": "object"}')
    schema = reader.read_whole()
    # An alternative with a parser of its own: otherwise two arrays would put their items on the same stack.
    options = [_json_parser(option, reader) for option in schema.get("anyOf", [schema])]
    return StrictJson(options[0] if len(options) == 1 else UnionParser(options), spaces=constraint.whitespace is None)


def _json_parser(schema: dict[str, Any], reader: _Reader) -> JsonSchemaParser:
    context = JsonSchemaParser._Context()
    context.model_class = JsonSchemaObject(**schema, **{"$defs": reader.definitions})
    context.alphabet_without_quotes = ALPHABET.replace('"', "")
    context.regex_parser_cache = reader.patterns  # the library's own is shared by the process
    return JsonSchemaParser(context, CONFIG)


class _Reader(SchemaReader):
    """Objects with named properties hold no others. Values with characters that JSON escapes are refused."""

    library = "lm-format-enforcer"
    enforced: ClassVar[dict[str, tuple[str, ...]]] = {
        "string": ("minLength", "maxLength", "pattern", "format"),
        "array": ("items", "minItems", "maxItems"),
        "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    }

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.patterns: dict[str, RegexParser] = {}
        self.definitions: dict[str, Any] = {}
        self._recursive: dict[str, str] = {}

    def any_value(self) -> dict[str, Any]:
        return {"anyOf": [{"type": kind} for kind in ALL_TYPES]}

    def recursive(self, reference: str, at: str) -> dict[str, Any]:
        name = self._recursive.setdefault(reference, f"d{len(self._recursive)}")
        return {"$ref": f"#/$defs/{name}"}

    def referred(self, reference: str, at: str, form: Form) -> Form:
        if reference in self._recursive:
            nested = [] if form is None else [part for part in form.get("anyOf", []) if part.get("type") in _NESTED]
            if form is None or len(nested) > 1:  # the library would put their items on the same stack
                raise self.refusal(at, "$ref", " that is recursive with several alternatives")
            self.definitions[self._recursive[reference]] = form
        return form

    def values(self, values: list[Any], at: str, keyword: str) -> Form:
        texts = [self.name(value) for value in values if isinstance(value, str)]
        numbers = [value for value in values if is_number(value)]
        others = [value for value in values if value is None or isinstance(value, bool) or value in ([], {})]
        if None in texts or len(texts) + len(numbers) + len(others) < len(values):
            raise self.refusal(at, keyword, " with arrays, objects or text that JSON escapes")
        options: list[Form] = [{"type": "string", "enum": texts}] if texts else []
        options += [{"enum": numbers}] if numbers else []
        return any_of([*options, *({"const": _Literal(json.dumps(value))} for value in others)])

    def text(self, least: int, most: float) -> Form:
        counts = {**({"minLength": least} if least else {}), **({} if most == math.inf else {"maxLength": int(most)})}
        return {"type": "string", **counts} if most else {"type": "string", "enum": [""]}

    def matching(self, pattern: regex.Node) -> Form:
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


_NESTED = ("array", "object", None)


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
