"""Structural tags for xgrammar: its own format, with a grammar for each content, and only what it enforces exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint, bounded
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
    ends,
    located,
)

_Items = tuple[Node, ...]


class TagFormat:
    """The format of one structural tag.

    Args:
        special: names of special tokens, which xgrammar would write as text.
        grammar_of: returns the EBNF of a content, and the pointers of the keywords that it leaves out.
    """

    def __init__(
        self,
        constraint: Constraint,
        special: Collection[str],
        grammar_of: Callable[[Constraint], tuple[str, Collection[str]]],
    ) -> None:
        self._constraint = constraint
        self._special = special
        self._grammar_of = grammar_of
        self.checked: dict[str, None] = {}
        """JSON pointers of the keywords of schemas that the grammars leave out."""

    def source(self) -> dict[str, Any]:
        """Return the structural tag. Raises `UnsupportedConstraint` where xgrammar would enforce something else."""
        return {"type": "structural_tag", "format": self._sequence(self._series((self._constraint.tag,)))}

    def _series(self, items: _Items) -> list[dict[str, Any]]:
        """Return the formats of `items` in order."""
        if not items:
            return []
        first = items[0]
        rest = items[1:]
        match first:
            case Series(inner):
                return self._series((*inner, *rest))
            case Text(text):
                return [*self._literal(text), *self._series(rest)]
            case Either(options):
                return [{"type": "or", "elements": [self._one(option) for option in options]}, *self._series(rest)]
            case Times(item, low, high):
                bounds = {"min": low, "max": -1 if high is None else high}
                return [{"type": "repeat", **bounds, "content": self._one(item)}, *self._series(rest)]
            case Content():
                with located(first, "structural_tag"):
                    grammar, checked = self._grammar_of(self._constraint.inner(first))
                self.checked |= dict.fromkeys(first.pointer + place for place in checked)
                return [{"type": "grammar", "grammar": grammar}, *self._series(rest)]
            case FreeText(excludes):
                return self._until({"type": "any_text", "excludes": [*excludes]}, rest)
            case Dispatch(rules, loop, excludes):
                written = [[self._plain(trigger), self._one(node)] for trigger, node in rules]
                dispatch = {"type": "dispatch", "rules": written, "loop": loop, "excludes": [*excludes]}
                if rest and not loop:
                    raise self._refusal("a dispatch without loop that something follows")
                return self._until(dispatch, rest)
            case Token():
                raise self._refusal("special tokens")
        raise AssertionError(first)

    def _one(self, node: Node) -> dict[str, Any]:
        if any(isinstance(end, FreeText | Dispatch) for end in ends(node)):
            raise self._refusal("free text at the end of an alternative or a repetition")
        return self._sequence(self._series((node,)))

    def _sequence(self, formats: list[dict[str, Any]]) -> dict[str, Any]:
        if len(formats) == 1:
            return formats[0]
        return {"type": "sequence", "elements": formats}

    def _until(self, text: dict[str, Any], rest: _Items) -> list[dict[str, Any]]:
        """Return free text that ends at the literals after it, as the content of a tag."""
        if not rest:
            return [text]
        first = rest[0]
        if isinstance(first, Series):
            return self._until(text, (*first.items, *rest[1:]))
        ends = [self._plain(end) for end in (first.options if isinstance(first, Either) else (first,))]
        if not all(ends):
            raise self._refusal("free text without an end")
        return [{"type": "tag", "begin": "", "content": text, "end": ends}, *self._series(rest[1:])]

    def _literal(self, text: str) -> list[dict[str, Any]]:
        if text:
            return [{"type": "const_string", "value": self._plain(Text(text))}]
        return []

    def _plain(self, node: Node) -> str:
        if not isinstance(node, Text):
            raise self._refusal("special tokens" if isinstance(node, Token) else "free text before other than literals")
        name = next((name for name in self._special if name in node.text), None)
        if name is not None:
            raise self._refusal(f"the special token {bounded(name, 60)!r}")
        return node.text

    def _refusal(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(f"xgrammar can't enforce {what} in a structural tag", param="structural_tag")
