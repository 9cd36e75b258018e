"""Enforce and read arguments of function calls that are written as elements instead of
JSON.

`expand` converts the schema of such arguments to nodes of a structural tag, which every
library enforces: one element for each named property, in the schema's order. Strings
are free text up to the end of their element, other values are JSON. In styles with
`item`, objects and arrays consist of elements too.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.json_text import JsonObject
from guided.schema import string_pattern
from guided.schema.canonical import CanonicalForm, canonical
from guided.schema.keywords import Schema, escape, listed
from guided.schema.validation import Validator
from guided.tags.structural_tag import (
    Content,
    Either,
    FreeText,
    Node,
    Series,
    Text,
    Times,
    located,
)
from guided.tags.styles import ITEM, KIND, LIST_NAME, NAME, SCALARS, STYLES, TYPES

_MAX_NESTING = 20
_MAX_FREE_NESTING = 4
"""Number of levels in a schema's pointer up to which an unrestricted value may be an
object or array."""
_CLOSING = {"{": "}", "[": "]"}


_Path = Sequence[str]
_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Python's names, which models sometimes write."""
_STRING = r"""<\|"\|>(?P<raw>.*?)<\|"\|>|(?P<json>"(?:\\.|[^"\\])*")|(?P<python>'(?:\\.|[^'\\])*')"""
_LIST = re.compile(rf"""(?:{_STRING}|[^<>"')}}]|}}(?!<))*""", re.DOTALL)
"""Elements of a list, up to the bracket after them."""
_LIST_PART = re.compile(
    rf"{_STRING}|(?P<name>{LIST_NAME})\s*[:=]|True|False|None|,(?=\s*[\]}}])", re.DOTALL
)
"""The parts of a list that JSON writes differently."""


def expand(content: Content, *, open_objects: bool | None) -> Node:
    """Return the nodes of arguments in a style other than JSON.

    Raises:
        UnsupportedConstraint: a keyword of the schema can't be enforced in this style.
            The error has its pointer.
    """
    with located(content, "structural_tag"):
        form = canonical(content.value, open_objects=open_objects)
    return _Writer(content).of_object(_alone(form.root, form), "")


