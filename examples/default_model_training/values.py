"""Names, numbers and words for the corpus, split by a hash into training and held-out
values."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.default_model import checkpoint_path

T = TypeVar("T", str, int, float)
SALT = (
    15  # with this value the held-out side has small numbers, too (11, 13, 18, 27 ...)
)
DATA: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text())
"""Word lists, facts of records, functions, and ways to ask."""
TOKENS: list[str] = [
    *json.loads((checkpoint_path() / "tokenizer.json").read_text())["model"]["vocab"]
]
PIECES = [
    token for token in TOKENS if token.isascii() and token.isalpha() and token.islower()
]
"""The tokens of letters: each has to be copied."""
WORDS: dict[str, list[str]] = {
    name: words.split() for name, words in DATA["words"].items()
}


def is_held_out(value: str | int | float) -> bool:
    """Return whether a value belongs to the tenth that training never sees (by a CRC-32
    of its text).

    Single characters are not values: training sees them all, and held-out draws avoid
    them.
    """
    text = str(value).lower()
    return len(text) > 1 and zlib.crc32(b"%d:%s" % (SALT, text.encode())) % 10 == 0


class Values:
    """Values from one side of the split. Every name, number, date and identifier passes
    through `_pick`.

    Closed vocabularies (colours, jobs, ...) are drawn freely: they are categories, not
    values to remember.
    """

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def one_of(self, name: str) -> str:
        """Return a word of a closed vocabulary."""
        return self.rng.choice(WORDS[name])

    def some(self, name: str) -> list[str]:
        """Return one to three words of a closed vocabulary."""
        return self.rng.sample(WORDS[name], self.rng.randint(1, 3))

    def draw(self, kind: str) -> Any:
        """Return a value of a kind in `corpus.json`: one of the methods below, perhaps
        with arguments."""
        method, *arguments = kind.split(" ")
        return getattr(self, method)(
            *(int(each) if each.isdigit() else each for each in arguments)
        )

    def flag(self) -> bool:
        return self.rng.random() < 0.5

    def several(self, kind: str) -> list[Any]:
        return [self.draw(kind) for _ in range(self.rng.randint(1, 4))]

    def _pick(self, draw: Callable[[], T]) -> T:
        for _ in range(10_000):
            value = draw()
            if is_held_out(value) == self.held_out:
                return value
        raise RuntimeError("no value on this side of the split")

    def word(self) -> str:
        """Return an invented word in lower case: syllables, sometimes random letters or
        another script."""
        return self._pick(self._word)

    def _word(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.12:
            return "".join(
                rng.choice("abcdefghijklmnopqrstuvwxyz")
                for _ in range(rng.randint(3, 8))
            )
        if kind < 0.15:
            script = self.one_of("scripts")
            return "".join(rng.choice(script) for _ in range(rng.randint(2, 6)))
        if kind < 0.22:
            return self.one_of("nouns")
        if kind < 0.5:
            return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 3)))
        text = ""
        for _ in range(rng.choice((1, 2, 2, 2, 3))):
            text += (
                self.one_of("onsets")
                + self.one_of("vowels")
                + (self.one_of("codas") if rng.random() < 0.8 else "")
            )
        if rng.random() < 0.07:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(DATA["words"]["accented"]) + text[at + 1 :]
        return text + (self.one_of("endings") if rng.random() < 0.8 else "")

    def letters(self) -> str:
        """Return random letters and digits of both cases."""
        signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        return self._pick(
            lambda: "".join(
                self.rng.choice(signs) for _ in range(self.rng.randint(2, 12))
            )
        )

    def _name(self, known: str, share: float) -> str:
        return self._pick(
            lambda: (
                self.one_of(known)
                if self.rng.random() < share
                else self._word().capitalize()
            )
        )

    def words(self, count: int) -> str:
        return " ".join(self.word() for _ in range(count))

    def song(self) -> str:
        return self.words(2).title()

    def first(self) -> str:
        return self._name("first", 0.35)

    def last(self) -> str:
        return self._name("last", 0.35)

    def city(self) -> str:
        second = f" {self.brand()}" if self.rng.random() < 0.1 else ""
        return self._pick(lambda: self._name("cities", 0.35) + second)

    def country(self) -> str:
        return self._name("countries", 0.6)

    def brand(self) -> str:
        return self._name("nouns", 0.0)

    def person(self) -> str:
        middle = f"{self.first()} " if self.rng.random() < 0.08 else ""
        return f"{self.first()} {middle}{self.last()}"

    def company(self) -> str:
        return self.brand() + (
            f" {self.one_of('suffixes')}" if self.rng.random() < 0.6 else ""
        )

    def title(self) -> str:
        topic = f"{self.one_of('topics')} " if self.rng.random() < 0.7 else ""
        return f"{self.brand()} {topic}{self.one_of('events')}"

    def venue(self) -> str:
        return f"{self.brand()} {self.one_of('venues')}"

    def product(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return f"{self.brand()} {self.one_of('things') if kind < 0.3 else self.integer(2, 99)}"
        return (
            f"{self.one_of('adjectives')} {self.one_of('things')}"
            if kind < 0.7
            else self.one_of("things")
        )

    def items(self) -> list[dict[str, Any]]:
        return [
            {"product": self.product(), "quantity": self.integer(1, 60)}
            for _ in range(self.rng.randint(1, 3))
        ]

    def integer(self, low: int, high: int) -> int:
        """Return an integer of `low..high`, on this side of the split."""
        return self._pick(lambda: self.rng.randint(low, high))

    def number(self) -> int:
        """Return an integer of 1 to 6 digits (held out: 2 to 6). All lengths are
        equally likely."""
        digits = max(self.rng.randint(1, 6), 2 if self.held_out else 1)
        return self.integer(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)

    def rating(self) -> float:
        return self.rng.randint(10, 50) / 10

    def expression(self) -> str:
        return f"{self.number()} {self.rng.choice('+-*/')} {self.number()}"

    def path(self) -> str:
        return f"{self.word()}.{self.rng.choice(('txt', 'csv', 'md', 'py'))}"

    def price(self) -> float:
        high = self.rng.choice((10, 100, 100, 1000, 5000))
        return self._pick(lambda: round(self.rng.uniform(1, high), 2))

    def iso_date(self) -> str:
        rng = self.rng
        return self._pick(
            lambda: (
                f"{rng.randint(1950, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
            )
        )

    def date(self) -> str:
        """Return an ISO date, or a date with the month's name."""
        rng = self.rng
        if rng.random() < 0.6:
            return self.iso_date()
        return self._pick(
            lambda: (
                f"{rng.randint(1, 28)} {self.one_of('months')} {rng.randint(1990, 2035)}"
            )
        )

    def phrase(self) -> str:
        """Return two to six words, as a title or a sentence."""
        words = [
            self.one_of("small") if self.rng.random() < 0.2 else self.word()
            for _ in range(5)
        ]
        text = " ".join((self.word(), *words[: self.rng.randint(1, 5)]))
        return self.rng.choice(
            (text, text.title(), text.capitalize(), text.capitalize() + ".")
        )

    def time(self) -> str:
        return self._pick(
            lambda: (
                f"{self.rng.randint(0, 23):02}:{self.rng.choice((0, 15, 30, 45, 10, 5)):02}"
            )
        )

    def _filled(self, pattern: str) -> str:
        """Return a pattern with random digits for `0` and letters for `A`."""
        signs = {"0": "0123456789", "A": "ABCDEFGHJKLMNPQRSTUVWXYZ"}
        return "".join(self.rng.choice(signs.get(each, each)) for each in pattern)

    def phone(self) -> str:
        patterns = ("000-0000", "000-000-0000", "+00 000 0000", "(000) 000-0000")
        return self._pick(lambda: self._filled(self.rng.choice(patterns)))

    def code(self) -> str:
        """Return an identifier such as `A-4821`, `INV-0032`, `QX17` or `#88213`."""
        patterns = ("A-0000", "AAA-0000", "AA-00000", "AA00", "A000", "#00000")
        return self._pick(lambda: self._filled(self.rng.choice(patterns)))

    def email(self) -> str:
        def draw() -> str:
            user = (
                self.one_of("first").lower()
                if self.rng.random() < 0.3
                else self._word()
            )
            host = (
                self._word()
                if self.rng.random() < 0.6
                else self.rng.choice(("example", "mail", "work"))
            )
            return f"{user}@{host}.{self.rng.choice(('com', 'org', 'net', 'io', 'de', 'fr'))}"

        return self._pick(draw)
