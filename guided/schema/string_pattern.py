"""The strings of a JSON Schema as patterns: those that a subschema allows, or does not, and their JSON text.

A pattern describes the string, a grammar its JSON text between quotes, where `"`, `\\` and control characters are
escaped. So a pattern is parsed, and its characters are written as in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.regex import automaton
from guided.regex import tree as regex
from guided.regex.parser import parse, parse_search, width
from guided.regex.tree import UNIVERSE, Chars, Concatenation, Node, Repeat
from guided.schema.formats import FORMATS
from guided.schema.keywords import Schema, listed, types_of

_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_ANY = regex.repeat(Chars(UNIVERSE), 0, None)
_BLANKS = regex.ranges_of([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])
_SPACES = regex.ranges_of((code, code) for code in range(0x3001) if chr(code).isspace())
"""The characters that `str.strip` removes."""
_MAX_NAME = 64
_END = "end"
"""The key of a trie's node where a name ends; a character has length 1."""
PLAIN = regex.complement(regex.ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]))
"""Characters that are not escaped in JSON strings (without DEL, which some libraries escape)."""


@lru_cache(maxsize=16)
def whitespace(pattern: str) -> str:
    """Return a regex for the whitespace between JSON tokens, without what JSON does not allow there. Empty for none.

    Raises:
        InvalidConstraint: nothing is left of a part of the pattern, or as `parse` does.
    """

    def blank(chars: Chars) -> Chars:
        ranges = regex.intersection(chars.ranges, _BLANKS)
        if not ranges:
            message = "the whitespace pattern needs a character other than space, tab, line feed and carriage return"
            raise InvalidConstraint(message, param="whitespace_pattern")
        return Chars(ranges)

    return regex.render(regex.map_chars(parse(pattern, param="whitespace_pattern"), blank))


def matches(pattern: str, text: str) -> bool:
    """Return whether `text` contains a match of `pattern`. Raises as `parse_search` does."""
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(regex.render(parse_search(pattern)))


def in_json(node: Node, *, escapes: bool) -> Node:
    """Return `node` as JSON text between quotes.

    Args:
        escapes: write characters that need it with their short escapes. Without it they are excluded, so the result
            matches less.

    Raises:
        UnsupportedConstraint: nothing is left without the excluded characters.
    """

    def spelled(chars: Chars) -> Node:
        plain = regex.intersection(chars.ranges, PLAIN)
        options: list[Node] = [Chars(plain)] if plain else []
        for character, escape in _ESCAPED.items() if escapes else ():
            if regex.intersection(chars.ranges, ((ord(character), ord(character)),)):
                options.append(regex.literal(escape))
        if not options:
            raise UnsupportedConstraint("the pattern needs a character that is escaped in JSON strings")
        return regex.choice(options)

    return regex.map_chars(node, spelled)


def is_empty(schema: dict[str, Any]) -> bool:
    """Return whether a schema has a pattern of which all matches are shorter or longer than the schema allows."""
    if schema.get("type") != "string" or "pattern" not in schema:
        return False
    try:
        low, high = width(parse_search(schema["pattern"]))
    except InvalidConstraint:
        return False
    too_short = high is not None and bool(high < schema.get("minLength", 0))
    return too_short or bool(low > schema.get("maxLength", low))


