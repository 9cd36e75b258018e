"""The meta-schema of a dialect, one keyword at a time.

Valid values, which are nearly all, are recognized by small functions (`_compiled`). For the others, the `jsonschema`
package describes the error, in 0.1 ms per value. A validator of the official meta-schemas recurses into subschemas,
close to the stack limit at 60 levels. So the meta-schemas are split by keyword, and their references to the whole
meta-schema are read as "an object or a boolean".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from guided.errors import bounded
from guided.schema.instances import enforcing
from guided.schema.keywords import is_number
from guided.schema.pointer import pointer

Check = Callable[[Any], bool]
"""Whether a value is valid."""

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
"""The names of types in every dialect."""
_OLDER = frozenset({"id", "definitions", "dependencies", "additionalItems", "$recursiveRef", "$recursiveAnchor"})
_MAX_ERRORS = 10
"""Maximum number of errors per rule and value. An array may have one for each of its elements."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "format", "$comment", "deprecated"}
    | {"$id", "id", "$schema", "$anchor", "$defs", "definitions"}
)
"""Keywords of the meta-schemas that do not restrict a value."""


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
        rules = {name: _bounded(rule) for name, rule in validator.VALIDATORS.items()}
        self._describer: Any = extend(validator, {**rules, "uniqueItems": _unique_items})  # type: ignore[no-untyped-call]
        self._validators: dict[str, Any] = {}
        self._checks: dict[str, Check] = {}

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

    @property
    def siblings_of_ref_count(self) -> bool:
        """Whether keywords next to `$ref` have an effect: from draft 2019-09 on."""
        return "2020-12" in self.uri or "2019-09" in self.uri

    @property
    def is_draft3(self) -> bool:
        """Whether it is draft 3: `divisibleBy`, `extends`, `disallow`, `required: true` in a property."""
        return "draft-03" in self.uri

    def validator(self, document: dict[str, Any]) -> Any:
        """Return a validator for instances of `document`."""
        return enforcing(self._validator)(document)

    def fault(self, keyword: str, value: Any) -> Fault | None:
        """Return the error in `value` as the value of `keyword`; None if it is valid or the keyword unknown."""
        rule = self._keywords.get(keyword)
        if rule is None or self._check(keyword, rule)(value):
            return None
        validator = self._validators.get(keyword)
        if validator is None:
            # No format checker: it would compile regexes with Python's `re`, which hangs on some of them.
            validator = self._validators[keyword] = self._describer(rule)
        errors = validator.iter_errors(value)
        # `best_match` cannot rank errors of draft 3: its `type` may contain schemas.
        error = next(errors, None) if "extends" in self._validator.VALIDATORS else best_match(errors)
        return None if error is None else Fault(bounded(error.message), pointer(error.absolute_path))

    def knows(self, keyword: str) -> bool:
        """Whether `keyword` is one of the dialect, or of an older one that is still read."""
        return keyword in self._keywords or keyword in _OLDER

    def _check(self, keyword: str, rule: dict[str, Any]) -> Check:
        check = self._checks.get(keyword)
        if check is None:
            check = self._checks[keyword] = _compiled(rule, rule)
        return check

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        meta = self._validator.META_SCHEMA
        is_schema = {"type": meta["type"]}
        every = "allOf" if "allOf" in self._validator.VALIDATORS else "extends"  # draft 3
        found: dict[str, Any] = {}
        for vocabulary in [*_vocabularies(meta), meta]:
            surroundings = {
                name: vocabulary[name] for name in ("$id", "id", "$schema", "$anchor") if name in vocabulary
            }
            for name in ("$defs", "definitions"):
                if name in vocabulary:
                    surroundings[name] = _cut(vocabulary[name], is_schema)
            for keyword, rule in vocabulary.get("properties", {}).items():
                found[keyword] = {**surroundings, every: [{} if rule is True else _cut(rule, is_schema)]}
        return found


@lru_cache(maxsize=16)
def _dialect(validator: Any) -> Dialect:
    return Dialect(validator)


Rule = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _bounded(rule: Rule) -> Rule:
    """Return a rule of the `jsonschema` package that finds at most `_MAX_ERRORS` errors in a value."""
    return lambda *arguments: islice(rule(*arguments) or (), _MAX_ERRORS)


def _unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `uniqueItems` in linear time. (The package compares every pair if it cannot sort the values.)"""
    if unique and isinstance(instance, list) and not _are_unique(instance):
        yield ValidationError(f"{bounded(instance, 200)} has non-unique elements")


def _compiled(rule: Any, root: dict[str, Any]) -> Check:
    """Compile a rule of a meta-schema. `root` has the definitions that it refers to."""
    if isinstance(rule, bool):
        return lambda _: rule
    checks = [_compiled_keyword(keyword, rule, root) for keyword in rule if keyword not in _ANNOTATIONS]
    if len(checks) == 1:
        return checks[0]
    return lambda value: all(check(value) for check in checks)


def _compiled_keyword(keyword: str, rule: dict[str, Any], root: dict[str, Any]) -> Check:
    argument = rule[keyword]
    match keyword:
        case "$ref" if argument.startswith("#/"):
            _, group, name = argument.split("/")
            return _compiled(root[group][name], root)
        case "type":
            names = [argument] if isinstance(argument, str) else argument
            kinds = [_TYPE_CHECKS[name] if isinstance(name, str) else _compiled(name, root) for name in names]
            return kinds[0] if len(kinds) == 1 else lambda value: any(kind(value) for kind in kinds)
        case "anyOf" | "allOf" | "extends":
            parts = [_compiled(part, root) for part in argument]
            combine = any if keyword == "anyOf" else all
            return lambda value: combine(part(value) for part in parts)
        case "enum":
            return lambda value: isinstance(value, str) and value in argument
        case "items":
            item = _compiled(argument, root)
            return lambda value: not isinstance(value, list) or all(map(item, value))
        case "additionalProperties" | "propertyNames":
            member = _compiled(argument, root)
            of_names = keyword == "propertyNames"
            return lambda value: not isinstance(value, dict) or all(map(member, value if of_names else value.values()))
        case "minItems":
            return lambda value: not isinstance(value, list) or len(value) >= argument
        case "uniqueItems":
            return lambda value: not (argument and isinstance(value, list)) or _are_unique(value)
        case "minimum" if rule.get("exclusiveMinimum") is True:  # drafts 3 and 4
            return lambda value: not is_number(value) or value > argument
        case "minimum":
            return lambda value: not is_number(value) or value >= argument
        case "exclusiveMinimum":
            return lambda value: argument is True or not is_number(value) or value > argument
        case "pattern":
            matches = re.compile(argument).search
            return lambda value: not isinstance(value, str) or matches(value) is not None
        case _:  # the `jsonschema` package decides about rare rules
            return lambda _: False


_TYPE_CHECKS: dict[str, Check] = {
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
    "any": lambda value: True,
}


def _are_unique(values: list[Any]) -> bool:
    return len({identity(value) for value in values}) == len(values)


def identity(value: Any) -> Any:
    """Return a hashable that is equal for equal JSON values: 1 equals 1.0, but not true.

    Numbers become strings, because a user can choose integers with equal hashes.
    """
    if isinstance(value, dict):
        return "object", frozenset((name, identity(member)) for name, member in value.items())
    if isinstance(value, list | tuple):
        return "array", *map(identity, value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return type(value).__name__, str(value)


def _vocabularies(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the meta-schemas that `meta` combines (2019-09 and later)."""
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
