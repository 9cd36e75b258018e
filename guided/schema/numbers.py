"""Numbers within bounds, and multiples of a number.

A number is what its text says. Readers round it to a double, which never passes an
inclusive bound. So an exclusive bound becomes the next number inside it with few
decimals. A multiple that is no integer has at most 15 significant digits: with more, it
may be the same double as another number.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, lcm
from typing import NamedTuple

from guided.json_text import JsonObject
from guided.regex.tree import EMPTY, Chars, Node, choice, literal, points, sequence
from guided.schema.keywords import NUMBER_BOUNDS

EXACT = 2**53
"""All smaller integers are exact as doubles."""
_MAX_DECIMALS = 6
"""xgrammar's own limit."""
_LARGE = 10**9
"""Larger bounds have no decimals: xgrammar writes six, and a double has 15 significant
digits."""
SIGNIFICANT_DIGITS = 15
_MAX_DIGITS = 19
"""Maximum number of digits in a regex, for integers without bounds."""
_MAX_TEXTS = 1000
"""Maximum number of values in a list, and of endings in a regex."""
_NO_BOUND = 10**30


class Numbers(NamedTuple):
    """The multiples of `step` from `low` to `high`, all in units of the last
    decimal."""

    low: int
    high: int
    step: int
    decimals: int
    """Maximum number of decimals."""

    @property
    def units(self) -> range:
        """The numbers in ascending order, in units of the last decimal."""
        first = -(-self.low // self.step) * self.step
        return range(first, self.high + 1, self.step)

    @property
    def are_few(self) -> bool:
        """Whether the numbers can be listed."""
        return self.high - self.low < _MAX_TEXTS * self.step

    def with_decimals(self, decimals: int) -> Numbers:
        """Return those that need at most `decimals` decimals. A bound that would move
        away from zero stays."""
        unit = 10 ** (self.decimals - decimals)
        low = max(self.low, min(0, -(-self.low // unit) * unit))
        high = min(self.high, max(0, self.high // unit * unit))
        return Numbers(low, high, lcm(self.step, unit), self.decimals)

    def value(self, units: int) -> float:
        """Return the number that has so many units."""
        if self.decimals:
            return float(units / 10**self.decimals)
        return units

    def bounds(self) -> dict[str, float]:
        """Return the bounds as keywords of JSON Schema."""
        bounds = {"minimum": self.low, "maximum": self.high}
        return {
            keyword: self.value(bound)
            for keyword, bound in bounds.items()
            if abs(bound) < _NO_BOUND
        }


def numbers_of(schema: JsonObject, kind: str) -> Numbers:
    """Return the numbers, or integers (`kind`), that the bounds and `multipleOf` of
    `schema` allow."""
    bounds = {
        keyword: Fraction(str(schema[keyword]))
        for keyword in NUMBER_BOUNDS
        if keyword in schema
    }
    multiple = Fraction(str(schema.get("multipleOf", 0)))
    decimals = 0
    if kind == "number" and (multiple or max(map(abs, bounds.values())) < _LARGE):
        decimals = _MAX_DECIMALS
    while multiple and decimals and 10 ** (decimals - 1) % multiple.denominator == 0:
        decimals -= 1
    scale = 10**decimals
    limit = _NO_BOUND
    if multiple and decimals:
        limit = 10**SIGNIFICANT_DIGITS - 1
    units = {keyword: bound * scale for keyword, bound in bounds.items()}
    low = max(
        -limit,
        ceil(units.get("minimum", -limit)),
        floor(units.get("exclusiveMinimum", -limit - 1)) + 1,
    )
    high = min(
        limit,
        floor(units.get("maximum", limit)),
        ceil(units.get("exclusiveMaximum", limit + 1)) - 1,
    )
    return Numbers(low, high, (multiple * scale).numerator or 1, decimals)


def pattern_of(numbers: Numbers) -> Node | None:
    """Return the regex of the JSON texts; None if it would be too large."""
    low, high, step, decimals = numbers
    period = next(
        (10**count for count in range(SIGNIFICANT_DIGITS) if 10**count % step == 0),
        None,
    )
    if not numbers.are_few and (period is None or period // step > _MAX_TEXTS):
        return None
    options = []
    for sign, least, most in (("", max(low, 0), high), ("-", max(-high, 1), -low)):
        for count in range(decimals + 1, _MAX_DIGITS + 1):
            node = _digits(least, min(most, 10**count - 1), 0, step, count, decimals)
            if node is not None:
                options.append(sequence([literal(sign), node]))
            least = max(least, 10**count)
    return choice(options)


@lru_cache(maxsize=10_000)
def _digits(
    low: int, high: int, before: int, step: int, count: int, decimals: int
) -> Node | None:
    """Return the texts of the last `count` digits of multiples of `step`; None if there
    is no multiple.

    Decimals that are zeros may be missing at the end.

    Args:
        low: least number that these digits may be.
        high: greatest number that they may be.
        before: value of the digits before these, modulo `step`.
    """
    first = low + (-low - before) % step
    if first > high:
        return None
    if count == 0:
        return EMPTY
    unit = 10 ** (count - 1)
    digits_before: dict[Node, list[int]] = {}
    for digit, code in enumerate(b"0123456789"):
        start = digit * unit
        least = max(low - start, 0)
        most = min(high - start, unit - 1)
        node = _digits(least, most, (before + start) % step, step, count - 1, decimals)
        if node is not None:
            digits_before.setdefault(node, []).append(code)
    text = choice(
        sequence([Chars(points(codes)), node]) for node, codes in digits_before.items()
    )
    if count == decimals:
        text = sequence([literal("."), text])
    if count <= decimals and first == 0:
        return choice([text, EMPTY])
    return text
