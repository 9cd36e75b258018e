"""What lm-format-enforcer can enforce of a JSON Schema, said in the few forms that it reads rightly.

Its schema parser looks at one keyword and forgets its neighbours, and ignores what it doesn't know. So a schema is
rewritten, meaning kept, until nothing is left to be ignored; what can't be rewritten is refused by keyword and pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import jsonschema

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema.pointer import escape

__all__ = ["Prepared", "prepare"]

_TYPES = ("object", "array", "string", "number", "boolean", "null")

_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"}
        | {"maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
    ),
    "array": frozenset(
        {"items", "minItems", "maxItems", "prefixItems", "additionalItems", "uniqueItems", "contains", "minContains"}
        | {"maxContains", "unevaluatedItems"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_KEYWORDS["integer"] = _KEYWORDS["number"]
"""What each type's keywords are (JSON Schema 2020-12 and earlier drafts); they say nothing of other types."""

_ENFORCED = frozenset({"minLength", "maxLength", "pattern", "properties", "required", "additionalProperties"}) | {
    "items",
    "minItems",
    "maxItems",
}
_ANYWHERE = frozenset({"$ref", "anyOf", "allOf", "oneOf", "enum", "const", "type"})
_NEVER = frozenset({"not", "if", "$dynamicRef", "$recursiveRef"})
_VACUOUS: dict[str, object] = {
    "uniqueItems": False,
    "minProperties": 0,
    "additionalItems": True,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "exclusiveMinimum": False,
    "exclusiveMaximum": False,
}
"""Values with which a keyword that can't be enforced says nothing."""

_MAX_NODES = 5_000
"""Subschemas up to which references are written out."""


def _is_vacuous(keyword: str, value: object) -> bool:
    return keyword in _VACUOUS and value is _VACUOUS[keyword]  # identity: 0 equals False, and small ints are unique


@dataclass
class Prepared:
    """A schema in the library's terms."""

    schema: dict[str, Any]
    patterns: set[str] = field(default_factory=set)
    """Patterns of strings, as full matches in the common subset of regexes."""
    literals: set[str] = field(default_factory=set)
    """Texts that strings and keys may be required to spell."""


def prepare(schema: dict[str, Any] | bool) -> Prepared:
    """Rewrite `schema`.

    Raises:
        UnsupportedConstraint: it says something that lm-format-enforcer would not enforce: which keyword, where.
        InvalidConstraint: nothing satisfies it.
    """
    rewriter = _Rewriter(schema)
    try:
        rewritten = rewriter.schema_at(schema, "")
    except _NothingError as nothing:
        raise InvalidConstraint(
            "nothing satisfies the schema: no value is allowed here", param="json_schema", pointer=nothing.pointer
        ) from None
    if rewriter.definitions:
        rewritten = {**rewritten, "$defs": rewriter.definitions}
    return Prepared(rewritten, rewriter.patterns, rewriter.literals)


class _NothingError(Exception):
    """No value satisfies the subschema at `pointer`."""

    def __init__(self, pointer: str) -> None:
        super().__init__(pointer)
        self.pointer = pointer


