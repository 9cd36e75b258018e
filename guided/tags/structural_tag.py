"""Structural tags: free text with constrained parts, in the format that vLLM and
xgrammar publish.

msgspec checks the shape of a structural tag. `parse` reduces the formats to eight kinds
of nodes, which `guided/tags/` lowers for each library. Contents (schemas, regexes,
grammars) are checked in `guided/constraint.py`.

Free text ends at the first occurrence of a literal that can follow it: a trigger, or an
end tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta, Struct

from guided.errors import ConstraintTooLarge, InvalidConstraint, bounded
from guided.json_text import JsonError, JsonObject, JsonTooLarge, loads
from guided.limits import LIMITS
from guided.tags.styles import STYLES

ContentKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class Text(Struct, frozen=True):
    """A literal text. The name of a special token in the text stands for the token."""

    text: str


class Token(Struct, frozen=True):
    """One token, given as its id or as the name of a special token."""

    token: int | str


Mark = Text | Token
"""The begin of a tag, its end, or a trigger."""


class Content(Struct, frozen=True):
    """An output of another constraint, the content. `pointer` is the place of `value`
    in the structural tag."""

    kind: ContentKind
    value: Any
    pointer: str
    style: str = "json"
    """The style of a function's arguments: `json`, or a name in
    `guided/tags/styles.py`."""
    excludes: tuple[str, ...] = ()
    """Strings that texts must not contain, in styles other than `json`."""

    def __hash__(self) -> int:
        return hash(self.pointer)


class FreeText(Struct, frozen=True):
    """Any text without the strings in `excludes`, of at most `max_tokens` tokens."""

    excludes: tuple[str, ...] = ()
    max_tokens: int | None = None


class Series(Struct, frozen=True):
    """A sequence of all items in order."""

    items: tuple[Node, ...]


class Either(Struct, frozen=True):
    """An alternative: one of `options`."""

    options: tuple[Node, ...]


class Times(Struct, frozen=True):
    """A repetition: `item`, `low` to `high` times (None: unbounded)."""

    item: Node
    low: int
    high: int | None

    def after_one(self) -> Times:
        """Return the repetition that follows its first item."""
        if self.high is not None:
            return Times(self.item, max(self.low - 1, 0), self.high - 1)
        if self.low == 0:
            return self
        return Times(self.item, self.low - 1, None)


class Dispatch(Struct, frozen=True):
    """Free text up to a trigger, then the node of the trigger; repeated with `loop`.
    Free text alone is valid."""

    rules: tuple[tuple[Mark, Node], ...]
    loop: bool
    excludes: tuple[str, ...] = ()


Node = Mark | Content | FreeText | Series | Either | Times | Dispatch


def parse(
    tag: JsonObject, param: str, expand: Callable[[Content], Node] | None = None
) -> Node:
    """Check the shape of a structural tag, and return its nodes. `expand` replaces
    contents in styles other than JSON.

    Raises:
        InvalidConstraint: a field is missing, unknown, or has a wrong value; or a tag
            can never be produced.
        ConstraintTooLarge: the tag exceeds a limit.
    """
    return _NodeBuilder(param, expand).node(
        _convert(tag, _Document, "", param).format, "/format", 0
    )


def read(tag: JsonObject | str, param: str) -> Any:
    """Read a structural tag from an object or JSON text, in the form with `format` or
    in vLLM's older form.

    Raises the errors of `parse`.
    """
    try:
        nesting = 2 * LIMITS.max_nesting
        document = tag
        if isinstance(tag, str):
            document = loads(tag, max_values=LIMITS.max_values, max_nesting=nesting)
    except JsonTooLarge as error:
        raise ConstraintTooLarge(
            f"the structural tag is over a limit: {error}", param=param
        ) from None
    except JsonError as error:
        raise InvalidConstraint(
            f"the structural tag is not JSON: {error}", param=param
        ) from None
    if not (isinstance(document, Mapping) and "structures" in document):
        return document
    older = _convert(document, _Older, "", param)
    tags = [
        {
            "begin": part.begin,
            "content": {"type": "json_schema", "json_schema": part.schema},
            "end": part.end,
        }
        for part in older.structures
    ]
    return {
        "format": {"type": "triggered_tags", "triggers": older.triggers, "tags": tags}
    }


def parts(node: Node) -> Sequence[Node]:
    """Return the direct children of a node."""
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
    """Return the distinct contents of a structural tag."""
    return list(dict.fromkeys(part for part in walk(node) if isinstance(part, Content)))


def ends(node: Node) -> Iterator[Node]:
    """Yield the nodes (literals, contents, free text, dispatches) with which an output
    of `node` can end."""
    match node:
        case Series(items):
            inside: Sequence[Node] = [item for item in items if item != Text("")][-1:]
        case Either() | Times():
            inside = parts(node)
        case _:
            inside = ()
            yield node
    for part in inside:
        yield from ends(part)


@contextmanager
def located(content: Content, param: str) -> Iterator[None]:
    """Make errors about a content point to the content's place in the structural
    tag."""
    try:
        yield
    except InvalidConstraint as error:
        error.param = param
        error.pointer = content.pointer + (error.pointer or "")
        raise


# no backend can take a NUL character
_Literal = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
_Trigger = Annotated[str, Meta(pattern=r"^[^\x00]+$")]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_AtLeastOne = Meta(min_length=1)
_Limit = Annotated[int, Meta(ge=0)] | None
_Excludes = list[Annotated[str, _AtLeastOne]]
_Tags = Annotated[list["_TagForm"], _AtLeastOne]


class _Form(Struct, tag_field="type", forbid_unknown_fields=True):
    """A format of `xgrammar.structural_tag`; its `type` is the tag of the class. Inner
    formats have the type `Any`."""


class _TokenForm(_Form, tag="token"):
    token: str | _TokenId


_MarkForm = _Literal | _TokenForm


class _TagForm(_Form, tag="tag"):
    begin: _MarkForm
    content: Any
    end: _MarkForm | Annotated[list[_MarkForm], _AtLeastOne]


class _JsonSchemaForm(_Form, tag="json_schema"):
    json_schema: Any
    style: str = "json"
    any_order: bool = (
        False  # the enforced order, that of the schema, is valid in both cases
    )
    max_whitespace_cnt: None = None
    excludes: _Excludes = []


class _RegexForm(_Form, tag="regex"):
    pattern: Any


class _GrammarTextForm(_Form, tag="grammar"):
    grammar: Any


class _ChoiceForm(_Form, tag="choice"):
    choice: Any


class _JsonObjectForm(_Form, tag="json_object"):
    pass


class _ConstStringForm(_Form, tag="const_string"):
    value: _Literal


class _AnyTokensForm(_Form, tag="any_tokens"):
    exclude_tokens: list[str] = []
    max_tokens: _Limit = None


class _AnyTextForm(_Form, tag="any_text"):
    excludes: _Excludes = []
    max_tokens: _Limit = None
    max_chars: None = None


class _SequenceForm(_Form, tag="sequence"):
    elements: list[Any]


class _OrForm(_Form, tag="or"):
    elements: Annotated[list[Any], _AtLeastOne]


class _TriggeredTagsForm(_Form, tag="triggered_tags"):
    triggers: Annotated[list[_Trigger], _AtLeastOne]
    tags: _Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Excludes = []


class _TokenTriggeredTagsForm(_Form, tag="token_triggered_tags"):
    trigger_tokens: Annotated[list[str | _TokenId], _AtLeastOne]
    tags: _Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    # xgrammar's option is not supported
    exclude_tokens: Annotated[list[Any], Meta(max_length=0)] = []


class _TagsWithSeparatorForm(_Form, tag="tags_with_separator"):
    tags: _Tags
    separator: _Literal
    at_least_one: bool = False
    stop_after_first: bool = False


class _OptionalForm(_Form, tag="optional"):
    content: Any


class _PlusForm(_Form, tag="plus"):
    content: Any


class _StarForm(_Form, tag="star"):
    content: Any


class _RepeatForm(_Form, tag="repeat"):
    content: Any
    min: Annotated[int, Meta(ge=0)]
    max: Annotated[int, Meta(ge=-1)]


class _DispatchForm(_Form, tag="dispatch"):
    rules: Annotated[list[tuple[_Trigger, Any]], _AtLeastOne]
    loop: bool = True
    excludes: _Excludes = []


class _Document(Struct, forbid_unknown_fields=True):
    format: Any
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(Struct, forbid_unknown_fields=True):
    begin: _Literal
    schema: Any
    end: _Literal


class _Older(Struct, forbid_unknown_fields=True):
    """vLLM's older form of a structural tag."""

    structures: list[_Structure]
    triggers: Annotated[list[_Trigger], _AtLeastOne]
    type: Literal["structural_tag"] = "structural_tag"


