"""Names, numbers and words for the corpus, split by a hash into those for training and those held out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

from examples.default_model_training import words

T = TypeVar("T", str, int, float)
SALT = 15  # with this one the held-out side has small numbers, too (11, 13, 18, 27 ...)


def is_held_out(value: str | int | float) -> bool:
    """Whether a value belongs to the tenth that training never sees (decided by a CRC-32 of its text).

    Single characters are the alphabet, not values: training sees them all, and held-out draws avoid them.
    """
    text = str(value).lower()
    return len(text) > 1 and zlib.crc32(b"%d:%s" % (SALT, text.encode())) % 10 == 0


class Values:
    """Draws values from one side of the split; every name, number, date and identifier passes through `_pick`.

    Closed vocabularies (colours, jobs, ...) are drawn freely: they are categories, not values to remember.
    """

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def _pick(self, draw: Callable[[], T]) -> T:
        for _ in range(10_000):
            value = draw()
            if is_held_out(value) == self.held_out:
                return value
        raise RuntimeError("no value on this side of the split")

    def word(self) -> str:
        """An invented word in lower case: syllables, now and then random letters or another script."""
        return self._pick(self._word)

    def _word(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.10:
            return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
        if kind < 0.13:
            return "".join(rng.choice(rng.choice(words.SCRIPTS)) for _ in range(rng.randint(2, 4)))
        if kind < 0.15:
            script = rng.choice(words.SCRIPTS)
            return "".join(rng.choice(script) for _ in range(rng.randint(2, 6)))
        if kind < 0.22:
            return rng.choice(words.NOUNS)
        text = "".join(
            rng.choice(words.ONSETS) + rng.choice(words.VOWELS) + rng.choice(words.CODAS)
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        ) + rng.choice(words.ENDINGS)
        if rng.random() < 0.07:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(words.ACCENTED) + text[at + 1 :]
        return text

    def _name(self, known: list[str], share: float) -> str:
        def draw() -> str:
            return self.rng.choice(known) if self.rng.random() < share else self._word().capitalize()

        return self._pick(draw)

    def phrase(self) -> str:
        """Two to six words, as a title or a sentence."""
        parts = [self.word() for _ in range(self.rng.randint(2, 6))]
        for at in range(1, len(parts)):
            if self.rng.random() < 0.3:
                parts[at] = self.rng.choice(words.SMALL)
        text = " ".join(parts)
        return self.rng.choice((text.capitalize(), text.title(), text, text.capitalize() + "."))

    def first(self) -> str:
        return self._name(words.FIRST, 0.35)

    def last(self) -> str:
        return self._name(words.LAST, 0.35)

    def city(self) -> str:
        return self._name(words.CITIES, 0.4)

    def country(self) -> str:
        return self._name(words.COUNTRIES, 0.6)

    def brand(self) -> str:
        return self._name(words.NOUNS, 0.0)

    def person(self) -> str:
        first = self.first()
        if self.rng.random() < 0.08:
            return f"{first} {self.first()} {self.last()}"
        return f"{first} {self.last()}"

    def company(self) -> str:
        suffix = f" {self.rng.choice(words.SUFFIXES)}" if self.rng.random() < 0.6 else ""
        return self.brand() + suffix

    def venue(self) -> str:
        return f"{self.brand()} {self.rng.choice(words.VENUES)}"

    def product(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return f"{self.brand()} {rng.choice(words.THINGS)}"
        if kind < 0.6:
            return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.THINGS)}"
        return rng.choice(words.THINGS) if kind < 0.8 else f"{self.brand()} {self.integer(2, 99)}"

    def integer(self, low: int, high: int) -> int:
        """An integer of `low..high`, of this side of the split."""
        return self._pick(lambda: self.rng.randint(low, high))

    def number(self) -> int:
        """An integer of 1 to 6 digits (2 to 6 where held out), each length as likely."""
        digits = max(self.rng.randint(1, 6), 2 if self.held_out else 1)
        return self.integer(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)

    def price(self) -> float:
        high = self.rng.choice((10, 100, 100, 1000, 5000))
        return self._pick(lambda: round(self.rng.uniform(1, high), 2))

    def rating(self) -> float:
        return self._pick(lambda: self.rng.randint(10, 50) / 10)

    def date(self) -> tuple[int, int, int]:
        """Year, month, day; the split is on the ISO text."""
        rng = self.rng
        text = self._pick(lambda: f"{rng.randint(1950, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}")
        year, month, day = (int(part) for part in text.split("-"))
        return year, month, day

    def iso_date(self) -> str:
        year, month, day = self.date()
        return f"{year}-{month:02}-{day:02}"

    def long_date(self) -> str:
        def draw() -> str:
            rng = self.rng
            return f"{rng.randint(1, 28)} {rng.choice(words.MONTHS)} {rng.randint(1990, 2035)}"

        return self._pick(draw)

    def time(self) -> str:
        return self._pick(lambda: f"{self.rng.randint(0, 23):02}:{self.rng.choice((0, 15, 30, 45, 10, 5)):02}")

    def phone(self) -> str:
        rng = self.rng

        def digits(count: int) -> str:
            return "".join(rng.choice("0123456789") for _ in range(count))

        def draw() -> str:
            style = rng.randrange(4)
            if style == 0:
                return f"{digits(3)}-{digits(4)}"
            if style == 1:
                return f"{digits(3)}-{digits(3)}-{digits(4)}"
            if style == 2:
                return f"+{rng.randint(1, 99)} {digits(3)} {digits(4)}"
            return f"({digits(3)}) {digits(3)}-{digits(4)}"

        return self._pick(draw)

    def email(self) -> str:
        def draw() -> str:
            rng = self.rng
            user = rng.choice((*words.FIRST, *words.LAST)).lower() if rng.random() < 0.3 else self.word()
            if rng.random() < 0.4:
                user += rng.choice("._") + self.word()
            host = self.word() if rng.random() < 0.6 else rng.choice(("example", "mail", "work", "post"))
            return f"{user}@{host}.{rng.choice(('com', 'org', 'net', 'io', 'de', 'fr', 'co'))}"

        return self._pick(draw)

    def code(self) -> str:
        """An identifier such as `A-4821`, `INV-0032`, `QX17` or `88213`."""
        rng = self.rng

        def draw() -> str:
            letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 6)))
            return rng.choice((f"{letters}-{digits}", f"{letters}{digits}", f"#{digits}", f"{letters}-{digits}"))

        return self._pick(draw)

    def some(self, known: list[str], low: int = 1, high: int = 3) -> list[str]:
        """`low..high` different entries of a closed vocabulary."""
        return self.rng.sample(known, self.rng.randint(low, high))