class _Writer:
    """Converts one content to nodes. The argument `place` is a JSON pointer into the
    schema of the content."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._style = STYLES[content.style]
        self._gap: tuple[Node, ...] = ()
        """The separator of elements, if the style has one."""
        if self._style.separator:
            self._gap = (Text(self._style.separator),)

    def of_object(self, schema: Schema, place: str) -> Node:
        """Return the elements of an object: one for each named property, or any
        elements without named properties."""
        form, root = self._only(
            schema, "object", place, "properties", "required", "additionalProperties"
        )
        rest = root.get("additionalProperties", True)
        parts = root.get("properties", {})
        if not parts and rest is not False:
            return self._repeated(
                self._element(
                    None, _alone(rest, form), f"{place}/additionalProperties"
                ),
                0,
                None,
            )
        elements = []
        items = []
        is_begun = False
        for name, part in parts.items():
            at = f"{place}/properties/{escape(name)}"
            is_item = self._style.item and not self._gap and name == ITEM
            if (
                not re.fullmatch(self._style.names, name)
                or html.unescape(name) != name
                or is_item
            ):
                raise self._refusal(f"the name {bounded(name, 60)!r}", place)
            if part is not False:
                is_needed = name in root.get("required", ())
                element = self._element(name, _alone(part, form), at)
                elements.append(element)
                if is_begun:
                    element = Series((*self._gap, element))
                elif not is_needed:
                    element = Series((element, *self._gap))
                if not is_needed:
                    element = Times(element, 0, 1)
                items.append(element)
                is_begun = is_begun or is_needed
        if self._gap and elements and not is_begun:
            # Any order is allowed, because a grammar with an alternative for each first
            # element would be too large.
            return self._repeated(Either(tuple(elements)), 0, len(elements))
        return Series(tuple(items))

    def _repeated(self, element: Node, least: int, most: int | None) -> Node:
        """Return `least` to `most` elements."""
        if not self._gap:
            return Times(element, least, most)
        others = Times(
            Series((*self._gap, element)), max(least - 1, 0), most and most - 1
        )
        return Times(Series((element, others)), min(least, 1), 1)

    def _of_array(self, schema: Schema, place: str) -> Node:
        form, root = self._only(schema, "array", place, "items", "minItems", "maxItems")
        item = self._element(
            ITEM,
            _alone(root.get("items", True), form),
            f"{place}/items",
            self._style.item,
        )
        least = root.get("minItems", 0)
        most = root.get("maxItems")
        if most == 0:
            return Series(())
        return self._repeated(item, least, most)

    def _only(
        self, schema: Schema, kind: str, place: str, *keywords: str
    ) -> tuple[CanonicalForm, JsonObject]:
        """Return the schema restricted to the type `kind`. Raises if it then has other
        keywords than `keywords`."""
        if place.count("/") > 2 * _MAX_NESTING:
            raise self._refusal(
                f"a schema that is nested deeper than {_MAX_NESTING} levels", place
            )
        form = _restricted(schema, (kind,)) or canonical({"const": None})
        root = _root(form)
        if listed(root) in ([{}], [[]]):
            return form, {"additionalProperties": False, "maxItems": 0}
        if root.get("type") != kind:
            raise self._refusal(f"values other than one {kind}", place)
        for keyword in root.keys() - keywords - {"type"}:
            raise self._refusal(repr(keyword), f"{place}/{keyword}")
        return form, root

    def _element(
        self, name: str | None, schema: Schema, place: str, begin: str = ""
    ) -> Node:
        """Return an element with a value of `schema`. The element may have any name if
        `name` is None."""
        options = []
        before, _, after = (begin or self._style.begin).partition(KIND)
        for kind, types in self._style.kinds.items():
            end = self._style.mark(
                self._style.end, name or NAME, _CLOSING.get(kind, kind)
            )
            mark = end.rstrip("\n")
            last = self._named(mark, place)
            # the text of a value ends at the mark, without the line break
            if mark != end:
                last.append(Text("\n"))
            values = self._values(schema, types, place, mark.partition(NAME)[0])
            options += [Series((Text(kind + after), value, *last)) for value in values]
        if not options:
            raise self._refusal("this schema", place)
        first = self._named(before.replace(NAME, name or NAME), place)
        return Series((*first, Either(tuple(dict.fromkeys(options)))))

    def _named(self, text: str, place: str) -> list[Node]:
        """Return the nodes of a text in which `{name}` stands for any name."""
        before, any_name, after = text.partition(NAME)
        if not any_name:
            return [Text(before)]
        return [
            Text(before),
            Content("regex", self._style.new_names, f"{self._content.pointer}{place}"),
            Text(after),
        ]

    def _values(
        self, schema: Schema, types: Sequence[str], place: str, end: str
    ) -> Iterator[Node]:
        """Yield the nodes of the values of `schema` that have one of `types`. A string
        ends with `end`."""
        has_texts = "string" in types and not self._style.has_json_strings
        texts = None
        if has_texts:
            texts = _restricted(schema, ("string",))
        if texts is not None:
            strings = _root(texts)
            values = listed(strings)
            if values is not None:
                if any(end.strip() in value for value in values):
                    raise self._refusal(
                        "a value that contains the end of its element", place
                    )
                yield from map(Text, values)
            elif strings == {"type": "string"}:
                yield FreeText(self._content.excludes)
                if types == TYPES:
                    return  # values of other types are free text too
            else:
                text = Content("regex", "", f"{self._content.pointer}{place}/pattern")
                with located(text, "structural_tag"):
                    yield Content(
                        "regex", string_pattern.pattern_of(strings), text.pointer
                    )
        rest = [kind for kind in types if kind != "string" or not has_texts]
        if self._style.item:
            # An unrestricted value may not be an object or array, except at the first
            # levels of a list.
            is_narrow = schema in (True, {}) and (
                not self._gap or place.count("/") > _MAX_FREE_NESTING
            )
            for kind, nodes_of in (
                ("object", self.of_object),
                ("array", self._of_array),
            ):
                if (
                    kind in rest
                    and not is_narrow
                    and _restricted(schema, (kind,)) is not None
                ):
                    yield nodes_of(schema, place)
            rest = [kind for kind in rest if kind in SCALARS]
        form = None
        if rest:
            form = _restricted(schema, rest)
        if form is not None:
            yield Content(
                "json_schema",
                _alone(form.root, form),
                f"{self._content.pointer}{place}",
            )

    def _refusal(self, what: str, place: str) -> UnsupportedConstraint:
        message = f"arguments in the style {self._content.style} can't have {what}"
        return UnsupportedConstraint(
            message, param="structural_tag", pointer=self._content.pointer + place
        )


def _alone(schema: Schema, form: CanonicalForm) -> Schema:
    """Return a part of a form as an independent schema."""
    if isinstance(schema, dict) and form.definitions:
        return {**schema, "$defs": form.definitions}
    return schema


def _restricted(schema: Schema, types: Sequence[str]) -> CanonicalForm | None:
    """Return the canonical form of a schema restricted to `types`; None if no value
    satisfies it."""
    document: JsonObject = {"type": [*types]}
    if isinstance(schema, dict):
        part = {**schema}
        document = {"$defs": part.pop("$defs", {}), "allOf": [part, document]}
    elif not schema:
        return None
    try:
        return canonical(document)
    except InvalidConstraint:
        return None


def _root(form: CanonicalForm) -> JsonObject:
    root: Any = form.root
    while isinstance(root, dict) and "$ref" in root:
        root = form.target(root)
    if isinstance(root, dict):
        return root
    return {}


class ArgumentReader:
    """Reads the arguments of one function's calls.

    Args:
        style: one of `STYLES`.
        schema: the valid schema of the arguments. It decides whether a text is a
            string, or the JSON that it spells.
    """

    def __init__(self, style: str, schema: Schema) -> None:
        self._style = STYLES[style]
        self._validator = Validator(schema)

    def read(self, text: str, position: int, path: _Path = ()) -> tuple[Any, int]:
        """Return the values of the complete elements at `position`, and the position
        after them.

        `path` is the place of the elements within the arguments. If all elements are
        items, their values form a list.
        """
        if self._style.separator:
            return _read_list(text, position)
        values = []
        while begin := self._style.begin_pattern.match(text, position):
            groups = {"name": "", "kind": "", "pad": "", **begin.groupdict("")}
            name = html.unescape(groups["name"]) or ITEM
            close = groups["pad"] + self._style.mark(self._style.end, name).strip()
            value, end = self._value(
                text, begin.end(), close, groups["kind"], (*path, name)
            )
            if end < 0:
                break
            values.append((name, value))
            position = end
        named = dict(values)
        if path and self._style.item and named.keys() == {ITEM}:
            return [value for _, value in values], position
        return named, position

    def _value(
        self, text: str, start: int, close: str, kind: str, path: _Path
    ) -> tuple[Any, int]:
        """Return the value at `start` and the position after its element; -1 if the
        element is not complete.

        The value ends at the first `close` for which the value satisfies the schema.
        """
        if self._style.item:
            parts, after = self.read(text, start, path)
            if (parts or kind in ("dict", "list")) and text.startswith(close, after):
                return parts or {"dict": {}, "list": []}.get(kind), after + len(close)
        end = text.find(close, start)
        while end >= 0:
            for option in self._options(text[start:end], kind):
                if self._fits(option, path):
                    return option, end + len(close)
            end = text.find(close, end + 1)
        # the mask allows the end of another name
        if NAME in self._style.end and close not in text[start:]:
            for mark in self._style.end_pattern.finditer(text, start):
                return text[start : mark.start()], mark.end()
        return None, -1

    def _options(self, text: str, kind: str) -> Iterator[Any]:
        """Yield the possible values of a text."""
        types = self._style.kinds.get(kind, TYPES)
        if types != ("string",):
            try:
                value = json.loads(_LITERALS.get(text.strip(), text))
                if not isinstance(value, str):
                    yield value
            except ValueError:
                if not text and self._style.item:
                    yield from ({}, [])
        if "string" in types:
            yield text

    def _fits(self, value: Any, path: _Path) -> bool:
        """Return whether a value satisfies the schema at `path`. Other values of the
        arguments are not considered."""
        document = value
        for name in reversed(path):
            if name == ITEM and self._style.item and len(path) > 1:
                document = [document]
            else:
                document = {name: document}
        return not any(
            len(error.instance_path) >= len(path)
            for error in self._validator.errors(document)
        )


def _read_list(text: str, position: int) -> tuple[Any, int]:
    """Return the values of a list and the position after it. For an incomplete list,
    this is the end of the text."""
    written = _LIST.match(text, position)
    assert written is not None
    try:
        return json.loads(
            f"{{{_LIST_PART.sub(_as_json, written[0])}}}", strict=False
        ), written.end()
    except (ValueError, SyntaxError):
        return {}, len(text)


def _as_json(part: re.Match[str]) -> str:
    match part.lastgroup:
        case "raw":
            return json.dumps(part["raw"])
        case "python":
            return json.dumps(ast.literal_eval(part[0]))
        case "name":
            return f"{json.dumps(part['name'])}:"
    return _LITERALS.get(part[0], part[0].strip(","))