_Format: Any = Union[*_Form.__subclasses__()]
_MAX_COMPARED = 10**8
"""Maximum number of characters in which triggers are searched, which takes half a
second if triggers begin alike."""


@dataclass
class _NodeBuilder:
    """Converts formats to nodes, for one call of `parse`. The argument `at` is the JSON
    pointer of a format."""

    _param: str
    _expand: Callable[[Content], Node] | None
    _alternatives: int = 0

    def node(self, value: Any, at: str, depth: int) -> Node:
        if depth > LIMITS.max_nesting:
            message = f"formats are nested deeper than {LIMITS.max_nesting} levels"
            raise ConstraintTooLarge(message, param=self._param)
        form = _convert(value, _Format, at, self._param)
        match form:
            case _JsonSchemaForm():
                return self._schema(form, at)
            case _GrammarTextForm():
                return Content("grammar", form.grammar, f"{at}/grammar")
            case _ChoiceForm():
                return Content("choice", form.choice, f"{at}/choice")
            case _RegexForm():
                return Content("regex", form.pattern, f"{at}/pattern")
            case _JsonObjectForm():
                return Content("json_object", None, at)
            case _ConstStringForm():
                return Text(form.value)
            case _AnyTextForm():
                return FreeText(self._distinct(form.excludes), form.max_tokens)
            case _AnyTokensForm():  # special tokens, which are not text, are excluded
                return FreeText(self._distinct(form.exclude_tokens), form.max_tokens)
            case _TokenForm():
                return Token(form.token)
            case _SequenceForm():
                return Series(
                    tuple(self._nodes(form.elements, f"{at}/elements", depth))
                )
            case _OrForm():
                return self._either(self._nodes(form.elements, f"{at}/elements", depth))
            case _TagForm():
                return Series(self._tag(form, at, depth))
            case _TriggeredTagsForm() | _TokenTriggeredTagsForm():
                return self._triggered_tags(form, at, depth)
            case _TagsWithSeparatorForm():
                return self._separated_tags(form, at, depth)
            case _DispatchForm():
                return self._dispatch(form, at, depth)
            case _OptionalForm():
                return self._times(form.content, 0, 1, at, depth)
            case _PlusForm():
                return self._times(form.content, 1, -1, at, depth)
            case _StarForm():
                return self._times(form.content, 0, -1, at, depth)
            case _RepeatForm():
                return self._times(form.content, form.min, form.max, at, depth)
        raise AssertionError(f"{type(form).__name__} is no format")

    def _times(self, content: Any, low: int, high: int, at: str, depth: int) -> Node:
        """Return the content, repeated `low` to `high` times. A `high` of -1 is
        unbounded."""
        if -1 < high < low:
            raise self._invalid(
                "min and max are no range; max may be -1 for unbounded", at
            )
        if max(low, high) > LIMITS.max_repetition:
            message = f"the limit of repetitions is {LIMITS.max_repetition}"
            raise ConstraintTooLarge(message, param=self._param, pointer=at)
        item = self.node(content, f"{at}/content", depth + 1)
        if high == -1:
            return Times(item, low, None)
        return Times(item, low, high)

    def _separated_tags(
        self, form: _TagsWithSeparatorForm, at: str, depth: int
    ) -> Node:
        tags = enumerate(form.tags)
        option = self._either(
            [
                Series(self._tag(tag, f"{at}/tags/{index}", depth + 1))
                for index, tag in tags
            ]
        )
        several = option
        if not form.stop_after_first:
            several = Series(
                (option, Times(Series((Text(form.separator), option)), 0, None))
            )
        if form.at_least_one:
            return several
        return Times(several, 0, 1)

    def _dispatch(self, form: _DispatchForm, at: str, depth: int) -> Node:
        self._count(len(form.rules))
        rules = [
            (Text(trigger), self.node(rule, f"{at}/rules/{index}/1", depth + 1))
            for index, (trigger, rule) in enumerate(form.rules)
        ]
        return self._checked(
            Dispatch(tuple(rules), form.loop, self._distinct(form.excludes)), at
        )

    def _schema(self, form: _JsonSchemaForm, at: str) -> Node:
        if form.style not in ("json", *STYLES):
            raise self._invalid(
                f"there is no style {bounded(form.style, 60)!r}: {', '.join(STYLES)}",
                f"{at}/style",
            )
        if form.excludes and form.style == "json":
            raise self._invalid(
                "excludes is for the texts of arguments in another style than json",
                f"{at}/excludes",
            )
        excludes = self._distinct(form.excludes)
        content = Content(
            "json_schema", form.json_schema, f"{at}/json_schema", form.style, excludes
        )
        if form.style == "json" or self._expand is None:
            return content
        return self._expand(content)

    def _nodes(self, values: Sequence[Any], at: str, depth: int) -> list[Node]:
        return [
            self.node(value, f"{at}/{index}", depth + 1)
            for index, value in enumerate(values)
        ]

    def _tag(self, tag: _TagForm, at: str, depth: int) -> tuple[Mark, Node]:
        """Return the begin of a tag, and the node of its content and end."""
        content = self.node(tag.content, f"{at}/content", depth + 1)
        ends = tag.end
        if not isinstance(ends, list):
            ends = [ends]
        if ends != [""]:
            content = Series((content, self._either([_mark(end) for end in ends])))
        return _mark(tag.begin), content

    def _triggered_tags(
        self, form: _TriggeredTagsForm | _TokenTriggeredTagsForm, at: str, depth: int
    ) -> Node:
        tags = [
            self._tag(tag, f"{at}/tags/{index}", depth + 1)
            for index, tag in enumerate(form.tags)
        ]
        rules: dict[Mark, list[Node]] = {}
        excludes: tuple[str, ...] = ()
        if isinstance(form, _TriggeredTagsForm):
            rules = {Text(trigger): [] for trigger in form.triggers}
            excludes = self._distinct(form.excludes)
        else:
            rules = {Token(trigger): [] for trigger in form.trigger_tokens}
        self._count(len(rules))  # `_checked` compares the triggers with each other
        for index, (begin, rest) in enumerate(tags):
            for trigger, options in rules.items():
                left = _after(begin, trigger)
                if left is not None:
                    options.append(Series((left, rest)))
                    break
            else:
                message = (
                    "the tag never can be produced: no trigger is a prefix of its begin"
                )
                raise self._invalid(message, f"{at}/tags/{index}/begin")
        begun = tuple(
            (trigger, self._either(options)) for trigger, options in rules.items()
        )
        dispatch = self._checked(
            Dispatch(begun, not form.stop_after_first, excludes), at
        )
        if not form.at_least_one:
            return dispatch
        first = self._either([Series((begin, rest)) for begin, rest in tags])
        if form.stop_after_first:
            return first
        return Series((first, dispatch))

    def _checked(self, dispatch: Dispatch, at: str) -> Dispatch:
        """Check that each trigger of `dispatch` can occur, and that a tag begins with
        it."""
        triggers = [
            trigger.text for trigger, _ in dispatch.rules if isinstance(trigger, Text)
        ]
        if len(triggers) * sum(map(len, triggers)) > _MAX_COMPARED:
            message = (
                "the triggers are too long, or too many: each is searched in all others"
            )
            raise ConstraintTooLarge(message, param=self._param, pointer=at)
        for whole, part in permutations(triggers, 2):
            if part in whole:
                message = f"the trigger {bounded(whole, 60)!r} contains the trigger {bounded(part, 60)!r}"
                raise self._invalid(f"{message}: its tags never can be produced", at)
        for trigger, rest in dispatch.rules:
            if rest == Either(()):
                [shown] = msgspec.structs.astuple(trigger)
                raise self._invalid(
                    f"no tag begins with the trigger {bounded(shown, 60)!r}", at
                )
        return dispatch

    def _distinct(self, excludes: Sequence[str]) -> tuple[str, ...]:
        self._count(len(excludes))
        return tuple(dict.fromkeys(excludes))

    def _either(self, options: Sequence[Node]) -> Node:
        distinct = tuple(dict.fromkeys(options))
        self._count(len(distinct))
        if len(distinct) == 1:
            return distinct[0]
        return Either(distinct)

    def _count(self, alternatives: int) -> None:
        self._alternatives += alternatives
        if self._alternatives > LIMITS.max_alternatives:
            raise LIMITS.too_many_alternatives(self._param, None)

    def _invalid(self, message: str, at: str) -> InvalidConstraint:
        return InvalidConstraint(message, param=self._param, pointer=at)


def _convert(value: Any, kind: Any, at: str, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        parts = re.fullmatch(r"(.*?)(?: - at `\$(\S+)`)?", str(error), re.DOTALL)
        assert parts is not None
        message = bounded(parts[1])
        pointer = at + re.sub(r"[.\[](\w+)\]?", r"/\1", parts[2] or "")
        if message.startswith("Invalid value") and kind is _Format:
            message += f"; there are {', '.join(str(form.__struct_config__.tag) for form in _Form.__subclasses__())}"
        raise InvalidConstraint(message, param=param, pointer=pointer) from None


def _mark(mark: str | _TokenForm) -> Mark:
    if isinstance(mark, str):
        return Text(mark)
    return Token(mark.token)


def _after(begin: Mark, trigger: Mark) -> Text | None:
    """Return the text of `begin` after `trigger`, or None if `begin` does not start
    with it."""
    if begin == trigger:
        return Text("")
    if (
        isinstance(begin, Text)
        and isinstance(trigger, Text)
        and begin.text.startswith(trigger.text)
    ):
        return Text(begin.text.removeprefix(trigger.text))
    return None
