"""lm-format-enforcer's parsers and its prefix tree of the tokens, with one byte of UTF-8 as a character.

So tokens may begin and end within a character. Within JSON strings, a space is `SPACE`: the library skips spaces at
their beginning.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from interegular.fsm import anything_else
from lmformatenforcer import CharacterLevelParser, CharacterLevelParserConfig, JsonSchemaParser, RegexParser
from lmformatenforcer.characterlevelparser import UnionParser
from lmformatenforcer.jsonschemaparser import (
    ListParsingState,
    NumberParsingState,
    ObjectParsingStage,
    ObjectParsingState,
    StringParsingState,
)
from lmformatenforcer.tokenizerprefixtree import JsonFreetextTokenCache, TokenizerPrefixTree
from numpy.typing import NDArray

from guided import regex
from guided.backends import json_syntax
from guided.bitmask import pack
from guided.vocabulary import Vocabulary

SPACE = "\u0100"
"""A space within a JSON string."""
ALPHABET = "".join(chr(byte) for byte in (*range(0x21, 0x80), *range(0xC2, 0xF5))) + SPACE
"""The characters of free strings: the first bytes of characters only, because the library counts them."""
CONFIG = CharacterLevelParserConfig(
    alphabet=ALPHABET, max_consecutive_whitespaces=12, force_json_field_order=False, max_json_array_length=0
)
_SHARED = ("root", "context", "_config", "pattern", "current_key")
"""Attributes of parsers that are the same for all of a grammar, or are not read later."""


class StrictJson(CharacterLevelParser):  # type: ignore[misc]
    """The library's parser of a schema together with the syntax of JSON and UTF-8.

    Args:
        spaces: allow whitespace between JSON tokens.
        begun: the first bytes of an incomplete character.
    """

    def __init__(
        self, inner: CharacterLevelParser, spaces: bool, syntax: json_syntax.State = json_syntax.START, begun: str = ""
    ) -> None:
        self.inner, self.spaces, self.syntax, self.begun = inner, spaces, syntax, begun

    def add_character(self, new_character: str) -> StrictJson:
        allowed = self.inner.get_allowed_characters()
        symbol = SPACE if new_character == " " and json_syntax.in_string(self.syntax) else new_character
        options = [self.inner] if self.begun and _is_free(self.inner) else []  # the library does not count these bytes
        if symbol in allowed:
            options.append(_after(self.inner, symbol))
        after = _advance(self.syntax, self.begun, new_character, self.spaces)
        assert after is not None
        return StrictJson(options[0] if len(options) == 1 else UnionParser(options), self.spaces, *after)

    def get_allowed_characters(self) -> str:
        free = bool(self.begun) and _is_free(self.inner)
        found = _possible(self.inner.get_allowed_characters(), self.syntax, self.begun, self.spaces, free)
        if json_syntax.in_number(self.syntax):
            found = "".join(c for c in found if c not in ".eE" or not _only_integers(self.inner, c))
        return found

    def can_end(self) -> bool:
        return json_syntax.complete(self.syntax) and bool(self.inner.can_end())

    def shortcut_key(self) -> Hashable | None:
        if self.begun or not json_syntax.in_string(self.syntax):
            return None
        key: Hashable | None = self.inner.shortcut_key()
        return key

    def open_pattern(self) -> RegexParser | None:
        """Return the automaton of the string that is being read, if it has a pattern."""
        tops = list(_tops(self.inner)) if json_syntax.in_string(self.syntax) else []
        return tops[0].regex_parser if len(tops) == 1 and isinstance(tops[0], StringParsingState) else None


@lru_cache(maxsize=1 << 16)
def _advance(syntax: json_syntax.State, begun: str, byte: str, spaces: bool) -> tuple[json_syntax.State, str] | None:
    """Return the state of the syntax and the bytes of an incomplete character after `byte`; None if it can't follow."""
    if byte < "\x80":
        after = None if begun else json_syntax.step(syntax, byte, spaces)
        return None if after is None else (after, "")
    if not json_syntax.in_string(syntax):
        return None
    begun += byte
    try:
        begun.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        return (syntax, begun) if error.reason == "unexpected end of data" else None
    return syntax, ""


