"""Validation of a finished output against its schema, independent of `guided`.

`jsonschema` validates by the dialect of `$schema`. Here it reads patterns as ECMA-262 does (a translation for the
`regex` package), checks formats, and calculates with the decimals of the text. Every reading of the text must be valid:
doubles or exact decimals, and the first or the last of two equal keys.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cache, partial
from typing import Any

import jsonschema
import regex
from jsonschema.validators import extend, validator_for

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_UNIT = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_PCHAR = rf"(?:{_UNIT}|[:@])"
_HOST = rf"(?:\[[0-9A-Fa-fv:.]+\]|{_UNIT}*)"
_AUTHORITY = rf"//(?:(?:{_UNIT}|:)*@)?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*"
_ABSOLUTE = rf"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_PCHAR}+(?:/{_PCHAR}*)*|){_TAIL}"
_RELATIVE = rf"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:(?:{_UNIT}|@)+(?:/{_PCHAR}*)*)?){_TAIL}"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_PERIOD = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_MAILBOX = r"""(?:[\w!#$%&'*+/=?^`{|}~.-]+|"(?:[ !#-\[\]-~]|\\[ -~])*")"""


def _full(pattern: str) -> Callable[[str], Any]:
    compiled = regex.compile(pattern, regex.ASCII)
    return lambda text: compiled.fullmatch(text)


def _is_time(text: str) -> bool:
    shape = _full(r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)")(text)
    return bool(shape) and datetime.time.fromisoformat(text[:8]) is not None


def _is_regex(text: str) -> bool:
    return _search(text) is not None


def _is_date(text: str) -> bool:
    return bool(_full(r"\d{4}-\d\d-\d\d")(text)) and datetime.date.fromisoformat(text) is not None


FORMATS: dict[str, Callable[[str], Any]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": lambda text: _is_date(text[:10]) and text[10] in "Tt" and _is_time(text[11:]),
    "duration": _full(rf"P(?:\d+W|{_PERIOD}(?:{_CLOCK})?|{_CLOCK})"),
    "email": _full(rf"{_MAILBOX}@(?:{_LABEL}(?:\.{_LABEL})*|\[[\w:.]+\])"),
    "hostname": lambda text: len(text) <= 253 and _full(rf"{_LABEL}(?:\.{_LABEL})*")(text),
    "ipv4": lambda text: ipaddress.IPv4Address(text) is not None,
    "ipv6": lambda text: "%" not in text and ipaddress.IPv6Address(text) is not None,
    "json-pointer": _full(r"(?:/(?:[^/~]|~[01])*)*"),
    "relative-json-pointer": _full(r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)"),
    "uri": _full(_URI),
    "uri-reference": _full(rf"{_URI}|{_RELATIVE}"),
    "regex": _is_regex,
    "uuid": _full(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"),
}
"""Name -> whether a text has the format, by its RFC; may raise ValueError instead."""

_SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": _SPACES}
_CLASSES |= {name.upper(): f"^{members}" for name, members in _CLASSES.items()}
_OUTSIDE = {".": r"[^\n\r\u2028\u2029]", "^": r"\A", "$": r"\Z"}
_PIECE = regex.compile(r"\\(?:c.|x..|u....|.)|\[\^|.", regex.DOTALL)


def translated(pattern: str) -> str:
    """Return an ECMA-262 pattern in the notation of the `regex` package, version 1."""
    parts: list[str] = []
    pieces = [found[0] for found in _PIECE.finditer(pattern)]
    while pieces:
        piece = pieces.pop(0)
        if piece in ("[", "[^"):
            parts.append(piece + _members(pieces))
        elif piece in _CLASSES:
            parts.append(f"[{_CLASSES[piece]}]")
        else:
            parts.append(_OUTSIDE.get(piece, piece))
    return "".join(parts)


def _members(pieces: list[str]) -> str:
    """Take the rest of a class from `pieces`, to its bracket. Only a hyphen between two characters is a range."""
    members, begun = "", False
    while (piece := pieces.pop(0)) != "]":
        if piece in _CLASSES:
            members, begun = members + f"[{_CLASSES[piece]}]", False
        elif piece == "-" and begun and pieces[0] != "]":
            members, begun = f"{members}-{_member(pieces.pop(0))}", False
        else:
            members, begun = members + _member(piece), True
    return members + "]"


def _member(piece: str) -> str:
    """Return one or two characters of a class, escaped."""
    return piece if piece[0] == "\\" else "".join(c if c.isalnum() else f"\\{c}" for c in piece)


@cache
def _search(pattern: str) -> Any:
    return regex.compile(translated(pattern), regex.VERSION1).search


def problem(text: str, schema: Any) -> str | None:
    """Return why `text` does not satisfy `schema`, or None."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    for keep_last, numbers in itertools.product((True, False), ("doubles", "decimals")):
        try:
            document = json.loads(
                text,
                parse_float=_decimal if numbers == "decimals" else float,
                object_pairs_hook=dict if keep_last else _first_of_equal_keys,
            )
        except ValueError as wrong:
            return f"not JSON: {wrong}"
        error = next(_validator(schema if numbers == "doubles" else exact).iter_errors(document), None)
        if error is not None:
            reading = f"{numbers}, the {'last' if keep_last else 'first'} of equal keys"
            return f"{error.message[:200]} ({reading})"
    return None


def _first_of_equal_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs[::-1])


def _decimal(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of 19 digits
        return float(text)


def _validator(schema: Any) -> Any:
    return _extended(validator_for(schema, jsonschema.Draft202012Validator))(schema)


@cache
def _extended(validator: Any) -> Any:
    checks: dict[str, Any] = {"pattern": _pattern, "patternProperties": _pattern_properties, "format": _format}
    checks |= {"additionalProperties": _additional, "multipleOf": _multiple}
    known = {name: check for name, check in checks.items() if name in validator.VALIDATORS or name == "format"}
    for name in {"enum", "const"} & validator.VALIDATORS.keys():
        known[name] = partial(_as_doubles, validator.VALIDATORS[name])
    types = validator.TYPE_CHECKER.redefine("number", lambda _, value: _is_number(value))
    types = types.redefine("integer", lambda _, value: _is_integer(value, validator))
    return extend(validator, known, type_checker=types)  # type: ignore[no-untyped-call]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_integer(value: Any, validator: Any) -> bool:
    if isinstance(value, bool) or not _is_number(value):
        return False
    return isinstance(value, int) or (
        validator.TYPE_CHECKER.is_type(1.0, "integer")
        and Decimal(value).is_finite()
        and Decimal(value) == Decimal(value).to_integral_value()
    )


def _errors(failed: bool, message: str) -> Iterator[jsonschema.ValidationError]:
    if failed:
        yield jsonschema.ValidationError(message)


def _as_doubles(check: Any, validator: Any, listed: Any, value: Any, schema: Any) -> Any:
    """Check `enum` or `const`. A number may be written with other digits of the same double."""
    return check(validator, _doubles(listed), _doubles(value), schema)


def _doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _doubles(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_doubles(part) for part in value]
    return float(value) if isinstance(value, Decimal) else value


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    failed = isinstance(value, str) and not _search(pattern)(value)
    yield from _errors(failed, f"{value!r} has no match of {pattern!r}")


def _pattern_properties(validator: Any, named: Any, value: Any, _schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, schema in named.items():
            for key in filter(_search(pattern), value):
                yield from validator.descend(value[key], schema, path=key)


def _additional(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        searches = [_search(pattern) for pattern in schema.get("patternProperties", {})]
        for key in set(value) - set(schema.get("properties", {})):
            if rest is not True and not any(search(key) for search in searches):
                yield from _errors(rest is False, f"{key!r} is not allowed")
                if rest is not False:
                    yield from validator.descend(value[key], rest, path=key)


def _format(_validator: Any, name: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and name in FORMATS:
        try:
            right = bool(FORMATS[name](value))
        except (ValueError, IndexError, regex.error):
            right = False
        yield from _errors(not right, f"{value!r} is no {name}")


def _multiple(_validator: Any, multiple: Any, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        step = Fraction(str(multiple))
        _, digits, shift = Decimal(str(value)).as_tuple()
        number, exponent = int("".join(map(str, digits))), int(shift)
        if exponent >= 0:
            rest = number * step.denominator * pow(10, exponent, step.numerator) % step.numerator
        else:
            rest = number * step.denominator % (step.numerator * 10**-exponent)
        yield from _errors(rest != 0, f"{value} is no multiple of {multiple}")
