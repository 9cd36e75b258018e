"""Validates the JSON in an output while the output grows: the whole of it, or the
contents of a structural tag.

The output is parsed by the nodes of the structural tag. Where they are ambiguous,
several ways to read it are followed. The output satisfies its constraint if one of them
comes to an end with valid contents only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from guided.errors import ConstraintNotMet
from guided.schema.beginnings import Beginnings
from guided.schema.validation import finite, not_validated
from guided.tags.structural_tag import (
    Content,
    Dispatch,
    Either,
    FreeText,
    Node,
    Series,
    Text,
    Times,
    Token,
)
from guided.vocabulary import Vocabulary

_JSON = json.JSONDecoder(parse_float=finite)
_BLANKS = " \n\r\t"
_FIRST = '{["-0123456789tfn'
"""The characters with which a JSON value begins."""
_MORE_OF_A_NUMBER = re.compile(r"[-+.eE0-9]*")

_Items = tuple[Node, ...]
_State = tuple[int, _Items]
"""A position in the output, and the nodes that have to follow there."""


class Reading(NamedTuple):
    """What is known of an output."""

    length: int
    """Number of its tokens; -1: not even the empty output was read."""
    states: tuple[_State, ...]
    """The ways in which it can go on."""
    complete: bool = False
    """It may end here."""
    violation: ConstraintNotMet | None = None
    """What is wrong with the content that was found invalid last."""


class ContentReader:
    """Reads the outputs of one structural tag.

    Args:
        node: the structural tag. It contains no grammars, because their ends are not
            known here. A regex ends where the literal after it first occurs.
        schemas: pointer of a content -> validator of its beginnings. Other contents are
            valid.
    """

    def __init__(
        self, node: Node, schemas: Mapping[str, Beginnings], vocabulary: Vocabulary
    ) -> None:
        self._schemas = schemas
        self.reads_tag = not isinstance(node, Content)
        """Other text may follow a content. If not, the content ends with the output."""
        self.vocabulary = vocabulary
        self.start = Reading(-1, ((0, (node,)),))
        """Before the empty output."""

    def read(self, before: Reading, output: bytes, length: int) -> Reading:
        """Read an output, the text of `length` tokens, that begins with the one that
        was read `before`."""
        text = output.decode("utf-8", "ignore")
        todo = list(before.states)
        waiting: list[_State] = []
        seen: dict[tuple[int, ...], _State] = {}
        complete = False
        violation = before.violation
        while todo:
            state = todo.pop()
            position, items = state
            if seen.setdefault((position, *map(id, items)), state) is not state:
                continue
            if not items:
                complete = complete or not text[position:].strip(_BLANKS)
            elif isinstance(items[0], Content) and items[0].kind not in (
                "choice",
                "regex",
            ):
                end, grows, violated = self._value(items[0], text, position)
                violation = violated or violation
                if end is not None and violated is None:
                    todo.append((end, items[1:]))
                if grows:
                    waiting.append(state)
            else:
                following, wait = self._follow(items[0], items[1:], text, position)
                todo += following
                if wait is not None:
                    waiting.append((wait, items))
        return Reading(length, tuple(waiting), complete, violation)

    def open_content(
        self, reading: Reading, output: bytes
    ) -> tuple[Beginnings, int] | None:
        """Return the schema of the content that an output ends in, if it is validated,
        and the content's first byte."""
        if len(reading.states) != 1:
            return None
        position, (first, *_) = reading.states[0]
        if not isinstance(first, Content) or first.pointer not in self._schemas:
            return None
        before = output.decode("utf-8", "ignore")[:position]
        return self._schemas[first.pointer], len(before.encode())

    def _follow(
        self, first: Node, rest: _Items, text: str, position: int
    ) -> tuple[list[_State], int | None]:
        """Return the states after `first`, and the position from which to look at it
        again when there is more text."""
        match first:
            case Text() | Token():
                literal = self._literal(first)
                if text.startswith(literal, position):
                    return [(position + len(literal), rest)], None
                if literal.startswith(text[position:]):
                    return [], position
                return [], None
            case Series(items):
                return [(position, (*items, *rest))], None
            case Either(options):
                return [(position, (option, *rest)) for option in options], None
            case Content("regex"):
                return self._free_text({}, (), rest, text, position)
            case Content(_, choices):
                return [(position, (Text(choice), *rest)) for choice in choices], None
            case Times(item, low, high):
                states: list[_State] = []
                if high != 0:
                    states.append((position, (item, first.after_one(), *rest)))
                if low == 0:
                    states.append((position, rest))
                return states, None
            case FreeText(excludes):
                return self._free_text({}, excludes, rest, text, position)
            case Dispatch(rules, loop, excludes):
                after = rest
                if loop:
                    after = (first, *rest)
                triggers = {self._literal(mark): (node, *after) for mark, node in rules}
                return self._free_text(triggers, excludes, rest, text, position)
        raise AssertionError(first)

    def _free_text(
        self,
        triggers: Mapping[str, _Items],
        excludes: Sequence[str],
        rest: _Items,
        text: str,
        position: int,
    ) -> tuple[list[_State], int | None]:
        """Follow free text up to the first trigger, with the nodes after it, or the
        first beginning of `rest`."""
        ends = self._beginnings(rest)
        marks = {*triggers, *ends, *excludes}
        places = {
            mark: place for mark in marks if (place := text.find(mark, position)) >= 0
        }
        if not places:
            searched = len(text) + 1 - max(map(len, marks), default=1)
            return [(len(text), rest)], max(position, searched)
        nearest = min(places.values())
        readings = [
            (nearest + len(mark), after)
            for mark, after in triggers.items()
            if places.get(mark) == nearest
        ]
        if any(places.get(mark) == nearest for mark in ends):
            readings.append((nearest, rest))
        return readings, None

    def _beginnings(self, items: _Items) -> list[str]:
        """Return the literals with which an output of `items` can begin."""
        match items:
            case [Text(""), *rest]:
                return self._beginnings(tuple(rest))
            case [Text() | Token() as literal, *_]:
                return [self._literal(literal)]
            case [Series(inner), *rest]:
                return self._beginnings((*inner, *rest))
            case [Either(options), *rest]:
                return [
                    mark
                    for option in options
                    for mark in self._beginnings((option, *rest))
                ]
            case [Times(item, 0), *rest]:
                return [
                    *self._beginnings((item, *rest)),
                    *self._beginnings(tuple(rest)),
                ]
            case [Times(item), *rest]:
                return self._beginnings((item, *rest))
        return []

    def _literal(self, node: Text | Token) -> str:
        """Return a literal as it stands in the text of an output."""
        if isinstance(node, Text):
            return node.text
        if isinstance(node.token, str):
            return node.token
        return self.vocabulary.spelled([node.token]).decode()

    def _value(
        self, content: Content, text: str, position: int
    ) -> tuple[int | None, bool, ConstraintNotMet | None]:
        """Return where the JSON value at `position` ends, whether it can go on, and why
        it is invalid."""
        start = len(text) - len(text[position:].lstrip(_BLANKS))
        try:
            value, end = _JSON.raw_decode(text, start)
        except json.JSONDecodeError:
            return None, text[start : start + 1] in _FIRST, None
        except (ValueError, RecursionError) as failure:
            return None, False, not_validated(failure)
        grows = (
            isinstance(value, int | float)
            and _MORE_OF_A_NUMBER.fullmatch(text, end) is not None
        )
        violation = None
        if content.pointer in self._schemas:
            violation = self._schemas[content.pointer].violation(value)
        return end, grows, violation
