"""The meta-schema of a dialect, one keyword at a time.

A validator of the official meta-schemas (of the `jsonschema` package) recurses into subschemas: close to the stack
limit at 60 levels. So they are split by keyword; references to the whole meta-schema mean "an object or a boolean".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from guided.errors import bounded
from guided.schema.pointer import pointer

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
"""The names of types in every dialect."""
_ANNOTATIONS = ("title", "description", "default", "format", "$comment")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the value of a keyword is not valid, and where in it (a JSON pointer, empty for the value itself)."""

    message: str
    inside: str


class Dialect:
    """One version of JSON Schema. `Dialect.of` returns it.

    Args:
        validator: the dialect's class of the `jsonschema` package.
    """

    def __init__(self, validator: Any) -> None:
        self._validator = validator
        self._validators: dict[str, Any] = {}

    @classmethod
    def of(cls, document: dict[str, Any]) -> Dialect:
        """Return the dialect that `$schema` names; 2020-12 if it names no known one."""
        named = document.get("$schema")
        known = {"$schema": named} if isinstance(named, str) else {}
        return _dialect(validator_for(known, default=Draft202012Validator))

    @property
    def uri(self) -> str:
        """The identifier of the meta-schema."""
        meta = self._validator.META_SCHEMA
        return str(meta.get("$id") or meta["id"])

    def validator(self, document: dict[str, Any]) -> Any:
        """Return a `jsonschema` validator for instances of `document`; it ignores formats."""
        return self._validator(document)

    def fault(self, keyword: str, value: Any) -> Fault | None:
        """Return the error in `value` as the value of `keyword`; None if it is valid or the keyword unknown."""
        if keyword not in self._keywords or isinstance(value, self._enough.get(keyword, ())):
            return None
        if keyword == "type" and isinstance(value, str) and value in TYPES:
            return None
        validator = self._validators.get(keyword)
        if validator is None:
            # No format checker: it would compile regexes with Python's `re`, which hangs on some of them.
            validator = self._validators[keyword] = self._validator(self._keywords[keyword])
        error = best_match(validator.iter_errors(value))
        return None if error is None else Fault(bounded(error.message), pointer(error.absolute_path))

    @cached_property
    def _enough(self) -> dict[str, type]:
        """Keywords that only require a string or an object: most of a schema, checked without a validator."""
        enough: dict[str, type] = {}
        for keyword, wrapped in self._keywords.items():
            rule = wrapped["allOf"][0]
            said = {name: value for name, value in rule.items() if name not in _ANNOTATIONS} if rule else {}
            if said == {"type": "string"}:
                enough[keyword] = str
            elif said == {"type": "object"}:
                enough[keyword] = dict
        return enough

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        meta = self._validator.META_SCHEMA
        is_schema = {"type": meta["type"]}
        found: dict[str, Any] = {}
        for vocabulary in [*_vocabularies(meta), meta]:
            surroundings = {
                name: vocabulary[name] for name in ("$id", "id", "$schema", "$anchor") if name in vocabulary
            }
            for name in ("$defs", "definitions"):
                if name in vocabulary:
                    surroundings[name] = _cut(vocabulary[name], is_schema)
            for keyword, rule in vocabulary.get("properties", {}).items():
                found[keyword] = {**surroundings, "allOf": [{} if rule is True else _cut(rule, is_schema)]}
        return found


@lru_cache(maxsize=16)
def _dialect(validator: Any) -> Dialect:
    return Dialect(validator)


def _vocabularies(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The meta-schemas that `meta` combines (2019-09 and later)."""
    base = str(meta.get("$id", "")).rpartition("/")[0]
    return [REGISTRY.contents(f"{base}/{part['$ref']}") for part in meta.get("allOf", []) if "$ref" in part]


def _cut(rule: Any, is_schema: dict[str, Any]) -> Any:
    """Replace references to the whole meta-schema by `is_schema`."""
    if isinstance(rule, list):
        return [_cut(part, is_schema) for part in rule]
    if not isinstance(rule, dict):
        return rule
    if rule.get("$ref") == "#" or "$dynamicRef" in rule or "$recursiveRef" in rule:
        return is_schema
    return {name: _cut(part, is_schema) for name, part in rule.items()}
