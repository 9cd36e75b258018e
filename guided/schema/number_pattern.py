"""Ranges of numbers as regular expressions for their JSON text."""

from __future__ import annotations


def integers(low: int | None, high: int | None) -> str:
    """Return a regex for the integers from `low` to `high`, inclusive (None: unbounded); empty if there are none."""
    parts: list[str] = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        parts += [f"-(?:{part})" for part in _naturals(nearest, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _naturals(max(0, 0 if low is None else low), high)
    return "|".join(parts)


def numbers(low: int, high: int | None, *, above: bool, below: bool) -> str:
    """Return a regex for numbers from `low` >= 0 to `high` (None: unbounded), without exponents.

    They have at most 15 digits around the bounds, besides zeros at the end: a reader with doubles would round longer
    ones to an excluded bound.

    Args:
        above, below: exclude the bound itself.
    """
    parts = []
    places = max(1, 15 - len(str(low if high is None else high)))
    last = None if high is None else high - 1
    first = low + 1 if above else low
    if last is None or first <= last:
        parts.append(rf"(?:{integers(first, last)})(?:\.[0-9]{{1,{places}}})?")
    if above and (high is None or high > low):
        parts.append(rf"{low}\.[0-9]{{0,{places - 1}}}[1-9]0*")
    if high is not None and not below and (high > low or not above):
        parts.append(rf"{high}(?:\.0+)?")
    return "|".join(parts)


def _naturals(low: int, high: int | None) -> list[str]:
    """Return regexes that together match `low` to `high`, both >= 0, without leading zeros."""
    if high is not None and low > high:
        return []
    if high is None:
        digits = len(str(low))
        return [*_naturals(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    if len(str(low)) < len(str(high)):
        middle = 10 ** len(str(low)) - 1
        return [*_naturals(low, middle), *_naturals(middle + 1, high)]
    return _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> list[str]:
    """Return regexes for numbers of equal length: the common first digits, then the others."""
    rest = len(low) - 1
    if rest < 0:
        return [""]
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [low[0] + part for part in _same_length(low[1:], high[1:])]
    parts = []
    if low[1:] != "0" * rest:
        parts += [low[0] + part for part in _same_length(low[1:], "9" * rest)]
        first += 1
    top = []
    if high[1:] != "9" * rest:
        top = [high[0] + part for part in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        parts.append(digit + (f"[0-9]{{{rest}}}" if rest > 1 else "[0-9]" * rest))
    return parts + top
