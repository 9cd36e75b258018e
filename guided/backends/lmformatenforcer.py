"""Adapter for lm-format-enforcer: character-level parsers in Python. The slow backend: a mask takes milliseconds.

The library's `TokenEnforcer` is not used: it answers exceptions with end-of-sequence only, and stores every prefix for
ever. A character of the library is one byte of UTF-8 here, so tokens may begin and end within a character. Its JSON is
a superset (integers have fractions, items are miscounted), so each document is validated before it may end.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from lmformatenforcer import CharacterLevelParser, CharacterLevelParserConfig, JsonSchemaParser
from lmformatenforcer.characterlevelparser import StringParser, UnionParser
from lmformatenforcer.tokenizerprefixtree import JsonFreetextTokenCache, TokenizerPrefixTree
from numpy.typing import NDArray

from guided.backends.base import Backend, CompiledGrammar, TextMatcher
from guided.backends.schema_lowering import ArrayShape, FewKeywords, any_of
from guided.bitmask import pack
from guided.constraint import Constraint
from guided.errors import TokenRejected, UnsupportedConstraint
from guided.schema.keywords import ALL_TYPES, is_number
from guided.vocabulary import Vocabulary, valid_utf8

_SPACE = "\u0100"
"""A space within a JSON string: the library skips spaces at its beginning."""
_ALPHABET = "".join(chr(byte) for byte in (*range(0x21, 0x80), *range(0xC2, 0xF5))) + _SPACE
"""The characters of free strings: only the first bytes of characters, because the library counts them."""
_CONFIG = CharacterLevelParserConfig(_ALPHABET, max_consecutive_whitespaces=12, max_json_array_length=0)
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
            options = [StringParser(choice.encode().decode("latin-1")) for choice in constraint.value]
            return LMFormatEnforcerGrammar(UnionParser(options), self._tokens)
        if constraint.whitespace:
            raise UnsupportedConstraint("lm-format-enforcer has no whitespace pattern", param="whitespace_pattern")
        schema = _EnforcerLowering(constraint).document()
        definitions = schema.pop("$defs", {})
        # An alternative with a parser of its own: otherwise two arrays would put their items on the same stack.
        parts = [{**part, "$defs": definitions} for part in schema.get("anyOf", [schema])]
        parsers = [JsonSchemaParser(part, _CONFIG) for part in parts]
        start = _Json(UnionParser(parsers), frozenset() if constraint.whitespace == "" else _BLANKS)
        grammar = LMFormatEnforcerGrammar(start, self._tokens)
        grammar.checked = ("",)
        return grammar


class _EnforcerLowering(FewKeywords):
    """Values with characters that JSON escapes are left out."""

    library = "lm-format-enforcer"
    _inlined: tuple[dict[str, Any], ...] = ()
    """The references that are lowered as their targets at the moment."""

    def any_value(self) -> dict[str, Any]:
        return {"anyOf": [{"type": kind} for kind in ALL_TYPES]}

    def reference(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Lower a reference: to several alternatives as the alternatives, because their items would share a stack."""
        target = self.form.target(schema)
        if isinstance(target, dict) and isinstance(target.get("type"), str):
            return super().reference(schema)
        if schema in self._inlined:
            raise self.refusal(schema, "$ref", " to alternatives that contain themselves")
        outer = self._inlined
        self._inlined = (*outer, schema)
        lowered = self.lower(target)
        self._inlined = outer
        return lowered

    def string(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "pattern" in schema:
            self.parse_pattern(schema)  # refuses a malformed one
        return {"type": "string", **{name: int(schema[name]) for name in ("minLength", "maxLength") if name in schema}}

    def array(self, schema: dict[str, Any], shape: ArrayShape) -> dict[str, Any]:
        return super().array(schema, shape._replace(least=min(shape.least, 1), most=None))  # it miscounts others

    def finite(self, schema: dict[str, Any], keyword: str, values: list[Any]) -> dict[str, Any]:
        texts = [self.name(value) for value in values if isinstance(value, str)]
        numbers = [value for value in values if is_number(value)]
        if None in texts or len(texts) + len(numbers) + values.count(None) < len(values):
            raise self.refusal(schema, keyword, " with other than null, numbers and text without escapes")
        options: list[dict[str, Any]] = [{"type": "string", "enum": texts}, {"enum": numbers}]
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
    """The library's JSON without trailing commas, and with any spaces and bytes in strings."""

    inner: CharacterLevelParser
    spaces: frozenset[str]  # the whitespace that is allowed between JSON tokens
    quoted: bool = False  # in a string
    escaped: bool = False  # after a backslash in a string
    begun: str = ""  # the first bytes of an incomplete character
    last: str = ""  # the last character, without whitespace between JSON tokens

    def add_character(self, new_character: str) -> _Json:
        if self.quoted and new_character == " ":
            symbol = _SPACE
        else:
            symbol = new_character
        is_read = symbol not in _REST or symbol in self.inner.get_allowed_characters()  # not in free strings
        if "\x80" <= symbol < _SPACE:
            begun = self.begun + symbol
        else:
            begun = ""
        return _Json(
            self.inner.add_character(symbol) if is_read else self.inner,
            self.spaces,
            quoted=self.quoted != (symbol == '"' and not self.escaped),
            escaped=self.quoted and symbol == "\\" and not self.escaped,
            begun="" if _is_utf8(begun) else begun,
            last=self.last if symbol in _BLANKS else symbol,
        )

    def get_allowed_characters(self) -> str:
        allowed = set(self.inner.get_allowed_characters())
        if self.begun:
            return "".join(byte for byte in allowed & _REST or _REST if _is_utf8(self.begun + byte, begun=True))
        if self.quoted:
            return "".join(" " if character == _SPACE else character for character in allowed - _BLANKS)
        allowed -= _BLANKS.difference(() if not self.last or self.inner.can_end() else self.spaces)
        return "".join(allowed.difference("}" if self.last == "," else ""))

    def can_end(self) -> bool:
        return bool(self.inner.can_end())

    def shortcut_key(self) -> Any:
        if self.quoted and not self.begun:
            return self.inner.shortcut_key()
        return None


@lru_cache(maxsize=1 << 16)
def _is_utf8(text: str, *, begun: bool = False) -> bool:
    """Return whether bytes, written as one character each, are UTF-8; `begun`: or the beginning of it."""
    try:
        text.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        return begun and error.reason == "unexpected end of data"
    return True


class _ByteTexts:
    """The tokens as texts of one character per byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._width = vocabulary.padded_vocab_size
        contents = {token: vocabulary.token_bytes[token] for token in vocabulary.text_token_ids}
        self.texts = {token: content.decode("latin-1") for token, content in contents.items()}
        spelled = [(token, text, False) for token, text in self.texts.items()]
        self._root = TokenizerPrefixTree(spelled, False, vocabulary.vocab_size).root
        self._free = JsonFreetextTokenCache(False, vocabulary.vocab_size)
        for token, content in contents.items():
            whole = content[: valid_utf8(content)].decode()
            rest = content[valid_utf8(content) :].decode("latin-1")
            if _FREE.fullmatch(whole) and not (rest and whole[-1:] == '"') and _is_utf8(rest, begun=True):
                self._free.add_token(whole + rest[:1], token)
        self._free.freeze()
        self._masks: dict[tuple[int, int], NDArray[np.int32]] = {}

    def free(self, length: int, least: int, most: int) -> NDArray[np.int32]:
        """Return the mask within a free string of `length` characters, without its end and escapes."""
        longest = self._free.max_token_len
        key = min(longest, max(0, least - length)), min(longest, most - length)
        if key not in self._masks:
            self._masks[key] = pack(self._free.lookup_allowed_tokens(*key).allowed_tokens, self._width)
        return self._masks[key]

    def following(self, state: CharacterLevelParser, first: str = "") -> NDArray[np.int32]:
        """Return the mask after `state`; with `first`, only of tokens that begin with one of its characters."""
        found: list[int] = []
        todo = [(self._root, state, first)]
        while todo:
            node, at, only = todo.pop()
            allowed = set(at.get_allowed_characters())
            for character in node.children.keys() & (allowed.intersection(only) if only else allowed):
                child = node.children[character]
                found += child.tokens
                if child.children:
                    todo.append((child, at.add_character(character), ""))
        return pack(found, self._width)


class LMFormatEnforcerGrammar(CompiledGrammar):
    """The parser at the start."""

    def __init__(self, start: CharacterLevelParser, tokens: _ByteTexts) -> None:
        self._start = start
        self._tokens = tokens

    def matcher(self) -> LMFormatEnforcerMatcher:
        return LMFormatEnforcerMatcher(self._tokens, self._start)


class LMFormatEnforcerMatcher(TextMatcher):
    """One sequence: the library's parsers, which are immutable, after each of its text tokens."""

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

    def fill_bitmask(self, row: NDArray[np.int32]) -> bool:
        state = self._states[-1]
        tokens = self._shared
        if (free := state.shortcut_key()) is not None:
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
