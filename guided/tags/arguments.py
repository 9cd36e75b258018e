"""Arguments of function calls that are written as elements instead of JSON: how they are enforced, and how they are read.

`expand` writes such a content of a structural tag as nodes, which every library enforces: one element for each named
property, in the schema's order. Strings are free text up to the end of their element, other values are JSON. In styles
with `item`, objects and arrays consist of elements too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any


from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema import string_pattern
from guided.schema.canonical import CanonicalForm, canonical
from guided.schema.keywords import Schema, escape, listed
from guided.schema.validation import Validator
from guided.structural_tag import Content, Either, FreeText, Node, Series, Text, Times, located
from guided.tags.styles import FREE_NAME, ITEM, NAME, SCALARS, STYLES, TYPES

_MAX_NESTING = 20




def expand(content: Content) -> Node:
    """Return the nodes of arguments in a style.

    Raises:
        UnsupportedConstraint: a keyword of the schema can't be enforced in this style; with its pointer.
    """
    with located(content, "structural_tag"):
        form = canonical(content.value)
    return _Writer(content).of_object(_alone(form.root, form), "")


class _Writer:
    """Writes one content as nodes. `place` is a JSON pointer into its schema."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._style = STYLES[content.style]

    def of_object(self, schema: Schema, place: str) -> Node:
        """Return the elements of an object. Others than those that the schema names are generated only if it names none."""
        form, root = self._only(schema, "object", place, {"properties", "required", "additionalProperties"})
        rest, required = root.get("additionalProperties", True), root.get("required", ())
        parts = {**root.get("properties", {}), **{name: rest for name in required if name not in root["properties"]}}
        if not parts and rest is not False:
            if NAME in self._style.end:
                raise self._refusal("an object without named properties", place)
            return Times(self._element(None, _alone(rest, form), f"{place}/additionalProperties"), 0, None)
        elements = []
        for name, part in parts.items():
            at = f"{place}/properties/{escape(name)}"
            if re.fullmatch(FREE_NAME, name) is None:
                raise self._refusal(f"the name {bounded(name, 60)!r}", at)
            if part is not False:
                element = self._element(name, _alone(part, form), at)
                elements.append(element if name in required else Times(element, 0, 1))
        return Series(tuple(elements))

    def _of_array(self, schema: Schema, place: str) -> Node:
        form, root = self._only(schema, "array", place, {"items", "minItems", "maxItems"})
        item = self._element(ITEM, _alone(root.get("items", True), form), f"{place}/items", self._style.item)
        return Times(item, int(root.get("minItems", 0)), root.get("maxItems"))

    def _only(
        self, schema: Schema, kind: str, place: str, keywords: set[str]
    ) -> tuple[CanonicalForm, dict[str, Any]]:
        """Return the values of the type `kind`, which have no other keywords than `keywords`."""
        if place.count("/") > 2 * _MAX_NESTING:
            raise self._refusal(f"a schema that is nested deeper than {_MAX_NESTING} levels", place)
        form = _restricted(schema, (kind,))
        root = {} if form is None else _root(form)
        if root.get("type") != kind:
            raise self._refusal(f"values other than one {kind}", place)
        for keyword in root.keys() - keywords - {"type"}:
            raise self._refusal(repr(keyword), f"{place}/{keyword}")
        return form, {"properties": {}, **root}

    def _element(self, name: str | None, schema: Schema, place: str, begin: str = "") -> Node:
        """Return an element with a value of `schema`. Without `name`: with any name."""
        begin = begin or self._style.begin
        options = []
        for kind, types in self._style.kinds.items():
            for value in self._values(schema, types, place):
                if name is None:
                    before, _, after = self._style.mark(begin, NAME, kind).partition(NAME)
                    first: list[Node] = [Text(before), Content("regex", FREE_NAME, f"{self._content.pointer}{place}"), Text(after)]
                else:
                    first = [Text(self._style.mark(begin, name, kind))]
                options.append(Series((*first, value, Text(self._style.mark(self._style.end, name or "")))))
        if not options:
            raise self._refusal("this schema", place)
        return options[0] if len(options) == 1 else Either(tuple(dict.fromkeys(options)))

    def _values(self, schema: Schema, types: tuple[str, ...], place: str) -> Iterator[Node]:
        """Yield the nodes of the values of `schema` with one of `types`."""
        texts = _restricted(schema, ("string",)) if "string" in types else None
        if texts is not None:
            strings = _root(texts)
            values = listed(strings)
            if values is not None:
                if any(self._style.end.strip() in value for value in values):
                    raise self._refusal("a value that contains the end of its element", place)
                yield from map(Text, values)
            elif strings == {"type": "string"}:
                yield FreeText(self._content.excludes)
                if types == TYPES:
                    return  # any other value is such a text too
            else:
                text = Content("regex", "", f"{self._content.pointer}{place}/pattern")
                with located(text, "structural_tag"):
                    yield Content("regex", string_pattern.pattern_of(strings), text.pointer)
        rest = [kind for kind in types if kind != "string"]
        if self._style.item:
            # Narrowed: where any value is allowed, no objects and arrays.
            for kind in {"object", "array"} & set(rest) if schema not in (True, {}) else ():
                if _restricted(schema, (kind,)) is not None:
                    yield self.of_object(schema, place) if kind == "object" else self._of_array(schema, place)
            rest = [kind for kind in rest if kind in SCALARS]
        form = _restricted(schema, tuple(rest)) if rest else None
        if form is not None:
            yield Content("json_schema", _alone(form.root, form), f"{self._content.pointer}{place}")

    def _refusal(self, what: str, place: str) -> UnsupportedConstraint:
        message = f"arguments in the style {self._content.style} can't have {what}"
        return UnsupportedConstraint(message, param="structural_tag", pointer=self._content.pointer + place)


