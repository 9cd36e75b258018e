"""Structural tags: free text with constrained parts, in the format that vLLM and xgrammar publish.

`parse` checks the shape of a structural tag and reduces its formats to eight kinds of nodes, which
`guided/tags/` lowers for each library. It checks no content (schemas, regexes, grammars): `guided/constraint.py` does.

Free text ends at the first occurrence of a literal that can follow it: a trigger, or an end tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

from guided.errors import ConstraintTooLarge, InvalidConstraint, bounded
from guided.json_text import JsonError, JsonTooLarge, loads
from guided.limits import Limits

ContentKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text. The name of a special token in it stands for the token."""

    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its id, or the name of a special token."""

    token: int | str


@dataclass(frozen=True, slots=True)
class Content:
    """An output of another constraint. `pointer` is the place of its value in the structural tag."""

    kind: ContentKind
    value: Any
    pointer: str

    def __hash__(self) -> int:
        return hash(self.pointer)


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text without the strings in `excludes`, of at most `max_tokens` tokens."""

    excludes: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """All items in order."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of `options`."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """`low` to `high` times (None: unbounded)."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Free text up to a trigger, then the node of this trigger; with `loop`, repeated. Free text alone is valid too."""

    rules: tuple[tuple[Text | Token, Node], ...]
    loop: bool
    excludes: tuple[str, ...] = ()


Node = Text | Token | Content | FreeText | Series | Either | Times | Dispatch


def parse(tag: Mapping[str, Any], limits: Limits, param: str) -> Node:
    """Check the shape of a structural tag, and return its nodes.

    Raises:
        InvalidConstraint: a field is missing, unknown, or has a wrong value; or a tag can never be produced.
        ConstraintTooLarge: over one of `limits`.
    """
    return _Reader(limits, param).document(tag)


def read(text: str, limits: Limits, param: str) -> Any:
    """Parse the JSON text of a structural tag within `limits`. Raises as `parse` does."""
    try:
        return loads(text, max_values=limits.max_values, max_nesting=2 * limits.max_nesting)
    except JsonTooLarge as error:
        raise ConstraintTooLarge(f"the structural tag is over a limit: {error}", param=param) from None
    except JsonError as error:
        raise InvalidConstraint(f"the structural tag is not JSON: {error}", param=param) from None


