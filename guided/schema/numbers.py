"""Numbers within bounds, and multiples of a number.

A number is what its text says. Readers round it to a double, which never passes an inclusive bound. So an exclusive
bound becomes the next number inside it with few decimals. A multiple that is no integer has at most 15 significant
digits: with more, it may be the same double as another number.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, lcm
from typing import Any, NamedTuple

from guided import regex
from guided.regex import Chars, Node
from guided.schema.keywords import NUMBER_BOUNDS

EXACT = 2**53
"""All smaller integers are exact as doubles."""
_SIGNIFICANT_DIGITS = 15
_MAX_DIGITS = 19
"""Maximum number of digits in a regex, for integers without bounds."""
_MAX_TEXTS = 1000
_NO_BOUND = 10**30


class Numbers(NamedTuple):
    """The multiples of `step` from `low` to `high`, all in units of the last decimal."""

    low: int
    high: int
    step: int
    decimals: int
    """Maximum number of decimals."""

    @property
    def units(self) -> range:
        """The numbers in ascending order."""
        first = -(-self.low // self.step) * self.step
        return range(first, self.high + 1, self.step)

    @property
    def are_few(self) -> bool:
        """Whether the numbers can be listed."""
        return self.high - self.low < _MAX_TEXTS * self.step

    def with_decimals(self, decimals: int) -> Numbers:
        """Return those that need at most `decimals` decimals. Only the digits of a bound that follow are dropped."""
        unit = 10 ** (self.decimals - decimals)
        low = max(self.low, min(0, -(-self.low // unit) * unit))
        high = min(self.high, max(0, self.high // unit * unit))
        return Numbers(low, high, lcm(self.step, unit), self.decimals)

    def value(self, units: int) -> float:
        """Return `units` of the last decimal; an integer if possible."""
        scale = int(10**self.decimals)
        whole, rest = divmod(units, scale)
        return units / scale if rest else whole

    def bounds(self) -> dict[str, float]:
        """Return the bounds as keywords of JSON Schema."""
        bounds = {"minimum": self.low, "maximum": self.high}
        return {keyword: self.value(bound) for keyword, bound in bounds.items() if abs(bound) < _NO_BOUND}


def numbers_of(schema: dict[str, Any], decimals: int) -> Numbers:
    """Return the numbers within the bounds of `schema`, and its `multipleOf`, with at most `decimals` decimals."""
    bounds = {keyword: Fraction(str(schema[keyword])) for keyword in NUMBER_BOUNDS if keyword in schema}
    multiple = Fraction(str(schema.get("multipleOf", 0)))
    largest = floor(max(map(abs, bounds.values()), default=0))
    decimals = min(decimals, max(0, _SIGNIFICANT_DIGITS - len(str(largest))))
    while multiple and decimals and 10 ** (decimals - 1) % multiple.denominator == 0:
        decimals -= 1
    scale = 10**decimals
    limit = 10**_SIGNIFICANT_DIGITS - 1 if multiple and decimals else _NO_BOUND
    units = dict.fromkeys(NUMBER_BOUNDS, Fraction(limit + 1))
    units["minimum"] = units["exclusiveMinimum"] = Fraction(-limit - 1)
    units |= {keyword: bound * scale for keyword, bound in bounds.items()}
    low = max(-limit, ceil(units["minimum"]), floor(units["exclusiveMinimum"]) + 1)
    high = min(limit, floor(units["maximum"]), ceil(units["exclusiveMaximum"]) - 1)
    return Numbers(low, high, (multiple * scale).numerator or 1, decimals)


def pattern_of(numbers: Numbers) -> Node | None:
    """Return the regex of the JSON texts; None if it would be too large."""
    low, high, step, decimals = numbers
    period = next((10**count for count in range(_SIGNIFICANT_DIGITS) if 10**count % step == 0), None)
    if not numbers.are_few and (period is None or period // step > _MAX_TEXTS):
        return None
    options = []
    for sign, least, most in (("", max(low, 0), high), ("-", max(-high, 1), -low)):
        for count in range(decimals + 1, _MAX_DIGITS + 1):
            node = _digits(least, min(most, 10**count - 1), 0, step, count, decimals)
            if node is not None:
                options.append(regex.sequence([regex.literal(sign), node]))
            least = max(least, 10**count)
    return regex.choice(options)


@lru_cache(maxsize=10_000)
def _digits(low: int, high: int, before: int, step: int, count: int, decimals: int) -> Node | None:
    """Return the last `count` digits of multiples of `step`, without zeros that end the decimals; None for no multiple.

    Args:
        low: least number that these digits may be.
        high: greatest number that they may be.
        before: value of the digits before these, modulo `step`.
    """
    first = low + (-low - before) % step
    if first > high:
        return None
    if count == 0:
        return regex.EMPTY
    unit = 10 ** (count - 1)
    digits_before: dict[Node, list[tuple[int, int]]] = {}
    for digit in range(10):
        start = digit * unit
        least = max(low - start, 0)
        most = min(high - start, unit - 1)
        node = _digits(least, most, (before + start) % step, step, count - 1, decimals)
        if node is not None:
            code = ord(str(digit))
            digits_before.setdefault(node, []).append((code, code))
    text = regex.choice(regex.sequence([Chars(regex.ranges_of(codes)), node]) for node, codes in digits_before.items())
    if count == decimals:
        text = regex.sequence([regex.literal("."), text])
    if count <= decimals and first == 0:
        return regex.choice([text, regex.EMPTY])
    return text