@lru_cache(maxsize=4096)
def _possible(allowed: str, syntax: json_syntax.State, begun: str, spaces: bool, free: bool) -> str:
    """Return the bytes that the library (in its characters), JSON and UTF-8 allow."""
    found = set(allowed)
    if json_syntax.in_string(syntax):
        found = {" " if c == SPACE else c for c in found if c not in " \t\n\r"}
    if free:
        found |= {chr(byte) for byte in range(0x80, 0xC0)}
    return "".join(c for c in found if c <= "\xff" and _advance(syntax, begun, c, spaces) is not None)


def _after(parser: CharacterLevelParser, symbol: str) -> CharacterLevelParser:
    """Advance a parser. The library counts some items at their end and again at the comma."""
    if isinstance(parser, UnionParser):
        options = [_after(option, symbol) for option in parser.parsers if symbol in option.get_allowed_characters()]
        return options[0] if len(options) == 1 else UnionParser(options)
    after = parser.add_character(symbol)
    if symbol == "," and isinstance(parser, JsonSchemaParser) and isinstance(parser.object_stack[-1], ListParsingState):
        place = len(parser.object_stack) - 1
        for option in after.parsers if isinstance(after, UnionParser) else [after]:
            option.object_stack[place] = option.object_stack[place]._clone()
            option.object_stack[place].num_items_seen -= 1
    return after


def _tops(parser: CharacterLevelParser) -> Iterable[CharacterLevelParser]:
    """Iterate over the parsers that read the current value."""
    if isinstance(parser, UnionParser):
        for option in parser.parsers:
            yield from _tops(option)
    elif isinstance(parser, JsonSchemaParser):
        yield from _tops(parser.object_stack[-1]) if parser.object_stack else ()
    else:
        yield parser


def _is_free(parser: CharacterLevelParser) -> bool:
    """Whether a string of any characters is being read."""
    strings = [top for top in _tops(parser) if isinstance(top, StringParsingState)]
    return any(not top.allowed_strings and top.regex_parser is None for top in strings)


def _only_integers(parser: CharacterLevelParser, symbol: str) -> bool:
    """Whether only integers accept `symbol`: the library allows them fractions and exponents."""
    takers = [top for top in _tops(parser) if symbol in top.get_allowed_characters()]
    return all(isinstance(top, NumberParsingState) and not top.allow_floating_point for top in takers)


class ByteTokens:
    """The tokens as texts of one character per byte."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        texts = {token: vocabulary.token_bytes[token].decode("latin-1") for token in vocabulary.text_token_ids}
        tree = TokenizerPrefixTree([(*item, False) for item in texts.items()], False, vocabulary.vocab_size)
        self.root = tree.root
        self._free = JsonFreetextTokenCache(False, vocabulary.vocab_size)
        for token, text in texts.items():
            self._free.add_token(_units(text), token)
        self._free.freeze()
        self._masks: dict[tuple[int, int], NDArray[np.int32]] = {}
        ordered = sorted(vocabulary.text_token_ids, key=lambda token: -len(texts[token]))
        self._ids = np.array(ordered, dtype=np.int64)
        contents = [vocabulary.token_bytes[token] for token in ordered]
        self._columns = [
            np.array([content[at] for content in contents if len(content) > at], dtype=np.uint8)
            for at in range(len(contents[0]))
        ]

    def pack(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        return pack(tokens, self.vocabulary.padded_vocab_size)

    def free(self, length: int, least: int, most: int) -> NDArray[np.int32]:
        """Return the mask within a free string of `length` characters, without tokens that begin with its end."""
        longest = self._free.max_token_len
        key = min(longest, max(0, least - length)), min(longest, most - length)
        if key not in self._masks:
            self._masks[key] = self.pack(self._free.lookup_allowed_tokens(*key).allowed_tokens)
        return self._masks[key]

    def matching(self, table: NDArray[np.int32], state: int) -> NDArray[np.int32]:
        """Return the mask of the tokens that lead from `state` to another state than the last one of `table`."""
        states = np.full(len(self._ids), state, dtype=np.int32)
        for column in self._columns:
            states[: len(column)] = table[states[: len(column)], column]
        return self.pack(self._ids[states != len(table) - 1])


def _units(text: str) -> str:
    """Return `x` for each character that a token adds to a free string, and its end; nothing if it can't follow."""
    syntax, begun, units = ("", "text"), "", ""
    for byte in text:
        inside = json_syntax.in_string(syntax) and not begun
        after = _advance(syntax, begun, byte, False)
        if after is None:
            return ""
        syntax, begun = after
        units += '"' if json_syntax.complete(syntax) else "x" if inside else ""
    return units