def parts(node: Node) -> Sequence[Node]:
    """Return the nodes directly in a node."""
    match node:
        case Series(items) | Either(items):
            return items
        case Times(item):
            return (item,)
        case Dispatch(rules):
            return [item for _, item in rules]
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes within it."""
    yield node
    for part in parts(node):
        yield from walk(part)


def contents(node: Node) -> list[Content]:
    """Return the contents of a structural tag, each once."""
    return list(dict.fromkeys(each for each in walk(node) if isinstance(each, Content)))


def ends(node: Node) -> Iterator[Node]:
    """Yield the nodes with which an output of `node` can end: literals, contents, free text, dispatches."""
    inside = () if isinstance(node, Dispatch) else parts(node)
    if isinstance(node, Series):
        inside = [item for item in inside if item != Text("")][-1:]
    for part in inside:
        yield from ends(part)
    if not isinstance(node, Series | Either | Times):
        yield node


@contextmanager
def located(content: Content, param: str) -> Iterator[None]:
    """Make errors about a content point to its place in the structural tag."""
    try:
        yield
    except InvalidConstraint as error:
        error.param, error.pointer = param, content.pointer + (error.pointer or "")
        raise


_MAX_TOKEN_ID = 1 << 31
_MAX_COMPARED = 10**8
"""Characters in which triggers are searched: half a second, if they begin alike."""
_Fields = Mapping[str, Any]
_CONTENTS: dict[str, tuple[ContentKind, str]] = {
    "json_schema": ("json_schema", "json_schema"),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar", "grammar"),
    "choice": ("choice", "choice"),
    "json_object": ("json_object", ""),
}
"""Format -> kind of constraint, and the field with its value."""
_ADVICE = {
    "exclude_token": "any_text with excludes",
    "any_tokens": "any_text",
    "token_dispatch": "dispatch with the names of special tokens as patterns",
    "qwen_xml_parameter": "json_schema",
}
_TYPES: dict[type, str] = {str: "a string", list: "a list", dict: "an object", bool: "true or false", int: "an integer"}


class _Reader:
    """One call of `parse`."""

    def __init__(self, limits: Limits, param: str) -> None:
        self._limits = limits
        self._param = param
        self._alternatives = 0
        self._formats: dict[str, Callable[[_Fields, str, int], Node]] = {
            **dict.fromkeys(_CONTENTS, self._content),
            "const_string": lambda fields, at, _: self._literal(self._take(fields, at, str, "value"), f"{at}/value"),
            "any_text": self._any_text,
            "sequence": lambda fields, at, depth: Series(tuple(self._list(fields, at, depth, "elements"))),
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "token_triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda fields, at, depth: self._times(fields, at, depth, 0, 1),
            "plus": lambda fields, at, depth: self._times(fields, at, depth, 1, None),
            "star": lambda fields, at, depth: self._times(fields, at, depth, 0, None),
            "repeat": self._repeat,
            "token": lambda fields, at, _: self._token(self._take(fields, at, (str, int), "token"), f"{at}/token"),
            "dispatch": self._dispatch,
        }

    def document(self, tag: Any) -> Node:
        if not isinstance(tag, Mapping):
            raise self._invalid(f"a structural tag is {_TYPES[dict]}", "")
        if tag.get("type", "structural_tag") != "structural_tag":
            message = 'a structural tag has the type "structural_tag", and its "format" contains the formats'
            raise self._invalid(message, "/type")
        if "structures" in tag:
            return self._older(tag)
        self._known(tag, "", "type", "format")
        return self._format(tag.get("format"), "/format", 0)

    def _older(self, tag: _Fields) -> Node:
        """Read vLLM's older form: `structures` (begin, schema, end) and `triggers`."""
        self._known(tag, "", "type", "structures", "triggers")
        tags = []
        for index, each in enumerate(self._take(tag, "", list, "structures")):
            at = f"/structures/{index}"
            if not isinstance(each, Mapping):
                raise self._invalid("a structure is an object with begin, schema and end", at)
            self._known(each, at, "begin", "schema", "end")
            begin = self._literal(self._take(each, at, str, "begin"), f"{at}/begin")
            end = self._literal(self._take(each, at, str, "end"), f"{at}/end")
            if "schema" not in each:
                raise self._invalid("schema is missing", at)
            tags.append((begin, Series((Content("json_schema", each["schema"], f"{at}/schema"), end)), f"{at}/begin"))
        triggers = self._literals(tag, "", "triggers")
        return self._triggered(triggers, tags, "", loop=True, at_least_one=False, excludes=())

    def _format(self, format_: Any, at: str, depth: int) -> Node:
        if not isinstance(format_, Mapping):
            raise self._invalid("a format is an object with a type", at)
        if depth > self._limits.max_nesting:
            message = f"formats are nested deeper than {self._limits.max_nesting} levels"
            raise ConstraintTooLarge(message, param=self._param)
        name = format_.get("type")
        name = name if isinstance(name, str) else repr(name)
        read = self._formats.get(name)
        if read is None:
            instead = f": use {_ADVICE[name]}" if name in _ADVICE else f"; there are {', '.join(self._formats)}"
            raise self._invalid(f"{bounded(name, 60)!r} is not a supported format{instead}", f"{at}/type")
        return read(format_, at, depth)

    def _content(self, fields: _Fields, at: str, _depth: int) -> Node:
        kind, field = _CONTENTS[fields["type"]]
        neutral = {"style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}
        for name, value in neutral.items():
            if kind == "json_schema" and fields.get(name, value) != value:
                message = f"{name} is not supported here, except {value!r}"
                raise self._invalid(message, f"{at}/{name}")
        self._known(fields, at, "type", field, *(neutral if kind == "json_schema" else ()))
        if field and field not in fields:
            raise self._invalid(f"{field} is missing", at)
        return Content(kind, fields.get(field), f"{at}/{field}" if field else at)

    def _any_text(self, fields: _Fields, at: str, _depth: int) -> Node:
        self._known(fields, at, "type", "excludes", "max_tokens", "max_chars")
        if fields.get("max_chars") is not None:
            raise self._invalid("max_chars is not supported", f"{at}/max_chars")
        limit = None if fields.get("max_tokens") is None else self._take(fields, at, int, "max_tokens")
        if limit is not None and limit < 0:
            raise self._invalid("max_tokens is not negative", f"{at}/max_tokens")
        return FreeText(self._excludes(fields, at), limit)

    def _or(self, fields: _Fields, at: str, depth: int) -> Node:
        options = self._list(fields, at, depth, "elements")
        if not options:
            raise self._invalid("or has no elements: nothing can be produced", f"{at}/elements")
        return self._either(options)

    def _tag(self, fields: _Fields, at: str, depth: int) -> Node:
        begin, rest = self._tag_parts(fields, at, depth)
        return Series((begin, rest))

    def _tag_parts(self, fields: Any, at: str, depth: int) -> tuple[Text | Token, Node]:
        """Return a tag's begin, and what follows it."""
        if not isinstance(fields, Mapping) or fields.get("type", "tag") != "tag":
            raise self._invalid("a tag is an object with begin, content and end", at)
        self._known(fields, at, "type", "begin", "content", "end")
        begin = self._mark(self._take(fields, at, (str, dict), "begin"), f"{at}/begin", depth)
        content = self._format(fields.get("content"), f"{at}/content", depth + 1)
        end = self._take(fields, at, (str, dict, list), "end")
        ends = end if isinstance(end, list) else [end]
        if not ends:
            raise self._invalid('end is an empty list; "" is no end tag', f"{at}/end")
        marks = [self._mark(each, f"{at}/end", depth) for each in ends]
        return begin, Series((content, self._either(marks)))

    def _triggered_tags(self, fields: _Fields, at: str, depth: int) -> Node:
        tokens = fields["type"] == "token_triggered_tags"
        name, excludes = ("trigger_tokens", "exclude_tokens") if tokens else ("triggers", "excludes")
        self._known(fields, at, "type", name, "tags", "at_least_one", "stop_after_first", excludes)
        if tokens and fields.get(excludes):
            raise self._invalid(f"{excludes} is not supported: free text has no special tokens", f"{at}/{excludes}")
        triggers: list[Text | Token]
        if tokens:
            values = self._take(fields, at, list, name)
            triggers = [self._token(each, f"{at}/{name}") for each in values if isinstance(each, str | int)]
        else:
            triggers = self._literals(fields, at, name)
        tags = [
            (*self._tag_parts(each, f"{at}/tags/{index}", depth + 1), f"{at}/tags/{index}/begin")
            for index, each in enumerate(self._take(fields, at, list, "tags"))
        ]
        return self._triggered(
            triggers,
            tags,
            at,
            loop=not self._flag(fields, at, "stop_after_first"),
            at_least_one=self._flag(fields, at, "at_least_one"),
            excludes=() if tokens else self._excludes(fields, at),
        )

    def _triggered(
        self,
        triggers: Sequence[Text | Token],
        tags: Sequence[tuple[Text | Token, Node, str]],
        at: str,
        *,
        loop: bool,
        at_least_one: bool,
        excludes: tuple[str, ...],
    ) -> Node:
        if not tags or not triggers:
            raise self._invalid("there is no tag, or no trigger", at)
        self._count(len(triggers))  # they are compared with each other
        rules: dict[Text | Token, list[Node]] = {trigger: [] for trigger in triggers}
        for begin, rest, place in tags:
            trigger = next((each for each in rules if _starts(begin, each)), None)
            if trigger is None:
                raise self._invalid("the tag never can be produced: no trigger is a prefix of its begin", place)
            left = begin.text[len(trigger.text) :] if isinstance(begin, Text) and isinstance(trigger, Text) else ""
            rules[trigger].append(Series((Text(left), rest)))
        dispatch = self._checked(Dispatch(tuple((t, self._either(r)) for t, r in rules.items()), loop, excludes), at)
        if not at_least_one:
            return dispatch
        first = self._either([Series((begin, rest)) for begin, rest, _ in tags])
        return Series((first, dispatch)) if loop else first

    def _dispatch(self, fields: _Fields, at: str, depth: int) -> Node:
        self._known(fields, at, "type", "rules", "loop", "excludes")
        rules: list[tuple[Text | Token, Node]] = []
        for index, rule in enumerate(self._take(fields, at, list, "rules")):
            place = f"{at}/rules/{index}"
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise self._invalid("a rule is a list of a non-empty string and a format", place)
            rules.append((self._literal(rule[0], f"{place}/0"), self._format(rule[1], f"{place}/1", depth + 1)))
        if not rules:
            raise self._invalid("dispatch has no rules", f"{at}/rules")
        self._count(len(rules))
        return self._checked(
            Dispatch(tuple(rules), self._flag(fields, at, "loop", True), self._excludes(fields, at)), at
        )

    def _checked(self, dispatch: Dispatch, at: str) -> Dispatch:
        """Check that each trigger of `dispatch` can occur, and is followed by something."""
        triggers = [trigger.text for trigger, _ in dispatch.rules if isinstance(trigger, Text)]
        if (len(triggers) + len(dispatch.excludes)) * sum(map(len, triggers)) > _MAX_COMPARED:
            message = "the triggers are too long, or too many: each is searched in all others"
            raise ConstraintTooLarge(message, param=self._param, pointer=at)
        for whole, part in permutations(triggers, 2):
            if part in whole:
                message = f"the trigger {bounded(whole, 60)!r} contains the trigger {bounded(part, 60)!r}"
                raise self._invalid(f"{message}: its tags never can be produced", at)
        for trigger, rest in dispatch.rules:
            if rest == Either(()):
                shown = trigger.text if isinstance(trigger, Text) else trigger.token
                raise self._invalid(f"no tag begins with the trigger {bounded(shown, 60)!r}", at)
            for exclude in dispatch.excludes:
                if isinstance(trigger, Text) and exclude in trigger.text:
                    message = f"excludes forbids the trigger {bounded(trigger.text, 60)!r}"
                    raise self._invalid(f"{message}: its tags never can be produced", f"{at}/excludes")
        return dispatch

    def _tags_with_separator(self, fields: _Fields, at: str, depth: int) -> Node:
        self._known(fields, at, "type", "tags", "separator", "at_least_one", "stop_after_first")
        tags = self._list(fields, at, depth, "tags", self._tag)
        if not tags:
            raise self._invalid("there is no tag", f"{at}/tags")
        separator = self._literal(self._take(fields, at, str, "separator"), f"{at}/separator")
        one = self._either(tags)
        once = self._flag(fields, at, "stop_after_first")
        several = one if once else Series((one, Times(Series((separator, one)), 0, None)))
        return several if self._flag(fields, at, "at_least_one") else Times(several, 0, 1)

    def _repeat(self, fields: _Fields, at: str, depth: int) -> Node:
        low, high = self._take(fields, at, int, "min"), self._take(fields, at, int, "max")
        if low < 0 or high < -1 or -1 < high < low:
            raise self._invalid("min and max are no range; max may be -1 for unbounded", at)
        if max(low, high) > self._limits.max_repetition:
            message = f"the limit of repetitions is {self._limits.max_repetition}"
            raise ConstraintTooLarge(message, param=self._param, pointer=at)
        return self._times(fields, at, depth, low, None if high == -1 else high)

    def _times(self, fields: _Fields, at: str, depth: int, low: int, high: int | None) -> Node:
        self._known(fields, at, "type", "content", *(("min", "max") if fields["type"] == "repeat" else ()))
        return Times(self._format(fields.get("content"), f"{at}/content", depth + 1), low, high)

    def _list(
        self, fields: _Fields, at: str, depth: int, name: str, read: Callable[[Any, str, int], Node] | None = None
    ) -> list[Node]:
        self._known(fields, at, "type", name, *(("separator", "at_least_one", "stop_after_first") if read else ()))
        each = read or self._format
        return [
            each(item, f"{at}/{name}/{index}", depth + 1)
            for index, item in enumerate(self._take(fields, at, list, name))
        ]

    def _mark(self, mark: Any, at: str, depth: int) -> Text | Token:
        """Read a begin or an end: a string, or a `token` format."""
        if isinstance(mark, str):
            return self._literal(mark, at)
        node = self._format(mark, at, depth)
        if not isinstance(node, Token):
            raise self._invalid("a begin or an end is a string or a token", at)
        return node

    def _literals(self, fields: _Fields, at: str, name: str) -> list[Text | Token]:
        values = self._take(fields, at, list, name)
        for index, value in enumerate(values):
            if not isinstance(value, str) or not value:
                raise self._invalid("a trigger is a non-empty string", f"{at}/{name}/{index}")
        return [self._literal(value, f"{at}/{name}") for value in dict.fromkeys(values)]

    def _token(self, token: str | int, at: str) -> Token:
        if isinstance(token, int) and not 0 <= token < _MAX_TOKEN_ID:  # Python's hashes of longer numbers collide
            raise self._invalid("there is no token with this id", at)
        return Token(token)

    def _literal(self, text: str, at: str) -> Text:
        if "\x00" in text:
            raise self._invalid("the text contains a NUL character, which no backend can take", at)
        return Text(text)

    def _excludes(self, fields: _Fields, at: str) -> tuple[str, ...]:
        values = fields.get("excludes") or []
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            raise self._invalid("excludes is a list of non-empty strings", f"{at}/excludes")
        self._count(len(values))
        return tuple(dict.fromkeys(values))

    def _either(self, options: Sequence[Node]) -> Node:
        distinct = tuple(dict.fromkeys(options))
        self._count(len(distinct))
        return distinct[0] if len(distinct) == 1 else Either(distinct)

    def _count(self, alternatives: int) -> None:
        self._alternatives += alternatives
        if self._alternatives > self._limits.max_alternatives:
            raise self._limits.too_many_alternatives(self._param, None)

    def _take(self, fields: _Fields, at: str, kind: type | tuple[type, ...], name: str) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if name not in fields:
            raise self._invalid(f"{name} is missing", at)
        value = fields[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self._invalid(f"{name} is {' or '.join(_TYPES[each] for each in kinds)}", f"{at}/{name}")
        return value

    def _flag(self, fields: _Fields, at: str, name: str, default: bool = False) -> bool:
        return bool(self._take(fields, at, bool, name)) if name in fields else default

    def _known(self, fields: _Fields, at: str, *names: str) -> None:
        unknown = next((name for name in fields if name not in names), None)
        if unknown is not None:
            shown = ", ".join(filter(None, names))
            raise self._invalid(f"there is no field {bounded(unknown, 60)!r} here; there are {shown}", at)

    def _invalid(self, message: str, at: str) -> InvalidConstraint:
        return InvalidConstraint(message, param=self._param, pointer=at)


def _starts(begin: Text | Token, trigger: Text | Token) -> bool:
    if isinstance(begin, Text) and isinstance(trigger, Text):
        return begin.text.startswith(trigger.text)
    return begin == trigger