def fit(node: Node, least: int, most: int | None) -> Node:
    """Restrict `node` to `least` to `most` characters.

    This is possible if the lengths have no effect, or if only one repetition of a fixed length varies the length.

    Raises:
        UnsupportedConstraint: not possible, or no match has such a length.
    """
    low, high = width(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    if (most is not None and low > most) or (high is not None and high < least):
        raise UnsupportedConstraint("no match of the pattern has a length between minLength and maxLength")
    items: list[Node] = list(node.items) if isinstance(node, Concatenation) else [node]
    loose = [index for index, item in enumerate(items) if len(set(width(item))) == 2]
    if len(loose) == 1 and isinstance(item := items[loose[0]], Repeat):
        size, longest = width(item.item)
        if 0 < size == longest:
            fixed = low - item.low * size
            fewest = max(item.low, -((fixed - least) // size))
            limits = [item.high]
            if most is not None:
                limits.append((most - fixed) // size)
            highest = min((limit for limit in limits if limit is not None), default=None)
            if highest is None or fewest <= highest:
                items[loose[0]] = regex.repeat(item.item, fewest, highest)
                return regex.sequence(items)
    raise UnsupportedConstraint("a pattern together with minLength or maxLength that it doesn't imply")


def pattern_of(schema: Schema) -> str:
    """Return a pattern for the strings that satisfy `schema`.

    Raises:
        UnsupportedConstraint: `schema` has keywords other than those for strings.
        InvalidConstraint: a pattern is malformed.
    """
    return _whole(_strings(schema))


def complement_of(schema: Schema) -> str:
    """Return a pattern for the strings that do not satisfy `schema`. Raises as `pattern_of` does."""
    try:
        return _whole(_complement(_strings(schema, exact=True)))
    except RecursionError:
        raise UnsupportedConstraint("the pattern is too deep to be negated") from None


def without(pattern: str, names: Iterable[str]) -> str:
    """Return a pattern for the strings that contain a match of `pattern` and are not in `names`. Raises as above."""
    listed = automaton.of(regex.choice(map(regex.literal, names)))
    return _whole(automaton.texts(automaton.of(parse_search(pattern)).difference(listed)))


def other_names(names: Iterable[str]) -> Node:
    """Return the names of properties that are not one of `names`, also not in other case or with blanks around it.

    A model that comes to a property too late, out of the schema's order, would otherwise write `"name "` for `"name"`.
    No name begins with a blank, and none continues the first `_MAX_NAME` characters of a longer one of `names`.
    """
    trie: dict[str, Any] = {}
    for name in names:
        branch = trie
        for character in name.strip()[:_MAX_NAME]:
            branch = branch.setdefault(character.lower(), {})
        branch[_END] = len(name) > _MAX_NAME
    return _beside(trie, is_first=True)


def _beside(trie: dict[str, Any], *, is_first: bool = False) -> Node:
    """Return the rest of a name after a beginning of one of the names in a trie."""
    if trie.get(_END):
        return Chars(())
    children = {character: branch for character, branch in trie.items() if character != _END}
    known = regex.ranges_of((code, code) for character in children for code in _cases(character))
    is_name = _END in trie
    if is_name or is_first:
        excluded = regex.ranges_of([*known, *_SPACES])
    else:
        excluded = known
    options = [regex.sequence([Chars(regex.complement(excluded)), _ANY])]
    if is_name:
        options.append(regex.sequence([Chars(_SPACES), Chars(regex.complement(_SPACES)), _ANY]))
    else:
        options.append(regex.EMPTY)
    for character, branch in children.items():
        rest = _beside(branch)
        if rest != Chars(()):
            options.append(regex.sequence([Chars(regex.ranges_of((c, c) for c in _cases(character))), rest]))
    return regex.choice(options)


def _cases(character: str) -> Iterator[int]:
    """Yield the code points of a character in lower and upper case."""
    for written in (character, character.lower(), character.upper()):
        if len(written) == 1:
            yield ord(written)


def _whole(node: Node) -> str:
    return f"^(?:{regex.render(node)})$"


def _strings(schema: Schema, *, exact: bool = False) -> Node:
    """Return the strings that satisfy `schema`. `exact`: all of them, or refuse."""
    if schema is True or schema == {}:
        return _ANY
    if isinstance(schema, dict) and "string" in types_of(schema):
        literals = [regex.literal(value) for value in listed(schema) or () if isinstance(value, str)]
        if literals:
            return regex.choice(literals)
        if schema.keys() == {"anyOf"}:
            return regex.choice(_strings(part, exact=exact) for part in schema["anyOf"])
        formats = {} if exact else FORMATS  # our patterns match fewer strings
        if schema.keys() <= {"type", "pattern", "minLength", "maxLength", "format"}:
            pattern = schema.get("pattern", formats.get(schema.get("format", "")))
            if not {"pattern", "format"} <= schema.keys() and ("format" not in schema or pattern is not None):
                if pattern is None:
                    node = _ANY
                else:
                    node = parse_search(pattern)
                most: Any = schema.get("maxLength")
                return fit(node, int(schema.get("minLength", 0)), None if most is None else int(most))
        if schema.keys() <= {"type", "not"}:
            return _complement(_strings(schema["not"], exact=True))
    raise UnsupportedConstraint("these strings can't be described by one pattern")


def _complement(node: Node) -> Node:
    """Return all other strings."""
    return automaton.texts(automaton.of(node).everythingbut())
