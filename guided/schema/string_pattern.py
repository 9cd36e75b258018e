"""The strings of a JSON Schema as patterns: those that a subschema allows, or does not,
and their JSON text.

A pattern describes the string, a grammar its JSON text between quotes, where `"`, `\\`
and control characters are escaped. So a pattern is parsed, and its characters are
written as in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.json_text import JsonObject
from guided.regex import automaton
from guided.regex.parser import parse, parse_search, width
from guided.regex.tree import (
    EMPTY,
    UNIVERSE,
    Chars,
    Concatenation,
    Node,
    Repeat,
    choice,
    complement,
    intersection,
    literal,
    map_chars,
    points,
    ranges_of,
    render,
    repeat,
    sequence,
)
from guided.schema.formats import FORMATS
from guided.schema.keywords import Schema, as_object, listed, types_of

_ESCAPED = {
    '"': '\\"',
    "\\": "\\\\",
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\b": "\\b",
    "\f": "\\f",
}
_ANY = repeat(Chars(UNIVERSE), 0, None)
_BLANKS = points(b"\t\n\r ")
_SPACES = points(code for code in range(0x3001) if chr(code).isspace())
"""The characters that `str.strip` removes."""
_MAX_NAME = 64
_END = "end"
"""The key of a trie's node where a name ends; a character has length 1."""
PLAIN = complement(points([*range(0x20), *b'"\\\x7f']))
"""Characters that are not escaped in JSON strings (without DEL, which some libraries
escape)."""


@lru_cache(maxsize=16)
def whitespace(pattern: str) -> str:
    """Return a regex for the whitespace between JSON tokens, without what JSON does not
    allow there. Empty for none.

    Raises:
        InvalidConstraint: nothing is left of a part of the pattern, or as `parse` does.
    """

    def blank(chars: Chars) -> Chars:
        ranges = intersection(chars.ranges, _BLANKS)
        if not ranges:
            message = "the whitespace pattern needs a character other than space, tab, line feed and carriage return"
            raise InvalidConstraint(message, param="whitespace_pattern")
        return Chars(ranges)

    return render(map_chars(parse(pattern, param="whitespace_pattern"), blank))


def matches(pattern: str, text: str) -> bool:
    """Return whether `text` contains a match of `pattern`. Raises as `parse_search`
    does."""
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(render(parse_search(pattern)))


def in_json(node: Node, *, escapes: bool) -> Node:
    """Return `node` as JSON text between quotes.

    Args:
        escapes: write characters that need it with their short escapes. Without it they
            are excluded, so the result matches less.

    Raises:
        UnsupportedConstraint: nothing is left without the excluded characters.
    """

    def spelled(chars: Chars) -> Node:
        options: list[Node] = []
        plain = intersection(chars.ranges, PLAIN)
        if plain:
            options.append(Chars(plain))
        for character, escape in _ESCAPED.items():
            if escapes and intersection(chars.ranges, points([ord(character)])):
                options.append(literal(escape))
        if not options:
            raise UnsupportedConstraint(
                "the pattern needs a character that is escaped in JSON strings"
            )
        return choice(options)

    return map_chars(node, spelled)


def is_empty(schema: JsonObject) -> bool:
    """Return whether a schema has a pattern of which all matches are shorter or longer
    than the schema allows."""
    if schema.get("type") != "string" or "pattern" not in schema:
        return False
    try:
        low, high = width(parse_search(schema["pattern"]))
    except InvalidConstraint:
        return False
    if high is not None and high < schema.get("minLength", 0):
        return True
    return bool(low > schema.get("maxLength", low))


