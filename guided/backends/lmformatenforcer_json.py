"""lm-format-enforcer's `JsonSchemaParser` as an automaton, combined with the syntax of JSON.

The parser alone accepts trailing commas, `1.e5`, raw tabs in strings, and 1e-5 as an integer. `json_syntax` runs in
parallel, and both must accept. Within strings, where nearly every token is allowed, tokens are not tried one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, RegexParser
from lmformatenforcer.characterlevelparser import ForceStopParser, SequenceParser, StringParser, UnionParser
from lmformatenforcer.external.jsonschemaobject import JsonSchemaObject
from lmformatenforcer.jsonschemaparser import (
    ListParsingState,
    NumberParsingState,
    ObjectParsingStage,
    ObjectParsingState,
    StringParsingState,
)
from numpy.typing import NDArray

from guided.backends.character_tokens import OTHER, CharacterTokens, Ids
from guided.backends.lmformatenforcer_automata import MAX_SPACES, Automaton, RegexAutomaton, config, tree_tokens
from guided.backends.lmformatenforcer_schema import Lowered
from guided.bitmask import pack
from guided.errors import UnsupportedConstraint
from guided.schema import json_syntax

_SPACE = " \t\n\r"
_MAX_CHARACTERS = 25_000
"""Maximum number of characters that patterns and values name. The library tries each of them for a mask."""


class JsonState:
    """The states of the schema's parser and of the JSON syntax.

    Args:
        spaces: length of the last run of whitespace between JSON tokens. The schema's parser does not read it.
    """

    __slots__ = ("allowed", "parser", "spaces", "syntax")

    def __init__(self, parser: CharacterLevelParser, syntax: json_syntax.State, spaces: int = 0) -> None:
        self.parser = parser
        self.syntax = syntax
        self.spaces = spaces
        self.allowed = _characters(parser.get_allowed_characters(), spaces < MAX_SPACES)

    def spaced(self, syntax: json_syntax.State) -> JsonState:
        """Return the state after whitespace that leads to `syntax`."""
        after = copy.copy(self)
        after.syntax, after.spaces = syntax, self.spaces + 1
        if after.spaces == MAX_SPACES:
            after.allowed = after.allowed.difference(_SPACE)
        return after


@lru_cache(maxsize=4096)
def _characters(text: str, spaces: bool) -> frozenset[str]:
    """Return the characters as a set. Equal sets are shared: many states have one of a few."""
    return frozenset(text).difference("" if spaces else _SPACE)


class JsonAutomaton(Automaton):
    """A JSON Schema.

    Args:
        lowered: the schema in the library's terms.
        spaces: allow whitespace between JSON tokens.
    """

    def __init__(self, lowered: Lowered, tokens: CharacterTokens, spaces: bool) -> None:
        self._spaces = spaces
        self._patterns = {pattern: RegexAutomaton(pattern, tokens) for pattern in lowered.patterns}
        characters = frozenset().union(*lowered.literals, *(pattern.named for pattern in self._patterns.values()))
        if len(characters) > _MAX_CHARACTERS:
            raise UnsupportedConstraint(
                f"lm-format-enforcer can't enforce patterns that name more than {_MAX_CHARACTERS} characters",
                param="json_schema",
            )
        self.named = frozenset(character for character in characters if character >= "\x80")
        self._tokens = tokens
        self.start = JsonState(self._parser(lowered.schema), json_syntax.START)

    def _parser(self, schema: dict[str, Any]) -> JsonSchemaParser:
        settings = config(self.named)
        context = JsonSchemaParser._Context()
        context.model_class = JsonSchemaObject(**copy.deepcopy(schema))
        context.alphabet_without_quotes = settings.alphabet.replace('"', "")
        # The library's own cache is shared by all parsers of the process.
        context.regex_parser_cache = {}
        for pattern, automaton in self._patterns.items():
            automaton.parser.config = settings
            context.regex_parser_cache[pattern] = automaton.parser
        return JsonSchemaParser(context, settings)

    def step(self, state: JsonState, character: str) -> JsonState | None:
        symbol = character if character < "\x80" or character in self.named else OTHER
        if symbol not in state.allowed:
            return None
        syntax = json_syntax.step(state.syntax, character, self._spaces)
        if syntax is None or (symbol in ".eE" and json_syntax.in_number(state.syntax) and _whole(state.parser, symbol)):
            return None
        inside = state.syntax[1].startswith(("text", "name"))
        if character in _SPACE and not inside:
            return state.spaced(syntax)
        parser = _after(state.parser, symbol)
        if symbol == " " and inside:
            parser = _with_first_space(parser)
        after = JsonState(parser, syntax)
        # The library may continue to a state that allows nothing: a dead end.
        return after if after.allowed or self.final(after) else None

    def final(self, state: JsonState) -> bool:
        return json_syntax.complete(state.syntax) and bool(state.parser.can_end())

    def following(self, state: JsonState) -> Collection[str]:
        return [c for c in state.allowed if json_syntax.step(state.syntax, c, self._spaces) is not None]

    def mask(self, state: JsonState) -> NDArray[np.int32]:
        options = _options(state.parser)
        if len(options) > 1:
            masks = [self.mask(JsonState(option, state.syntax, state.spaces)) for option in options]
            either: NDArray[np.int32] = np.bitwise_or.reduce(masks)
            return either
        string = _open_string(state.parser) if json_syntax.in_string(state.syntax) else None
        if string is not None:
            return self._in_string(state, string)
        return self._pack(tree_tokens(self, state, self._tokens.tree))

    def _pack(self, tokens: Any) -> NDArray[np.int32]:
        return pack(tokens, self._tokens.vocabulary.padded_vocab_size)

    def _in_string(self, state: JsonState, string: StringParsingState) -> NDArray[np.int32]:
        """Return the mask within a string that is free or has a pattern.

        Content tokens are found by length or by the pattern's table, closing tokens by the text after the quote.
        """
        strings = self._tokens.strings
        if string.regex_parser is None:
            low, high = _room(string)
            inside = strings.open(high)
            if low > strings.longest:
                return inside
            lengths = strings.lengths[strings.closing]
            closing = strings.closing[(lengths >= low) & (lengths <= high)]
            return self._with_closing(state, string, inside, closing)
        automaton = self._patterns[string.pattern]
        ends, live = automaton.ends(strings.contents, automaton.numbers[string.regex_parser.current_state])
        reached, final = strings.plain[live], strings.plain[automaton.finals[ends]]
        inside = self._pack(strings.tokens[reached[strings.rests[reached] < 0]])
        return self._with_closing(state, string, inside, final[strings.rests[final] >= 0])

    def _with_closing(
        self, state: JsonState, string: StringParsingState, inside: NDArray[np.int32], closing: Ids
    ) -> NDArray[np.int32]:
        """Add the `closing` tokens with an allowed text after the quote to the mask `inside`."""
        strings = self._tokens.strings
        complete = JsonState(_with_top(state.parser, _completed(string)), state.syntax)
        after = self.step(complete, '"') if len(closing) else None
        if after is None:
            return inside
        spelled = tree_tokens(self, after, strings.rest_tree)
        return inside | self._pack(strings.tokens[closing[np.isin(strings.rests[closing], spelled)]])

    def key(self, state: JsonState) -> Hashable | None:
        key = _key(state.parser)
        return None if key is None else (key, state.syntax, state.spaces)


def _with_first_space(parser: CharacterLevelParser) -> CharacterLevelParser:
    """Add the first space of a string: the library skips it, so it would neither count nor be matched."""
    if isinstance(parser, JsonSchemaParser) and parser.object_stack:
        parser.object_stack[-1] = _with_first_space(parser.object_stack[-1])
    elif isinstance(parser, UnionParser):
        return UnionParser([_with_first_space(option) for option in parser.parsers])
    elif isinstance(parser, StringParsingState) and parser.seen_opening_quote and not parser.parsed_string:
        parser = parser._clone()
        parser.parsed_string = " "
        if parser.regex_parser is not None:
            parser.regex_parser = parser.regex_parser.add_character(" ")
    return parser


def _after(parser: CharacterLevelParser, symbol: str) -> CharacterLevelParser:
    """Advance each alternative separately: the library reads the items of alternative arrays from one stack."""
    options = _options(parser)
    if len(options) > 1:
        advanced = [_after(option, symbol) for option in options if symbol in option.get_allowed_characters()]
        return advanced[0] if len(advanced) == 1 else UnionParser(advanced)
    after = parser.add_character(symbol)
    if symbol == "," and isinstance(parser, JsonSchemaParser) and isinstance(parser.object_stack[-1], ListParsingState):
        # The library has counted this item at its end, and counts it at the comma too.
        depth = len(parser.object_stack) - 1
        for option in after.parsers if isinstance(after, UnionParser) else [after]:
            array = option.object_stack[depth]._clone()
            array.num_items_seen -= 1
            option.object_stack[depth] = array
    return after


def _options(parser: CharacterLevelParser) -> list[CharacterLevelParser]:
    """Return the alternatives of a union: the tokens that may follow are those of all of them."""
    if isinstance(parser, UnionParser):
        return list(parser.parsers)
    if (
        isinstance(parser, JsonSchemaParser)
        and parser.object_stack
        and isinstance(parser.object_stack[-1], UnionParser)
    ):
        return [_with_top(parser, option) for option in parser.object_stack[-1].parsers]
    return [parser]


def _with_top(parser: JsonSchemaParser, top: CharacterLevelParser) -> JsonSchemaParser:
    """Return a copy of `parser` with another parser of the current value."""
    stack = [*parser.object_stack[:-1], top]
    copied = JsonSchemaParser(parser.context, parser.config, stack, parser.num_consecutive_whitespaces)
    copied.last_parsed_string = parser.last_parsed_string
    copied.last_non_whitespace_character = parser.last_non_whitespace_character
    return copied


def _completed(string: StringParsingState) -> StringParsingState:
    """Return a copy of an open string that lacks only its closing quote."""
    complete = string._clone()
    if complete.regex_parser is None:
        complete.parsed_string = complete.parsed_string.ljust(complete.min_length or 0, "a")
    else:
        context = complete.regex_parser.context
        complete.regex_parser = RegexParser(context, complete.regex_parser.config, min(context.pattern.finals))
    return complete


def _top(parser: CharacterLevelParser) -> Iterable[CharacterLevelParser]:
    """Iterate over the parsers that read the current value."""
    if isinstance(parser, UnionParser):
        for option in parser.parsers:
            yield from _top(option)
    elif isinstance(parser, JsonSchemaParser):
        if parser.object_stack:
            yield from _top(parser.object_stack[-1])
    else:
        yield parser


def _whole(parser: CharacterLevelParser, symbol: str) -> bool:
    """Whether only integers would accept `symbol` (the library allows fractions and exponents in them)."""
    takers = [top for top in _top(parser) if symbol in top.get_allowed_characters()]
    return all(isinstance(top, NumberParsingState) and not top.allow_floating_point for top in takers)


def _open_string(parser: CharacterLevelParser) -> StringParsingState | None:
    """Return the string that is being read, if it is free or has a pattern."""
    if not isinstance(parser, JsonSchemaParser) or not parser.object_stack:
        return None
    top = parser.object_stack[-1]
    if not isinstance(top, StringParsingState) or top.allowed_strings:
        return None
    return top if top.seen_opening_quote and not top.seen_closing_quote else None


def _room(string: StringParsingState) -> tuple[int, int]:
    """Return how many more characters the string needs and may have."""
    length = len(string.parsed_string)
    high = np.iinfo(np.int64).max if string.max_length is None else string.max_length - length
    return max(0, (string.min_length or 0) - length), high


def _key(parser: CharacterLevelParser) -> Hashable | None:
    """Return a key that is equal for parsers with the same mask, and that is valid while the parser is alive."""
    match parser:
        case JsonSchemaParser():
            stack = tuple(map(_key, parser.object_stack))
            naming = any(
                isinstance(item, ObjectParsingState)
                and item.current_stage == ObjectParsingStage.PARSING_KEY_VALUE_SEPARATOR
                for item in parser.object_stack
            )
            last = parser.last_parsed_string if naming else None
            spaces = parser.num_consecutive_whitespaces
            return None if None in stack else (stack, spaces, last, parser.last_non_whitespace_character == "[")
        case UnionParser() | SequenceParser():
            parts = tuple(map(_key, parser.parsers))
            return None if None in parts else (type(parser).__name__, parts)
        case ObjectParsingState():
            if parser.is_dictionary:
                keys: Hashable = None if parser.schema_object.required else ()
            else:
                keys = frozenset(parser.existing_keys)
            return None if keys is None else ("object", id(parser.schema_object), parser.current_stage, keys)
        case ListParsingState():
            bounded = parser.min_items is not None or parser.max_items is not None
            seen = parser.num_items_seen if bounded else min(1, parser.num_items_seen)
            return ("list", id(parser.list_member_type), seen, parser.seen_list_opener, parser.seen_list_closer)
        case StringParsingState():
            return _string_key(parser)
        case NumberParsingState():  # its syntax is part of the state's key
            return ("number", parser.allow_floating_point)
        case RegexParser():
            return ("regex", id(parser.context), parser.current_state)
        case StringParser():
            return ("text", parser.target_str)
        case ForceStopParser():
            return ("stop", parser.allow_whitespace)
    return None


def _string_key(string: StringParsingState) -> Hashable | None:
    seen = (string.seen_opening_quote, string.seen_closing_quote, string.require_closing_quote)
    if string.allowed_strings:
        if len(string.allowed_strings) > 256:
            return None
        return ("enum", frozenset(string.allowed_strings), string.parsed_string, seen)
    if string.regex_parser is not None:
        return ("pattern", _key(string.regex_parser), seen)
    bounded = string.min_length is not None or string.max_length is not None
    length = len(string.parsed_string) if bounded else bool(string.parsed_string)
    return ("string", string.min_length, string.max_length, length, seen)
