"""Adapter for lm-format-enforcer: character-level parsers in Python. The slow backend:
a mask takes milliseconds.

The library's `TokenEnforcer` is not used: it answers exceptions with end-of-sequence
only, and stores every prefix for ever. A character of the library is one byte of UTF-8
here, so tokens may begin and end within a character. Its JSON is a superset (integers
have fractions, items are miscounted), so each document is validated before it may end.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lmformatenforcer import (
    CharacterLevelParser,
    CharacterLevelParserConfig,
    JsonSchemaParser,
)
from lmformatenforcer.characterlevelparser import StringParser, UnionParser
from lmformatenforcer.tokenizerprefixtree import (
    JsonFreetextTokenCache,
    TokenizerPrefixTree,
)

from guided.backends.base import Backend, CompiledGrammar, TextMatcher
from guided.backends.schema_lowering import FewKeywords, SchemaLowering, any_of, only
from guided.bitmask import Bitmask
from guided.constraint import Constraint
from guided.errors import TokenRejected, UnsupportedConstraint
from guided.json_text import JsonObject
from guided.schema.keywords import ALL_TYPES, is_number, types_of
from guided.vocabulary import Vocabulary, valid_utf8

_SPACE = "\u0100"
"""A space within a JSON string: the library skips spaces at its beginning."""
_ALPHABET = (
    "".join(chr(byte) for byte in (*range(0x21, 0x80), *range(0xC2, 0xF5))) + _SPACE
)
"""The characters of free strings: only the first bytes of characters, because the
library counts them."""
_CONFIG = CharacterLevelParserConfig(
    _ALPHABET, max_consecutive_whitespaces=12, max_json_array_length=0
)
_REST = frozenset(map(chr, range(0x80, 0xC0)))
"""The bytes of a character after the first one."""
_BLANKS = frozenset(" \t\r\n")
_FREE = re.compile(r'[^"\\\x00-\x1f]*"?')
"""Matches a token without escapes that may stand in a free string, or end it."""


class LMFormatEnforcerBackend(Backend):
    """The tokens in the library's own form, shared by all grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = _ByteTexts(vocabulary)

    def compile(self, constraint: Constraint) -> LMFormatEnforcerGrammar:
        if constraint.kind == "choice":
            options = [
                StringParser(choice.encode().decode("latin-1"))
                for choice in constraint.value
            ]
            return LMFormatEnforcerGrammar(UnionParser(options), self._tokens)
        if constraint.whitespace:
            raise UnsupportedConstraint(
                "lm-format-enforcer has no whitespace pattern",
                param="whitespace_pattern",
            )
        schema = _EnforcerLowering(constraint).document()
        definitions = schema.pop("$defs", {})
        # An alternative with a parser of its own: otherwise two arrays would put their
        # items on the same stack.
        parts = [
            {**part, "$defs": definitions} for part in schema.get("anyOf", [schema])
        ]
        parser = UnionParser([JsonSchemaParser(part, _CONFIG) for part in parts])
        spaces = _BLANKS
        if constraint.whitespace == "":
            spaces = frozenset()
        grammar = LMFormatEnforcerGrammar(_Json(parser, spaces), self._tokens)
        grammar.checked = ("",)
        return grammar


class _EnforcerLowering(FewKeywords):
    """Values with characters that JSON escapes are left out."""

    library = "lm-format-enforcer"

    def any_value(self) -> JsonObject:
        return {"anyOf": [{"type": kind} for kind in ALL_TYPES]}

    def reference(self, schema: JsonObject) -> JsonObject:
        """Lower a reference: to several alternatives as the alternatives, because their
        items would share a stack."""
        if len(types_of(self.form.target(schema))) == 1:
            return SchemaLowering.reference(self, schema)
        return super().reference(schema)

    def string(self, schema: JsonObject) -> JsonObject:
        if "pattern" in schema:
            self.parse_pattern(schema)  # refuses a malformed one
        return {"type": "string", **only(schema, "minLength", "maxLength")}

    def array(self, schema: JsonObject) -> JsonObject:
        lowered = super().array(schema)
        lowered.pop("maxItems", None)  # it miscounts the items
        if lowered.get("minItems"):
            lowered["minItems"] = 1
        return lowered

    def finite(self, schema: JsonObject, keyword: str, values: list[Any]) -> JsonObject:
        texts = [self.name(value) for value in values if isinstance(value, str)]
        numbers = [value for value in values if is_number(value)]
        if None in texts or len(texts) + len(numbers) + values.count(None) < len(
            values
        ):
            raise self.refusal(
                schema,
                keyword,
                " with other than null, numbers and text without escapes",
            )
        options: list[JsonObject] = [
            {"type": "string", "enum": texts},
            {"enum": numbers},
        ]
        options = [option for option in options if option["enum"]]
        if None in values:
            options.append({"type": "null"})
        return any_of(options)

    def name(self, text: str) -> str | None:
        if json.dumps(text, ensure_ascii=False) != f'"{text}"':
            return None
        return text.encode().decode("latin-1").replace(" ", _SPACE)


