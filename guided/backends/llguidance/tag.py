"""Structural tags for llguidance: one Lark grammar, with a grammar of its own for each
JSON schema and grammar in it.

llguidance's lexer takes the longest lexeme, so whatever can be followed by literal text
(free text, regexes, choices) becomes a *lazy* lexeme together with this text: it ends
where the text first occurs. Literals that begin alike are factored, so that no lexeme
is a prefix of another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix

from guided.backends.grammar import slashed
from guided.constraint import Constraint
from guided.errors import ConstraintTooLarge, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.regex import tree as regex
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

_MAX_PARTS = 20_000
"""Maximum number of parts of the grammar. The text after alternatives with open ends is
repeated for each of them."""
_ANYTHING = "/(?s:.*)/"
_EMPTY = '""'


_AGAIN = Series(())
"""The end of a loop's body: the loop follows."""
_Items = tuple[Node, ...]
_Head = tuple[Text | Token, _Items]
"""The literal or the token with which an alternative begins, and the rest of it."""


class TagGrammar:
    """The grammar of one structural tag.

    Args:
        special: names and ids of the special tokens that it may use.
        grammar_of: returns llguidance's grammar of a content, as an entry of
            `grammars`, and the pointers of the keywords that it leaves out.
    """

    def __init__(
        self,
        constraint: Constraint,
        special: Mapping[str, int],
        grammar_of: Callable[[Constraint], tuple[JsonObject, list[str]]],
    ) -> None:
        self._constraint = constraint
        self._special = special
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._names_in = re.compile(f"({names or '(?!)'})")
        self._grammar_of = grammar_of
        self._names: dict[str, str] = {}
        """Body of a lexeme -> its name."""
        self._lazy: dict[str, str] = {}
        """Name of a lexeme -> the rule that takes it as early as possible."""
        self._rules: dict[Node, tuple[str, str]] = {}
        """Alternatives with ends of their own, which are written once -> name and body
        of their rule."""
        self._inner: dict[Content, JsonObject] = {}
        self._parts = 0
        self.special_token_ids: set[int] = set()
        """The special tokens that the grammar uses."""
        self.checked: list[str] = []
        """JSON pointers of the keywords of schemas that the grammar leaves out."""

    def source(self) -> JsonObject:
        """Return the grammars in llguidance's format.

        Raises:
            UnsupportedConstraint: where a part ends can't be decided token by token; or
                a content is not supported.
        """
        start = self._series((self._constraint.tag,)) or _EMPTY
        lexemes = (f"{name}: {body}" for body, name in self._names.items())
        lazy = (f"{rule}[lazy]: {name}" for name, rule in self._lazy.items())
        rules = (f"{name}: {body}" for name, body in self._rules.values())
        lark = "\n".join((f"start: {start}", *rules, *lazy, *lexemes)) + "\n"
        return {"grammars": [{"lark_grammar": lark}, *self._inner.values()]}

    def _series(self, items: _Items) -> str:
        """Return the expression for `items` in order."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ConstraintTooLarge(
                f"the structural tag has more than {_MAX_PARTS} parts",
                param="structural_tag",
            )
        if not items:
            return ""
        first = items[0]
        rest = items[1:]
        match first:
            case Series(inner):
                return self._series((*inner, *rest))
            case Text(text):
                pieces = self._pieces(text)
                if pieces != [first]:
                    return self._series((*pieces, *rest))
                part = _literal(text)
            case Token():
                part = self._token(first)
            case Either(options) if not any(map(self._is_open, options)):
                if first not in self._rules:
                    body = self._alternatives(options)
                    self._rules[first] = (f"r{len(self._rules)}", body)
                part = self._rules[first][0]
            case Either(options):
                return self._alternatives(options, rest)
            case Times(item, low, high):
                return self._repeated(item, low, high, rest)
            case FreeText(excludes):
                return self._text(excludes, [], rest)
            case Dispatch(rules, loop, excludes):
                after = rest
                if loop:
                    after = (_AGAIN,)
                heads = [
                    head
                    for trigger, node in rules
                    for head in self._heads((trigger, node, *after))
                ]
                return self._text(excludes, heads, rest, loop=loop)
            case Content():
                return self._content(first, rest)
        return f"{part} {self._series(rest)}"

    def _alternatives(self, options: Sequence[Node], rest: _Items = ()) -> str:
        """Return the expression for one of `options`, and then `rest`."""
        if len(options) == 1:
            return self._series((options[0], *rest))
        if rest and any(map(self._is_open, options)):
            options = [Series((option, *rest)) for option in options]
            rest = ()
        try:
            heads = [head for option in options for head in self._heads((option,))]
        except UnsupportedConstraint:
            # one option begins with something other than a literal
            expression = _any(self._series((option,)) for option in options)
        else:
            expression = self._factored(heads)
        return f"{expression} {self._series(rest)}"

    def _factored(self, heads: Sequence[_Head]) -> str:
        """Return the alternatives. Common prefixes are written once, so that no literal
        is a prefix of another one."""
        options = []
        for _, group in groupby(
            sorted(heads, key=_order), lambda head: _order(head)[:2]
        ):
            same = list(group)
            head, rest = same[0]
            if len(same) == 1:
                options.append(self._series((head, *rest)))
            elif isinstance(head, Token):
                options.append(
                    f"{self._token(head)} {self._alternatives([Series(rest) for _, rest in same])}"
                )
            else:
                texts = [
                    (text.text, rest) for text, rest in same if isinstance(text, Text)
                ]
                common = commonprefix([text for text, _ in texts])  # noqa: RUF071 -- of texts, which are no paths
                below = [
                    Series((Text(text[len(common) :]), *rest)) for text, rest in texts
                ]
                options.append(f"{_literal(common)} {self._alternatives(below)}")
        return _any(options)

    def _repeated(self, item: Node, low: int, high: int | None, rest: _Items) -> str:
        if high == 0:
            return self._series(rest)
        if high == 1 and low == 0:
            return self._alternatives([item, Series(())], rest)
        if high == 1:
            return self._series((item, *rest))
        if self._is_open(item):
            raise self._ambiguous("itself, and has no end of its own")
        counts = f"{{{low},}}"
        if high is not None:
            counts = f"{{{low},{high}}}"
        return f"({self._series((item,)) or _EMPTY}){counts} {self._series(rest)}"

    def _text(
        self,
        excludes: tuple[str, ...],
        heads: Sequence[_Head],
        rest: _Items,
        *,
        loop: bool = False,
    ) -> str:
        """Return free text up to one of `heads` (in a loop: again and again); or free
        text, and then `rest`."""
        exits: list[_Head] = []
        if rest:
            exits = self._heads(rest)
        stops = [head for head, _ in (*heads, *exits)]
        literals = {head.text for head in stops if isinstance(head, Text)}
        for text in literals:
            if any(text != other and text in other for other in literals):
                raise self._ambiguous(
                    f"text that contains {bounded(text, 40)!r}, which ends it before"
                )
        names = self._special_in(stops)
        body = self._lexeme(_without({*excludes, *names}))
        plain = self._lexeme(_without({*excludes, *names, *literals}))
        last = plain
        if rest:
            last = self._until(body, plain, exits)
        if not heads:
            return last
        once = self._until(body, plain, heads)
        if loop:
            return f"({once})* {last}"
        return _any([once, last])

    def _until(self, body: str, plain: str, heads: Sequence[_Head]) -> str:
        """Return `body` up to a literal, or `plain` (which contains none of the
        literals) up to a token."""
        options = []
        for _, group in groupby(sorted(heads, key=_order), _order):
            same = list(group)
            head = same[0][0]
            if isinstance(head, Token):
                before = f"{plain} {self._token(head)}"
            else:
                lexeme = self._lexeme(f"{body} {_literal(head.text)}")
                before = self._lazy.setdefault(lexeme, f"t{len(self._lazy)}")
            options.append(
                f"{before} {self._alternatives([Series(rest) for _, rest in same])}"
            )
        return _any(options)

    def _content(self, content: Content, rest: _Items) -> str:
        texts = self._texts(content)
        if texts is None:
            if content not in self._inner:
                with located(content, "structural_tag"):
                    grammar, checked = self._grammar_of(self._constraint.inner(content))
                self.checked += [content.pointer + place for place in checked]
                self._inner[content] = {**grammar, "name": f"c{len(self._inner)}"}
            return f"@{self._inner[content]['name']} {self._series(rest)}"
        if not rest:
            return self._lexeme(slashed(texts))
        heads = self._heads(rest)
        body = slashed(texts)
        names = self._special_in(head for head, _ in heads)
        if names:
            body += f" & {_without(names)}"
        lexeme = self._lexeme(body)
        return self._until(lexeme, lexeme, heads)

    def _texts(self, content: Content) -> regex.Node | None:
        with located(content, "structural_tag"):
            return self._constraint.inner(content).texts

    def _is_open(self, node: Node) -> bool:
        """Whether the end of `node` depends on the text after it."""
        return any(
            isinstance(end, FreeText | Dispatch)
            or (isinstance(end, Content) and self._texts(end) is not None)
            for end in ends(node)
        )

    def _heads(self, items: _Items) -> list[_Head]:
        """Return the alternatives with which `items` can begin: only with a literal or
        a token."""
        if items:
            first = items[0]
            rest = items[1:]
            match first:
                case Series(inner):
                    return self._heads((*inner, *rest))
                case Text(text):
                    if not text:
                        return self._heads(rest)
                    head, *more = self._pieces(text)
                    return [(head, (*more, *rest))]
                case Token():
                    return [(first, rest)]
                case Either(options):
                    return [
                        head
                        for option in options
                        for head in self._heads((option, *rest))
                    ]
                case Times(_, _, 0):
                    return self._heads(rest)
                case Times(item, low) if not self._is_open(item):
                    heads = self._heads((item, first.after_one(), *rest))
                    if low == 0:
                        heads += self._heads(rest)
                    return heads
        raise self._ambiguous("something else than literal text")

    def _pieces(self, text: str) -> list[Text | Token]:
        """Split a literal at the names of special tokens."""
        parts = enumerate(self._names_in.split(text))
        return [
            Token(part) if index % 2 else Text(part) for index, part in parts if part
        ] or [Text("")]

    def _token(self, token: Token) -> str:
        number = token.token
        if isinstance(number, str):
            number = self._special.get(number, -1)
        if number not in self._special.values():
            message = f"{bounded(repr(token.token), 60)} is no special token that an output may contain"
            raise UnsupportedConstraint(
                f"{message} (a stop token ends it, and is left out)",
                param="structural_tag",
            )
        self.special_token_ids.add(number)
        return f"<[{number}]>"

    def _special_in(self, heads: Iterable[Text | Token]) -> set[str]:
        """Return the names of special tokens that look like one of `heads` in the
        answer's text."""
        tokens = {head.token for head in heads if isinstance(head, Token)}
        return {name for name, token in self._special.items() if tokens & {name, token}}

    def _lexeme(self, body: str) -> str:
        return self._names.setdefault(body, f"T{len(self._names)}")

    def _ambiguous(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"llguidance can't tell where a part ends that is followed by {what}: put literal text between them",
            param="structural_tag",
        )


def _order(head: _Head) -> tuple[int, str, str]:
    """Return a sort key: tokens first. The first two elements are equal for literals
    that begin alike."""
    mark = head[0]
    if isinstance(mark, Token):
        return (0, str(mark.token), "")
    return (1, mark.text[:1], mark.text)


def _literal(text: str) -> str:
    if not text:
        return ""
    return slashed(regex.literal(text))


def _without(strings: Iterable[str]) -> str:
    """Return the lexeme of all texts that contain none of `strings`."""
    literals = sorted(strings)
    if not literals:
        return _ANYTHING
    anything = regex.Repeat(regex.Chars(regex.UNIVERSE), 0, None)
    return f"{_ANYTHING} & ~{slashed(regex.sequence((anything, regex.choice(map(regex.literal, literals)), anything)))}"


def _any(options: Iterable[str]) -> str:
    return "(" + " | ".join(option.strip() or _EMPTY for option in options) + ")"