def byte_table(fsm: Any, space: str) -> tuple[NDArray[np.int32], dict[int, int]]:
    """Return the next state by state and byte, with a dead state at the end, and the row of each state."""
    rows = {state: row for row, state in enumerate(fsm.map)}
    symbols = [space if byte == 0x20 else chr(byte) for byte in range(256)]
    columns = [fsm.alphabet[symbol if symbol in fsm.alphabet else anything_else] for symbol in symbols]
    table = np.full((len(rows) + 1, 256), len(rows), dtype=np.int32)
    for state, transitions in fsm.map.items():
        table[rows[state]] = [rows[transitions[column]] if column in transitions else len(rows) for column in columns]
    return table, rows


def in_bytes(node: regex.Node, space: int = 0x20) -> regex.Node:
    """Return a regex for the bytes of the texts that `node` matches. Very large classes are reduced to ASCII."""

    def spelled(chars: regex.Chars) -> regex.Node:
        ranges = [part for low, high in chars.ranges for part in ((low, min(high, 0x1F)), (max(low, 0x21), high))]
        blank = [(space, space)] if regex.intersection(chars.ranges, ((0x20, 0x20),)) else []
        ranges = [part for part in ranges if part[0] <= part[1]]
        single = regex.ranges_of([*blank, *regex.intersection(tuple(ranges), ((0, 0x7F),))])
        several = [_sequences(*part) for part in regex.intersection(chars.ranges, ((0x80, 0x10FFFF),))]
        return regex.choice([*([regex.Chars(single)] if single else []), *(one for part in several for one in part)])

    return regex.map_chars(regex.with_small_classes(node), spelled)


def _sequences(low: int, high: int) -> Iterable[regex.Node]:
    """Return the UTF-8 of the code points from `low` (beyond ASCII) to `high` as sequences of ranges of bytes."""
    for last in (0x7FF, 0xFFFF):
        if low <= last < high:
            return [*_sequences(low, last), *_sequences(last + 1, high)]
    for bits in (6, 12, 18):
        part = (1 << bits) - 1
        if low | part < high and low & part:
            return [*_sequences(low, low | part), *_sequences((low | part) + 1, high)]
        if low | part < high and high & part != part:
            return [*_sequences(low, (high & ~part) - 1), *_sequences(high & ~part, high)]
    pairs = zip(chr(low).encode(), chr(high).encode(), strict=True)
    return [regex.sequence(regex.Chars((pair,)) for pair in pairs)]


def state_key(part: Any) -> Hashable:
    """Return a key that is equal for parsers that allow the same. It is valid while the parser is alive."""
    if isinstance(part, list):
        return tuple(map(state_key, part))
    if isinstance(part, RegexParser):
        return id(part.context), part.current_state
    if not isinstance(part, CharacterLevelParser):
        return part if isinstance(part, Hashable) and not hasattr(part, "__dict__") else id(part)
    fields = {name: value for name, value in vars(part).items() if name not in _SHARED}
    match part:
        case NumberParsingState():  # its syntax is part of the state
            del fields["parsed_string"]
        case ListParsingState():
            del fields["parsed_string"]
            if part.min_items is None and part.max_items is None:
                fields["num_items_seen"] = min(1, part.num_items_seen)
        case ObjectParsingState() if part.is_dictionary:
            del fields["existing_keys"]
        case StringParsingState() if not (part.allowed_strings or part.min_length or part.max_length):
            fields["parsed_string"] = bool(part.parsed_string)
        case JsonSchemaParser():
            fields["last_non_whitespace_character"] = part.last_non_whitespace_character == "["
            if not any(map(_is_named, part.object_stack)):
                del fields["last_parsed_string"]
    return type(part).__name__, *(state_key(value) for value in fields.values())


def _is_named(parser: CharacterLevelParser) -> bool:
    """Whether the name of a property is being read, or was read last."""
    return (
        isinstance(parser, ObjectParsingState)
        and parser.current_stage == ObjectParsingStage.PARSING_KEY_VALUE_SEPARATOR
    )