@dataclass(frozen=True, eq=False)
class _Json(CharacterLevelParser):  # type: ignore[misc]
    """The library's JSON without trailing commas, and with any spaces and bytes in
    strings."""

    inner: CharacterLevelParser
    spaces: frozenset[str]  # the whitespace that is allowed between JSON tokens
    quoted: bool = False  # in a string
    escaped: bool = False  # after a backslash in a string
    begun: str = ""  # the first bytes of an incomplete character
    last: str = ""  # the last character, without whitespace between JSON tokens

    def add_character(self, new_character: str) -> _Json:
        symbol = new_character
        if self.quoted and symbol == " ":
            symbol = _SPACE
        inner = self.inner
        # free strings do not read these bytes
        if symbol not in _REST or symbol in inner.get_allowed_characters():
            inner = inner.add_character(symbol)
        begun = ""
        if "\x80" <= symbol < _SPACE and not _is_utf8(self.begun + symbol):
            begun = self.begun + symbol
        last = symbol
        if symbol in _BLANKS:
            last = self.last
        quoted = self.quoted != (symbol == '"' and not self.escaped)
        escaped = self.quoted and symbol == "\\" and not self.escaped
        return _Json(inner, self.spaces, quoted, escaped, begun, last)

    def get_allowed_characters(self) -> str:
        allowed = set(self.inner.get_allowed_characters())
        if self.begun:
            return "".join(
                byte
                for byte in allowed & _REST or _REST
                if _is_utf8(self.begun + byte, begun=True)
            )
        if self.quoted:
            return "".join(allowed - _BLANKS).replace(_SPACE, " ")
        spaces = self.spaces
        if not self.last or self.inner.can_end():
            spaces = frozenset()
        allowed -= _BLANKS - spaces
        if self.last == ",":
            allowed.discard("}")
        return "".join(allowed)

    def can_end(self) -> bool:
        return bool(self.inner.can_end())

    def shortcut_key(self) -> Any:
        if self.quoted and not self.begun:
            return self.inner.shortcut_key()
        return None


@lru_cache(maxsize=1 << 16)
def _is_utf8(text: str, *, begun: bool = False) -> bool:
    """Return whether bytes, written as one character each, are UTF-8; `begun`: or the
    beginning of it."""
    try:
        text.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        return begun and error.reason == "unexpected end of data"
    return True


class _ByteTexts:
    """The tokens as texts of one character per byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        contents = {
            token: vocabulary.token_bytes[token] for token in vocabulary.text_token_ids
        }
        self.texts = {
            token: content.decode("latin-1") for token, content in contents.items()
        }
        spelled = [(token, text, False) for token, text in self.texts.items()]
        self._root = TokenizerPrefixTree(spelled, False, vocabulary.vocab_size).root
        self._free = JsonFreetextTokenCache(False, vocabulary.vocab_size)
        for token, content in contents.items():
            whole = content[: valid_utf8(content)].decode()
            rest = content[valid_utf8(content) :].decode("latin-1")
            if (
                _FREE.fullmatch(whole)
                and not (rest and whole[-1:] == '"')
                and _is_utf8(rest, begun=True)
            ):
                self._free.add_token(whole + rest[:1], token)
        self._free.freeze()
        self._masks: dict[tuple[int, int], Bitmask] = {}

    def free(self, length: int, least: int, most: int) -> Bitmask:
        """Return the mask within a free string of `length` characters, without its end
        and escapes."""
        longest = self._free.max_token_len
        key = min(longest, max(0, least - length)), min(longest, most - length)
        if key not in self._masks:
            self._masks[key] = self.vocabulary.mask(
                self._free.lookup_allowed_tokens(*key).allowed_tokens
            )
        return self._masks[key]

    def following(self, state: CharacterLevelParser, first: str = "") -> Bitmask:
        """Return the mask after `state`; with `first`, only of tokens that begin with
        one of its characters."""
        tokens: list[int] = []
        todo = [(self._root, state, first)]
        while todo:
            node, parser, firsts = todo.pop()
            allowed = node.children.keys() & set(parser.get_allowed_characters())
            if firsts:
                allowed &= set(firsts)
            for character in allowed:
                child = node.children[character]
                tokens += child.tokens
                if child.children:
                    todo.append((child, parser.add_character(character), ""))
        return self.vocabulary.mask(tokens)


@dataclass(eq=False)
class LMFormatEnforcerGrammar(CompiledGrammar):
    """The parser at the start."""

    start: CharacterLevelParser
    tokens: _ByteTexts

    def matcher(self) -> LMFormatEnforcerMatcher:
        return LMFormatEnforcerMatcher(self.tokens, self.start)


class LMFormatEnforcerMatcher(TextMatcher):
    """One sequence: the library's parsers, which are immutable, after each of its text
    tokens."""

    def __init__(self, shared: _ByteTexts, start: CharacterLevelParser) -> None:
        super().__init__(shared.vocabulary)
        self._shared = shared
        self._states = [start]

    def accept_text(self, token_ids: list[int]) -> None:
        for token in token_ids:
            state = self._states[-1]
            text = self._shared.texts.get(token, "\uffff")  # which is no byte
            for character in text:
                if character not in state.get_allowed_characters():
                    raise TokenRejected(f"token {token} is not allowed here")
                state = state.add_character(character)
            self._states.append(state)

    def fill_bitmask(self, row: Bitmask) -> bool:
        state = self._states[-1]
        tokens = self._shared
        free = state.shortcut_key()
        if free is not None:
            row[:] = tokens.free(*free[1:]) | tokens.following(state, '"\\')
        else:
            row[:] = tokens.following(state)
        return self.is_accepting()

    def rollback_text(self, count: int) -> None:
        del self._states[-count:]

    def copy_state(self) -> None:
        self._states = list(self._states)

    def is_accepting(self) -> bool:
        return bool(self._states[-1].can_end())
