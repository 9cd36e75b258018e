"""Convert Python types to constraints, and parse outputs as values of these types.

A type is anything that pydantic describes (a model, a dataclass, a `TypedDict`, an
`Enum`, a `Literal`, `list[int]`) or a term of the outlines package (`outlines.types`:
regexes, `Choice`, `JsonSchema`, `CFG`). Fields of a model may be terms, too.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from guided.constraint import Constraint
from guided.errors import InvalidConstraint, bounded

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_PARAM = "output_type"
_TERMS = "outlines.types.dsl"
"""The module that defines outlines' terms."""


def constraint_for(
    output_type: Any,
    *,
    whitespace: str | None = None,
    open_objects: bool | None = None,
    param: str = _PARAM,
) -> Constraint:
    """Build the constraint of a type.

    An `Enum` or a `Literal` of strings is a `choice`: the output is the plain text of
    one value. Other types are JSON. A term of outlines is a schema, a grammar, or else
    a regex.

    Raises:
        InvalidConstraint: there is no constraint for this type.
        ConstraintTooLarge: the constraint exceeds a limit.
    """
    if _is_term(output_type):
        return _constraint_of_term(output_type, whitespace, open_objects, param)
    choices = _strings(output_type)
    if choices:
        _refuse_whitespace(whitespace)
        return Constraint.choice(choices, param=param)
    adapter = _adapter(output_type, param)
    try:
        schema = adapter.json_schema(schema_generator=_schema_generator())
    except Exception as error:  # pydantic's errors share no base class but Exception
        raise InvalidConstraint(
            f"{_name(output_type)} has no JSON schema: {bounded(error)}", param=param
        ) from None
    return Constraint.json_schema(
        schema, whitespace=whitespace, open_objects=open_objects, param=param
    )


def parse_as(output_type: Any, text: str) -> Any:
    """Parse a complete output, which satisfies the constraint of `output_type`, as a
    value of this type.

    For a term of outlines that is a schema, the value is that of `json.loads`; for
    other terms, it is the text. Raises `ValueError` if a validator of the type, which a
    JSON schema may not express, rejects the value.
    """
    if _is_term(output_type):
        if hasattr(output_type, "schema"):
            return json.loads(text)
        return text
    adapter = _adapter(output_type, _PARAM)
    if _strings(output_type):
        return adapter.validate_python(text)
    return adapter.validate_json(text)


def _strings(output_type: Any) -> list[str]:
    """Return the values of an `Enum` or a `Literal` if all are non-empty strings, which
    a `choice` requires."""
    values: Sequence[Any] = ()
    if get_origin(output_type) is Literal:
        values = get_args(output_type)
    if isinstance(output_type, enum.EnumMeta):
        members: dict[str, Any] = dict(output_type.__members__)
        values = [member.value for member in members.values()]
    if all(type(value) is str and value for value in values):
        return list(values)
    return []


def _adapter(output_type: Any, param: str) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(output_type)
    except Exception as error:  # also raised for a type without a hash
        message = f"{_name(output_type)} is not a type that can be a constraint: {bounded(error)}"
        raise InvalidConstraint(message, param=param) from None


@lru_cache(maxsize=64)
def _cached_adapter(output_type: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(output_type)


@lru_cache(maxsize=1)
def _schema_generator() -> Any:
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        """Writes a `Decimal` as a number: pydantic's alternative, a string, has a
        pattern with lookaround."""

        def decimal_schema(self, schema: Any) -> Any:
            numeric: Any = {**schema, "type": "float"}
            return self.float_schema(numeric)

        def generate_inner(self, schema: Any) -> Any:
            """Anchor the pattern of a field that is a term of outlines: the term
            matches the whole string."""
            written = super().generate_inner(schema)
            if (
                schema["type"] == "function-plain"
                and schema["function"]["function"].__module__ == _TERMS
            ):
                written["pattern"] = f"^(?:{written['pattern']})$"
            return written

    return Generator


def _is_term(output_type: Any) -> bool:
    """Return whether `output_type` is a term of outlines. This does not import
    outlines."""
    return any(
        base.__module__ == _TERMS and base.__name__ == "Term"
        for base in type(output_type).__mro__
    )


def _constraint_of_term(
    term: Any, whitespace: str | None, open_objects: bool | None, param: str
) -> Constraint:
    kind = type(term).__name__
    if kind == "JsonSchema":
        if whitespace is None:
            whitespace = term.whitespace_pattern
        return Constraint.json_schema(
            term.schema, whitespace=whitespace, open_objects=open_objects, param=param
        )
    _refuse_whitespace(whitespace)
    if kind == "CFG":
        return Constraint.grammar(term.definition, param=param)
    return Constraint.regex(_regex(term, param), param=param)


def _regex(term: Any, param: str) -> str:
    """Return the regex of a term that is neither a schema nor a grammar."""
    dsl: Any = import_module(_TERMS)
    # outlines' own regex ignores some keywords
    if any(isinstance(part, dsl.JsonSchema) for part in _parts(term)):
        raise InvalidConstraint(
            "a JsonSchema within another term is not supported: use it alone",
            param=param,
        )
    try:
        # it needs no parentheses as a whole, and may begin with flags
        if isinstance(term, dsl.Regex):
            pattern: str = term.pattern
        else:
            pattern = dsl.to_regex(term)
    except (TypeError, RuntimeError) as error:
        message = (
            f"outlines has no regex for this {type(term).__name__}: {bounded(error)}"
        )
        raise InvalidConstraint(message, param=param) from None
    return pattern


def _parts(term: Any) -> Iterator[Any]:
    yield term
    for part in (*getattr(term, "terms", ()), *getattr(term, "items", ())):
        yield from _parts(part)
    if hasattr(term, "term"):
        yield from _parts(term.term)


def _refuse_whitespace(whitespace: str | None) -> None:
    if whitespace is not None:
        raise InvalidConstraint(
            "whitespace_pattern requires a JSON constraint", param="whitespace_pattern"
        )


def _name(output_type: Any) -> str:
    return bounded(getattr(output_type, "__name__", repr(output_type)), 120)
