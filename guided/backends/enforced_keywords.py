"""Read a JSON schema for a library: the first keyword that the library does not enforce is refused, with its pointer.

Annotations, and keywords of other types, are left out. Each `$ref` is replaced with its target.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar
from urllib.parse import unquote

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint, bounded
from guided.schema import string_pattern
from guided.schema.keywords import OF_TYPE, Schema, common_types, kind_of
from guided.schema.metaschema import Dialect
from guided.schema.pointer import escape

Form = dict[str, Any] | None
"""A subschema in the library's terms; None if no value satisfies it."""
_COMBINERS = ("$ref", "const", "enum", "anyOf", "allOf")
_NEVER = ("oneOf", "not", "if", "$dynamicRef", "$recursiveRef", "dependencies")
_TYPED = tuple(name for names in OF_TYPE.values() for name in names)
_STRUCTURE = {"properties", "items", "prefixItems", "enum", "const"}
"""Next to these, alternatives are refused. Next to other keywords, those are."""
_WITHOUT_EFFECT = {"minLength", "minItems", "minProperties", "required", "uniqueItems", "patternProperties"}
"""Keywords without effect where they are 0, false or empty."""
_MAX_SUBSCHEMAS = 5_000


def any_of(options: list[Form]) -> Form:
    """Join alternatives; nested ones become one list."""
    found = [one for option in options if option is not None for one in option.get("anyOf", [option])]
    return options[0] if len(options) == 1 else {"anyOf": found} if len(found) > 1 else next(iter(found), None)


