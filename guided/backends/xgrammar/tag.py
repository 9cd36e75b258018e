"""Structural tags for xgrammar: its own format, with a grammar for each content, and
only what it enforces exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from guided.constraint import Constraint
from guided.errors import UnsupportedConstraint, bounded
from guided.json_text import JsonObject
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


@dataclass
class TagFormat:
    """The format of one structural tag."""

    constraint: Constraint
    special: Collection[str]
    """Names of special tokens, which xgrammar would write as text."""
    grammar_of: Callable[[Constraint], tuple[str, Collection[str]]]
    """Returns the EBNF of a content, and the pointers of the keywords that it leaves
    out."""
    checked: dict[str, None] = field(default_factory=dict)
    """JSON pointers of the keywords of schemas that the grammars leave out."""

    def source(self) -> JsonObject:
        """Return the structural tag. Raises `UnsupportedConstraint` where xgrammar
        would enforce something else."""
        return {
            "type": "structural_tag",
            "format": self._sequence(self._series((self.constraint.tag,))),
        }

    def _series(self, items: _Items) -> list[JsonObject]:
        """Return the formats of `items` in order."""
        formats: list[JsonObject] = []
        for place, item in enumerate(items):
            rest = items[place + 1 :]
            match item:
                case Series(inner):
                    return [*formats, *self._series((*inner, *rest))]
                case Text(text):
                    if text:
                        formats.append(
                            {"type": "const_string", "value": self._plain(item)}
                        )
                case Either(options):
                    formats.append(
                        {
                            "type": "or",
                            "elements": [self._one(option) for option in options],
                        }
                    )
                case Times(repeated, low, high):
                    if high is None:
                        high = -1
                    formats.append(
                        {
                            "type": "repeat",
                            "min": low,
                            "max": high,
                            "content": self._one(repeated),
                        }
                    )
                case Content():
                    with located(item, "structural_tag"):
                        grammar, checked = self.grammar_of(self.constraint.inner(item))
                    self.checked |= dict.fromkeys(
                        item.pointer + pointer for pointer in checked
                    )
                    formats.append({"type": "grammar", "grammar": grammar})
                case FreeText(excludes):
                    return [
                        *formats,
                        *self._until(
                            {"type": "any_text", "excludes": [*excludes]}, rest
                        ),
                    ]
                case Dispatch(rules, loop, excludes):
                    written = [
                        [self._plain(trigger), self._one(node)]
                        for trigger, node in rules
                    ]
                    dispatch = {
                        "type": "dispatch",
                        "rules": written,
                        "loop": loop,
                        "excludes": [*excludes],
                    }
                    if rest and not loop:
                        raise self._refusal(
                            "a dispatch without loop that something follows"
                        )
                    return [*formats, *self._until(dispatch, rest)]
                case Token():
                    raise self._refusal("special tokens")
        return formats

    def _one(self, node: Node) -> JsonObject:
        if any(isinstance(end, FreeText | Dispatch) for end in ends(node)):
            raise self._refusal(
                "free text at the end of an alternative or a repetition"
            )
        return self._sequence(self._series((node,)))

    def _sequence(self, formats: list[JsonObject]) -> JsonObject:
        if len(formats) == 1:
            return formats[0]
        return {"type": "sequence", "elements": formats}

    def _until(self, text: JsonObject, rest: _Items) -> list[JsonObject]:
        """Return free text that ends at the literals after it, as the content of a
        tag."""
        if not rest:
            return [text]
        first = rest[0]
        if isinstance(first, Series):
            return self._until(text, (*first.items, *rest[1:]))
        options: Sequence[Node] = (first,)
        if isinstance(first, Either):
            options = first.options
        ends = list(map(self._plain, options))
        if not all(ends):
            raise self._refusal("free text without an end")
        return [
            {"type": "tag", "begin": "", "content": text, "end": ends},
            *self._series(rest[1:]),
        ]

    def _plain(self, node: Node) -> str:
        if isinstance(node, Token):
            raise self._refusal("special tokens")
        if not isinstance(node, Text):
            raise self._refusal("free text before other than literals")
        for name in self.special:
            if name in node.text:
                raise self._refusal(f"the special token {bounded(name, 60)!r}")
        return node.text

    def _refusal(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"xgrammar can't enforce {what} in a structural tag", param="structural_tag"
        )