def fit(node: Node, least: int, most: int | None) -> Node:
    """Restrict `node` to `least` to `most` characters.

    This is possible if the lengths have no effect, or if only one repetition of a fixed
    length varies the length.

    Raises:
        UnsupportedConstraint: not possible, or no match has such a length.
    """
    low, high = width(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    items = [node]
    if isinstance(node, Concatenation):
        items = list(node.items)
    loose = [index for index, item in enumerate(items) if len(set(width(item))) == 2]
    if len(loose) == 1 and isinstance(item := items[loose[0]], Repeat):
        size, longest = width(item.item)
        if 0 < size == longest:
            fixed = low - item.low * size
            fewest = max(item.low, -((fixed - least) // size))
            highest = item.high
            if most is not None and (
                highest is None or (most - fixed) // size < highest
            ):
                highest = (most - fixed) // size
            if highest is None or fewest <= highest:
                items[loose[0]] = repeat(item.item, fewest, highest)
                return sequence(items)
    raise UnsupportedConstraint(
        "a pattern together with minLength or maxLength that it doesn't imply"
    )


def pattern_of(schema: Schema) -> str:
    """Return a pattern for the strings that satisfy `schema`.

    Raises:
        UnsupportedConstraint: `schema` has keywords other than those for strings.
        InvalidConstraint: a pattern is malformed.
    """
    return _whole(_strings(schema))


def complement_of(schema: Schema) -> str:
    """Return a pattern for the strings that do not satisfy `schema`. Raises as
    `pattern_of` does."""
    try:
        return _whole(_complement(_strings(schema, exact=True)))
    except RecursionError:
        raise UnsupportedConstraint("the pattern is too deep to be negated") from None


def without(pattern: str, names: Iterable[str]) -> str:
    """Return a pattern for the strings that contain a match of `pattern` and are not in
    `names`. Raises as above."""
    listed = automaton.of(choice(map(literal, names)))
    return _whole(
        automaton.texts(automaton.of(parse_search(pattern)).difference(listed))
    )


def other_names(names: Iterable[str]) -> Node:
    """Return the names of properties that are not one of `names`, also not in other
    case or with blanks around it.

    A model that comes to a property too late, out of the schema's order, would
    otherwise write `"name "` for `"name"`. No name begins with a blank, and none
    continues the first `_MAX_NAME` characters of a longer one of `names`.
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
    children = {
        character: branch for character, branch in trie.items() if character != _END
    }
    excluded = points(code for character in children for code in _cases(character))
    is_name = _END in trie
    if is_name or is_first:
        excluded = ranges_of([*excluded, *_SPACES])
    options = [sequence([Chars(complement(excluded)), _ANY])]
    if is_name:
        options.append(sequence([Chars(_SPACES), Chars(complement(_SPACES)), _ANY]))
    else:
        options.append(EMPTY)
    for character, branch in children.items():
        rest = _beside(branch)
        if rest != Chars(()):
            options.append(sequence([Chars(points(_cases(character))), rest]))
    return choice(options)


def _cases(character: str) -> Iterator[int]:
    """Yield the code points of a character in lower and upper case."""
    for written in (character, character.lower(), character.upper()):
        if len(written) == 1:
            yield ord(written)


def _whole(node: Node) -> str:
    return f"^(?:{render(node)})$"


def _strings(schema: Schema, *, exact: bool = False) -> Node:
    """Return the strings that satisfy `schema`. `exact`: all of them, or refuse."""
    if schema is not False and "string" in types_of(schema):
        schema = as_object(schema)
        literals = [
            literal(value) for value in listed(schema) or () if isinstance(value, str)
        ]
        if literals:
            return choice(literals)
        # our patterns match fewer strings
        if "format" in schema and "pattern" not in schema and not exact:
            schema["pattern"] = FORMATS[schema.pop("format")]
        if schema.keys() == {"anyOf"}:
            return choice(_strings(part, exact=exact) for part in schema["anyOf"])
        if schema.keys() <= {"type", "pattern", "minLength", "maxLength"}:
            node = _ANY
            if "pattern" in schema:
                node = parse_search(schema["pattern"])
            return fit(node, schema.get("minLength", 0), schema.get("maxLength"))
        if schema.keys() <= {"type", "not"}:
            return _complement(_strings(schema["not"], exact=True))
    raise UnsupportedConstraint("these strings can't be described by one pattern")


def _complement(node: Node) -> Node:
    """Return all other strings."""
    return automaton.texts(automaton.of(node).everythingbut())