class SchemaReader(ABC):
    """Translates one schema into the terms of one library."""

    library: ClassVar[str]
    enforced: ClassVar[dict[str, tuple[str, ...]]]
    """Type -> its keywords that the library enforces."""
    formats: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: str) -> None:
        self.document: Schema = json.loads(source)
        if isinstance(self.document, dict) and Dialect.of(self.document).is_draft3:
            raise UnsupportedConstraint(
                f"{self.library} can't enforce draft 3", param="json_schema", pointer="/$schema"
            )
        self._count = 0
        self._open: list[str] = []
        """The references that are being resolved."""

    @abstractmethod
    def any_value(self) -> dict[str, Any]:
        """Return the form of any value."""

    @abstractmethod
    def values(self, values: list[Any], at: str, keyword: str) -> Form:
        """Return the form of the `values` of a `keyword`. Raises `refusal` for those that are not enforced."""

    @abstractmethod
    def text(self, least: int, most: float) -> Form:
        """Return the form of strings of `least` to `most` characters."""

    @abstractmethod
    def matching(self, pattern: regex.Node) -> Form:
        """Return the form of strings that are without escapes in JSON and match `pattern` as a whole."""

    @abstractmethod
    def name(self, text: str) -> str | None:
        """Return the name of a property in the library's characters; None if it is not possible."""

    @abstractmethod
    def recursive(self, reference: str, at: str) -> dict[str, Any]:
        """Return the form of a `$ref` to a schema that it is part of."""

    def referred(self, reference: str, at: str, form: Form) -> Form:
        """Return what replaces a `$ref` to a schema of the form `form`."""
        return form

    def read_whole(self) -> dict[str, Any]:
        """Return the form of the whole schema."""
        try:
            form = self.read(self.document)
        except (TypeError, AttributeError, RecursionError) as error:  # of another draft, or too long a way of `$ref`s
            message = f"{self.library} can't read this schema: {bounded(error)}"
            raise UnsupportedConstraint(message, param="json_schema") from None
        if form is None:
            raise InvalidConstraint("no value satisfies the schema", param="json_schema", pointer="")
        return form

    def refusal(self, at: str, keyword: str, why: str = "") -> UnsupportedConstraint:
        """Return the error for a keyword of the subschema at the pointer `at`."""
        message = f"{self.library} does not enforce {bounded(keyword, 60)!r}{why}"
        return UnsupportedConstraint(message, param="json_schema", pointer=f"{at}/{escape(keyword)}")

    def read(self, schema: Schema, at: str = "") -> Form:
        """Return the form of the subschema at the pointer `at`."""
        if isinstance(schema, bool):
            return self.any_value() if schema else None
        self._count += 1
        if self._count > _MAX_SUBSCHEMAS or (at and isinstance(schema.get("$id"), str)):
            message = f"{self.library} takes no '$id' inside a schema, and at most {_MAX_SUBSCHEMAS} parts"
            raise UnsupportedConstraint(message, param="json_schema")
        used = {name: value for name, value in schema.items() if value or name not in _WITHOUT_EFFECT}
        main, *more = [name for name in (*_NEVER, *_COMBINERS) if name in used] or ["type"]
        if main in _NEVER:
            raise self.refusal(at, main)
        if main == "type":
            return self._typed(used, at)
        if siblings := [*more, *(name for name in _TYPED if name in used)]:
            gives_way = main in ("anyOf", "allOf") and not _STRUCTURE.isdisjoint(siblings)
            raise self.refusal(at, main if gives_way else siblings[0], " next to other keywords")
        kinds = _kinds(used)
        if main == "$ref":
            return self._reference(used["$ref"], kinds, at)
        if main in ("const", "enum"):
            values = used["enum"] if main == "enum" else [used["const"]]
            return self.values([value for value in values if _is_of(value, kinds)], at, main)
        if main == "allOf" and len(used["allOf"]) > 1:
            raise self.refusal(at, "allOf", " with several schemas")
        return any_of([self.read(_narrowed(part, kinds), f"{at}/{main}/{n}") for n, part in enumerate(used[main])])

    def _typed(self, used: dict[str, Any], at: str) -> Form:
        kinds = _kinds(used) or [kind for kind in OF_TYPE if any(name in used for name in OF_TYPE[kind])][:1]
        if not kinds:
            return self.any_value()
        options = []
        for kind in kinds:
            names = OF_TYPE.get("number" if kind == "integer" else kind, ())
            own = {name: value for name, value in used.items() if name in names}
            for name in own:
                if name not in self.enforced.get(kind, ()):
                    raise self.refusal(at, name)
            match kind:
                case "string":
                    options.append(self._string(own, at))
                case "array":
                    options.append(self._array(own, at))
                case "object":
                    options.append(self._object(own, at))
                case _:
                    options.append({"type": kind})
        return any_of(options)

    def _reference(self, reference: str, kinds: list[str], at: str) -> Form:
        place = unquote(reference)[1:]
        target: Any = self.document
        try:
            if not reference.startswith("#") or not f"{place}/".startswith("/"):
                raise KeyError(reference)
            for token in place.split("/")[1:]:
                name: Any = token.replace("~1", "/").replace("~0", "~")
                target = target[int(name) if isinstance(target, list) else name]
        except (LookupError, ValueError, TypeError):
            raise self.refusal(at, "$ref", " out of the schema") from None
        key = f"{reference} {kinds}"
        if key in self._open:
            return self.recursive(key, at)
        self._open.append(key)
        found = self.read(_narrowed(target, kinds), place)
        self._open.pop()
        return self.referred(key, at, found)

    def _string(self, own: dict[str, Any], at: str) -> Form:
        conditions = [name for name in own if name != "format" or own[name] in string_pattern.FORMATS]
        main = next((name for name in ("format", "pattern") if name in conditions), None)
        if main is None:
            least, most = int(own.get("minLength", 0)), own.get("maxLength", math.inf)
            return self.text(least, most) if least <= most else None
        if others := [name for name in conditions if name != main]:
            raise self.refusal(at, others[0], f" next to {main!r}")
        if main == "format":
            if own["format"] not in self.formats:
                raise self.refusal(at, "format", f" {own['format']}")
            return {"type": "string", "format": own["format"]}
        try:
            plain = regex.within(string_pattern.read(own["pattern"]), string_pattern.PLAIN)
        except InvalidConstraint as error:
            raise type(error)(error.message, param="json_schema", pointer=f"{at}/pattern") from None
        if plain is None:
            raise self.refusal(at, "pattern", " that only text with escaped characters matches")
        return self.matching(plain)

    def _array(self, own: dict[str, Any], at: str) -> Form:
        counts: dict[str, Any] = {name: int(own[name]) for name in ("minItems", "maxItems") if name in own}
        least, most = counts.get("minItems", 0), counts.get("maxItems", math.inf)
        keyword = "items" if isinstance(own.get("items"), list) else "prefixItems"
        if prefix := own.get(keyword):
            parts = [self.read(part, f"{at}/{keyword}/{index}") for index, part in enumerate(prefix)]
            if "prefixItems" not in self.enforced["array"] or None in parts or not least <= len(parts) <= most:
                raise self.refusal(at, keyword, " for single places, except in arrays of just these items")
            return {"prefixItems": parts}
        item = self.read(own.get("items", True), f"{at}/items")
        if least > most or (least and item is None):
            return None
        if item is None or not most:
            return self.values([[]], at, "items")
        items = {} if item == self.any_value() else {"items": item}
        return {"type": "array", **items, **counts}

    def _object(self, own: dict[str, Any], at: str) -> Form:
        required, most = own.get("required", []), own.get("maxProperties", math.inf)
        parts = {name: (part, f"properties/{escape(name)}") for name, part in own.get("properties", {}).items()}
        for name in required:
            parts.setdefault(name, (own.get("additionalProperties", True), "additionalProperties"))
        if not parts and most > 0:
            rest = self.read(own.get("additionalProperties", True), f"{at}/additionalProperties")
            if rest is not None:
                for name in own.keys() & {"minProperties", "maxProperties"}:
                    raise self.refusal(at, name)
                return {"type": "object", **({} if rest == self.any_value() else {"additionalProperties": rest})}
        names = {name: self.name(name) for name in parts}
        if own.get("minProperties", 0) > len(required):
            raise self.refusal(at, "minProperties")
        if None in [names[name] for name in required]:
            raise self.refusal(at, "required", " with names that JSON escapes")
        forms = {names[name]: self.read(part, f"{at}/{place}") for name, (part, place) in parts.items()}
        properties = {name: form for name, form in forms.items() if None not in (name, form)}
        if most < len(properties) and most > 0:
            raise self.refusal(at, "maxProperties")
        if not properties or not most:
            return None if required else self.values([{}], at, "properties")
        needed = [names[name] for name in required]
        return (
            {"type": "object", "properties": properties, "required": needed} if properties.keys() >= {*needed} else None
        )


def _kinds(schema: dict[str, Any]) -> list[str]:
    """Return the value of `type` as a list; empty without it."""
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _is_of(value: Any, kinds: list[str]) -> bool:
    kind = kind_of(value)
    return not kinds or kind in kinds or (kind == "number" and "integer" in kinds and value == value // 1)


def _narrowed(schema: Schema, kinds: list[str]) -> Schema:
    """Return a schema for the values of `schema` that are of one of the types."""
    if schema is False or not kinds:
        return schema
    inner = {} if schema is True else schema
    common = common_types(inner, {"type": kinds})
    return {**inner, "type": common} if common else False