class _Rewriter:
    def __init__(self, root: dict[str, Any] | bool) -> None:
        self._root = root
        self._open: list[str] = []
        self._recursive: dict[str, str] = {}
        self._nodes = 0
        self.definitions: dict[str, Any] = {}
        self.patterns: set[str] = set()
        self.literals: set[str] = set()

    def schema_at(self, schema: Any, pointer: str) -> dict[str, Any]:
        """The schema found at `pointer`, following what it refers to; recursion becomes a definition."""
        if pointer in self._open:
            name = self._recursive.setdefault(pointer, f"d{len(self._recursive)}")
            return {"$ref": f"#/$defs/{name}"}
        self._open.append(pointer)
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise self._unsupported("$ref", pointer, "so many references")
        try:
            rewritten = self._rewrite(schema, pointer)
        finally:
            self._open.pop()
        if pointer not in self._recursive:
            return rewritten
        self.definitions[self._recursive[pointer]] = rewritten
        return {"$ref": f"#/$defs/{self._recursive[pointer]}"}

    def _rewrite(self, schema: Any, pointer: str) -> dict[str, Any]:
        if schema is False:
            raise _NothingError(pointer)
        if schema is True:
            schema = {}
        said = {keyword: value for keyword, value in schema.items() if not _is_vacuous(keyword, value)}
        if pointer and "$id" in said:
            raise self._unsupported("$id", pointer, "below the root")
        for keyword in said:
            if keyword in _NEVER:
                raise self._unsupported(keyword, pointer)
        for keyword in ("enum", "const"):
            if keyword in said:
                return self._enumeration(said, keyword, pointer)
        for keyword in ("$ref", "anyOf", "allOf", "oneOf"):
            if keyword in said:
                self._alone(said, keyword, pointer)
                return self._combination(keyword, said[keyword], pointer)
        types = said.get("type", _TYPES)
        if isinstance(types, str):
            return self._typed(types, said, pointer)
        # Keywords of one type say nothing of the others: each alternative gets its own.
        options = [self._typed(name, said, pointer) for name in types if not (name == "integer" and "number" in types)]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _alone(self, said: dict[str, Any], keyword: str, pointer: str) -> None:
        """Beside a combining keyword, the library ignores all others."""
        others = frozenset().union(*_KEYWORDS.values(), _ANYWHERE) - {keyword}
        for other in said:
            if other in others:
                raise self._unsupported(other, pointer, f"beside {keyword!r}")

    def _combination(self, keyword: str, value: Any, pointer: str) -> dict[str, Any]:
        at = f"{pointer}/{keyword}"
        if keyword == "$ref":
            target = unquote(value[1:])
            if not value.startswith("#") or target[:1] not in ("", "/"):
                raise self._unsupported("$ref", pointer, "other than to a JSON pointer within the schema")
            return self.schema_at(self._lookup(target), target)
        if keyword == "anyOf":
            return {"anyOf": self._options((option, f"{at}/{index}") for index, option in enumerate(value))}
        if len(value) == 1:
            return self.schema_at(value[0], f"{at}/0")
        raise self._unsupported(keyword, pointer)

    def _options(self, alternatives: Iterable[tuple[Any, str]]) -> list[dict[str, Any]]:
        """Those of some alternatives that any value satisfies."""
        found, empty = [], None
        for schema, pointer in alternatives:
            try:
                found.append(self.schema_at(schema, pointer))
            except _NothingError as nothing:
                empty = nothing
        if not found and empty is not None:
            raise empty
        return found

    def _lookup(self, pointer: str) -> Any:
        found: Any = self._root
        for token in pointer.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    def _enumeration(self, said: dict[str, Any], keyword: str, pointer: str) -> dict[str, Any]:
        values = said["enum"] if keyword == "enum" else [said["const"]]
        rest = {other: value for other, value in said.items() if other != keyword}
        if "$ref" in rest:
            raise self._unsupported("$ref", pointer, f"beside {keyword!r}")
        values = [value for value in values if jsonschema.Draft202012Validator(rest).is_valid(value)]
        options: list[dict[str, Any]] = []
        if texts := [value for value in values if isinstance(value, str)]:
            options.append({"type": "string", "enum": self._spelled(texts, keyword, pointer)})
        if numbers := [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]:
            options.append({"enum": numbers})
        if None in values:
            options.append({"type": "null"})
        booleans = [value for value in values if isinstance(value, bool)]
        if len(booleans) == 2:
            options.append({"type": "boolean"})
        elif booleans or any(isinstance(value, list | dict) for value in values):
            raise self._unsupported(keyword, pointer, "with arrays, objects or just one of the booleans")
        if not options:
            raise _NothingError(f"{pointer}/{keyword}")
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _spelled(self, texts: Iterable[str], keyword: str, pointer: str) -> list[str]:
        texts = list(texts)
        for text in texts:
            if json.dumps(text, ensure_ascii=False)[1:-1] != text:
                raise self._unsupported(keyword, pointer, f"with text that JSON escapes ({bounded(text, 40)!r})")
        self.literals.update(texts)
        return texts

    def _typed(self, name: str, said: dict[str, Any], pointer: str) -> dict[str, Any]:
        own = {keyword: value for keyword, value in said.items() if keyword in _KEYWORDS[name]}
        for keyword in own:
            if keyword not in _ENFORCED:
                raise self._unsupported(keyword, pointer)
        match name:
            case "string":
                return self._string(own, pointer)
            case "array":
                return self._array(own, pointer)
            case "object":
                return self._object(own, pointer)
        return {"type": name}

    def _string(self, own: dict[str, Any], pointer: str) -> dict[str, Any]:
        if own.get("pattern") == "":  # found in any string
            own = {keyword: value for keyword, value in own.items() if keyword != "pattern"}
        if "pattern" not in own:
            if own.get("maxLength") == 0:
                return {"type": "string", "enum": [""]}
            return {"type": "string", **own}
        for keyword in ("minLength", "maxLength"):
            if keyword in own:
                raise self._unsupported(keyword, pointer, "beside 'pattern'")
        try:  # ECMA's classes are ASCII; as a full match, which is narrower than a search and never wider
            pattern = regex.canonical(f"(?a:{own['pattern']})", small_classes=True, param="json_schema")
        except InvalidConstraint as error:
            raise type(error)(error.message, param="json_schema", pointer=f"{pointer}/pattern") from None
        if not pattern:
            return {"type": "string", "enum": [""]}
        pattern = f"(?:{pattern})"
        self.patterns.add(pattern)
        return {"type": "string", "pattern": pattern}

    def _array(self, own: dict[str, Any], pointer: str) -> dict[str, Any]:
        items = own.get("items", True)
        if isinstance(items, list):
            raise self._unsupported("items", pointer, "as a list")
        if items is False or own.get("maxItems") == 0:
            raise self._unsupported("items" if items is False else "maxItems", pointer, "that leaves no item")
        rewritten: dict[str, Any] = {"type": "array"}
        if items is not True and items != {}:
            try:
                rewritten["items"] = self.schema_at(items, f"{pointer}/items")
            except _NothingError:
                if own.get("minItems", 0) > 0:
                    raise
                raise self._unsupported("items", pointer, "that leaves no item") from None
        return rewritten | {key: own[key] for key in ("minItems", "maxItems") if key in own}

    def _object(self, own: dict[str, Any], pointer: str) -> dict[str, Any]:
        additional = own.get("additionalProperties", True)
        at = f"{pointer}/additionalProperties"
        required = list(own.get("required", []))
        if "properties" not in own and additional is not False:
            rewritten: dict[str, Any] = {"type": "object", "required": self._spelled(required, "required", pointer)}
            if additional is not True and additional != {}:
                rewritten["additionalProperties"] = self.schema_at(additional, at)
            return rewritten
        # Where properties are named, the library allows no others, whatever `additionalProperties` says: narrower.
        properties: dict[str, Any] = {}
        for key, value in own.get("properties", {}).items():
            try:
                properties[key] = self.schema_at(value, f"{pointer}/properties/{escape(key)}")
            except _NothingError:
                if key in required:
                    raise
        for key in required:
            if key not in properties:
                properties[key] = self.schema_at(additional, at)
        self._spelled(properties, "properties", pointer)
        return {"type": "object", "properties": properties, "required": required}

    def _unsupported(self, keyword: str, pointer: str, how: str = "") -> UnsupportedConstraint:
        return UnsupportedConstraint(
            f"lm-format-enforcer doesn't enforce {' '.join(filter(None, (repr(keyword), how)))}:"
            " leave it out, or choose another backend",
            param="json_schema",
            pointer=f"{pointer}/{escape(keyword)}",
        )