def _alone(schema: Schema, form: CanonicalForm) -> Schema:
    """Return a part of a form as a schema of its own."""
    return {**schema, "$defs": form.definitions} if isinstance(schema, dict) and form.definitions else schema


def _restricted(schema: Schema, types: tuple[str, ...]) -> CanonicalForm | None:
    """Return the values of `types` that satisfy a schema; None if there are none."""
    inner = {} if schema is True else {name: value for name, value in schema.items() if name != "$defs"} if schema else {"not": {}}
    definitions = {"$defs": schema["$defs"]} if isinstance(schema, dict) and "$defs" in schema else {}
    try:
        return canonical({**definitions, "allOf": [inner, {"type": [*types]}]})
    except InvalidConstraint:
        return None


def _root(form: CanonicalForm) -> dict[str, Any]:
    root: Any = form.root
    while isinstance(root, dict) and "$ref" in root:
        root = form.target(root)
    return root if isinstance(root, dict) else {}


_Element = tuple[str, str, Any]
"""Name, kind and text of an element; or elements instead of the text."""


class ArgumentReader:
    """Reads the arguments of one function's calls.

    Args:
        style: one of `STYLES`.
        schema: the schema of the arguments, which decides between a text and the value that it spells.
    """

    def __init__(self, style: str, schema: Schema) -> None:
        self._style = STYLES[style]
        self._schema = schema
        self._others: dict[tuple[str | int, ...], list[Any]] = {}
        """Path of a value -> other ways to read it."""

    def elements(self, text: str, position: int) -> tuple[list[_Element], int]:
        """Return the complete elements at `position`, and the position after them."""
        found = []
        while begin := self._style.begin_pattern.match(text, position):
            groups = begin.groupdict("")
            name, kind, pad = (groups.get(group, "") for group in ("name", "kind", "pad"))
            name = name or ITEM
            value, end = self._value(text, begin.end(), name, kind, pad + self._style.mark(self._style.end, name).strip())
            if end < 0:
                break
            found.append((name, kind, value))
            position = end
        return found, position

    def arguments(self, elements: list[_Element]) -> dict[str, Any]:
        """Return the arguments that elements spell."""
        self._others = {}
        arguments: dict[str, Any] = {name: self._read(value, kind, (name,)) for name, kind, value in elements}
        while (path := self._wrong(arguments)) is not None:
            holder: Any = arguments
            for part in path[:-1]:
                holder = holder[part]
            holder[path[-1]] = self._others[path].pop(0)
        return arguments

    def _value(self, text: str, start: int, name: str, kind: str, close: str) -> tuple[Any, int]:
        """Return the value at `start` and the position after its element; -1 if it is not complete."""
        if self._style.item:
            children, after = self.elements(text, start)
            if (children or kind in ("dict", "list")) and text.startswith(close, after):
                return children, after + len(close)
        end = text.find(close, start)
        if self._is_json(name, kind):
            try:
                after = json.JSONDecoder().raw_decode(text, start)[1]
            except ValueError:
                pass
            else:
                end = after if text.startswith(close, after) else end
        return (text[start:end], end + len(close)) if end >= 0 else ("", -1)

    def _is_json(self, name: str, kind: str) -> bool:
        """Whether the value is certainly JSON, which may contain the end of its element."""
        if kind:
            return "string" not in self._style.kinds.get(kind, TYPES)
        properties = self._schema.get("properties", {}) if isinstance(self._schema, dict) else {}
        declared = properties.get(name)
        return isinstance(declared, dict) and declared.get("type") in ("object", "array")

    def _read(self, value: Any, kind: str, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, list):
            if kind == "list" or (not kind and all(name == ITEM for name, _, _ in value)):
                return [self._read(each, inner, (*path, place)) for place, (_, inner, each) in enumerate(value)]
            return {name: self._read(each, inner, (*path, name)) for name, inner, each in value}
        types = self._style.kinds.get(kind, TYPES)
        options: list[Any] = []
        if types != ("string",):
            spelled = _LITERALS.get(value.strip(), value)
            try:
                options = [read] if not isinstance(read := json.loads(spelled), str) else []
            except ValueError:
                options = [] if value or not self._style.item else [{}, []]
        if "string" in types or not options:
            options.append(value)
        self._others[path] = options[1:]
        return options[0]

    def _wrong(self, arguments: dict[str, Any]) -> tuple[str | int, ...] | None:
        """Return the path of a value that violates the schema, and can be read in another way."""
        if not any(self._others.values()):
            return None
        for path in self._validator.paths(arguments):
            for length in range(len(path), 0, -1):
                if self._others.get(path[:length]):
                    return path[:length]
        return None

    @cached_property
    def _validator(self) -> Validator:
        return Validator(self._schema)


_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Python's names, which models sometimes write."""
