"""Numbers within bounds, and multiples of a number, as JSON texts.

A text has no exponent, and a number is what its text says. Readers round it to a double, but decimals with at most 15
significant digits are different doubles. So the number of decimals is limited: to nine, to fewer next to a bound with
many digits, and to those of `multipleOf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Any

from guided import regex
from guided.regex import Chars, Node
from guided.schema.keywords import NUMBER_BOUNDS

EXACT = 2**53
"""All smaller integers are exact as doubles."""
_SIGNIFICANT_DIGITS = 15
_MAX_DECIMALS = 9
_MAX_TEXTS = 1000
"""Maximum number of texts, or of their endings, that a regex lists for `multipleOf`."""
_DIGIT = Chars(((48, 57),))
_POINT = regex.literal(".")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The multiples of `step` from `low` to `high` (None: no bound), all in units of the last decimal."""

    low: int | None
    high: int | None
    step: int
    decimals: int
    """Maximum number of decimals."""

    @classmethod
    def between(cls, low: int | None, high: int | None, step: int, decimals: int) -> Numbers:
        """Return the multiples within bounds that may be none."""
        if low is not None:
            low = -(-low // step) * step
        if high is not None:
            high = high // step * step
        return cls(low, high, step, decimals)

    def with_decimals(self, decimals: int) -> Numbers:
        """Return those that need at most `decimals` decimals."""
        step = lcm(self.step, 10 ** (self.decimals - decimals))
        return Numbers.between(self.low, self.high, step, self.decimals)

    def magnitudes(self) -> Iterator[tuple[str, int, int | None]]:
        """Yield each sign, and the least and the greatest number behind it. Zero has no sign."""
        if self.high is None or self.high >= max(self.low or 0, 0):
            yield "", max(self.low or 0, 0), self.high
        if self.low is None or self.low < 0:
            yield "-", max(-(self.high or 0), self.step), None if self.low is None else -self.low


def numbers_of(schema: dict[str, Any], *, integer: bool) -> Numbers:
    """Return the numbers within the bounds of `schema`, and its `multipleOf`."""
    bounds = {keyword: Fraction(str(schema[keyword])) for keyword in NUMBER_BOUNDS if keyword in schema}
    multiple = Fraction(str(schema.get("multipleOf", 0)))
    largest = floor(max(map(abs, bounds.values()), default=0))
    decimals = 0 if integer else min(_MAX_DECIMALS, max(0, _SIGNIFICANT_DIGITS - len(str(largest))))
    while multiple and decimals and 10 ** (decimals - 1) % multiple.denominator == 0:
        decimals -= 1
    scale = 10**decimals
    low = high = None
    if multiple and decimals:
        high = 10**_SIGNIFICANT_DIGITS - 1
        low = -high
    if "minimum" in bounds:
        low = ceil(bounds["minimum"] * scale)
    elif "exclusiveMinimum" in bounds:
        low = floor(bounds["exclusiveMinimum"] * scale) + 1
    if "maximum" in bounds:
        high = floor(bounds["maximum"] * scale)
    elif "exclusiveMaximum" in bounds:
        high = ceil(bounds["exclusiveMaximum"] * scale) - 1
    return Numbers.between(low, high, (multiple * scale).numerator or 1, decimals)


def pattern_of(numbers: Numbers) -> Node | None:
    """Return the regex of the JSON texts; None if it would be too large, because of `step`."""
    step, decimals = numbers.step, numbers.decimals
    free = next((count for count in range(60) if 10**count % step == 0), None)
    """The digits before this many last ones do not matter for `step`."""
    texts = _MAX_TEXTS if free is None else 10**free // step
    if numbers.low is not None and numbers.high is not None:
        texts = min(texts, (numbers.high - numbers.low) // step)
    if texts >= _MAX_TEXTS:
        return None
    options = []
    for sign, low, high in numbers.magnitudes():
        ending = max(free or 0, decimals)
        longest = len(str(max(low, 10**ending) if high is None else high))
        for length in range(decimals + 1, max(longest, decimals + 1) + 1):
            least = low if length == decimals + 1 else max(low, 10 ** (length - 1))
            most = 10**length - 1 if high is None else min(high, 10**length - 1)
            options.append((sign, _Digits(least, most, step, decimals).after(0, length)))
        if high is None:
            last = _Digits(0, 10**ending, step, decimals).after(0, ending)
            more = regex.repeat(_DIGIT, longest - ending, None)
            if last is not None:
                options.append((sign, regex.sequence([Chars(((49, 57),)), more, last])))
    return regex.choice(regex.sequence([regex.literal(sign), node]) for sign, node in options if node is not None)


class _Digits:
    """The texts of the multiples of `step` from `low` to `high`, digit by digit."""

    def __init__(self, low: int, high: int, step: int, decimals: int) -> None:
        self._low = low
        self._high = high
        self._step = step
        self._decimals = decimals
        self._within: dict[tuple[int, int], Node | None] = {}
        """What may follow where every continuation is within the bounds, by remainder and number of digits."""

    def after(self, number: int, digits: int) -> Node | None:
        """Return what may follow after the first digits of `number`, the others being zero; None for nothing."""
        least = max(self._low, number)
        most = min(self._high, number + 10**digits - 1)
        if most // self._step * self._step < least:
            return None
        if most - least + 1 < 10**digits:
            return self._after(number, digits)
        key = number % self._step, digits
        if key not in self._within:
            self._within[key] = self._after(number, digits)
        return self._within[key]

    def _after(self, number: int, digits: int) -> Node:
        digits_before: dict[Node, list[int]] = {}
        for digit in range(10 if digits else 0):
            node = self.after(number + digit * 10 ** (digits - 1), digits - 1)
            if node is not None:
                digits_before.setdefault(node, []).append(ord("0") + digit)
        options = []
        for node, codes in digits_before.items():
            chars = Chars(regex.ranges_of((code, code) for code in codes))
            options.append(regex.sequence([chars, node]))
        if digits > self._decimals:
            return regex.choice(options)
        if options and digits == self._decimals:
            options = [regex.sequence([_POINT, regex.choice(options)])]
        if self._low <= number <= self._high and number % self._step == 0:
            options.append(regex.EMPTY)
        return regex.choice(options)
